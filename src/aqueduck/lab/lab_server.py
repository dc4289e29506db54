"""
The embedded server of demo and benchmarks, closed to other users of the machine.

Its superuser has a random password in a file that only this user can read and that libpq finds through
`PGPASSFILE`, so that connection strings, configuration files and command lines contain no password.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from aqueduck.lab.embedded import EmbeddedPostgres

__all__ = ["lab_server", "private_file"]


@contextlib.contextmanager
def lab_server(directory: Path, settings: Mapping[str, str] | None = None) -> Iterator[EmbeddedPostgres]:
    """A server in its own directory; this process and its children can connect."""
    password = secrets.token_urlsafe(24)
    file = directory / "pgpass"
    private_file(file, f"*:*:*:postgres:{password}\n")
    before = os.environ.get("PGPASSFILE")
    os.environ["PGPASSFILE"] = str(file)
    try:
        with EmbeddedPostgres(
            directory / "postgres", settings=settings, password=password, password_in_dsn=False
        ) as server:
            yield server
    finally:
        if before is None:
            del os.environ["PGPASSFILE"]
        else:
            os.environ["PGPASSFILE"] = before


def private_file(path: Path, text: str) -> None:
    """Write a file that only this user can read, from the first byte on."""
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
