"""
Restrict files with data to the current user.

Stages, spills, checkpoints, parked changes, sinks and local lakes have cell values in clear text, including those of columns that
a target masks.  `restrict_new_files` sets the mode of all new files of the process.  `private_directory` creates or
checks a directory at a path that another user could have prepared.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from aqueduck.model.errors import ConfigError, system_reason

__all__ = ["UMASK_VARIABLE", "private_directory", "refuse_others_directory", "restrict_new_files"]

UMASK_VARIABLE = "AQUEDUCK_UMASK"
"""Overrides the umask for new files, for example 027 if a group of users reads a lake on local disk."""


def restrict_new_files(env: Mapping[str, str]) -> None:
    """Make new files of this process and its children private to the user, unless the variable sets another mask."""
    text = env.get(UMASK_VARIABLE, "077")
    try:
        mask = int(text, 8)
    except ValueError:
        mask = -1
    if not 0 <= mask <= 0o777 or mask & 0o700:
        raise ConfigError(
            f"the variable {UMASK_VARIABLE} must be an octal mask that leaves the owner all rights",
            hint="such as 077 or 027",
        )
    os.umask(mask)


def private_directory(path: Path) -> Path:
    """Create a directory that only this user can enter, or check that an existing one belongs to this user."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.lstat()
        if found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode):
            if found.st_mode & 0o077:
                path.chmod(0o700)
            return path
    except OSError as exc:
        raise ConfigError(f"the directory {path} cannot be created: {system_reason(exc)}") from None
    raise _of_others(path)


def refuse_others_directory(path: Path) -> None:
    """Raise if `private_directory` would refuse what is at the path; for a check, which creates nothing."""
    try:
        found = path.lstat()
    except OSError:  # missing, or reported by the check of the directory above
        return
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise _of_others(path)


def _of_others(path: Path) -> ConfigError:
    return ConfigError(
        f"the directory {path} is a link or belongs to another user",
        hint="remove it, or choose another path: state_dir, stage_dir or the variable TMPDIR",
    )
