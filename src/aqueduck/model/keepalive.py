"""
How soon a peer that vanished without a word is noticed, on every connection to PostgreSQL, from both of its ends.

Without these settings a system waits two hours before it asks whether the other side is still there, and a quarter of an hour
for an answer.  A connection string that names one of them wins.  Silence of a peer whose system still answers is noticed by
`postgres.capture.capture`, as the server says something when it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CLIENT_END", "SERVER_END", "server_end"]

#: our end, as keywords of libpq: an idle peer is asked after 10 s and given up after 22
CLIENT_END: Mapping[str, int] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}

#: the server's end, as its settings: with the connection go its locks, slots and transactions
SERVER_END: Mapping[str, str] = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20000",
    "client_connection_check_interval": "5000",
}


def server_end(options: str) -> dict[str, str]:
    """What is set for a connection whose own `options` may name some of it."""
    return {name: value for name, value in SERVER_END.items() if name not in options}
