"""Errors about DuckLake."""

from __future__ import annotations

from aqueduck.model.errors.base import AqueduckError, Retry

__all__ = [
    "CatalogUnreachableError",
    "DataPathError",
    "DuplicateKeyError",
    "EncryptedLakeError",
    "ForeignTargetError",
    "LakeBusyError",
    "LakeError",
    "LakeTableMissingError",
    "LakeTypeError",
    "LakeWriteError",
    "MergedChangesError",
    "NoSnapshotError",
    "PartitionedTargetError",
    "ReservedColumnError",
    "ResyncNeededError",
    "SchemaChangeError",
    "SourceDivergedError",
    "SourceExpiredError",
    "TargetReplacedError",
    "ValueCastError",
]


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
