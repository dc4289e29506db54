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
    """Who acts after an error: the service by itself, or a person."""

    AUTO = "auto"
    OPERATOR = "operator"


class AqueduckError(Exception):
    """The base of every error that Aqueduck raises on purpose."""

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
        Rebuild the error that a piece of text, such as a Spark stack trace, ends in.

        The last line with a known code counts: a traceback puts the error that was raised
        after the ones that caused it.  Text without a known code gives `None`.
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
    """The family of errors about the PostgreSQL source; never raised itself."""


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
    """The role lacks a right that it needs."""

    code = "pg.privilege"


class RowSecurityError(SourceError):
    """A policy of row-level security may hide rows of a table from the role."""

    code = "pg.row_security"


class TableMissingError(SourceError):
    """A configured table does not exist in the source."""

    code = "pg.table_missing"


class TableRecreatedError(SourceError):
    """A source table was dropped, and another one has its name."""

    code = "pg.table_recreated"


class NoKeyError(SourceError):
    """A table has no key by which its rows could be matched."""

    code = "pg.no_key"


class SlotLostError(SourceError):
    """The slot is gone, and with it the WAL between it and now."""

    code = "pg.slot_lost"


class SlotActiveError(SourceError):
    """Another connection is reading the slot right now."""

    code = "pg.slot_active"
    retry = Retry.AUTO


class SlotConflictError(SourceError):
    """A slot of that name exists, but it is not the one that fits the lake."""

    code = "pg.slot_conflict"


class TwoPhaseSlotError(SourceError):
    """The slot sends prepared transactions before anybody knows whether they will be committed."""

    code = "pg.slot_two_phase"


class SlotLimitError(SourceError):
    """The server has no free replication slot or walsender."""

    code = "pg.slot_limit"


class PublicationError(SourceError):
    """The publication is missing or does not publish what it must."""

    code = "pg.publication"


class UnpublishedError(SourceError):
    """Tables were not published for a while, and what changed in them then was not sent."""

    code = "pg.unpublished"


class ProtocolError(SourceError):
    """The replication stream holds bytes that pgoutput does not write."""

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
    """The family of errors about DuckLake; never raised itself."""


class CatalogUnreachableError(LakeError):
    """The lake's catalog could not be opened."""

    code = "lake.catalog"


class DataPathError(LakeError):
    """The lake's data path cannot be written or is not the one the catalog knows."""

    code = "lake.data_path"


class EncryptedLakeError(LakeError):
    """The lake is encrypted: DuckLake could not read files that somebody else wrote."""

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
    """A value cannot be held by the type of its lake column."""

    code = "lake.value"


class LakeTypeError(LakeError):
    """A column has a type that cannot be carried exactly."""

    code = "lake.type"


class SchemaChangeError(LakeError):
    """A change of the source table's columns cannot be applied to its lake table."""

    code = "lake.schema_change"


class SourceExpiredError(LakeError):
    """Lake snapshots that were still to be read have expired."""

    code = "lake.expired"


class MergedChangesError(LakeError):
    """Updates that were not read yet lie in files that were merged, and look like new rows."""

    code = "lake.merged"


class SourceDivergedError(LakeError):
    """The source lake has another history than the one that was read: it was put back and written on."""

    code = "lake.diverged"


class ReservedColumnError(LakeError):
    """A source column has a name that DuckLake's change feed needs for itself."""

    code = "lake.reserved_column"


class LakeTableMissingError(LakeError):
    """The lake table to read or to fill does not exist."""

    code = "lake.table_missing"


class TargetReplacedError(LakeError):
    """A table or view that we did not make has the name of a target."""

    code = "lake.table_replaced"


class PartitionedTargetError(LakeError):
    """A target is partitioned, and its files would not be."""

    code = "lake.partitioned"


class ForeignTargetError(LakeError):
    """The target is a table of the lake that Aqueduck did not make."""

    code = "lake.foreign_target"


class NoSnapshotError(LakeError):
    """No lake snapshot shows the source as of what was asked for."""

    code = "lake.no_snapshot"


class DuplicateKeyError(LakeError):
    """A write has several rows of one key, and nothing says which of them wins."""

    code = "lake.duplicate_key"


class ResyncNeededError(LakeError):
    """A change of the source table can only be followed by copying the table again."""

    code = "lake.resync_needed"


class CopyDisturbedError(AqueduckError):
    """Something happened to a table while it was copied; the copy starts over by itself."""

    code = "copy.disturbed"
    retry = Retry.AUTO


