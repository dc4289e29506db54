"""
Translate DuckDB's errors into Aqueduck's; no other module does.

DuckDB quotes values, file names and whole connection strings in its messages.  We show only the
part before the first quotation mark and keep the original exception out of the traceback.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import duckdb

from aqueduck.lake.session.ducklake_version import version_error
from aqueduck.model.connections import LET_SCRAM
from aqueduck.model.errors import (
    AqueduckError,
    CatalogUnreachableError,
    DataPathError,
    LakeBusyError,
    LakeFileMissingError,
    LakeWriteError,
    SchemaChangeError,
    ValueCastError,
)

__all__ = ["classify", "classify_attach", "lake_errors"]

_CONFLICT = (
    "transaction conflict",
    "write-write conflict",
    "database is locked",
    "could not serialize",
    "deadlock",
    "maximum retry count",
    "ducklake_snapshot_pkey",  # someone else's lake snapshot has the number
    "unique constraint failed: ducklake_snapshot",
)
_LOST = (
    "unable to connect",
    "server closed the connection",
    "terminating connection",
    "connection already closed",
    "no connection to the server",
    "ssl connection has been closed",
    "the database system is",
    "could not receive data",
    "could not send data",
)
_STORAGE = (
    "permission denied",
    "no space left",
    "read-only file system",
    "input/output error",
    "failed to create directory",
    "could not write",
    "disk quota",
)
_GONE = ("no such file or directory", "no files found that match", "404 (not found)")
_VALUES = (duckdb.ConversionException, duckdb.OutOfRangeException)
_KNOWN_PATH = re.compile(r'data path in the catalog "([^"]+)"')
_COLUMN_CAST = re.compile(
    r'failed to cast column "((?:[^"]|"")+)" from type .+? to ([A-Z][A-Z_ ]*(?:\([\d,]+\))?)'
)
_NOT_NULL = re.compile(r"NOT NULL constraint failed: [^.\s]+\.(\S+)")
_OWN = re.compile(r"^Invalid Input Error: aqueduck: (.*)")
_SHOWN = re.compile(r"^[^'\"\n`$]*")

_REASONS = (
    (
        "authentication method requirement",
        "the server asks for the password in a form that could be intercepted",
    ),
    ("connection refused", "connection refused"),
    ("password authentication failed", "password authentication failed"),
    ("no password supplied", "the server requires a password"),
    ("no pg_hba.conf entry", "the server's pg_hba.conf has no entry for this client"),
    ("could not translate host name", "the host name is unknown"),
    ("timeout expired", "the server did not answer in time"),
    ("no route to host", "there is no route to the host"),
    ("no such file or directory", "no such file or directory"),
    ("permission denied", "permission denied"),
    ("file is not a database", "the file is not a SQLite database"),
    ("not a valid duckdb database file", "the file is not a DuckDB database"),
    ("unable to open database file", "the file cannot be opened"),
    ("database does not exist", "the lake does not exist yet"),
    ("conflicting lock", "another process has the file open"),
    ("already attached by database", "this process already has the file open"),
    ("file handle conflict", "this process already has the file open"),
    ("too many connections", "the server has no free connection"),
    ("does not exist", "the database, the role or the lake in it does not exist"),
)
_DUCKDB_FILE_HINT = "only one process at a time can open a DuckDB file: stop the other one, or use a postgres: or sqlite: catalog"


@contextlib.contextmanager
def lake_errors(doing: str, *, table: str | None = None) -> Iterator[None]:
    """Translate DuckDB's errors inside this block; `doing` is the subject of "… failed"."""
    try:
        yield
    except duckdb.Error as exc:
        # `from None`: the original quotes cell values and connection strings.
        raise classify(exc, doing, table=table) from None


def classify(exc: duckdb.Error, doing: str, *, table: str | None = None) -> AqueduckError:
    """The error of ours for one of DuckDB's."""
    text = str(exc).lower()
    if any(words in text for words in _CONFLICT):
        return LakeBusyError(f"{doing} conflicted with another writer of the lake", table=table)
    if any(words in text for words in _LOST):
        return LakeWriteError(f"{doing} lost the connection to the lake's catalog", table=table)
    if own := _OWN.search(str(exc)):
        return ValueCastError(
            own[1], hint="cast the column to a type that holds the value (docs/types.md)", table=table
        )
    if isinstance(exc, _VALUES):
        hint = "see docs/types.md for the values that each type can hold, then resync the table"
        found = _COLUMN_CAST.search(str(exc))
        where = f" in the column {found[1]}, which is {found[2].strip()}" if found else ""
        message = f"{doing} found a value that its lake type cannot hold{where}"
        return ValueCastError(message, hint=hint, table=table)
    if isinstance(exc, duckdb.IOException | duckdb.HTTPException) and any(
        words in text for words in _STORAGE
    ):
        hint = "check free space and the rights on lake.data_path"
        return DataPathError(f"{doing} could not write to the lake's storage", hint=hint, table=table)
    if isinstance(exc, duckdb.IOException) and any(words in text for words in _GONE):
        hint = (
            "restore the files below lake.data_path, and the table continues; if they are lost, re-copy the table:"
            " aqueduck tables resync -c FILE TABLE; if its mode keeps the past: aqueduck tables remove -c FILE TABLE"
            " --drop-target, then tables add"
        )
        return LakeFileMissingError(f"{doing} did not find a file of the lake", hint=hint, table=table)
    if isinstance(exc, duckdb.ConstraintException) and (column := _NOT_NULL.search(str(exc))):
        return SchemaChangeError(
            f"{doing} found NULL for the column {column[1]}, which was set to NOT NULL in the lake",
            hint=f"alter the lake table: alter column {column[1]} drop not null",
            table=table,
        )
    if isinstance(exc, duckdb.OutOfMemoryException):
        hint = "increase the group's task_memory, or add memory to the machine"
        return LakeWriteError(f"{doing} ran out of memory", hint=hint, table=table)
    return LakeWriteError(f"{doing} failed: {type(exc).__name__}: {_shown(exc)}", table=table)


def classify_attach(exc: duckdb.Error, kind: str) -> AqueduckError:
    """The error for a lake that could not be attached; `kind` is postgres, sqlite or duckdb."""
    text = str(exc).lower()
    if "data_path parameter" in text:
        known = _KNOWN_PATH.search(str(exc))
        hint = f"set lake.data_path to the path with which this lake was created{f', {known[1]}' if known else ''}"
        return DataPathError("lake.data_path differs from the data path in the lake's catalog", hint=hint)
    if other := version_error(str(exc)):
        return other
    reason = next((reason for words, reason in _REASONS if words in text), type(exc).__name__)
    hint = "check lake.catalog"
    if kind == "duckdb" and "open" in reason:
        hint = _DUCKDB_FILE_HINT
    if "authentication method requirement" in text:
        hint = LET_SCRAM
    return CatalogUnreachableError(f"the lake's {kind} catalog cannot be opened: {reason}", hint=hint)


def _shown(exc: duckdb.Error) -> str:
    found = _SHOWN.match(str(exc))
    return (found[0].strip(" :-(") if found else "")[:200] or "no reason given"
