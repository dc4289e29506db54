"""
Digests of rows: both sides of a comparison are read the same way.

A row has two hashes, of its key and of all its cells, both computed on the lake's types.  Sums of
hashes do not depend on the order of rows; they can be added over pieces of a table, and a piece can
be subtracted again.  A comparison first asks for sums by bucket of keys, and for single rows only of
the buckets that differ.  `sync.verify` controls the comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import duckdb
import pyarrow as pa

from aqueduck.lake.fold.projected import project_rows
from aqueduck.lake.session.engine import new_connection
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.sql import ident, lake_table
from aqueduck.lake.target.mode_rows import present_rows
from aqueduck.model.columns.typemap import cast_sql, lake_type
from aqueduck.model.errors import AqueduckError
from aqueduck.model.modes import UPSERT, TableMode
from aqueduck.model.schema import Column, TableName, TableSchema

__all__ = [
    "Answer",
    "Difference",
    "Question",
    "ask_lake",
    "ask_stream",
    "compare_rows",
    "key_columns_sql",
    "with_version",
]

MEMORY = "256MB"
_ROWS = pa.schema(
    [("k", pa.uint64()), ("h", pa.uint64()), ("key", pa.list_(pa.string())), ("version", pa.string())]
)

Kind = Literal["missing", "extra", "changed", "repeated"]


@dataclass(frozen=True, slots=True)
class Question:
    """Asks for the sums of all rows, by bucket of their keys, or for the rows of the `listed` buckets."""

    buckets: int = 1
    listed: tuple[int, ...] | None = None


@dataclass(slots=True)
class Answer:
    """Sums by bucket (rows, sum of hashes), or rows; `error` if the read failed."""

    sums: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: pa.Table = field(default_factory=_ROWS.empty_table)
    error: str | None = None

    @property
    def count(self) -> int:
        return sum(rows for rows, _ in self.sums.values())

    def plus(self, other: Answer) -> Answer:
        """The answer for both pieces together."""
        return Answer(
            _added(self.sums, other.sums, 1),
            pa.concat_tables([self.rows, other.rows]) if len(other.rows) else self.rows,
            self.error or other.error,
        )

    def minus(self, other: Answer) -> Answer:
        """The sums without those of a piece."""
        return replace(self, sums=_added(self.sums, other.sums, -1), error=self.error or other.error)


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose rows differ between the two sides."""

    kind: Kind
    """missing or extra in the lake, changed cells, or repeated (another number of rows)."""
    key: tuple[str | None, ...]
    key_hash: int
    version: str | None
    """The transaction that wrote the source's row."""


def with_version(schema: TableSchema) -> TableSchema:
    """The columns to read from the source: the table's, and the transaction that wrote the row."""
    schema = schema.streamed
    return replace(schema, columns=(*schema.columns, Column("xmin", 25, -1, "text")))


def ask_stream(
    batches: Iterable[pa.RecordBatch], schema: TableSchema, question: Question, keys: pa.Array | None = None
) -> Answer:
    """
    Answer the question for rows given as PostgreSQL's text, with the columns of `with_version`.

    With `keys`, only rows with one of these keys count.
    """
    names = [f"n{i}" for i in range(len(schema.streamed.columns) + 1)]
    source = _Source(batches)
    # Some of the lake's columns may not be compared, but cells are numbered by all of them.
    places = {c.name: i for i, c in enumerate(schema.streamed.in_lake.columns)}
    typed = ", ".join(f"{cast_sql(c, f'n{places[c.name]}')} as v{i}" for i, c in enumerate(schema.columns))
    reader = pa.RecordBatchReader.from_batches(pa.schema([(n, pa.string()) for n in names]), source)
    con = new_connection(threads=1, memory_limit=MEMORY)
    try:
        con.register("aqueduck_chunk", reader)
        read = f"(select * rename ({names[-1]} as version) from aqueduck_chunk)"
        rows = f"select {typed}, version from {project_rows(con, schema, read, also=['version'])}"
        return _ask(con, rows, schema, question, keys)
    except AqueduckError:
        if source.error is not None:
            raise source.error from None
        raise
    finally:
        con.close()


@dataclass
class _Source:
    """Iterates over batches and keeps their exception, because DuckDB would keep only its text."""

    batches: Iterable[pa.RecordBatch]
    error: AqueduckError | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self.batches
        except AqueduckError as exc:
            self.error = exc
            raise


