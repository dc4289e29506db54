"""
Everything Aqueduck raises on purpose, and how it crosses Spark as text.

    AqueduckError                    aqueduck.error
    ├── ConfigError                  config.invalid
    ├── SourceError                  (family: PostgreSQL)
    │   ├── SourceUnreachableError   pg.unreachable      retried
    │   ├── AuthenticationError      pg.auth
    │   ├── WalLevelError            pg.wal_level
    │   ├── PrivilegeError           pg.privilege
    │   ├── RowSecurityError         pg.row_security
    │   ├── TableMissingError        pg.table_missing
    │   ├── TableRecreatedError      pg.table_recreated
    │   ├── NoKeyError               pg.no_key
    │   ├── SlotLostError            pg.slot_lost
    │   ├── SlotActiveError          pg.slot_active      retried
    │   ├── SlotConflictError        pg.slot_conflict
    │   ├── TwoPhaseSlotError        pg.slot_two_phase
    │   ├── SlotLimitError           pg.slot_limit
    │   ├── PublicationError         pg.publication
    │   ├── UnpublishedError         pg.unpublished
    │   ├── ProtocolError            pg.protocol         retried
    │   ├── ConnectionLostError      pg.connection_lost  retried
    │   ├── SnapshotGoneError        pg.snapshot_gone
    │   └── SourceQueryError         pg.query
    ├── LakeError                    (family: DuckLake)
    │   ├── CatalogUnreachableError  lake.catalog
    │   ├── DataPathError            lake.data_path
    │   ├── EncryptedLakeError       lake.encrypted
    │   ├── LakeBusyError            lake.conflict       retried
    │   ├── LakeWriteError           lake.write          retried
    │   ├── ValueCastError           lake.value
    │   ├── LakeTypeError            lake.type
    │   ├── SchemaChangeError        lake.schema_change
    │   ├── SourceExpiredError       lake.expired
    │   ├── SourceDivergedError      lake.diverged
    │   ├── MergedChangesError       lake.merged
    │   ├── ReservedColumnError      lake.reserved_column
    │   ├── LakeTableMissingError    lake.table_missing
    │   ├── TargetReplacedError      lake.table_replaced
    │   ├── PartitionedTargetError   lake.partitioned
    │   ├── ForeignTargetError       lake.foreign_target
    │   ├── NoSnapshotError          lake.no_snapshot
    │   ├── DuplicateKeyError        lake.duplicate_key
    │   └── ResyncNeededError        lake.resync_needed
    ├── CopyDisturbedError           copy.disturbed      retried
    ├── TableDisabledError           table.disabled
    ├── HttpError                    (family: the HTTP server and its API)
    │   ├── ServerStartError         http.start
    │   ├── BadRequestError          http.request
    │   ├── TokenError               http.token
    │   ├── ReadOnlyError            http.read_only
    │   ├── ScopeError               http.scope
    │   ├── NotFoundError            http.not_found
    │   └── MethodError              http.method
    ├── EventError                   (family: change events)
    │   ├── EventValueError          events.value
    │   ├── TransactionTooLargeError events.too_large
    │   ├── BookmarkError            events.bookmark
    │   ├── SinkPathError            sink.path
    │   ├── SinkTableError           sink.table
    │   ├── SinkWriteError           sink.write          retried
    │   ├── SinkRejectedError        sink.rejected
    │   └── SinkUnreachableError     sink.unreachable    retried
    ├── RoutingError                 fanout.routing
    ├── SparkStartError              spark.start
    ├── SparkQueryError              spark.query         retried
    ├── StageFullError               stage.full
    ├── VerifyDifferenceError        verify.different
    ├── VerifyPostponedError         verify.postponed
    ├── ServiceLockedError           service.locked
    ├── RegistryIncompleteError      registry.incomplete
    └── MaintenanceError             maintenance.failed

A code is stable and has a heading in `docs/errors.md`.  Foreign exceptions are translated
elsewhere, at the boundary they come from.  Messages hold no cell values and no secrets.
"""

