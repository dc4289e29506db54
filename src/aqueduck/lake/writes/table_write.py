"""
Write the rows of users' queries to a lake table: tasks write files, the driver commits them in one transaction.

`open_target` creates or checks the table before anything is written.  A task runs `write_part`.  `commit_parts` makes
all parts of a write visible at once, together with the mark of the batch (`aqueduck.spark_writes`), so that a repeated
batch changes nothing.  This implements the Spark format `ducklake` (`spark.formats.lake_writer`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from aqueduck import faults
from aqueduck.config.lake_place import LakePlace
from aqueduck.lake.fold.fold_tasks import task_engine
from aqueduck.lake.session.catalog import OWN_SCHEMA
from aqueduck.lake.session.encryption import new_key, parquet_rows, prepare_encryption
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.files import write_files
from aqueduck.lake.session.object_stores import know_store
from aqueduck.lake.session.pool import LakePool, PooledLake
from aqueduck.lake.session.sql import ident, idents, literal, string_list
from aqueduck.lake.session.storage import discard_file, list_files, no_glob, remove_file
from aqueduck.lake.target.places import hidden_rows_error, hides_rows, read_places
from aqueduck.lake.upkeep.statistics import settle_statistics
from aqueduck.lake.writes.write_fold import folded_rows
from aqueduck.lake.writes.write_target import CONTROL, WriteOrder, WriteTarget
from aqueduck.model.errors import ConfigError, LakeBusyError, LakeError
from aqueduck.model.retries import doubling, retried
from aqueduck.model.schema import TableName

__all__ = ["MARKS", "BatchMark", "PartFile", "check_mark", "commit_parts", "drop_parts", "write_part"]

MARKS = TableName(OWN_SCHEMA, "spark_writes")
INLINE_ROWS = 1000
TRIES = 12
FLUSH_EVERY = 1000
"""The number of batches after which old versions of a mark are flushed from the catalog."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file that a task wrote; it is part of the table only after the commit."""

    path: str
    rows: int
    key: str | None = None
    """The key of the file, if it is encrypted."""


@dataclass(frozen=True, slots=True)
class BatchMark:
    """The query and the batch of a write; each batch is written once."""

    query: str
    batch: int

    @property
    def prefix(self) -> str:
        """The prefix of the names of its files."""
        return f"aqueduck-spark_{''.join(c for c in self.query if c.isalnum())[:32]}-{self.batch}-"


class _WrittenBeforeError(Exception):
    """The lake already has this batch."""


# -- in a task


def write_part(
    place: LakePlace, target: WriteTarget, batches: Iterator[pa.RecordBatch], mark: BatchMark | None
) -> PartFile | None:
    """Write rows into the table's directory; None if there are none."""
    first = next(batches, None)
    if first is None:
        return None

    prefix = "aqueduck-spark-" if mark is None else mark.prefix
    name = f"{prefix}{uuid.uuid4().hex[:12]}.parquet"
    _know(place, target)
    key = new_key() if target.encrypted else None
    with task_engine(target.directory, len(target.cells)) as con:
        if target.encrypted:
            prepare_encryption(con)
        with lake_errors("taking in rows", table=target.table.qualified):
            con.register(
                "arrived", pa.RecordBatchReader.from_batches(first.schema, itertools.chain([first], batches))
            )
        files = write_files(
            con, f"select {', '.join(target.cells)} from arrived", target.directory, name,
            columns=len(target.cells), table=target.table.qualified, key=key,
        )  # fmt: skip
    return PartFile(files[0].path, files[0].rows, key) if files else None


# -- on the driver


