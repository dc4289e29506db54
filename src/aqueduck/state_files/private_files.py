"""
Files that hold other people's data are for this user alone.

Stages, spills, checkpoints, parked changes, sinks and local lakes hold cell values in clear, also of columns that a target masks.
`restrict_new_files` sets the mode of every new file of the process; `private_directory` makes or checks a directory at a place that
others could have prepared.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from aqueduck.model.errors import ConfigError, system_reason

__all__ = ["UMASK_VARIABLE", "private_directory", "restrict_new_files"]

UMASK_VARIABLE = "AQUEDUCK_UMASK"
"""Another mask for new files, such as 027 where a group reads a lake on local disk."""


def restrict_new_files(env: Mapping[str, str]) -> None:
    """Files that this process and its children make are for this user alone, unless the variable says otherwise."""
    text = env.get(UMASK_VARIABLE, "077")
    try:
        mask = int(text, 8)
    except ValueError:
        mask = -1
    if not 0 <= mask <= 0o777 or mask & 0o700:
        raise ConfigError(
            f"the variable {UMASK_VARIABLE} must be a mask in octal that leaves the owner all rights",
            hint="such as 077 or 027",
        )
    os.umask(mask)


def private_directory(path: Path) -> Path:
    """The directory, made if it is missing; nobody else may enter it, and nobody else has prepared it."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.lstat()
        if found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode):
            if found.st_mode & 0o077:
                path.chmod(0o700)
            return path
    except OSError as exc:
        raise ConfigError(f"the directory {path} cannot be made: {system_reason(exc)}") from None
    raise ConfigError(
        f"the directory {path} is a link or belongs to another user",
        hint="remove it, or choose another place: state_dir, stage_dir or the variable TMPDIR",
    )
