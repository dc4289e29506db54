"""Random histories of a source lake, polled at random points: every destination is the source's filtered content."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import duckdb
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fanout_lakes import Fan

ODD = ("a", "b", "A", "", " a", "it's", 'quo"te', "né", "x; drop table t; --", None)
VALUES = {"one": "a", "two": "it's"}

ids = st.integers(0, 12)
tenants = st.sampled_from(ODD)
numbers = st.one_of(st.none(), st.integers(-5, 5))


def text(value: object) -> str:
    return "null" if value is None else "'" + str(value).replace("'", "''") + "'"


def insert(row: tuple[int, str | None, int | None]) -> str:
    number, tenant, v = row
    key = "null" if number == 0 else str(number)
    # Keys are unique in the source, including the key NULL.
    return (
        f"insert into lake.t (id, c, v) select {key}, {text(tenant)}, {text(v)}"
        f" where not exists (select 1 from lake.t where id is not distinct from {key})"
    )


def several(first: int) -> str:
    return (
        f"insert into lake.t (id, c, v) select i, (['a','b',null,'it''s'])[1 + i % 4], i from range({first * 20 + 100},"
        f" {first * 20 + 120}) r(i) where i not in (select id from lake.t where id is not null)"
    )


single = st.one_of(
    st.tuples(ids, tenants, numbers).map(insert),
    st.integers(0, 3).map(several),
    st.tuples(ids, numbers).map(lambda x: f"update lake.t set v = {text(x[1])} where id = {x[0]}"),
    st.tuples(ids, tenants).map(lambda x: f"update lake.t set c = {text(x[1])} where id = {x[0]}"),
    st.tuples(ids, tenants).map(
        lambda x: f"update lake.t set c = {text(x[1])}, v = 1 where id % 3 = {x[0] % 3}"
    ),
    st.tuples(ids, st.integers(1, 40)).map(
        lambda x: (
            f"update lake.t set id = {x[1]} where id = {x[0]} and {x[1]} not in (select id from lake.t where id is not null)"
        )
    ),
    # Two keys change places.
    st.just("update lake.t set id = 3 - id where id in (1, 2)"),
    ids.map(lambda x: f"delete from lake.t where id = {x}"),
    st.just("delete from lake.t where id is null"),
    ids.map(lambda x: f"delete from lake.t where id % 5 = {x % 5}"),
)
together = st.lists(single, min_size=2, max_size=4).map(lambda s: ";".join(["begin", *s, "commit"]))
upkeep = st.sampled_from(
    [
        "call ducklake_flush_inlined_data('lake')",
        "call ducklake_merge_adjacent_files('lake')",
        "call ducklake_rewrite_data_files('lake', delete_threshold => 0)",
        "call ducklake_rewrite_data_files('lake')",
        "create or replace table lake.other as select 1 as x",
    ]
)
columns = st.sampled_from(
    [
        "alter table lake.t add column if not exists w varchar default 'it''s'",
        "alter table lake.t add column if not exists n double",
        "alter table lake.t drop column if exists w",
        "alter table lake.t add column if not exists filename varchar default 'x.parquet'",
        "alter table lake.t add column if not exists file_row_number int default 0",
        "alter table lake.t drop column if exists filename",
    ]
)
steps = st.one_of(single, single, single, together, upkeep, columns, st.just("POLL"), st.just("POLL one"))


def try_change(fan: Fan, step: str) -> None:
    """What DuckLake itself refuses to commit did not happen."""
    try:
        fan.change(step)
    except duckdb.TransactionException:
        with contextlib.suppress(duckdb.Error):
            fan.source.execute("rollback")


def run(history: list[str], directory: Path, inline: int) -> None:
    fan = Fan(directory, dict(VALUES), inline=inline)
    try:
        fan.change("create table lake.t (id int, c varchar, v int)")
        fan.poll()
        for step in [*history, "POLL"]:
            if step == "POLL one":
                fan.poll("one")
            elif step == "POLL":
                assert not [a.error for a in fan.poll() if a.error]
                assert fan.differing() == {}
            else:
                try_change(fan, step)
    finally:
        fan.close()


FLUSHED_AFTER_A_REWRITE = [
    "insert into lake.t values (1,'a',1),(2,'b',2),(3,'a',3)",
    several(0),
    "POLL",
    "delete from lake.t where id in (2, 101)",
    "insert into lake.t values (4,'a',1)",
    "call ducklake_rewrite_data_files('lake', delete_threshold => 0)",
    "POLL one",
    "update lake.t set c = 'b', v = 8 where id = 3",
    "call ducklake_flush_inlined_data('lake')",
]
REMOVED_BY_THE_TRANSACTION_THAT_WROTE_IT = [
    several(0),
    "POLL",
    f"begin; {several(1)}; delete from lake.t where id % 5 = 3; commit",
]
FLUSHED_AFTER_TWO_UPDATES = [
    "insert into lake.t values (1,'a',1),(2,'a',2)",
    "update lake.t set v = v + 1 where id in (1, 2)",
    "POLL one",
    "delete from lake.t where id = 1",
    "update lake.t set c = 'it''s' where id = 2",
    "call ducklake_flush_inlined_data('lake')",
]
UPDATED_WITH_A_COLUMN_CALLED_FILENAME = [
    "alter table lake.t add column filename varchar default 'x.parquet'",
    several(0),
    "POLL",
    "update lake.t set v = -1 where id % 2 = 0",
    "POLL one",
    f"begin; update lake.t set v = -2 where id = 104; update lake.t set c = 'b', v = -3 where id = 104; {several(1)};"
    " update lake.t set c = 'it''s' where id = 120; delete from lake.t where id % 5 = 3; commit",
]
UPDATED_THEN_REWRITTEN = [
    "insert into lake.t values (1,'a',1),(2,'b',2),(3,'a',3)",
    several(0),
    "update lake.t set v = v + 100, c = 'b' where id in (1, 100)",
    "call ducklake_rewrite_data_files('lake', delete_threshold => 0)",
]


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=3, max_size=12), st.sampled_from([0, 5, 1000]))
@example(FLUSHED_AFTER_A_REWRITE, 5)
@example(FLUSHED_AFTER_TWO_UPDATES, 1000)
@example(REMOVED_BY_THE_TRANSACTION_THAT_WROTE_IT, 0)
@example(UPDATED_THEN_REWRITTEN, 0)
@example(UPDATED_WITH_A_COLUMN_CALLED_FILENAME, 0)
@example(UPDATED_WITH_A_COLUMN_CALLED_FILENAME, 5)
def test_after_each_poll_a_destination_is_the_filtered_source(history: list[str], inline: int) -> None:
    """P-F01, P-F02, P-F06, P-F15, P-F16, hazard 6: whatever happened between two polls, nothing is missing, doubled or left over."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        run(history, Path(directory), inline)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=5, max_size=40), st.sampled_from([0, 5, 1000]))
def test_long_histories(history: list[str], inline: int) -> None:
    """P-F01, P-F02: the same for long histories, many of them."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        run(history, Path(directory), inline)
