"""Options of tables in the registry: by file, by SQL, and refused where they are not options."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from aqueduck.model.errors import ConfigError
from aqueduck.postgres.registry.registry import call, reconcile_file
from tests.postgres.registry.wishes import config_of, refused, table

Connection = psycopg.Connection[Any]

OPTIONS = {"exclude": ["x"], "mask": {"y": {"constant": "1"}, "z": "redact"}, "where": "id > 1"}


def test_options_of_the_file_are_in_the_registry_and_follow_it(conn: Connection) -> None:
    """The mapping stays the same when options change; the service decides the consequences."""
    config = config_of({"name": "g", "tables": [{"source": "a", **OPTIONS}, {"source": "b"}]})
    assert reconcile_file(conn, config)
    before = table(conn, "a")
    assert (before.options, table(conn, "b").options) == (OPTIONS, {})
    assert not reconcile_file(conn, config)
    assert reconcile_file(conn, config_of({"name": "g", "tables": [{"source": "a"}, {"source": "b"}]}))
    assert (table(conn, "a").options, table(conn, "a").id) == ({}, before.id)


def test_options_by_sql_are_kept_and_shown(conn: Connection) -> None:
    """The same call again changes nothing, another one is refused with a way out."""
    conn.execute("alter table public.a add x int, add y int, add z int")
    call(conn, "add_table", source="a", options=json.dumps(OPTIONS))
    call(conn, "add_table", source="a", options=json.dumps(OPTIONS))
    assert table(conn, "a").options == OPTIONS
    error = refused(conn, "add_table", source="a", options='{"where": "id > 2"}')
    assert "other options" in str(error)
    assert "remove_table" in str(error)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ('{"colums": ["a"]}', "unknown option colums"),
        ('{"columns": "a"}', "the option columns has the wrong form"),
        ('{"where": true}', "the option where has the wrong form"),
        ('{"columns": ["a"], "exclude": ["b"]}', "both columns and exclude"),
        ("[]", "must be an object"),
    ],
)
def test_what_is_no_option_is_refused_by_name(conn: Connection, options: str, says: str) -> None:
    """P-S26: at the call, not by the service later."""
    assert says in str(refused(conn, "add_table", source="a", options=options))


@pytest.mark.parametrize(
    "options",
    ['{"columns": ["id", "X"]}', '{"exclude": ["X"]}', '{"rename": {"X": "y"}}', '{"mask": {"X": "redact"}}'],
)
def test_a_column_that_is_not_there_is_refused_by_name(conn: Connection, options: str) -> None:
    """P-S02: an unknown column is refused by the call, with its name; options on a column that was renamed since stay valid."""
    conn.execute("alter table public.a add x int")
    error = refused(conn, "add_table", source="a", options=options)
    assert 'public.a has no column "X"' in str(error)
    assert (error.code, error.hint) == ("config.invalid", "correct the name in its options; capitals count")
    conn.execute('alter table public.a rename x to "X"')
    call(conn, "add_table", source="a", options=options)
    conn.execute('alter table public.a rename "X" to z')
    call(conn, "add_table", source="a", options=options)
    assert table(conn, "a").options == json.loads(options)


@pytest.mark.parametrize("depth", [700, 100_000])
def test_options_that_are_nested_too_deeply_are_bad_input(conn: Connection, depth: int) -> None:
    """Neither the parser nor the look at its values ends in an error of ours."""
    options = '{"x": ' * depth + "1" + "}" * depth
    with pytest.raises(ConfigError, match="options is"):
        call(conn, "add_table", source="a", options=options)
