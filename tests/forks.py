"""
Processes that tests kill, each there within a moment.

A server process imports and compiles everything once and forks a process for each request.  Requests and answers are lines
of JSON on its standard input and output.  What runs in the process is a function of a module of tests; its result is the exit code.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

MODULES = ("tests.events_process", "tests.chain_steps")
"""Imported, and warmed up, before the first fork."""


class Forked:
    """One process of the server."""

    def __init__(
        self,
        target: str,
        log: Path,
        *,
        fault: str | None = None,
        file_bytes: int | None = None,
        **arguments: Any,
    ) -> None:
        """`target` is module:function; `file_bytes` is the most that a file of it may have: a disk that is full sooner."""
        self.pid = _ask(
            target=target, log=str(log), fault=fault or "", file_bytes=file_bytes, arguments=arguments
        )
        self._code: int | None = None

    def wait(self) -> int:
        """Its exit code, once it has ended; that of a killed process is the negative number of the signal."""
        if self._code is None:
            self._code = _ask(wait=self.pid)
        return self._code

    def end(self, number: signal.Signals) -> int:
        if self._code is None:
            os.kill(self.pid, number)
        return self.wait()


def _ask(**request: Any) -> int:
    server = _server()
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


@functools.cache
def _server() -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.forks"]
    server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


# -- in the server


def serve() -> None:
    for module in MODULES:
        importlib.import_module(module).warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                run(request)
        print(answer, flush=True)


def run(request: dict[str, Any]) -> NoReturn:
    from aqueduck import faults
    from aqueduck.model.errors import AqueduckError

    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if request["file_bytes"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], resource.RLIM_INFINITY))
    faults.arm(request["fault"])
    module, _, function = request["target"].partition(":")
    code = 0
    try:
        getattr(importlib.import_module(module), function)(**request["arguments"])
    except AqueduckError as exc:
        print(f"aqueduck: {exc}", file=sys.stderr, flush=True)
        code = exc.exit_code
    except BaseException as exc:  # noqa: BLE001 - the test sees it in the log
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
        code = 70
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
