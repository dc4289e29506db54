"""
What a comparison reads: tables on their way to a verdict, and queries on both sides.

`Sides` turns queries into pieces for a reader (`spark.query.verify_job`): chunks of the source under a
snapshot and the lake at a version. `verify_rounds` chooses the queries and judges the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
import pyarrow as pa

from aqueduck.lake.compare.digest import Answer, Difference, Question
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.versions import KEYS
from aqueduck.lake.target.mode_checks import Finding
from aqueduck.model.columns.projection import masks_key
from aqueduck.model.schema import TableSchema
from aqueduck.postgres.catalog.key_lookup import can_look_up, key_condition
from aqueduck.postgres.copy.table_copy import plan_chunks
from aqueduck.spark.query.verify_job import LakeRead, Reader, SourceRead

__all__ = ["Pair", "Pinned", "Progress", "Query", "Sides", "Verdict", "Work", "hashes", "key_table"]

CHUNK_BYTES = 32 << 20
WHOLE_RELATION = 1 << 62
LOOKUP_KEYS_MAX = 50_000

Verdict = Literal["identical", "different", "not compared"]
Progress = Callable[[str, str, float], None]
"""Called with a table, the current step, and the finished share of it."""


@dataclass
class Work:
    """One table on its way to a verdict."""

    group: str
    state: TableState
    keys: pa.Table | None = None
    """What remains to be compared: these keys, or the whole table."""
    source_rows: int = 0
    lake_rows: int = 0
    differences: list[Difference] = field(default_factory=list)
    more: bool = False
    """Whether more rows differ than were listed."""
    position: int | None = None
    version: int | None = None
    key_names: tuple[str, ...] = ()
    note: str | None = None
    """Why it was not compared, or a remark on the verdict."""
    left_out: tuple[str, ...] = ()
    """Columns that are not compared, because the lake lacks some of their values."""
    verdict: Verdict | None = None
    behind: bool = False
    """Whether the lake lacked changes of the source's snapshot when it was compared."""
    findings: tuple[Finding, ...] = ()
    """Inconsistencies within the lake table."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """The pinned state of both sides: an exported snapshot of the source, a version of the lake."""

    snapshot: str
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A table whose sides can be compared; `moved` are the keys in motion."""

    work: Work
    schema: TableSchema
    moved: pa.Table


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A query on one pair; restricted to some keys if they are given."""

    pair: Pair
    question: Question
    keys: pa.Table | None = None


@dataclass
class Sides:
    """Source and lake, and their readers."""

    dsn: str
    conn: psycopg.Connection[Any]
    lake: LakeSession
    reader: Reader
    progress: Progress
    by_sql: bool = False
    """Whether the source's snapshot is taken without a replication connection."""

    def answers(self, pinned: Pinned, queries: Sequence[Query], doing: str) -> list[tuple[Answer, Answer]]:
        """The answers of source and lake to each query."""
        reads: list[SourceRead | LakeRead] = []
        keys: dict[int, pa.Array] = {}
        counts: list[list[int]] = []
        for i, query in enumerate(queries):
            chunks = self._source_reads(2 * i, query, pinned.snapshot)
            reads += [*chunks, self._lake_read(2 * i + 1, query, pinned.version)]
            counts.append([0, len(chunks) + 1])
            if query.keys is not None:
                keys[2 * i] = keys[2 * i + 1] = hashes(query.keys)

        def done(part: int, count: int) -> None:
            so_far = counts[part // 2]
            so_far[0] += count
            query = queries[part // 2]
            # The part of a table in motion is small.
            if query.keys is None or query.pair.work.keys is not None:
                self.progress(query.pair.work.state.source, doing, so_far[0] / so_far[1])

        found = self.reader.read(reads, keys, done)
        return [(found.get(2 * i, Answer()), found[2 * i + 1]) for i in range(len(queries))]

    def source_answers(self, snapshot: str, queries: Sequence[Query]) -> list[Answer]:
        """The answers of the source alone, under its own snapshot."""
        reads = [read for i, query in enumerate(queries) for read in self._source_reads(i, query, snapshot)]
        keys = {i: hashes(query.keys) for i, query in enumerate(queries) if query.keys is not None}
        found = self.reader.read(reads, keys, lambda _part, _count: None)
        return [found.get(i, Answer()) for i in range(len(queries))]

    def _source_reads(self, part: int, query: Query, snapshot: str) -> list[SourceRead]:
        """The table's chunks; or, for a few keys that can be looked up, one statement for each partition."""
        schema, condition, chunk_bytes = query.pair.schema, None, CHUNK_BYTES
        few = query.keys is not None and len(query.keys) <= LOOKUP_KEYS_MAX and not masks_key(schema)
        if query.keys is not None and few and can_look_up(schema.streamed):
            condition, chunk_bytes = (
                key_condition(schema.streamed, query.keys["key"].to_pylist()),
                WHOLE_RELATION,
            )
        chunks = plan_chunks(self.conn, schema, chunk_bytes=chunk_bytes)
        return [SourceRead(part, self.dsn, snapshot, schema, c, query.question, condition) for c in chunks]

    def _lake_read(self, part: int, query: Query, version: int) -> LakeRead:
        state = query.pair.work.state
        return LakeRead(
            part, self.lake.config, state.target, version, query.pair.schema, query.question, state.mode
        )


def hashes(keys: pa.Table) -> pa.Array:
    """The keys' hashes alone."""
    return keys["k"].combine_chunks()


def key_table(differences: Sequence[Difference]) -> pa.Table:
    """The keys of differences, to be queried again."""
    rows = {"k": [d.key_hash for d in differences], "key": [list(d.key) for d in differences]}
    return pa.table(rows, KEYS)
