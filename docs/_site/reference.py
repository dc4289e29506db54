"""
Write the pages that are generated from the program: `python docs/_site/reference.py`, or `make reference`.

docs/cli.md comes from the command line, docs/rest.md from the OpenAPI document, and docs/schema/*.json (for editors)
from the models of the configuration, with the meanings of docs/configuration.md and docs/events.md.  `tests/docs/test_reference.py`
fails when one of them is stale.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from aqueduck.cli.commands import app
from aqueduck.cli.help_texts import EXAMPLES
from aqueduck.config import events
from aqueduck.config.fanout import FanoutConfig
from aqueduck.config.sync import SyncConfig
from aqueduck.web.api import make_app

ROOT = Path(__file__).parents[2]

CLI_HEAD = """\
# Commands

This page is generated from the program by `make reference`. The option `--help` of each command prints the same.

Every command that works on a flow takes its configuration file with `-c FILE`; without it, `aqueduck.yaml` in the current directory.
The keys of the file determine the flow
([configuration.md](configuration.md), [fanout.md](fanout.md), [events.md](events.md)).

## Exit codes

| code | meaning |
|---|---|
| 0 | done; for `verify`, everything is identical; for `check`, nothing is missing |
| 1 | an error, a failed check, or a difference found by `verify` |
| 2 | an invalid command line or configuration |
| 3 | `verify` could not compare everything, and found no difference in the rest |
| 130 | interrupted with ctrl-C; a running service stops and exits with 0 |

An error is one line on standard error, with a [code](errors.md) and the next step. With `--json`, standard output is JSON
and nothing else (for `bench`, its last line).

## Environment variables

