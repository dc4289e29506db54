"""docs/cli.md, docs/rest.md and the schemas for editors say what the program does."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest
import typer
import yaml

from aqueduck.cli.commands import app
from aqueduck.cli.help_texts import EXAMPLES
from tests.docs.reader import ROOT
from tests.docs.test_docs import FILES, problem_of

COMMANDS = typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
REFERENCE = runpy.run_path(str(ROOT / "docs" / "_site" / "reference.py"))


@pytest.mark.parametrize("path", REFERENCE["PAGES"])
def test_a_generated_page_is_not_stale(path: str) -> None:
    """The page equals what `make reference` would write now."""
    written = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
    assert written == REFERENCE["PAGES"][path](), f"{path} is stale: run `make reference`"


def test_every_command_and_address_has_its_heading() -> None:
    """The generator leaves out nothing that a person can call."""
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"aqueduck run", "aqueduck tables add", "aqueduck slots drop"} <= set(headings)
    addresses = re.findall(r"^\| `(GET|POST|PUT|DELETE) (/api/v1/[\w/{}]+)`", api_table(), re.MULTILINE)
    rest = (ROOT / "docs" / "rest.md").read_text(encoding="utf-8")
    undescribed = ("/events", "/openapi.json")
    missing = [
        f"{m} {a}"
        for m, a in addresses
        if not a.endswith(undescribed) and f"## {m} {a}" not in re.sub(r":path", "", rest)
    ]
    assert len(addresses) > 15
    assert missing == []


def test_the_examples_of_the_help_are_valid() -> None:
    """Every command has examples, which exist with their options."""
    names = {name for name, _ in COMMANDS}
    assert names | {""} == EXAMPLES.keys()
    lines = [line.split(" | ")[0] for lines in EXAMPLES.values() for line in lines]
    assert [f"{line}: {problem}" for line in lines if (problem := problem_of(line))] == []
    assert [
        line for name, lines in EXAMPLES.items() for line in lines if f"aqueduck {name}" not in line
    ] == []


def api_table() -> str:
    return (ROOT / "docs" / "operations-http.md").read_text(encoding="utf-8")


def flow_of(document: Any) -> str | None:
    keys = {"groups": "sync", "routing": "fanout", "sink": "events"}
    return next((flow for key, flow in keys.items() if key in document and "source" in document), None)


@pytest.mark.parametrize("text", FILES)
def test_a_documented_file_fits_the_schema(text: str) -> None:
    """An editor underlines nothing in a file that the program accepts."""
    jsonschema = pytest.importorskip("jsonschema")
    document = yaml.safe_load(text)
    if flow := flow_of(document):
        schema = yaml.safe_load((ROOT / "docs" / "schema" / f"{flow}.json").read_text(encoding="utf-8"))
        jsonschema.validate(document, schema)


@pytest.mark.parametrize(
    ("flow", "text"),
    [
        ("sync", "{source: {dsn_env: A}, lake: {catalog: a, data_path: b}, groups: [{name: a, flush: 1}]}"),
        ("sync", "{source: {}, lake: {catalog: a, data_path: b}, groups: []}"),
        ("sync", "{source: {dsn_env: A}, lake: {catalog: a, catalog_env: B, data_path: b}, groups: []}"),
        ("events", "{source: {type: postgres-cdc, config: {}}, sink: {type: jsonl, config: {paht: a}}}"),
        ("events", "{source: {type: mysql, config: {}}, sink: {type: stdout}}"),
    ],
)
def test_a_mistake_does_not_fit_the_schema(flow: str, text: str) -> None:
    """An unknown key, a missing connection string, two catalogs, and an unknown type are underlined."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = yaml.safe_load((ROOT / "docs" / "schema" / f"{flow}.json").read_text(encoding="utf-8"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), schema)


def test_every_schema_is_named_where_people_look() -> None:
    """docs/configuration.md says how an editor finds each of them."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [
        p.name for p in sorted((ROOT / "docs" / "schema").iterdir()) if f"schema/{p.name}" not in text
    ] == []
