"""The demo of each flow proves what it prints: it counts both sides itself, after the service was killed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from aqueduck.lab.demo.events_demo import Rows, count_events
from aqueduck.lab.demo.screen import Act, Count, Screen
from aqueduck.lab.demo.service_process import ServiceProcess
from aqueduck.model.errors import AqueduckError


def screen() -> tuple[Screen, io.StringIO]:
    text = io.StringIO()
    return Screen(Console(file=text, width=80)), text


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (Count("t", source=3, copy=2, lost=1, duplicated=0, identical=False), "1 lost, 0 duplicated"),
        (Count("t", source=3, copy=4, lost=0, duplicated=1, identical=False), "0 lost, 1 duplicated"),
        (Count("t", source=3, copy=3, lost=0, duplicated=0, identical=False), "DIFFERENT"),
    ],
)
def test_a_difference_is_counted_and_fails_the_demo(count: Count, said: str) -> None:
    """A lost row, a row twice, or another value: the demo says so, and that the sides differ."""
    shown, text = screen()
    right = Count("u", source=1, copy=1, lost=0, duplicated=0, identical=True)
    assert not shown.compare([right, count], names=("PostgreSQL", "lake"))
    assert said in text.getvalue()
    assert "source and lake differ" in text.getvalue()


def test_equal_sides_are_called_identical() -> None:
    """The line that ends a good demo, and tests of wheels look for."""
    shown, text = screen()
    assert shown.compare(
        [Count("u", source=1, copy=1, lost=0, duplicated=0, identical=True)], names=("PostgreSQL", "lake")
    )
    assert text.getvalue().endswith("0 lost, 0 duplicated\nsource and lake are identical\n")


def test_a_load_ends_after_its_acts_and_not_before_the_service_runs_again() -> None:
    """Each act happens once, in order, also where the time is over before the service is back."""
    shown, text = screen()
    done, looks = [], iter([False, False, True, True])

    def act(name: str) -> str:
        done.append(name)
        return name

    acts = [Act(0.5, lambda: act("second")), Act(0.0, lambda: act("first"))]
    shown.watch(0.2, lambda: "view", lambda: "line", acts, done=lambda: next(looks))
    assert done == ["first", "second"]
    assert text.getvalue().index("first") < text.getvalue().index("second")


def test_a_service_that_ends_early_ends_the_demo_with_its_last_line(tmp_path: Path) -> None:
    """A demo does not wait for a service that is gone."""
    service = ServiceProcess(tmp_path / "missing.yaml", 1)
    service.start()
    try:
        with pytest.raises(AqueduckError, match="exit code 2") as caught:
            service.wait_until(lambda _flow: False, "nothing", 60)
    finally:
        service.stop()
    assert "missing.yaml" in (caught.value.hint or "")


EVENT = b'{"op":"insert","table":"orders","lsn":"0/1","after":{"id":1,"status":"new","total":"5.00"},"before":null}'


@pytest.mark.parametrize(
    ("lines", "changes", "lost", "duplicated"),
    [([EVENT], 1, 0, 0), ([EVENT, EVENT], 1, 0, 1), ([EVENT], 2, 1, 0), ([EVENT, EVENT], 2, 1, 1)],
)
def test_the_events_of_a_table_are_counted(
    lines: list[bytes], changes: int, lost: int, duplicated: int
) -> None:
    """A line that is there twice does not make up for one that is missing."""
    count = count_events("orders", lines, changes, lambda _table, rows: rows)
    assert (count.source, count.copy, count.lost, count.duplicated) == (changes, len(lines), lost, duplicated)
    assert count.right == (lost == duplicated == 0)


def test_an_event_with_another_value_than_the_row_is_a_difference() -> None:
    """Right numbers of events are not enough: the last event of a row has to have the row's values."""
    other: Rows = {("1",): ("paid", "5.00")}
    assert not count_events("orders", [EVENT], 1, lambda _table, _rows: other).right


@pytest.mark.spark
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "flow",
    ["sync", pytest.param("fanout", marks=pytest.mark.slow), pytest.param("events", marks=pytest.mark.slow)],
)
def test_the_demo_survives_its_kill(flow: str, tmp_path: Path) -> None:
    """`aqueduck demo` kills its service, resumes, counts no loss, and leaves nothing behind."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path), "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "aqueduck.cli", "demo", "--flow", flow, "--seconds", "4"],
        env=env, capture_output=True, text=True, timeout=380, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout
    assert "0 lost, 0 duplicated" in done.stdout
    assert "are identical" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not list(tmp_path.glob("aqueduck-demo-*"))