| variable | meaning |
|---|---|
| `AQUEDUCK_LOG_FORMAT` | the default of `--log-format` |
| `AQUEDUCK_UMASK` | the umask of files that are created, in place of `077` ([security.md](security.md#the-host)) |
| `PG_DSN` | the default of `--dsn` |
| `JAVA_HOME` | the Java that runs Spark |

The variables that a configuration file names, such as `dsn_env`, are read as well, and libpq's own, such as `PGPASSWORD`.

## Shell completion

`aqueduck --install-completion` makes bash, zsh, fish or PowerShell complete commands, options, tables, groups and settings;
`aqueduck --show-completion` prints the script. Tables and groups are read from the source of the configuration file.
"""

REST_HEAD = """\
# REST API

This page is generated from the program by `make reference`. A running service serves the same as an OpenAPI document at
`/api/v1/openapi.json`. Addresses, tokens, probes and status codes are explained in [operations-http.md](operations-http.md).

Requests that change something need a token with the scope `operate`. Times are ISO 8601 in UTC, and positions are LSNs such as `0/16B3748`.
"""

MODELS: dict[str, type[BaseModel]] = {"sync": SyncConfig, "fanout": FanoutConfig, "events": events._Document}
"""What a file of each flow consists of."""


# -- the command line


def cli() -> str:
    """docs/cli.md."""
    commands = _commands(typer.main.get_command(app))
    return CLI_HEAD + "".join(_command(names, command) for names, command in commands)


def _commands(command: Any, names: tuple[str, ...] = ("aqueduck",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        if hasattr(inner, "commands"):
            yield from _commands(inner, (*names, name))
        else:
            yield (*names, name), inner


def _command(names: tuple[str, ...], command: Any) -> str:
    kinds = typing.get_type_hints(inspect.unwrap(command.callback))
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    shown = [*arguments, *(option for option in options if option.required)]
    usage = " ".join([*names, *(_spelled(p, kinds)[0] for p in shown), "[OPTIONS]"])
    lines = ["", f"## {' '.join(names)}", "", _sentence(command.help), "", "```text", usage, "```"]
    lines += ["", "| argument or option | default | meaning |", "|---|---|---|"]
    for parameter in (*arguments, *options):
        name = ", ".join(f"`{text}`" for text in _spelled(parameter, kinds)).replace("|", "\\|")
        lines.append(f"| {name} | {_default(parameter)} | {_cell(parameter.help)} |")
    if examples := [line for line in EXAMPLES.get(names[1], ()) if line.startswith(" ".join(names))]:
        lines += ["", "```text", *examples, "```"]
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str | None) -> str:
    return _sentence(text or "").replace("|", "\\|")


def _spelled(parameter: Any, kinds: dict[str, Any]) -> list[str]:
    """How a parameter is typed, the shortest spelling first, such as `-c FILE`."""
    value = parameter.metavar or _value(kinds[parameter.name])
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        return [name if parameter.required else f"[{name}]"]
    return [f"{name} {value}".strip() for name in sorted(parameter.opts, key=len)]


def _value(kind: Any) -> str:
    """The placeholder for a value of a type: nothing for a flag."""
    for part in (kind, *typing.get_args(kind)):
        if typing.get_origin(part) is typing.Literal:
            return "|".join(typing.get_args(part))
        if part is bool:
            return ""
        if part in (int, float):
            return "NUMBER"
    return "TEXT"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, False):
        return ""
    return f"`{parameter.default}`"


# -- REST


def rest() -> str:
    """docs/rest.md."""
    served: Any = None  # the document describes requests and answers; it asks nothing of a service
    document = make_app(served, served).openapi()
    parts = [REST_HEAD]
    for path, operations in sorted(document["paths"].items()):
        for method, operation in sorted(operations.items()):
            parts.append(_operation(document, method.upper(), path, operation))
    parts.append("\n## Objects\n")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(_object(name, schema))
    return "".join(parts)


def _operation(document: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    lines = ["", f"## {method} {path}", "", f"{operation['summary']}."]
    rows = [
        (p["name"], p["in"], _type(p["schema"]), p["schema"].get("default"), p.get("description"))
        for p in operation.get("parameters", ())
    ]
    if body := operation.get("requestBody"):
        rows += [("", "body", _type(body["content"]["application/json"]["schema"]), None, None)]
    if rows:
        lines += ["", "| parameter | in | type | default | meaning |", "|---|---|---|---|---|"]
        for name, place, kind, default, meaning in rows:
            shown = "" if default is None else f"`{json.dumps(default)}`"
            lines.append(f"| {f'`{name}`' if name else ''} | {place} | {kind} | {shown} | {_cell(meaning)} |")
    answers = [
        f"{status}: {_type(answer['content']['application/json']['schema'])}"
        for status, answer in operation["responses"].items()
        if status != "default" and "application/json" in answer.get("content", {})
    ]
    lines += ["", f"Answer: {'; '.join(answers)}."]
    return "\n".join(lines) + "\n"


def _object(name: str, schema: dict[str, Any]) -> str:
    lines = ["", f"### {name}", ""]
    if "enum" in schema:
        lines.append(f"One of {', '.join(f'`{value}`' for value in schema['enum'])}.")
        return "\n".join(lines) + "\n"
    fields = schema["properties"].items()
    request = schema.get("additionalProperties") is False
    meanings = {field: _field_note(field, inner, schema) if request else "" for field, inner in fields}
    if not any(meanings.values()):
        lines += [
            "| field | type |",
            "|---|---|",
            *(f"| `{field}` | {_type(inner)} |" for field, inner in fields),
        ]
    else:
        lines += ["| field | type | meaning |", "|---|---|---|"]
        lines += [f"| `{field}` | {_type(inner)} | {meanings[field]} |" for field, inner in fields]
    return "\n".join(lines) + "\n"


def _field_note(field: str, inner: dict[str, Any], schema: dict[str, Any]) -> str:
    """Whether a field of a request may be omitted, and what it means."""
    given = inner.get("default")
    omitted = "Optional." if given in (None, {}) else f"Optional; default `{json.dumps(given)}`."
    parts = ["Required." if field in schema.get("required", ()) else omitted, _cell(inner.get("description"))]
    return " ".join(filter(None, parts))


def _type(schema: dict[str, Any]) -> str:
    """A JSON type in words, with a link if it is an object of this page."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    if schema.get("format") == "date-time":
        return "time"
    return str(kind)


# -- schemas for editors


def schema(flow: str) -> str:
    """docs/schema/FLOW.json: what an editor completes and underlines."""
    document = MODELS[flow].model_json_schema()
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["title"] = f"Aqueduck, flow {flow}"
    document.pop("description", None)
    meanings = _meanings("configuration.md")
    for name, section in {"": document, **document["$defs"]}.items():
        _refine(name, section, meanings)
    if flow == "events":
        meanings = _meanings("events.md")
        _describe(document, "", meanings)
        for part, kinds in events._TYPES.items():
            sections = [_typed(part, kind, model, meanings) for kind, model in kinds.items()]
            for section in sections:  # references are resolved in the whole document
                document["$defs"] |= section["properties"]["config"].pop("$defs", {})
            document["properties"][part] = {"oneOf": sections}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _typed(
    part: str, kind: str, model: type[BaseModel], meanings: dict[tuple[str, str], str]
) -> dict[str, Any]:
    """A section with `type` and `config`: any key of `config` may be given by the name of a variable."""
    config = model.model_json_schema()
    config.pop("required", None)  # a key, its `_env` or its `_file`: the program checks it
    config.pop("description", None)
    config["patternProperties"] = {"_env$": {"type": ["string", "object"]}, "_file$": {"type": "string"}}
    for section in (config, *config.get("$defs", {}).values()):
        _refine("", section, {})
    _describe(config, f"{part}.{kind}", meanings)
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, "config": config},
        "required": ["type"],
        "additionalProperties": False,
    }