class TableDisabledError(AqueduckError):
    """Somebody disabled the table: its changes are parked until it is enabled again."""

    code = "table.disabled"


class HttpError(AqueduckError):
    """The family of errors about the HTTP server; never raised itself."""

    status: ClassVar[int] = 500
    """Of the answer."""


class ServerStartError(HttpError):
    """The HTTP server cannot listen where it should."""

    code = "http.start"


class BadRequestError(HttpError):
    """A request that does not make sense as it stands."""

    code = "http.request"
    status = 400


class TokenError(HttpError):
    """A request needs the server's token and has none, or a wrong one."""

    code = "http.token"
    status = 401


class ReadOnlyError(HttpError):
    """A request wants to change something, and the server has no token that would permit it."""

    code = "http.read_only"
    status = 403


class ScopeError(HttpError):
    """A request wants to change something, and its token may only read."""

    code = "http.scope"
    status = 403


class NotFoundError(HttpError):
    """There is nothing at this address."""

    code = "http.not_found"
    status = 404


class MethodError(HttpError):
    """What is at this address does not take this method."""

    code = "http.method"
    status = 405


class EventError(AqueduckError):
    """The family of errors about change events and their sinks; never raised itself."""


class EventValueError(EventError):
    """The text of a value is not what PostgreSQL writes for its type."""

    code = "events.value"


class TransactionTooLargeError(EventError):
    """A transaction has more changes than `max_staged_records` allows."""

    code = "events.too_large"


class BookmarkError(EventError):
    """The bookmark cannot be read or written, or does not fit the sink or the source."""

    code = "events.bookmark"


class SinkPathError(EventError):
    """A file of the sink or the state cannot be opened or made."""

    code = "sink.path"


class SinkTableError(EventError):
    """The table of the sink has other columns than events need."""

    code = "sink.table"


class SinkWriteError(EventError):
    """Writing to the sink failed, such as on a full disk; nothing of the batch counts as delivered."""

    code = "sink.write"
    retry = Retry.AUTO


class SinkRejectedError(EventError):
    """The sink answered that it will not take an event, now or later."""

    code = "sink.rejected"


class SinkUnreachableError(EventError):
    """The sink did not answer, or answered that it cannot take events now."""

    code = "sink.unreachable"
    retry = Retry.AUTO


class RoutingError(AqueduckError):
    """Rows cannot be told apart by the routing field and the destinations' values."""

    code = "fanout.routing"


class SparkStartError(AqueduckError):
    """Spark, or the Java that it runs on, did not start."""

    code = "spark.start"


class SparkQueryError(AqueduckError):
    """A streaming query ended for a reason of Spark's own, such as a process that was lost."""

    code = "spark.query"
    retry = Retry.AUTO


class StageFullError(AqueduckError):
    """The stage has no room left and cannot make any."""

    code = "stage.full"


class VerifyDifferenceError(AqueduckError):
    """Source and lake do not hold the same rows."""

    code = "verify.different"


class VerifyPostponedError(AqueduckError):
    """A comparison was given up, because the flow needs the machine."""

    code = "verify.postponed"
    retry = Retry.AUTO


class ServiceLockedError(AqueduckError):
    """Another service already runs this group."""

    code = "service.locked"


class RegistryIncompleteError(AqueduckError):
    """The registry lacks what the service or the lake knows, and nobody removed that."""

    code = "registry.incomplete"


class MaintenanceError(AqueduckError):
    """The lake could not be maintained; its rows are as they were."""

    code = "maintenance.failed"


def error_codes() -> dict[str, type[AqueduckError]]:
    """Every code, and the class that it belongs to."""
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
    """The error itself if it is ours; else its kind and place, and the system's reason: its message may hold anything."""
    if isinstance(exc, AqueduckError):
        return exc
    frames = traceback.extract_tb(exc.__traceback__)
    place = (
        f" in {frames[-1].name} (line {frames[-1].lineno} of {frames[-1].filename.rpartition('/')[2]})"
        if frames
        else ""
    )
    if isinstance(exc, OSError) and exc.errno is not None:
        hint = "look at the disk, the rights and the network of this machine"
        return AqueduckError(f"{os.strerror(exc.errno).lower()}: {type(exc).__name__}{place}", hint=hint)
    return AqueduckError(f"{type(exc).__name__}{place}", hint="this is a bug; please report it")


def system_reason(exc: OSError) -> str:
    """What the operating system says, for the middle of a sentence; without the path, which `exc` itself would show."""
    return (exc.strerror or "unknown reason").lower()
