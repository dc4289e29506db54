"""
One round of a comparison: pin source and lake, read both, and prove the differences.

The source is read under an exported snapshot whose position P is known. The lake is read at a version that
has everything up to P, and possibly more. Any additional changes were written by versions after the version that
was current before the source's snapshot was made, so keys that these versions touched are *in motion*: they
are left out on both sides and compared in the next round.

One error remains possible: a row that was inserted before P and deleted after P within one batch leaves no
trace in the lake. Hence a row that is missing in the lake counts only if the same version of it is still in
the source after the lake's version was read. docs/verify.md has the whole argument.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from aqueduck.lake.compare.digest import Answer, Difference, Question, compare_rows
from aqueduck.lake.ledger.progress import read_position
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.versions import KEYS, changed_keys, current_version, tables_at, unsent_columns
from aqueduck.lake.target.apply import check_target
from aqueduck.lake.target.evolve import same_columns
from aqueduck.lake.target.places import check_place, notice_changes
from aqueduck.model.columns.projection import only_needed
from aqueduck.model.errors import (
    AqueduckError,
    LakeTableMissingError,
    PartitionedTargetError,
    Retry,
    SchemaChangeError,
    TargetReplacedError,
)
from aqueduck.model.schema import TableName, TableSchema, lsn_text
from aqueduck.postgres.catalog.table_storage import read_storage
from aqueduck.postgres.catalog.tables import describe_oid
from aqueduck.postgres.copy.table_copy import ExportedSnapshot, export_snapshot, export_snapshot_by_sql
from aqueduck.postgres.publications.slots import SlotInfo, slot_info
from aqueduck.postgres.session.group_lock import group_runs
from aqueduck.postgres.session.server import flush_wal
from aqueduck.sync.comparing.verify_reads import Pair, Pinned, Query, Sides, Work, hashes, key_table

__all__ = ["Round"]

MOTION_KEYS_MAX = 1_000_000
BUCKETS_MAX = 4096
BUCKET_ROWS = 4096
LISTED_ROWS_MAX = 200_000
SUSPECTS_MAX = 1000
POLL_SECONDS = 0.1
TOO_FAST = "its rows change faster than they can be compared"
NEW_COLUMNS = "its columns changed in the source, and reach the lake within 10 s of a running service or with the next row"


@dataclass
class Round:
    """What all rounds share; `run` executes one."""

    sides: Sides
    slots: Mapping[str, str]
    """The slot of each group."""
    wait_seconds: float
    _pinned: Pinned = field(init=False)

    @property
    def lake(self) -> LakeSession:
        return self.sides.lake

    def run(self, works: Sequence[Work]) -> None:
        """Compare what remains of each; works with a verdict are done."""
        before = current_version(self.lake)
        notice_changes(self.lake)
        storage = self._storage(works)
        self._say(works, "waits for a snapshot of the source")
        with contextlib.closing(_exported(self.sides)) as source:
            self._say(works, f"waits for the lake to reach {lsn_text(source.position)}")
            behind = self._wait({w.group for w in works}, source.position)
            self._pinned = Pinned(source.name, current_version(self.lake))
            states = (tables_at(self.lake, before), tables_at(self.lake, self._pinned.version))
            pairs = []
            for work in works:
                work.position, work.version, work.note = source.position, self._pinned.version, None
                pair = self._pin(work, *states, after=before, behind=behind)
                pairs += [] if pair is None else [pair]
            found = self._compare(pairs)
        rewritten = storage.items() ^ self._storage(works).items()
        self._judge([f for f in found if not self._again(f[0], {oid for oid, _ in rewritten})], behind)

    # -- pinning

    def _wait(self, groups: Iterable[str], position: int) -> dict[str, int]:
        """
        Wait until the lake has everything up to `position`; returns the lag in bytes of the groups that did
        not reach it.
        """
        deadline = time.monotonic() + self.wait_seconds
        behind: dict[str, int] = {}
        for group in groups:
            while True:
                slot = slot_info(self.sides.conn, self.slots[group])
                stored = read_position(self.lake, group)
                has = max(
                    stored.position if stored is not None else 0,
                    # A slot is confirmed up to the lake's position, even when there are no changes.
                    (slot.confirmed_flush_lsn or 0) if slot is not None else 0,
                )
                if has >= position:
                    break
                if not self._lives(group, slot) or time.monotonic() > deadline:
                    behind[group] = position - has
                    break
                time.sleep(POLL_SECONDS)
        return behind

    def _lives(self, group: str, slot: SlotInfo | None) -> bool:
        """Whether a service advances the group; between two queries its slot is not active."""
        return slot is not None and (slot.active or group_runs(self.sides.conn, group))

    def _pin(
        self,
        work: Work,
        before: Mapping[str, Mapping[int, TableState]],
        now: Mapping[str, Mapping[int, TableState]],
        *,
        after: int,
        behind: Mapping[str, int],
    ) -> Pair | None:
        """The table's columns and its keys in motion; if unavailable, the work's note says why."""
        state = now.get(work.group, {}).get(work.state.oid)
        if state is None or not state.ready:
            work.verdict, work.note = "not compared", "its copy is not complete yet"
            if state is not None and state.error is not None:
                work.note = f"errored: {state.error}"
            return None
        if state != before.get(work.group, {}).get(work.state.oid):
            work.keys, work.note = None, "it was re-copied meanwhile"
            return None
        work.state = state
        if (changed := _changed_by_hand(self.lake, state)) is not None:
            work.verdict, work.note = "not compared", str(changed)
            return None
        try:
            described = describe_oid(
                self.sides.conn, state.oid, need_key=state.mode.needs_key, projection=state.projection
            )
            in_lake = only_needed(described).in_lake
            if state.schema is not None and not same_columns(state.schema, in_lake):
                work.verdict, work.note = "not compared", NEW_COLUMNS
                return None
            schema = self._compared(work, in_lake)
            moved = (
                KEYS.empty_table()
                if work.group in behind
                else changed_keys(
                    self.lake,
                    state.target,
                    schema,
                    after=after,
                    upto=self._pinned.version,
                    limit=MOTION_KEYS_MAX,
                    mode=state.mode,
                )
            )
        except AqueduckError as exc:
            work.verdict = None if exc.retry is Retry.AUTO else "not compared"
            work.note = str(exc)
            return None
        work.key_names = schema.key
        if len(moved) == MOTION_KEYS_MAX:
            work.note = TOO_FAST
            return None
        return Pair(work, schema, moved)

    def _compared(self, work: Work, schema: TableSchema) -> TableSchema:
        """The columns to compare; a table without a key is identified by all of its columns."""
        state = work.state
        if state.mode.name == "append":
            work.left_out = unsent_columns(self.lake, state.target, self._pinned.version, state.mode)
            columns = tuple(c for c in schema.columns if c.name not in work.left_out)
            schema = replace(schema, columns=columns)
        return schema if schema.key else replace(schema, key=tuple(c.name for c in schema.columns))

    def _storage(self, works: Sequence[Work]) -> dict[int, str]:
        return read_storage(self.sides.conn, [work.state.oid for work in works])

    def _again(self, pair: Pair, rewritten: set[int]) -> bool:
        """Whether the reading is void, because the table was rewritten at the same time."""
        if pair.work.state.oid not in rewritten:
            return False
        pair.work.keys, pair.work.more = None, False
        pair.work.note = "it was truncated or rewritten meanwhile"
        return True

    # -- comparing

    def _compare(self, pairs: Sequence[Pair]) -> list[tuple[Pair, list[Difference]]]:
        """Keys that differ and are not in motion, for each pair that could be read."""
        whole = [p for p in pairs if p.work.keys is None]
        some = [p for p in pairs if p.work.keys is not None]
        differing = [
            pair
            for pair, source, lake in self._sums(whole, dict.fromkeys(whole, 1), "compares")
            if _differ(pair.work, source, lake)
        ]
        equal = [p for p in whole if p not in differing and p.work.note is None]
        return [*((p, []) for p in equal), *self._find(differing), *self._compare_keys(some)]

    def _sums(
        self, pairs: Sequence[Pair], buckets: Mapping[Pair, int], doing: str
    ) -> list[tuple[Pair, Answer, Answer]]:
        """Sums of both sides without the rows in motion."""
        queries = [Query(p, Question(buckets[p])) for p in pairs]
        moving = [Query(p, Question(buckets[p]), p.moved) for p in pairs if len(p.moved)]
        answers = self.sides.answers(self._pinned, [*queries, *moving], doing)
        parts = {w.pair: sides for w, sides in zip(moving, answers[len(queries) :], strict=True)}
        result = []
        for pair, (source, lake) in zip(pairs, answers, strict=False):
            moved = parts.get(pair, (Answer(), Answer()))
            source, lake = source.minus(moved[0]), lake.minus(moved[1])
            if error := source.error or lake.error:
                pair.work.note = error
            else:
                result.append((pair, source, lake))
        return result

    def _find(self, pairs: Sequence[Pair]) -> list[tuple[Pair, list[Difference]]]:
        """The differing keys of tables whose sums differ: first their buckets, then their rows."""
        buckets = {
            p: max(1, min(BUCKETS_MAX, max(p.work.source_rows, p.work.lake_rows) // BUCKET_ROWS))
            for p in pairs
        }
        queries = []
        for pair, source, lake in self._sums(pairs, buckets, "looks for differences"):
            listed, pair.work.more = _buckets_to_list(source, lake)
            queries.append(Query(pair, Question(buckets[pair], listed)))
        found = []
        for w, (source, lake) in zip(
            queries, self.sides.answers(self._pinned, queries, "looks for keys"), strict=True
        ):
            if error := source.error or lake.error:
                w.pair.work.note = error
            else:
                found.append((w.pair, compare_rows(source.rows, lake.rows, hashes(w.pair.moved))))
        return found

    def _compare_keys(self, pairs: Sequence[Pair]) -> list[tuple[Pair, list[Difference]]]:
        """Compare the keys that were in motion in the previous round, one by one."""
        queries = [Query(p, Question(listed=(0,)), p.work.keys) for p in pairs]
        found = []
        for w, (source, lake) in zip(
            queries, self.sides.answers(self._pinned, queries, "compares again"), strict=True
        ):
            work, moved = w.pair.work, hashes(w.pair.moved)
            if error := source.error or lake.error:
                work.note = error
                continue
            work.source_rows += _count_without(source.rows, moved)
            work.lake_rows += _count_without(lake.rows, moved)
            found.append((w.pair, compare_rows(source.rows, lake.rows, moved)))
        return found

    # -- judging

    def _judge(self, found: Sequence[tuple[Pair, list[Difference]]], behind: Mapping[str, int]) -> None:
        """Which differences are proven, and what remains for the next round."""
        up_to_date = [(p, d) for p, d in found if p.work.group not in behind]
        still_there = self._still_there([f for f in up_to_date if any(d.kind == "missing" for d in f[1])])
        for pair, differences in found:
            if pair.work.group in behind:
                _judge_behind(pair.work, differences, behind[pair.work.group])
            else:
                _judge(pair, differences, still_there.get(pair, set()))

    def _still_there(
        self, suspects: Sequence[tuple[Pair, list[Difference]]]
    ) -> dict[Pair, set[tuple[int, str]]]:
        """Keys and versions of rows that are missing in the lake and still in the source."""
        if not suspects:
            return {}
        queries = []
        for pair, differences in suspects:
            missing = [d for d in differences if d.kind == "missing"][:SUSPECTS_MAX]
            queries.append(Query(pair, Question(listed=(0,)), key_table(missing)))
        with contextlib.closing(_exported(self.sides)) as source:
            answers = self.sides.source_answers(source.name, queries)
        return {
            w.pair: set(zip(a.rows["k"].to_pylist(), a.rows["version"].to_pylist(), strict=True))
            for w, a in zip(queries, answers, strict=True)
        }

    def _say(self, works: Sequence[Work], doing: str) -> None:
        for work in works:
            self.sides.progress(work.state.source, doing, 0.0)


def _exported(sides: Sides) -> ExportedSnapshot:
    """Export a snapshot in a thread: it waits for open transactions, and a person may interrupt the wait."""
    made: Future[ExportedSnapshot] = Future()

    def export() -> None:
        try:
            if sides.by_sql:
                made.set_result(export_snapshot_by_sql(sides.dsn))
                flush_wal(sides.dsn)
            else:
                made.set_result(export_snapshot(sides.dsn))
        except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
            made.set_exception(exc)

    threading.Thread(target=export, name="verify-snapshot", daemon=True).start()
    while True:
        with contextlib.suppress(TimeoutError):
            return made.result(timeout=POLL_SECONDS)


def _differ(work: Work, source: Answer, lake: Answer) -> bool:
    """Whether the sums differ; records the row counts."""
    work.source_rows, work.lake_rows = source.count, lake.count
    return source.sums != lake.sums


def _buckets_to_list(source: Answer, lake: Answer) -> tuple[tuple[int, ...], bool]:
    """Differing buckets, as many as may be read row by row; and whether there are more."""
    differing = sorted(
        b for b in source.sums.keys() | lake.sums.keys() if source.sums.get(b) != lake.sums.get(b)
    )
    listed: list[int] = []
    rows = 0
    for bucket in differing:
        rows += source.sums.get(bucket, (0, 0))[0] + lake.sums.get(bucket, (0, 0))[0]
        if listed and rows > LISTED_ROWS_MAX:
            break
        listed.append(bucket)
    return tuple(listed), len(listed) < len(differing)


def _only(keys: pa.Table, hashes: pa.Array) -> pa.Table:
    return keys.filter(pc.is_in(keys["k"], value_set=hashes))


def _count_without(rows: pa.Table, hashes: pa.Array) -> int:
    return len(rows) - int(pc.sum(pc.is_in(rows["k"], value_set=hashes)).as_py() or 0)


def _changed_by_hand(lake: LakeSession, state: TableState) -> AqueduckError | None:
    """Why a comparison is impossible: the target was dropped, replaced or altered."""
    schema = state.schema
    name = None if schema is None else TableName(schema.schema, schema.name)
    try:
        check_place(lake, state.target, state.target_uuid, name)
        if schema is not None:
            check_target(lake, state.target, schema, state.mode)
    except PartitionedTargetError:
        return None  # it can be read
    except (LakeTableMissingError, SchemaChangeError, TargetReplacedError) as exc:
        return exc
    return None


def _judge_behind(work: Work, differences: list[Difference], behind: int) -> None:
    """Judge against a lake that is behind: a difference proves nothing, equality counts."""
    work.differences, work.verdict, work.behind = (
        differences,
        "different" if differences else "identical",
        True,
    )
    if differences:
        work.note = f"the lake is {behind:,} bytes behind: run the service, then verify again"


def _judge(pair: Pair, differences: Sequence[Difference], still_there: set[tuple[int, str]]) -> None:
    work = pair.work
    proven: list[Difference] = []
    unproven: list[Difference] = []
    for d in differences:
        sure = d.kind != "missing" or (d.key_hash, d.version or "") in still_there
        (proven if sure else unproven).append(d)
    left = pair.moved if work.keys is None else _only(work.keys, hashes(pair.moved))
    if proven:
        work.differences, work.verdict = proven, "different"
    elif work.more:  # the listed buckets are equal, but there are others
        work.keys, work.more, work.note = None, False, TOO_FAST
    elif not len(left) and not unproven:
        work.verdict = "identical"
    else:
        work.source_rows -= len(unproven)
        work.keys = pa.concat_tables([left, key_table(unproven)])
