"""
What the configuration files of all flows share: sections, YAML reading, paths, and the wording of mistakes.

The keys themselves are in `config.sync`, `config.fanout` and `config.events_sections`. A mistake names the
path of its key; for an unknown key it also names the known ones, which it finds through `Sections`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails

from aqueduck.config.secret_text import SecretText
from aqueduck.model.errors import ConfigError, system_reason
from aqueduck.model.schema import parse_table_name

__all__ = [
    "MIB",
    "RESERVED_SCHEMA",
    "SCHEME",
    "Bytes",
    "DataPath",
    "Interval",
    "LakeTable",
    "PostgresTable",
    "Secret",
    "Section",
    "Sections",
    "SlotName",
    "Text",
    "absolute",
    "absolute_catalog",
    "absolute_data_path",
    "describe",
    "describe_problems",
    "key_of",
    "read_file",
    "read_yaml",
    "refuse_repeated",
    "slot_name",
]

MIB = 1 << 20
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
NAME_BYTES_MAX = 63
RESERVED_SCHEMA = "aqueduck"
"""The schema with our own tables, in each lake."""
STORES = ("s3", "gs", "gcs", "r2")
"""Object stores that DuckDB can write to."""


def slot_name(value: str) -> str:
    if not _SLOT_NAME.fullmatch(value):
        raise ValueError("must be 1 to 63 of the characters a-z, 0-9 and _")
    return value


def _postgres_table(value: str) -> str:
    name = parse_table_name(value, default_schema="public")
    if max(len(part.encode()) for part in (name.schema, name.name)) > NAME_BYTES_MAX:
        raise ValueError(f"has more than the {NAME_BYTES_MAX} bytes that PostgreSQL keeps of a name")
    return str(name)


def _lake_table(value: str) -> str:
    name = parse_table_name(value, default_schema="main", fold_case=False)
    if name.schema.lower() == RESERVED_SCHEMA:
        raise ValueError(f"is in the schema {RESERVED_SCHEMA}, which is reserved: choose another schema")
    return str(name)


def _data_path(value: str) -> str:
    scheme, separator, _ = value.partition("://")
    if separator and scheme not in STORES:
        raise ValueError(f"must be a directory, or a URL that begins with {', '.join(STORES)} and ://")
    return value


_INTERVAL = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h|d)")
_UNIT_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def _interval(value: Any) -> float | None:
    """A duration in seconds; YAML parses a bare `off` as false."""
    if value in (None, "off") or value is False:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    found = _INTERVAL.fullmatch(value) if isinstance(value, str) else None
    if found is None or float(found[1]) == 0:
        raise ValueError("must be a time such as 30min, 6h or 1d, or off")
    return float(found[1]) * _UNIT_SECONDS[found[2]]


def _secret(value: Any, validated: ValidatorFunctionWrapHandler) -> SecretText:
    """Wrap a text; a text that is already a secret keeps its origin."""
    text = validated(value)
    return value if isinstance(value, SecretText) else SecretText(text)


Text = Annotated[str, Field(min_length=1)]
Secret = Annotated[str, Field(min_length=1), WrapValidator(_secret)]
"""A text that contains credentials."""
Interval = Annotated[float | None, BeforeValidator(_interval)]
"""A duration in people's notation, in seconds; None if it is off."""
DataPath = Annotated[str, Field(min_length=1), AfterValidator(_data_path)]
Bytes = Annotated[ByteSize, Field(gt=0)]
SlotName = Annotated[str, AfterValidator(slot_name)]
PostgresTable = Annotated[str, AfterValidator(_postgres_table)]
"""The name of a table, normalized by `TableName`; the default schema is `public`."""
LakeTable = Annotated[str, AfterValidator(_lake_table)]
"""The name of a lake table; the default schema is `main`, and its case is kept."""


