"""
The preflight of the lake and of our state directory: both must be reachable and writable.

Nothing is created: for a file that does not exist yet, its future folder is checked.
"""

from __future__ import annotations

import contextlib
import shlex
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.session.catalog import LakeSession, catalog_file, open_lake
from aqueduck.lake.session.encryption import prepare_encryption
from aqueduck.model.errors import (
    AqueduckError,
    CatalogUnreachableError,
    ConfigError,
    DataPathError,
    system_reason,
)
from aqueduck.postgres.session.connection import connect, translate_errors
from aqueduck.postgres.session.quoting import identifier
from aqueduck.state_files.private_files import refuse_others_directory

__all__ = [
    "check_catalog",
    "check_data_path",
    "check_state_dir",
    "existing_lake",
    "file_catalog_problem",
    "folder_problem",
    "repair",
]


def check_data_path(lake: LakeConfig) -> str:
    """Whether the lake's files can be written; object storage is only tested by opening the lake."""
    if "://" in lake.data_path:
        return "object storage; not tried before the first write"
    path = Path(lake.data_path)
    problem = folder_problem(path)
    if problem:
        raise DataPathError(f"the data path {path} {problem}", hint=repair(path))
    return f"{path} is writable" if path.exists() else f"{path} can be created"


def check_state_dir(state_dir: str, private: Iterable[Path] = ()) -> str:
    """Whether stage and checkpoint can be written; the directories in `private` must be this user's."""
    path = Path(state_dir)
    for directory in private:
        refuse_others_directory(directory)
    problem = folder_problem(path)
    if problem:
        raise ConfigError(f"the state directory {path} {problem}", hint=repair(path))
    return f"{path} is writable" if path.exists() else f"{path} can be created"


def check_catalog(lake: LakeConfig) -> str:
    """Whether the catalog can be opened, or created if there is none yet."""
    path = catalog_file(lake.catalog)
    return _check_postgres_catalog(lake) if path is None else _check_file_catalog(lake, path)


def _check_file_catalog(lake: LakeConfig, path: Path) -> str:
    problem = file_catalog_problem(path)
    if problem:
        hint = "let lake.catalog name a file" if path.is_dir() else repair(path.parent)
        raise CatalogUnreachableError(f"the catalog file {path} {problem}", hint=hint)
    if not path.exists():
        return f"{path} can be created"
    if lake.catalog.startswith("sqlite:") and not _holds_a_lake(path):
        return f"{path} has no lake yet; one can be created in it"
    _open(lake)
    return f"{path} can be opened"


def _holds_a_lake(path: Path) -> bool:
    """Whether a SQLite file has DuckLake's tables; for other files, opening them reports the problem."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as file:
            found = file.execute("select 1 from sqlite_master where name = 'ducklake_metadata'").fetchall()
    except sqlite3.Error:
        return True
    return bool(found)


def _check_postgres_catalog(lake: LakeConfig) -> str:
    uri = lake.catalog.startswith(("postgres://", "postgresql://"))
    dsn = lake.catalog if uri else lake.catalog.partition(":")[2]
    try:
        with connect(dsn) as conn, translate_errors("read the lake's catalog", conn=conn):
            row = conn.execute(
                "select to_regclass('public.ducklake_metadata') is not null, current_user::text, "
                "coalesce(has_schema_privilege(to_regnamespace('public'), 'create'), false)"
            ).fetchone()
    except AqueduckError as exc:
        raise CatalogUnreachableError(f"the catalog: {exc.message}", hint=exc.hint) from exc
    assert row is not None
    exists, role, may_create = row
    if exists:
        _open(lake)
        return "can be opened"
    if not may_create:
        raise CatalogUnreachableError(
            f"the role {role} may not create the catalog's tables in the schema public",
            hint=f"grant create on schema public to {identifier(role)}",
        )
    return "can be created"


@contextlib.contextmanager
def existing_lake(lake: LakeConfig) -> Iterator[LakeSession | None]:
    """
    The lake, opened for reading; None if there is none yet, or if `check_catalog` reports why it cannot be
    opened.
    """
    with contextlib.ExitStack() as stack:
        session = None
        with contextlib.suppress(AqueduckError):
            if check_catalog(lake).endswith("can be opened"):
                session = stack.enter_context(open_lake(lake, read_only=True))
        yield session


def _open(lake: LakeConfig) -> None:
    """
    Open an existing lake without creating anything in it.

    SQLite may leave its empty -wal and -shm files beside a catalog that was read.
    """
    with open_lake(lake, read_only=True) as session:
        if session.encrypted:
            prepare_encryption(session.con)


def file_catalog_problem(path: Path) -> str | None:
    """Why a catalog file can be neither written nor created."""
    problem = folder_problem(path.parent)
    return _file_problem(path) if not problem and path.exists() else problem


def folder_problem(folder: Path) -> str | None:
    """Why nothing can be written below the folder, which may not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return f"cannot be a folder: {existing} is a file"
    try:
        # A file without a name, which disappears before any other process can see it.
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as exc:
        return f"is not writable: {existing}: {system_reason(exc)}"


def _file_problem(path: Path) -> str | None:
    try:
        with path.open("r+b"):
            return None
    except OSError as exc:
        return f"is not writable: {system_reason(exc)}"


def repair(folder: Path) -> str:
    """The command that gives us a folder; if a file is in its place, the advice to use another path."""
    in_the_way = next((path for path in (folder, *folder.parents) if path.is_file()), None)
    if in_the_way is not None:
        return f"choose another path, or move the file {in_the_way} away"
    return f'sudo install -d -o "$(id -un)" {shlex.quote(str(folder))}'
