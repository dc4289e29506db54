"""
Workers of Spark's Python daemons that end without a word when Spark has stopped to listen.

So it is at a stop, where a worker started too slowly on a busy machine (Spark starts another one then), and after a minute in which
Spark had nothing to plan.  The daemon's own way is a traceback on the standard error of the service, which looks like a
failure and is none.
"""

from __future__ import annotations

import socket
import sys

from pyspark import daemon

__all__ = ["quiet_planning", "quiet_worker"]

_serve = daemon.worker


def quiet_worker(sock: socket.socket, authenticated: bool) -> int:
    """As `pyspark.daemon.worker`."""
    try:
        return int(_serve(sock, authenticated))
    except (BrokenPipeError, ConnectionResetError):
        return 1


def quiet_planning() -> None:
    """In a worker that plans: Spark starts those from a daemon of its own, whatever daemon it is told to use for tasks."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None and main.__spec__.name == "pyspark.daemon":
        main.worker = quiet_worker  # type: ignore[attr-defined]