def commit_parts(
    pool: LakePool,
    place: LakePlace,
    order: WriteOrder,
    target: WriteTarget,
    parts: Sequence[PartFile],
    mark: BatchMark | None,
) -> bool:
    """Make all parts visible in one lake snapshot; False if this batch was written before."""
    if not parts and order.mode != "overwrite":
        return True
    _know(place, target)

    def commit() -> set[str]:
        with pool.use(place) as lake:
            return _commit(lake, order, target, parts, mark)

    delays = doubling(0.05, 2.0, times=TRIES - 1, jitter=0.5)
    try:
        kept = retried(commit, delays, time.sleep, on=LakeBusyError)
    except _WrittenBeforeError:
        with contextlib.suppress(LakeError):  # the commit succeeded; leftover files are no reason to fail
            drop_parts(pool, place, target, _attempts(target, parts, mark))
        return False
    with contextlib.suppress(
        LakeError
    ):  # the commit succeeded; after an error Spark would write the rows again
        _remove_rest(target, parts, kept, mark)
        if mark is not None and mark.batch % FLUSH_EVERY == FLUSH_EVERY - 1:
            _flush_marks(pool, place)
    return True


def _commit(
    lake: PooledLake,
    order: WriteOrder,
    target: WriteTarget,
    parts: Sequence[PartFile],
    mark: BatchMark | None,
) -> set[str]:
    """Commit the parts; returns the paths of the files that became part of the table."""
    if mark is not None:
        _ensure_mark(lake, target.table, mark)
    settle_statistics(lake, [target.table], lake.settled)
    with lake.transaction():
        if mark is not None and not _move_mark(lake, target.table, mark):
            raise _WrittenBeforeError
        kept = _apply(lake, order, target, parts)
        info = {"query": mark.query, "batch": mark.batch} if mark is not None else {}
        lake.execute(
            f"call {ident(lake.alias)}.set_commit_message('aqueduck',"
            f" {literal(f'spark {order.mode} of {target.table.qualified}')},"
            f" extra_info => {literal(json.dumps(info))})",
            doing="writing the commit message",
        )
        faults.point("write.before_commit")
    faults.point("write.after_commit")
    with contextlib.suppress(
        LakeError
    ):  # the commit succeeded; after an error Spark would write the rows again
        settle_statistics(lake, [target.table], lake.settled)
    return kept


def _apply(lake: PooledLake, order: WriteOrder, target: WriteTarget, parts: Sequence[PartFile]) -> set[str]:
    table = lake.table(target.table)
    paths = [part.path for part in parts]
    if order.mode == "overwrite":
        lake.execute(f"delete from {table}", doing="emptying the table")
    if not parts:
        return set()
    rows = parquet_rows(paths, [part.key for part in parts])
    if order.mode == "upsert":
        folded = folded_rows(lake, order, target, rows)
        _delete_keys(lake, order, target, folded or rows)
        if folded is not None:
            condition = f" where {CONTROL}op is distinct from 'delete'" if order.op else ""
            _insert(lake, target, f"{folded}{condition}")
            lake.execute(f"drop table {folded}")
            return set()
    few = sum(part.rows for part in parts) <= INLINE_ROWS
    place = read_places(lake, [target.table]).get(target.table.folded)
    if few or target.inserted or (place is not None and not place.layout.is_plain):
        _insert(lake, target, rows)
        return set()
    lake.execute(
        f"call ducklake_add_data_files({literal(lake.alias)}, {literal(target.table.name)},"
        f" {string_list(map(no_glob, paths))}, schema => {literal(target.table.schema)}, ignore_extra_columns => true,"
        " hive_partitioning => false)",
        doing="adding data files",
    )
    return set(paths)


def _insert(lake: PooledLake, target: WriteTarget, rows: str) -> None:
    names = idents(target.stored)
    lake.execute(
        f"insert into {lake.table(target.table)} ({names}) select {names} from {rows}", doing="inserting rows"
    )


def _delete_keys(lake: PooledLake, order: WriteOrder, target: WriteTarget, rows: str) -> None:
    if hides_rows(lake, target.table):
        raise hidden_rows_error(target.table)
    same = " and ".join(f"t.{ident(key)} is not distinct from k.{ident(key)}" for key in order.keys)
    lake.execute(
        f"delete from {lake.table(target.table)} as t using (select {idents(order.keys)} from {rows}) as k where {same}",
        doing="deleting rows",
    )