from __future__ import annotations

import enum
import os
import re
import traceback
from typing import Any, ClassVar

__all__ = [
    "AqueduckError",
    "AuthenticationError",
    "BadRequestError",
    "BookmarkError",
    "CatalogUnreachableError",
    "ConfigError",
    "ConnectionLostError",
    "CopyDisturbedError",
    "DataPathError",
    "DuplicateKeyError",
    "EncryptedLakeError",
    "EventError",
    "EventValueError",
    "ForeignTargetError",
    "HttpError",
    "LakeBusyError",
    "LakeError",
    "LakeTableMissingError",
    "LakeTypeError",
    "LakeWriteError",
    "MaintenanceError",
    "MethodError",
    "NoKeyError",
    "NoSnapshotError",
    "NotFoundError",
    "PartitionedTargetError",
    "PrivilegeError",
    "ProtocolError",
    "PublicationError",
    "ReadOnlyError",
    "RegistryIncompleteError",
    "ReservedColumnError",
    "ResyncNeededError",
    "Retry",
    "RoutingError",
    "RowSecurityError",
    "SchemaChangeError",
    "ServerStartError",
    "ServiceLockedError",
    "SinkPathError",
    "SinkRejectedError",
    "SinkTableError",
    "SinkUnreachableError",
    "SinkWriteError",
    "SlotActiveError",
    "SlotConflictError",
    "SlotLimitError",
    "SlotLostError",
    "SnapshotGoneError",
    "SourceError",
    "SourceExpiredError",
    "SourceQueryError",
    "SourceUnreachableError",
    "SparkQueryError",
    "SparkStartError",
    "StageFullError",
    "TableDisabledError",
    "TableMissingError",
    "TableRecreatedError",
    "TargetReplacedError",
    "TokenError",
    "TransactionTooLargeError",
    "TwoPhaseSlotError",
    "UnpublishedError",
    "ValueCastError",
    "VerifyDifferenceError",
    "VerifyPostponedError",
    "WalLevelError",
    "error_codes",
    "own_error",
    "system_reason",
]

_CODE = re.compile(r"\[([a-z]+\.[a-z_]+)\] ")
_SQLSTATE = re.compile(r"(?:\s+SQLSTATE: [0-9A-Z]{5})+\s*$")
_TABLE = re.compile(r" \(table ([^()]*)\)$")
_OFFSET = re.compile(r" \(at byte (\d+)\)$")
_FIX = ". Fix: "


class Retry(enum.Enum):
    """Who acts after an error: the service, which retries, or a person."""

    AUTO = "auto"
    OPERATOR = "operator"


class AqueduckError(Exception):
    """The base of all errors that Aqueduck raises on purpose."""

    code: ClassVar[str] = "aqueduck.error"
    retry: ClassVar[Retry] = Retry.OPERATOR
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None, table: str | None = None) -> None:
        self.message = _one_line(message).removesuffix(".")
        self.hint = _one_line(hint) if hint else None
        self.table = _one_line(table) if table else None
        super().__init__(self.message)

    def __str__(self) -> str:
        text = f"[{self.code}] {self.message}{self._details()}"
        return f"{text}{_FIX}{self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self._keywords())

    def _keywords(self) -> dict[str, Any]:
        return {"hint": self.hint, "table": self.table}

    def _details(self) -> str:
        return f" (table {self.table})" if self.table else ""

    @classmethod
    def _from_body(cls, message: str, hint: str | None, table: str | None) -> AqueduckError:
        return cls(message, hint=hint, table=table)

    @staticmethod
    def from_text(text: str) -> AqueduckError | None:
        """
        Rebuild the error from text that ends in it, such as a Spark stack trace.

        The last line with a known code counts: a traceback prints an error after its causes. Returns `None`
        if no code is known.
        """
        for line in reversed(text.splitlines()):
            for found in _CODE.finditer(line):
                cls = _classes().get(found[1])
                if cls is not None:
                    return _parse(cls, line[found.end() :])
        return None


