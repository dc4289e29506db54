"""
Named places where a test can make the process die or fail.

`AQUEDUCK_FAULT=name[:n]` kills the process with SIGKILL at the n-th time it passes the
point `name`; `AQUEDUCK_FAULT=name:raise` raises `LakeWriteError` there, once.  Unset, a point
costs one comparison.  Every durable step has a point before and after it; `docs/guarantees.md`
lists them.
"""

from __future__ import annotations

import os
import signal
import sys

from aqueduck.model.errors import LakeWriteError

__all__ = ["arm", "point"]

_name = _how = ""
_left = 1


def arm(fault: str) -> None:
    """Take `fault`, written as in `AQUEDUCK_FAULT`, from now on; an empty one disarms."""
    global _name, _how, _left
    _name, _, _how = fault.partition(":")
    _left = int(_how) if _how.isdigit() else 1


def point(name: str) -> None:
    """Pass the point `name`."""
    if name == _name:
        _trip()


def _trip() -> None:
    global _left
    _left -= 1
    if _left != 0:
        return
    print(f"passed the fault point {_name}", file=sys.stderr, flush=True)
    if _how == "raise":
        raise LakeWriteError(f"a test made {_name} fail")
    os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get("AQUEDUCK_FAULT", ""))
