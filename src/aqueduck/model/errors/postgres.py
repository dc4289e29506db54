"""Errors about the PostgreSQL source."""

from __future__ import annotations

from aqueduck.model.errors.base import AqueduckError, Retry

__all__ = [
    "AuthenticationError",
    "ConnectionLostError",
    "NoKeyError",
    "PrivilegeError",
    "ProtocolError",
    "PublicationError",
    "RowSecurityError",
    "SlotActiveError",
    "SlotConflictError",
    "SlotLimitError",
    "SlotLostError",
    "SnapshotGoneError",
    "SourceError",
    "SourceQueryError",
    "SourceUnreachableError",
    "TableMissingError",
    "TableRecreatedError",
    "TwoPhaseSlotError",
    "UnpublishedError",
    "WalLevelError",
]


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