class ConfigError(AqueduckError):
    """The configuration file, an option or an environment variable is wrong."""

    code = "config.invalid"
    exit_code = 2


class SourceError(AqueduckError):
    """The family of errors about the PostgreSQL source; never raised directly."""


class SourceUnreachableError(SourceError):
    """No connection to the PostgreSQL server could be made."""

    code = "pg.unreachable"
    retry = Retry.AUTO


class AuthenticationError(SourceError):
    """The server refused the user, the password or the certificate."""

    code = "pg.auth"


class WalLevelError(SourceError):
    """The server does not write the WAL that logical decoding needs."""

    code = "pg.wal_level"


class PrivilegeError(SourceError):
    """The role lacks a required privilege."""

    code = "pg.privilege"


class RowSecurityError(SourceError):
    """A policy of row-level security may hide rows of a table from the role."""

    code = "pg.row_security"


class TableMissingError(SourceError):
    """A configured table does not exist in the source."""

    code = "pg.table_missing"


class TableRecreatedError(SourceError):
    """A source table was dropped, and another table has its name."""

    code = "pg.table_recreated"


class NoKeyError(SourceError):
    """A table has no key by which its rows could be matched."""

    code = "pg.no_key"


class SlotLostError(SourceError):
    """The slot is gone, and the WAL since its position with it."""

    code = "pg.slot_lost"


class SlotActiveError(SourceError):
    """Another connection is reading the slot."""

    code = "pg.slot_active"
    retry = Retry.AUTO


class SlotConflictError(SourceError):
    """A slot of that name exists, but it does not match the lake."""

    code = "pg.slot_conflict"


class TwoPhaseSlotError(SourceError):
    """The slot sends prepared transactions before their outcome is known."""

    code = "pg.slot_two_phase"


class SlotLimitError(SourceError):
    """The server has no free replication slot or walsender."""

    code = "pg.slot_limit"


class PublicationError(SourceError):
    """The publication is missing or does not publish what it must."""

    code = "pg.publication"


class UnpublishedError(SourceError):
    """Tables were not published for a while, and their changes during that time were not sent."""

    code = "pg.unpublished"


class ProtocolError(SourceError):
    """The replication stream contains bytes that pgoutput does not write."""

    code = "pg.protocol"
    retry = Retry.AUTO

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        table: str | None = None,
        offset: int | None = None,
    ) -> None:
        self.offset = offset
        super().__init__(message, hint=hint, table=table)

    def _keywords(self) -> dict[str, Any]:
        return {**super()._keywords(), "offset": self.offset}

    def _details(self) -> str:
        where = "" if self.offset is None else f" (at byte {self.offset})"
        return where + super()._details()

    @classmethod
    def _from_body(cls, message: str, hint: str | None, table: str | None) -> AqueduckError:
        message, offset = _cut(_OFFSET, message)
        return cls(message, hint=hint, table=table, offset=None if offset is None else int(offset))


class ConnectionLostError(SourceError):
    """An established connection to PostgreSQL broke."""

    code = "pg.connection_lost"
    retry = Retry.AUTO


class SnapshotGoneError(SourceError):
    """The snapshot under which a table is read has ended."""

    code = "pg.snapshot_gone"


class SourceQueryError(SourceError):
    """PostgreSQL refused a statement for a reason that has no code of its own."""

    code = "pg.query"


class LakeError(AqueduckError):
    """The family of errors about DuckLake; never raised directly."""


class CatalogUnreachableError(LakeError):
    """The lake's catalog could not be opened."""

    code = "lake.catalog"


class DataPathError(LakeError):
    """The lake's data path cannot be written or differs from the one in the catalog."""

    code = "lake.data_path"