# -- marks


def _ensure_mark(lake: PooledLake, table: TableName, mark: BatchMark) -> None:
    """Create the query's row in a separate transaction; concurrent writers of one query conflict on it."""
    key = f"{lake.alias}.mark.{mark.query}.{table.qualified}"
    if lake.memory.get(key):
        return
    with lake.transaction():
        lake.execute(f"create schema if not exists {ident(lake.alias)}.{ident(OWN_SCHEMA)}")
        lake.execute(
            f"create table if not exists {lake.table(MARKS)} (query_id varchar, table_name varchar,"
            " batch_id bigint, committed_at timestamp with time zone)",
            doing="making the table of marks",
        )
    with lake.transaction():
        found = lake.execute(
            f"select 1 from {lake.table(MARKS)} where query_id = ? and table_name = ?",
            (mark.query, table.qualified),
        )
        if not found:
            lake.execute(
                f"insert into {lake.table(MARKS)} values (?, ?, -1, now())", (mark.query, table.qualified),
                doing="writing a mark",
            )  # fmt: skip
    lake.memory[key] = True


def _move_mark(lake: PooledLake, table: TableName, mark: BatchMark) -> bool:
    [[count]] = lake.execute(
        f"update {lake.table(MARKS)} set batch_id = {mark.batch}, committed_at = now()"
        f" where query_id = {literal(mark.query)} and table_name = {literal(table.qualified)}"
        f" and batch_id < {mark.batch}",
        doing="writing a mark",
    )
    return bool(count)


def _flush_marks(pool: LakePool, place: LakePlace) -> None:
    with pool.use(place) as lake:
        lake.execute(
            f"call ducklake_flush_inlined_data({literal(lake.alias)}, schema_name => {literal(MARKS.schema)},"
            f" table_name => {literal(MARKS.name)})",
            doing="flushing marks",
        )


# -- files that were not committed


def drop_parts(pool: LakePool, place: LakePlace, target: WriteTarget, paths: Iterable[str]) -> None:
    """
    Remove those of the files that no lake snapshot has.

    The catalog is always checked, because a commit may have succeeded although its reply was lost.
    """
    unsure = list(paths)
    if not unsure:
        return
    _know(place, target)
    with pool.use(place, read_only=True) as lake:
        names = [path.rsplit("/", 1)[-1] for path in unsure]
        known = {
            str(path).rsplit("/", 1)[-1]
            for table in ("ducklake_data_file", "ducklake_files_scheduled_for_deletion")
            for (path,) in lake.execute(
                f"select path from {lake.metadata}.{table}"
                f" where list_contains({string_list(names)}, regexp_extract(path, '[^/]+$'))"
            )
        }
    for path in unsure:
        if path.rsplit("/", 1)[-1] not in known:
            remove_file(path)


def _remove_rest(
    target: WriteTarget, parts: Sequence[PartFile], kept: set[str], mark: BatchMark | None
) -> None:
    """Remove files whose rows were inserted instead, and files of an earlier attempt at the same batch."""
    for path in _attempts(target, parts, mark) - kept:
        discard_file(path)


def _know(place: LakePlace, target: WriteTarget) -> None:
    """Register the store for the table's directory, because the options may lack a data path."""
    know_store(target.directory, dict(place.properties))


def _attempts(target: WriteTarget, parts: Sequence[PartFile], mark: BatchMark | None) -> set[str]:
    """The parts, and the files of an earlier attempt at the same batch that failed before or after its commit."""
    left = () if mark is None else list_files(target.directory, mark.prefix)
    return {*(part.path for part in parts), *left}


def check_mark(query: str | None, batch: int | None) -> BatchMark | None:
    """The mark that the options name; one option without the other is an error."""
    if (query is None) != (batch is None):
        raise ConfigError("ducklake: the options query_id and batch_id must be set together")
    return None if query is None or batch is None else BatchMark(query, batch)
