"""
A child process that ends when we end, and the ways to end it sooner.

It knows two things about PostgreSQL: SIGQUIT stops it at once, and it then leaves backends behind that must
be waited for. `embedded` decides what to start and when.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from aqueduck.model.errors import SourceUnreachableError

__all__ = ["ends_within", "kill_family", "spawn", "wait_until"]

_KILL_SECONDS_MAX = 30.0
_PR_SET_PDEATHSIG = 1
# Load it now: a library must not be loaded between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def spawn(command: Sequence[str | Path], **arguments: Any) -> subprocess.Popen[bytes]:
    """
    Start a program that ends when we end, however we end (on Linux; elsewhere best effort).

    The kernel's death signal comes when the *thread* that forked ends, so the fork happens in a separate
    thread, which lives until the program has ended. A separate session keeps the terminal's ctrl-C from the
    program: only we stop it.
    """
    made: Future[subprocess.Popen[bytes]] = Future()
    us = os.getpid()

    def die_with_us() -> None:
        # Runs after the change of user, which would clear the death signal.
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGQUIT))
            if os.getppid() != us:
                os._exit(1)

    def fork_and_stay() -> None:
        try:
            process = subprocess.Popen(command, preexec_fn=die_with_us, start_new_session=True, **arguments)
        except (OSError, subprocess.SubprocessError) as exc:
            made.set_exception(exc)
        else:
            made.set_result(process)
            process.wait()

    threading.Thread(target=fork_and_stay, name=f"{Path(command[0]).name}-parent", daemon=True).start()
    return made.result()


def kill_family(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its children, and wait until they have ended."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    process.kill()
    process.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    wait_until(lambda: not any(map(_lives, children)), _KILL_SECONDS_MAX, "all backends are gone")


def ends_within(seconds: float, process: subprocess.Popen[bytes]) -> bool:
    """Wait for a process to end; returns whether it did."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition; `what` describes it in the error on timeout."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise SourceUnreachableError(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(0.01)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