class EncryptedLakeError(LakeError):
    """The lake is encrypted: DuckLake could not read the files that Aqueduck writes."""

    code = "lake.encrypted"


class LakeBusyError(LakeError):
    """Another writer committed to the catalog first."""

    code = "lake.conflict"
    retry = Retry.AUTO


class LakeWriteError(LakeError):
    """A lake transaction failed and was rolled back."""

    code = "lake.write"
    retry = Retry.AUTO


class ValueCastError(LakeError):
    """The type of a lake column cannot hold a value."""

    code = "lake.value"


class LakeTypeError(LakeError):
    """A column's type cannot be replicated exactly."""

    code = "lake.type"


class SchemaChangeError(LakeError):
    """A change of the source table's columns cannot be applied to its lake table."""

    code = "lake.schema_change"


class SourceExpiredError(LakeError):
    """Lake snapshots expired before they were read."""

    code = "lake.expired"


class MergedChangesError(LakeError):
    """Updates that were not read yet are in merged files, where they look like new rows."""

    code = "lake.merged"


class SourceDivergedError(LakeError):
    """The source lake's history differs from the one that was read: it was restored and then written."""

    code = "lake.diverged"


class ReservedColumnError(LakeError):
    """A source column has a name that DuckLake's change feed needs."""

    code = "lake.reserved_column"


class LakeTableMissingError(LakeError):
    """The lake table to read or to write does not exist."""

    code = "lake.table_missing"


class TargetReplacedError(LakeError):
    """A table or view that Aqueduck did not create has the name of a target."""

    code = "lake.table_replaced"


class PartitionedTargetError(LakeError):
    """A target is partitioned, but the files written to it would not be."""

    code = "lake.partitioned"


class ForeignTargetError(LakeError):
    """The target is a lake table that Aqueduck did not create."""

    code = "lake.foreign_target"


class NoSnapshotError(LakeError):
    """No lake snapshot shows the source at the requested point."""

    code = "lake.no_snapshot"


class DuplicateKeyError(LakeError):
    """A write has several rows with the same key, and nothing determines which one to keep."""

    code = "lake.duplicate_key"


class ResyncNeededError(LakeError):
    """A change of the source table requires copying the table again."""

    code = "lake.resync_needed"


class CopyDisturbedError(AqueduckError):
    """A table changed while it was copied; the copy restarts automatically."""

    code = "copy.disturbed"
    retry = Retry.AUTO


class TableDisabledError(AqueduckError):
    """The table is disabled: its changes are parked until it is enabled."""

    code = "table.disabled"


class HttpError(AqueduckError):
    """The family of errors about the HTTP server; never raised directly."""

    status: ClassVar[int] = 500
    """The status of the answer."""


class ServerStartError(HttpError):
    """The HTTP server cannot listen on its address."""

    code = "http.start"


class BadRequestError(HttpError):
    """A request is malformed."""

    code = "http.request"
    status = 400


class TokenError(HttpError):
    """A request needs the server's token and has none, or an invalid one."""

    code = "http.token"
    status = 401


class ReadOnlyError(HttpError):
    """A request would change something, and the server has no token that permits it."""

    code = "http.read_only"
    status = 403


class ScopeError(HttpError):
    """A request would change something, and its token is read-only."""

    code = "http.scope"
    status = 403


class NotFoundError(HttpError):
    """The address does not exist."""

    code = "http.not_found"
    status = 404


class MethodError(HttpError):
    """The address does not support the method."""

    code = "http.method"
    status = 405


class EventError(AqueduckError):
    """The family of errors about change events and their sinks; never raised directly."""


class EventValueError(EventError):
    """The text of a value is not what PostgreSQL writes for its type."""

    code = "events.value"


class TransactionTooLargeError(EventError):
    """A transaction has more changes than `max_staged_records` allows."""

    code = "events.too_large"


class BookmarkError(EventError):
    """The bookmark cannot be read or written, or does not match the sink or the source."""

    code = "events.bookmark"


