"""Errors about Spark and the stage that feeds it."""

from __future__ import annotations

from aqueduck.model.errors.base import AqueduckError, Retry

__all__ = [
    "SparkQueryError",
    "SparkStartError",
    "StageFullError",
]


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
