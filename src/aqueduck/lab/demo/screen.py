"""What a demo prints: steps, a live view with a progress bar, notes about what was just done, and counts at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

__all__ = ["Act", "Count", "Screen", "grid"]

BAR = 14


@dataclass(frozen=True, slots=True)
class Act:
    """Something that a demo does during the load, at a share of its time; the answer is printed."""

    at: float
    do: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Count:
    """How one table, tenant or file compares with its source."""

    name: str
    source: int
    copy: int
    lost: int
    duplicated: int
    identical: bool
    """The verdict of `aqueduck verify`, where the flow has it; otherwise that nothing is lost or duplicated."""

    @property
    def right(self) -> bool:
        return self.identical and not self.lost and not self.duplicated


class Screen:
    """The terminal of a demo; everything fits 80 columns."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._step = 0

    def step(self, text: str) -> None:
        self._step += 1
        self.console.print(f"[bold]{self._step}/4[/] {text}")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def page(self, address: str) -> None:
        self.say(f"    live in your browser while the demo runs: [bold cyan]{address}[/]")

    def watch(
        self,
        seconds: float,
        view: Callable[[], RenderableType],
        line: Callable[[], str],
        acts: Iterable[Act],
        *,
        done: Callable[[], bool],
    ) -> None:
        """Show the live view for this time, and until `done`; perform the acts when their time comes."""
        began = time.monotonic()
        waiting = sorted(acts, key=lambda act: act.at)
        with Live(console=self.console, refresh_per_second=4) as live:
            while (elapsed := time.monotonic() - began) < seconds or waiting or not done():
                while waiting and elapsed >= waiting[0].at * seconds:
                    live.console.print(
                        f"[bold yellow]{elapsed:4.0f} s[/]  {waiting.pop(0).do()}", highlight=False
                    )
                live.update(Group(view(), f"{_bar(elapsed / seconds)} {elapsed:.0f} s  {line()}"))
                time.sleep(0.25)
            live.update(Group(view(), f"{_bar(1)} {elapsed:.0f} s  {line()}"))

        if not self.console.is_terminal:
            self.console.print()

    def question(self, title: str, sql: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A query that anyone can run, and its answer."""
        self.console.print(Panel(sql, title=title, title_align="left", expand=False))
        self.console.print(grid(names, rows))

    def compare(self, counts: Sequence[Count], *, names: tuple[str, str]) -> bool:
        """Print all counts and the verdict; returns whether everything is right."""
        source, copy = names
        rows = [
            (c.name, f"{c.source:,}", f"{c.copy:,}", _zero(c.lost), _zero(c.duplicated),
             "[green]identical[/]" if c.identical else "[red]DIFFERENT[/]")
            for c in counts
        ]  # fmt: skip
        self.console.print(grid(("", source, copy, "lost", "duplicated", "content"), rows))
        lost, duplicated = sum(c.lost for c in counts), sum(c.duplicated for c in counts)
        self.say(f"{_zero(lost)} lost, {_zero(duplicated)} duplicated")
        right = all(c.right for c in counts)
        verdict = (
            "[bold green]source and {0} are identical[/]" if right else "[bold red]source and {0} differ[/]"
        )
        self.say(verdict.format(copy))
        return right

    def advise(self, advice: Sequence[str]) -> None:
        self.say("\nNext:")
        for line in advice:
            self.say(f"    {line[2:]}" if line.startswith("  ") else f"  • {line}")

    def wait_for_enter(self, address: str) -> None:
        """Keep the page until the user at a terminal has seen enough; without a terminal, return at once."""
        if self.console.is_terminal and sys.stdin.isatty():
            self.console.input(f"\nThe page stays at [bold cyan]{address}[/] until you press Enter. ")


def grid(names: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table whose first column is text and whose other columns are mostly numbers."""
    table = Table(expand=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    return table


def _bar(share: float) -> str:
    done = int(BAR * min(1.0, share))
    return f"[cyan]{'█' * done}{'░' * (BAR - done)}[/]"


def _zero(number: int) -> str:
    return f"[green]{number}[/]" if number == 0 else f"[bold red]{number:,}[/]"
