"""
A worker of Spark's Python daemon that ends without a word when Spark has stopped to listen.

So it is at a stop, and where a worker started too slowly on a busy machine; Spark starts another one then.  The daemon's
own way is a traceback on the standard error of the service, which looks like a failure and is none.
"""

from __future__ import annotations

import socket

from pyspark import daemon

__all__ = ["quiet_worker"]

_serve = daemon.worker


def quiet_worker(sock: socket.socket, authenticated: bool) -> int:
    """As `pyspark.daemon.worker`."""
    try:
        return int(_serve(sock, authenticated))
    except (BrokenPipeError, ConnectionResetError):
        return 1
