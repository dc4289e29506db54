"""
Texts with credentials, such as connection strings, which pass through Spark only as references.

Spark stores closures, partitions and plans of tasks in its blocks, on its disks and in its event logs. A
`SecretText` is therefore pickled as a reference to a file that only our user may read, in the directory given
to `keep_secrets`; the task reads the file.
"""

from __future__ import annotations

import functools
import os
import uuid
from pathlib import Path
from typing import Any

from aqueduck.model.errors import ConfigError, system_reason

__all__ = ["SECRETS_VARIABLE", "SecretText", "keep_secrets"]

SECRETS_VARIABLE = "AQUEDUCK_SECRETS"
"""Passes the directory to child processes, including those that Spark starts."""


class SecretText(str):
    """A text that is neither shown nor pickled; without a directory for secrets it is pickled as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'…'"

    def __deepcopy__(self, _: dict[int, Any]) -> SecretText:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        text, directory = str(self), os.environ.get(SECRETS_VARIABLE)
        if not directory:
            return (SecretText, (text,))
        return (_read, _place(_file(directory, os.getpid()), text))


def keep_secrets(directory: Path) -> None:
    """Keep secrets of this process and its children in a directory that only our user may enter."""
    os.environ[SECRETS_VARIABLE] = str(directory)


@functools.cache
def _file(directory: str, _process: int) -> str:
    path = f"{directory}/secrets-{uuid.uuid4().hex}"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    return path


@functools.lru_cache(maxsize=100_000)
def _place(path: str, text: str) -> tuple[str, int, int]:
    data = text.encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, data)  # appended: other threads write to the same file
        return path, os.lseek(file, 0, os.SEEK_CUR) - len(data), len(data)
    finally:
        os.close(file)


@functools.lru_cache(maxsize=100_000)
def _read(path: str, start: int, size: int) -> SecretText:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return SecretText(file.read(size).decode())
    except OSError as exc:
        hint = (
            "state_dir must be on storage that driver and executors share, and both must run as the same user"
        )
        raise ConfigError(
            f"a task cannot read the service's secrets: {system_reason(exc)}", hint=hint
        ) from None
