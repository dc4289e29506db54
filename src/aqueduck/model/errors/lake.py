"""Errors about DuckLake."""

from __future__ import annotations

from aqueduck.model.errors.base import AqueduckError, Retry

__all__ = [
    "CatalogUnreachableError",
    "DataPathError",
    "DuplicateKeyError",
    "EncryptedLakeError",
    "ForeignPathError",
    "ForeignTargetError",
    "LakeBusyError",
    "LakeError",
    "LakeFileMissingError",
    "LakeTableMissingError",
    "LakeTypeError",
    "LakeVersionError",
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
    """The family of errors about DuckLake; never raised directly."""


class CatalogUnreachableError(LakeError):
    """The lake's catalog could not be opened."""

    code = "lake.catalog"


class LakeVersionError(CatalogUnreachableError):
    """The lake's catalog has a version of DuckLake or DuckDB that this Aqueduck cannot read."""

    code = "lake.version"


class DataPathError(LakeError):
    """The lake's data path cannot be written or differs from the one in the catalog."""

    code = "lake.data_path"


class ForeignPathError(LakeError):
    """The lake names a file outside the place where its files belong."""

    code = "lake.foreign_path"


class EncryptedLakeError(LakeError):
    """The lake is encrypted, and what DuckDB needs to encrypt files is not installed."""

    code = "lake.encrypted"


class LakeBusyError(LakeError):
    """Another writer committed to the catalog first."""

    code = "lake.conflict"
    retry = Retry.AUTO


class LakeWriteError(LakeError):
    """A lake transaction failed and was rolled back."""

    code = "lake.write"
    retry = Retry.AUTO


class LakeFileMissingError(LakeWriteError):
    """A data file of the lake does not exist any more."""

    code = "lake.file_missing"


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
    """The source lake's history differs from what was read: the lake was restored and then written."""

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
    """A target is partitioned in a way that cannot be written."""

    code = "lake.partitioned"


class PartitionValueError(LakeError):
    """A value of a partition column is too long for the name of a directory."""

    code = "lake.partition_value"


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
