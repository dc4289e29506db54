"""
Watch the lake for manual changes of targets, including targets that receive no writes.

`TargetWatch.look` reads one number. Only if it shows that a table of the lake changed are the targets
checked: a target that is no longer the one we created is errored before the next batch reaches it, and one
that is correct again continues.
"""

from __future__ import annotations

from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.target.apply import check_target
from aqueduck.lake.target.places import check_place, know_places, notice_changes, refuse_hidden_rows
from aqueduck.model.errors import (
    LakeError,
    LakeTableMissingError,
    PartitionedTargetError,
    SchemaChangeError,
    TargetReplacedError,
)
from aqueduck.model.schema import TableName
from aqueduck.sync.groups.group import GroupRunner

__all__ = ["TargetWatch"]

_ABOUT_TARGETS = (LakeTableMissingError, PartitionedTargetError, SchemaChangeError, TargetReplacedError)
_CODES = {error.code for error in _ABOUT_TARGETS}


class TargetWatch:
    """Checks groups' targets periodically."""

    def __init__(self) -> None:
        self._versions: dict[str, int | None] = {}
        """DuckLake's count of table changes at the last look, by group."""

    def look(self, runner: GroupRunner) -> None:
        """Check once; raises if the lake cannot be read.  During a long commit, the next look does it."""
        mended = []
        with runner.between_commits() as free:
            if not free:
                return
            notice_changes(runner.lake)
            version = runner.lake.memory.schema_version
            if self._versions.get(runner.group.name) == version:
                return
            know_places(runner.lake, [state.target for state in runner.states.values()])
            for oid, state in runner.states.items():
                error = _problem(runner, state)
                if state.ready and error is not None:
                    runner.fail_table(oid, error)
                elif error is None and _failed_for_its_target(runner, oid):
                    mended.append(oid)
            runner.book.inform_of_layouts()
            self._versions[runner.group.name] = version
        for oid in mended:
            runner.copier.retry_now(oid)


def _problem(runner: GroupRunner, state: TableState) -> LakeError | None:
    schema = runner.tables[state.oid].schema
    try:
        there = check_place(
            runner.lake,
            state.target,
            state.target_uuid,
            TableName(schema.schema, schema.name),
            may_be_missing=state.awaits_copy,
        )
        if there and not state.awaits_copy:
            refuse_hidden_rows(runner.lake, state.target, TableName(schema.schema, schema.name))
        if there and not state.awaits_copy and state.schema is not None:
            check_target(runner.lake, state.target, state.schema, state.mode)
    except _ABOUT_TARGETS as exc:
        return exc
    return None


def _failed_for_its_target(runner: GroupRunner, oid: int) -> bool:
    life = runner.copier.schedule.failures.get(oid)
    return life is not None and life.failure is not None and life.failure.code in _CODES