def _describe(section: dict[str, Any], name: str, meanings: dict[tuple[str, str], str]) -> None:
    for key, value in section["properties"].items():
        if meaning := meanings.get((name, key)):
            value["description"] = meaning


SECTIONS = {
    "SourceConfig": "source",
    "LakeConfig": "lake",
    "GroupConfig": "groups",
    "TableConfig": "groups.tables",
    "SparkConfig": "spark",
    "ServerConfig": "server",
    "TokenConfig": "server.tokens",
    "MaintenanceConfig": "maintenance",
    "VerifyConfig": "verify",
    "TracingConfig": "tracing",
}
"""The sections of docs/configuration.md that describe the models."""
ALTERNATIVES = (
    {"dsn", "dsn_env", "dsn_file"},
    {"catalog", "catalog_env", "catalog_file", "postgres_uri_env"},
)
"""Alternative keys: a file has one of them, and the models that read it always have the first."""


def _refine(name: str, section: dict[str, Any], meanings: dict[tuple[str, str], str]) -> None:
    """Make a section of the models fit the file: alternatives, sizes as text, meanings for people."""
    required = section.get("required", [])
    for keys in ALTERNATIVES:
        given = [key for key in section.get("properties", ()) if key in keys]
        if given and len(given) > 1:
            required = [key for key in required if key not in keys]
            section["oneOf"] = [{"required": [key]} for key in sorted(given)]
    if "required" in section:
        section["required"] = required
    for key, value in section.get("properties", {}).items():
        value.pop("title", None)
        for word in ("ge", "le"):  # limits of sizes are pydantic's own words; the program checks them
            value.pop(word, None)
        if key in ("properties", "conf"):  # text that people also write as a number or a boolean
            value["additionalProperties"] = {"type": ["string", "number", "boolean"]}
        if meaning := meanings.get((SECTIONS.get(name, ""), key)):
            value["description"] = meaning


def _meanings(page: str) -> dict[tuple[str, str], str]:
    """Section and key to meaning, from the tables of a page."""
    found: dict[tuple[str, str], str] = {}
    section = ""
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"#{2,3} `([\w.]+)`", line):
            section = heading[1]
        elif row := re.match(r"\| `([\w.-]+)` \| [^|]* \| (.+) \|$", line):
            above, _, key = row[1].rpartition(".")
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row[2]).replace("`", "")
            found[above or section, key] = plain
    return found


PAGES = {
    "docs/cli.md": cli,
    "docs/rest.md": rest,
    "docs/schema/sync.json": lambda: schema("sync"),
    "docs/schema/fanout.json": lambda: schema("fanout"),
    "docs/schema/events.json": lambda: schema("events"),
}
"""What is generated, by its path from the root of the repository."""


if __name__ == "__main__":
    for path, write in PAGES.items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(write(), encoding="utf-8")
