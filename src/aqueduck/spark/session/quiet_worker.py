"""
Workers of Spark's Python daemons that exit silently when Spark no longer listens to them.

This happens at a stop, when a worker started too slowly on a busy machine (Spark then starts another one), and when
Spark had nothing to plan for a minute.  By default the daemon prints a traceback on the service's standard error, which
looks like a failure.
"""

from __future__ import annotations

import socket
import sys

from pyspark import daemon

__all__ = ["quiet_planning", "quiet_worker"]

_serve = daemon.worker


def quiet_worker(sock: socket.socket, authenticated: bool) -> int:
    """Like `pyspark.daemon.worker`, but silent when Spark has closed the connection."""
    try:
        return int(_serve(sock, authenticated))
    except (BrokenPipeError, ConnectionResetError):
        return 1


def quiet_planning() -> None:
    """The same for planning workers, which Spark always starts from its own daemon, even if the tasks have another."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None and main.__spec__.name == "pyspark.daemon":
        main.worker = quiet_worker  # type: ignore[attr-defined]