class Section(BaseModel):
    """A section of a file: immutable once read, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


Sections = Mapping[tuple[str, ...], type[Section]]
"""The sections of a file, by key path."""


# -- reading


def read_file(path: str | os.PathLike[str]) -> str:
    """The text of a configuration file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not a text file in UTF-8") from exc
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be read: {system_reason(exc)}", hint="check the path after -c"
        ) from exc


class _StrictLoader(yaml.SafeLoader):
    """A loader that refuses duplicate keys in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is not text", problem_mark=key.start_mark)
        keys = Counter(key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge")
        for key, count in keys.items():
            if count > 1:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key!r}", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.MarkedYAMLError as exc:
        line = f" in line {exc.problem_mark.line + 1}" if exc.problem_mark else ""
        raise ConfigError(f"{name} is not valid YAML{line}: {exc.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{name} is not valid YAML") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{name} must contain keys such as source, lake and groups",
            hint="see docs/configuration.md for every key",
        )
    return values


# -- paths


def absolute(path: str, base_dir: Path) -> str:
    return os.path.normpath(base_dir / Path(path).expanduser())


def absolute_data_path(path: str, base_dir: Path) -> str:
    """The absolute data path; a URL of an object store is returned unchanged."""
    return path if "://" in path else absolute(path, base_dir)


def absolute_catalog(catalog: str, base_dir: Path) -> str:
    if catalog.startswith("sqlite:"):
        return "sqlite:" + absolute(catalog.removeprefix("sqlite:"), base_dir)
    return catalog if SCHEME.match(catalog) else absolute(catalog, base_dir)


# -- mistakes

_WORDS = {
    "tuple_type": "must be a list, one entry per line after a dash",
    "dict_type": "must contain keys",
    "string_type": "must be text: put it in quotes",
    "string_too_short": "must not be empty",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
}
"""Wording for those kinds of pydantic's mistakes whose own text suits only programmers."""


def refuse_repeated(what: str, names: Iterable[str], where: str = "") -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"the {what} {name} appears {count} times{where}")


def describe_problems(exc: ValidationError, sections: Sections, *, prefix: tuple[str, ...] = ()) -> str:
    """Describe mistakes in terms of the file; `prefix` is the path of the values in it."""
    problems = exc.errors(include_url=False, include_input=False)
    return "; ".join(describe({**p, "loc": (*prefix, *p["loc"])}, sections) for p in problems)


def describe(problem: ErrorDetails, sections: Sections) -> str:
    """One mistake in terms of the file: the key's path and the problem."""
    location = problem["loc"]
    match problem["type"]:
        case "missing" if location == ("source", "dsn"):
            text = "is missing (or dsn_env)"
        case "missing":
            text = "is missing"
        case "extra_forbidden":
            text = "unknown key" + _suggestion(location, sections)
        case "literal_error":
            text = f"must be {problem['ctx']['expected']}"
        case "value_error":
            text = str(problem["ctx"]["error"])
        case "model_type":
            text = "must contain keys" + _example(location, sections)
        case kind if kind in _WORDS:
            text = _WORDS[kind]
        case _:
            text = problem["msg"][:1].lower() + problem["msg"][1:]
    return f"{_path(location)}: {text}" if location else text


def _path(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _suggestion(location: tuple[int | str, ...], sections: Sections) -> str:
    *path, key = location
    known = _known(path, sections)
    close = difflib.get_close_matches(str(key), known, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (known here: {', '.join(known)})"


def _example(location: tuple[int | str, ...], sections: Sections) -> str:
    known = _known(location, sections)
    return f", such as {known[0]}" if known else ""


def _known(path: Iterable[int | str], sections: Sections) -> list[str]:
    """The keys of the section at a path; empty if there is no such section."""
    section = sections.get(tuple(part for part in path if isinstance(part, str)))
    return [key_of(section, field) for field in section.model_fields] if section else []


def key_of(section: type[Section], field: str) -> str:
    return section.model_fields[field].alias or field
