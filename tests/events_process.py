"""
`aqueduck run` for events without Spark, in processes that tests kill: the same service over the local query.

A server process imports and compiles everything once and forks a process for each request, so that one starts
within a moment.  Requests and answers are lines of JSON on its standard input and output.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn


class Forked:
    """One process of the server."""

    def __init__(
        self, config_file: Path, log: Path, *, once: bool, fault: str | None, file_bytes: int | None = None
    ) -> None:
        """`file_bytes` is the most that a file of it may have: a disk that is full sooner."""
        request = {"config": str(config_file), "log": str(log), "once": once, "fault": fault or ""}
        self.pid = _ask(**request, file_bytes=file_bytes)
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
    command = [sys.executable, "-m", "tests.events_process"]
    server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


# -- in the server


def serve() -> None:
    from aqueduck.app import events  # noqa: F401 - imported for the forks
    from aqueduck.lake import json_events
    from aqueduck.postgres import decoder

    decoder.warm_up()
    json_events.warm_up()
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
    from aqueduck.app.events import EventsService
    from aqueduck.errors import AqueduckError
    from aqueduck.events_config import load_events

    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if request["file_bytes"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], resource.RLIM_INFINITY))
    name, _, how = request["fault"].partition(":")
    vars(faults).update(_name=name, _how=how, _left=int(how) if how.isdigit() else 1)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    code = 0
    try:
        config = load_events(request["config"])
        assert config is not None
        service = EventsService(config, with_spark=False)
        try:
            service.prepare()
            service.start(once=request["once"])
            (service.run_once if request["once"] else service.supervise)(stopping)
        finally:
            service.stop()
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
