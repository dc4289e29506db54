"""Showing something again and again: on a terminal in place, elsewhere one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from rich.console import Console

from aqueduck.model.errors import AqueduckError, Retry

__all__ = ["keep_showing"]


def keep_showing(
    out: Console, read: Callable[[], Any], show: Callable[[Any], None], seconds: float
) -> NoReturn:
    """Show what `read` returns, until interrupted; an error that may pass is shown in its place."""
    while True:
        found, error = None, None
        try:
            found = read()
        except AqueduckError as exc:
            if exc.retry is not Retry.AUTO:
                raise
            error = exc
        if out.is_terminal:
            out.clear()
            out.print(
                f"{datetime.now():%H:%M:%S}, every {seconds:g} s; ctrl-C ends", style="dim", highlight=False
            )
        if error is None:
            show(found)
        else:
            out.print(str(error), style="yellow", markup=False, highlight=False, soft_wrap=True)
        time.sleep(seconds)
