"""`aqueduck run` as a process of its own, with its page: what a demo starts, kills with -9 and starts again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aqueduck.model.errors import AqueduckError

__all__ = ["ServiceProcess", "page_port"]

HOST = "127.0.0.1"
USUAL_PORT = 8642


def page_port() -> int:
    """The usual port of the page, or a free one if it is taken."""
    for port in (USUAL_PORT, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    raise AqueduckError("there is no free port for the page of the demo")


class ServiceProcess:
    """The service of one configuration file; its output goes to a log beside the file."""

    def __init__(self, config_file: Path, port: int) -> None:
        self.address = f"http://{HOST}:{port}"
        self._command = [sys.executable, "-m", "aqueduck.cli", "run", "-c", str(config_file)]
        self._directory = config_file.parent
        self._log = config_file.parent / "service.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._deaf = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> int:
        """End the process with SIGKILL, which it cannot notice, and return its number."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        return self._process.pid

    def stop(self) -> None:
        """Ask the process to stop, and end what is left of its session."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def flow(self) -> dict[str, Any] | None:
        """The flow as the service's API shows it; `None` while the service does not answer."""
        self.check()
        try:
            with self._deaf.open(f"{self.address}/api/v1/status", timeout=2) as answer:
                flows = json.load(answer)["flows"]
        except (OSError, urllib.error.URLError, json.JSONDecodeError):
            return None
        return flows[0] if flows else None

    def check(self) -> None:
        """Raise an error if the service ended without being killed by the demo."""
        if self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            raise AqueduckError(
                f"the service of the demo ended with exit code {code}", hint=self._last_line()
            )

    def wait_until(self, done: Callable[[dict[str, Any]], bool], what: str, seconds: float = 180) -> None:
        """Wait until the flow shows what is expected."""
        deadline = time.monotonic() + seconds
        while (flow := self.flow()) is None or not done(flow):
            if time.monotonic() > deadline:
                raise AqueduckError(f"{what} was not reached within {seconds:.0f} s", hint=self._last_line())
            time.sleep(0.1)

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return lines[-1] if lines else "the service printed nothing"