class SinkPathError(EventError):
    """A file of the sink or the state cannot be opened or created."""

    code = "sink.path"


class SinkTableError(EventError):
    """The sink's table does not have the columns that events need."""

    code = "sink.table"


class SinkWriteError(EventError):
    """Writing to the sink failed, for example on a full disk; no event of the batch counts as delivered."""

    code = "sink.write"
    retry = Retry.AUTO


class SinkRejectedError(EventError):
    """The sink rejected an event permanently."""

    code = "sink.rejected"


class SinkUnreachableError(EventError):
    """The sink did not answer, or cannot accept events now."""

    code = "sink.unreachable"
    retry = Retry.AUTO


class RoutingError(AqueduckError):
    """The routing field and the destinations' values do not separate rows."""

    code = "fanout.routing"


class SparkStartError(AqueduckError):
    """Spark, or its Java, did not start."""

    code = "spark.start"


class SparkQueryError(AqueduckError):
    """A streaming query ended because of Spark itself, for example a lost process."""

    code = "spark.query"
    retry = Retry.AUTO


class StageFullError(AqueduckError):
    """The stage is full and cannot free space."""

    code = "stage.full"


class VerifyDifferenceError(AqueduckError):
    """Source and lake do not have the same rows."""

    code = "verify.different"


class VerifyPostponedError(AqueduckError):
    """A comparison was stopped because the flow needs the machine."""

    code = "verify.postponed"
    retry = Retry.AUTO


class ServiceLockedError(AqueduckError):
    """Another service already runs this group."""

    code = "service.locked"


class RegistryIncompleteError(AqueduckError):
    """The registry lacks entries that the service or the lake knows and that were not removed."""

    code = "registry.incomplete"


class MaintenanceError(AqueduckError):
    """Maintenance of the lake failed; its rows are unchanged."""

    code = "maintenance.failed"


def error_codes() -> dict[str, type[AqueduckError]]:
    """Every code and its class."""
    return dict(_classes())


def _classes() -> dict[str, type[AqueduckError]]:
    found: dict[str, type[AqueduckError]] = {}
    todo: list[type[AqueduckError]] = [AqueduckError]
    while todo:
        cls = todo.pop()
        todo.extend(cls.__subclasses__())
        if "code" in vars(cls):
            found[cls.code] = cls
    return found


def _parse(cls: type[AqueduckError], body: str) -> AqueduckError:
    text, _, hint = _SQLSTATE.sub("", body).partition(_FIX)
    message, table = _cut(_TABLE, text.rstrip())
    return cls._from_body(message, hint.strip() or None, table)


def _cut(pattern: re.Pattern[str], text: str) -> tuple[str, str | None]:
    found = pattern.search(text)
    return (text[: found.start()], found[1]) if found else (text, None)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _rebuild(cls: type[AqueduckError], message: str, keywords: dict[str, Any]) -> AqueduckError:
    return cls(message, **keywords)


def own_error(exc: BaseException) -> AqueduckError:
    """
    The error itself if it is ours; otherwise its type and place, and the system's reason: the message could
    contain anything.
    """
    if isinstance(exc, AqueduckError):
        return exc
    frames = traceback.extract_tb(exc.__traceback__)
    place = (
        f" in {frames[-1].name} (line {frames[-1].lineno} of {frames[-1].filename.rpartition('/')[2]})"
        if frames
        else ""
    )
    if isinstance(exc, OSError) and exc.errno is not None:
        hint = "check the disk, the permissions and the network of this machine"
        return AqueduckError(f"{os.strerror(exc.errno).lower()}: {type(exc).__name__}{place}", hint=hint)
    return AqueduckError(f"{type(exc).__name__}{place}", hint="this is a bug; please report it")


def system_reason(exc: OSError) -> str:
    """The operating system's message, for the middle of a sentence; without the path that `exc` would show."""
    return (exc.strerror or "unknown reason").lower()
