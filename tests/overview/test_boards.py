"""Boards and alerts use metrics and labels that exist, and have descriptions (P-F17)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from aqueduck.overview.metrics import METRICS

ROOT = Path(__file__).parents[2]
BOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())["groups"]
RULES = [pytest.param(rule, id=rule["alert"]) for found in ALERTS for rule in found["rules"]]
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
SERIES = {
    spec.name + suffix: spec for spec in METRICS for suffix in SUFFIXES.get(spec.kind, ("",))
}  # a histogram is asked for by its parts


def expressions(board: dict[str, Any]) -> Iterator[str]:
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def check(expression: str) -> None:
    """Each metric is known, and asked only for labels that it has."""
    names = re.findall(r"aqueduck_[a-z_]+", expression)
    assert names, f"no metric in {expression}"
    for name in names:
        assert name in SERIES, f"{name} does not exist"
    for name, selected in re.findall(r"(aqueduck_[a-z_]+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected):
            assert label in SERIES[name].labels, f"{name} has no label {label}"
    labels = {label for name in names for label in (*SERIES[name].labels, "le")}
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in grouped.split(",")} <= labels, expression
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")


def load(board: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(board.read_text(encoding="utf-8"))
    return found


def test_there_is_a_board_for_each_flow() -> None:
    """The two boards that the documents name."""
    assert [board.name for board in BOARDS] == ["fanout.json", "sync.json"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
def test_a_board_asks_for_metrics_that_exist(board: Path) -> None:
    """No panel stays empty because a name was changed."""
    for expression in expressions(load(board)):
        check(expression)


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
def test_a_board_can_be_imported(board: Path) -> None:
    """Panels have ids of their own, do not overlap, and take the data source that a person chooses."""
    found = load(board)
    panels = found["panels"]
    assert found["uid"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, panel["title"]
        places |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"


def test_every_metric_is_on_a_board() -> None:
    """P-F17: each metric is on a board."""
    asked = {
        name
        for board in BOARDS
        for expression in expressions(load(board))
        for name in re.findall(r"aqueduck_[a-z_]+", expression)
    }
    shown = {SERIES[name].name for name in asked}
    assert sorted({spec.name for spec in METRICS} - shown) == []


@pytest.mark.parametrize("rule", RULES)
def test_an_alert_is_about_metrics_that_exist_and_says_what_to_do(rule: dict[str, Any]) -> None:
    """Each alert has a severity, a line that says what is wrong, and the next step."""
    check(rule["expr"])
    assert re.fullmatch(r"Aqueduck[A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["description"].endswith(".")
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))
    labels = {
        label for name in re.findall(r"aqueduck_[a-z_]+", rule["expr"]) for label in SERIES[name].labels
    }
    for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
        assert label in labels, f"{rule['alert']} has no label {label}"


def test_an_alert_names_boards_that_exist() -> None:
    """Every board that the documents mention exists under that title."""
    titles = {json.loads(path.read_text())["title"] for path in BOARDS}
    named = set(re.findall(r'the board "([^"]+)"', str(ALERTS)))
    assert named
    assert named <= titles


def test_alerts_have_names_of_their_own() -> None:
    """Two firing rules with the same name could not be distinguished."""
    names = [rule["alert"] for found in ALERTS for rule in found["rules"]]
    assert len(set(names)) == len(names)


def test_the_document_lists_every_metric_as_it_is() -> None:
    """docs/metrics.md has a row for each metric: its name, kind, labels and meaning."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(aqueduck_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", text, re.MULTILINE)
    listed = [
        (spec.name, spec.kind, ", ".join(f"`{label}`" for label in spec.labels) or "–", spec.help)
        for spec in METRICS
    ]
    assert documented == listed
