"""
Everything Aqueduck raises on purpose: by subject in the modules of this package, and imported from here.

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
    │   │   └── LakeVersionError     lake.version
    │   ├── DataPathError            lake.data_path
    │   ├── ForeignPathError         lake.foreign_path
    │   ├── EncryptedLakeError       lake.encrypted
    │   ├── LakeBusyError            lake.conflict       retried
    │   ├── LakeWriteError           lake.write          retried
    │   │   └── LakeFileMissingError lake.file_missing   retried
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
    │   ├── PartitionValueError      lake.partition_value
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

from aqueduck.model.errors.base import (
    AqueduckError,
    Retry,
    error_codes,
    own_error,
    system_reason,
)
from aqueduck.model.errors.events import (
    BookmarkError,
    EventError,
    EventValueError,
    SinkPathError,
    SinkRejectedError,
    SinkTableError,
    SinkUnreachableError,
    SinkWriteError,
    TransactionTooLargeError,
)
from aqueduck.model.errors.http import (
    BadRequestError,
    HttpError,
    MethodError,
    NotFoundError,
    ReadOnlyError,
    ScopeError,
    ServerStartError,
    TokenError,
)
from aqueduck.model.errors.lake import (
    CatalogUnreachableError,
    DataPathError,
    DuplicateKeyError,
    EncryptedLakeError,
    ForeignPathError,
    ForeignTargetError,
    LakeBusyError,
    LakeError,
    LakeFileMissingError,
    LakeTableMissingError,
    LakeTypeError,
    LakeVersionError,
    LakeWriteError,
    MergedChangesError,
    NoSnapshotError,
    PartitionedTargetError,
    PartitionValueError,
    ReservedColumnError,
    ResyncNeededError,
    SchemaChangeError,
    SourceDivergedError,
    SourceExpiredError,
    TargetReplacedError,
    ValueCastError,
)
from aqueduck.model.errors.postgres import (
    AuthenticationError,
    ConnectionLostError,
    NoKeyError,
    PrivilegeError,
    ProtocolError,
    PublicationError,
    RowSecurityError,
    SlotActiveError,
    SlotConflictError,
    SlotLimitError,
    SlotLostError,
    SnapshotGoneError,
    SourceError,
    SourceQueryError,
    SourceUnreachableError,
    TableMissingError,
    TableRecreatedError,
    TwoPhaseSlotError,
    UnpublishedError,
    WalLevelError,
)
from aqueduck.model.errors.service import (
    ConfigError,
    CopyDisturbedError,
    MaintenanceError,
    RegistryIncompleteError,
    RoutingError,
    ServiceLockedError,
    TableDisabledError,
    VerifyDifferenceError,
    VerifyPostponedError,
)
from aqueduck.model.errors.spark import (
    SparkQueryError,
    SparkStartError,
    StageFullError,
)

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
    "ForeignPathError",
    "ForeignTargetError",
    "HttpError",
    "LakeBusyError",
    "LakeError",
    "LakeFileMissingError",
    "LakeTableMissingError",
    "LakeTypeError",
    "LakeVersionError",
    "LakeWriteError",
    "MaintenanceError",
    "MergedChangesError",
    "MethodError",
    "NoKeyError",
    "NoSnapshotError",
    "NotFoundError",
    "PartitionValueError",
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
    "ScopeError",
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
    "SourceDivergedError",
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