def ask_lake(
    con: duckdb.DuckDBPyConnection,
    target: TableName,
    version: int,
    schema: TableSchema,
    question: Question,
    keys: pa.Array | None = None,
    mode: TableMode = UPSERT,
) -> Answer:
    """Answer the question for the source's present rows in a lake table at a lake snapshot; `con` has the lake attached."""
    cells = ", ".join(
        f"cast({ident(c.name)} as {lake_type(c)}) as v{i}" for i, c in enumerate(schema.columns)
    )
    present = present_rows(mode, schema, f"(from {lake_table(target)} at (version => {int(version)}))")
    rows = f"select {cells}, null::varchar as version from ({present})"
    return _ask(con, rows, schema, question, keys)


def key_columns_sql(schema: TableSchema, cells: Sequence[str]) -> str:
    """The hash of a key, and the key as text; `cells` are the typed expressions of all columns."""
    key = [cells[i] for i in schema.key_indexes]
    return f"hash({', '.join(key)}) as k, [{', '.join(f'cast({c} as varchar)' for c in key)}] as key"


def compare_rows(source: pa.Table, lake: pa.Table, ignored: pa.Array) -> list[Difference]:
    """Keys whose rows differ, ordered by key; those in `ignored` are left out."""
    sides = {
        name: f"""select k, count(*) as n, sum(h::hugeint) as total, any_value(key) as key, max(version) as version
            from {name} where k not in (select k from ignored) group by k"""
        for name in ("source", "lake")
    }
    query = f"""
        from (
            select case when l.n is null then 'missing' when s.n is null then 'extra'
                        when s.n <> l.n then 'repeated' else 'changed' end as kind,
                   coalesce(s.key, l.key) as key, k, s.version
            from ({sides["source"]}) s full join ({sides["lake"]}) l using (k)
            where s.n is distinct from l.n or s.total is distinct from l.total
        ) order by try_cast(key[1] as double) nulls last, key
    """
    con = new_connection()
    try:
        con.register("source", source)
        con.register("lake", lake)
        con.register("ignored", pa.table({"k": ignored}))
        with lake_errors("comparing rows"):
            found = con.execute(query).fetchall()
    finally:
        con.close()
    return [Difference(kind, tuple(key), k, version) for kind, key, k, version in found]


def _ask(
    con: duckdb.DuckDBPyConnection, rows: str, schema: TableSchema, question: Question, keys: pa.Array | None
) -> Answer:
    cells = [f"v{i}" for i in range(len(schema.columns))]
    hashed = (
        f"select hash({', '.join(cells)}) as h, {key_columns_sql(schema, cells)}, version from ({rows}) r"
    )
    bucket = f"cast(k % {question.buckets} as integer)"
    with lake_errors("comparing rows", table=schema.qualified), _registered(con, keys) as wanted:
        if question.listed is None:
            found = con.execute(
                f"select {bucket} as bucket, count(*), sum(h::hugeint) from ({hashed}) r where {wanted} group by bucket"
            ).fetchall()
            return Answer(sums={b: (int(n), int(total)) for b, n, total in found})
        listed = "true" if question.buckets == 1 else f"{bucket} in ({', '.join(map(str, question.listed))})"
        table = con.execute(
            f"select k, h, key, version from ({hashed}) r where {wanted} and {listed}"
        ).to_arrow_table()
        return Answer(rows=table.cast(_ROWS))


@contextlib.contextmanager
def _registered(con: duckdb.DuckDBPyConnection, keys: pa.Array | None) -> Iterator[str]:
    """The condition that a row has one of the keys, which are registered while the block runs."""
    if keys is None:
        yield "true"
        return
    con.register("aqueduck_keys", pa.table({"k": keys}))
    try:
        yield "k in (select k from aqueduck_keys)"
    finally:
        con.unregister("aqueduck_keys")


def _added(
    some: dict[int, tuple[int, int]], others: dict[int, tuple[int, int]], sign: int
) -> dict[int, tuple[int, int]]:
    total = dict(some)
    for bucket, (rows, hashes) in others.items():
        before = total.get(bucket, (0, 0))
        total[bucket] = (before[0] + sign * rows, before[1] + sign * hashes)
    return {bucket: sums for bucket, sums in total.items() if sums != (0, 0)}
