"""Errors about Spark and the stage that feeds it."""

from __future__ import annotations

from aqueduck.model.errors.base import AqueduckError, Retry

__all__ = [
    "SparkQueryError",
    "SparkStartError",
    "StageFullError",
]


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
