"""
The demo of each flow: a live load, a service that is killed with -9 and resumes, and a count of what was lost.

    sync_demo    a small shop in PostgreSQL, replicated into a lake
    fanout_demo  one lake, split into a lake for each tenant
    events_demo  the shop's changes as JSON events in a file

Each demo runs `aqueduck run` as a process of its own (`service_process`), as a user would, and looks at the result
only from outside: by the service's API, by an independent DuckDB session, or by reading the file. `play` has the
order of what happens, `screen` what is printed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Literal

from rich.console import Console

from aqueduck.lab.demo.events_demo import EventsDemo
from aqueduck.lab.demo.fanout_demo import FanoutDemo
from aqueduck.lab.demo.play import Demo, play
from aqueduck.lab.demo.screen import Screen
from aqueduck.lab.demo.sync_demo import SyncDemo

__all__ = ["run_demo"]

_DEMOS: dict[str, Callable[[], Demo]] = {"sync": SyncDemo, "fanout": FanoutDemo, "events": EventsDemo}


def run_demo(
    flow: Literal["sync", "fanout", "events"] = "sync", *, seconds: float, kill: bool, keep: bool
) -> int:
    """Run a demo; returns 0 if both sides are identical at the end."""
    console = Console()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return 0 if play(_DEMOS[flow](), Screen(console), seconds=seconds, kill=kill, keep=keep) else 1
    except KeyboardInterrupt:
        console.print("\nstopped; everything the demo started is stopped")
        return 130


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
