"""`check`, `init`, `status` and `verify` on a fan-out file; without Spark, with real lakes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from aqueduck.cli.commands import app
from aqueduck.config.fanout import parse_fanout
from aqueduck.fanout.check import run_fanout_checks
from aqueduck.fanout.verify import verify_destinations
from aqueduck.lake.upkeep.lake_readers import oldest_cursor
from aqueduck.model.errors import VerifyDifferenceError
from tests.fanout_lakes import Fan, config, connect, document
from tests.fix_s3 import S3


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    fan.change(
        "create table lake.t (id int, c varchar, v double)",
        "insert into lake.t select i, (['a','b','x'])[1 + i % 3], i / 7 from range(300) r(i)",
    )
    yield fan
    fan.close()


def verdicts(fan: Fan, **sections: Any) -> dict[str, str]:
    return {r.destination: r.verdict for r in verify_destinations(config(fan, **sections), env={})}


@pytest.mark.slow
def test_each_destination_is_compared_at_its_own_cursor(fan: Fan) -> None:
    """Destinations that are behind are compared at their cursor; a destination without a seed is not compared."""
    fan.poll("one")
    assert verdicts(fan) == {"one": "identical", "two": "not compared"}
    fan.poll()
    fan.change("update lake.t set v = -v, c = 'b' where id % 5 = 0", "delete from lake.t where id % 4 = 1")
    fan.poll("two")
    assert fan.cursor("one") != fan.cursor("two")
    assert verdicts(fan) == {"one": "identical", "two": "identical"}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("delete from lake.t where id = 3", marks=pytest.mark.slow),
        pytest.param("insert into lake.t values (1000, 'a', 1)", marks=pytest.mark.slow),
        "update lake.t set v = 8 where id = 3",
    ],
)
def test_any_difference_is_found(fan: Fan, damage: str) -> None:
    """A missing, doubled or changed row is a difference, reported with counts and without values."""
    fan.poll()
    with connect(fan.place("one"), "data_inlining_row_limit 5") as con:
        con.execute(damage)
    assert verdicts(fan) == {"one": "different", "two": "identical"}


@pytest.mark.slow
def test_rows_that_are_not_ours_are_left_alone(fan: Fan) -> None:
    """Rows that another user keeps in a destination's table are not compared."""
    fan.poll()
    with connect(fan.place("one"), "data_inlining_row_limit 5") as con:
        con.execute("insert into lake.t values (1000, 'mine', 1)")
    assert verdicts(fan) == {"one": "identical", "two": "identical"}


@pytest.mark.slow
def test_an_append_only_destination_that_differs_is_not_judged(fan: Fan) -> None:
    """What the source removed stays at an append-only destination: that is no error, and no proof either."""
    fan.keys = ()
    fan.poll()
    routing = {"field": "c"}
    assert verdicts(fan, routing=routing) == {"one": "identical", "two": "identical"}
    fan.change("delete from lake.t where id = 3")
    fan.poll()
    assert verdicts(fan, routing=routing) == {"one": "not compared", "two": "identical"}


@pytest.mark.slow
def test_an_expired_cursor_is_not_compared(fan: Fan) -> None:
    """Without the source's lake snapshot nothing can be said, and nothing is."""
    fan.poll()
    fan.change("insert into lake.t values (900, 'a', 1)", "insert into lake.t values (901, 'a', 1)")
    fan.change("call ducklake_expire_snapshots('lake', older_than => now())")
    [one, _] = verify_destinations(config(fan), env={})
    assert (one.verdict, "lake.expired" in (one.note or "")) == ("not compared", True)


def test_commands_and_their_exit_codes(fan: Fan, tmp_path: Path) -> None:
    """`check` before anything exists, `init` twice, `status`, `verify` with 0, 1 and 3."""
    file = tmp_path / "viaduck.yaml"
    file.write_text(yaml.safe_dump(document(fan)))

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "-c", str(file)], catch_exceptions=True)

    found = run("check", "--json")
    assert found.exit_code == 0, found.output
    assert {r["name"]: r["detail"] for r in json.loads(found.output)}[
        "destination one"
    ] == "its lake can be created"
    assert not (tmp_path / "one.sqlite").exists()
    assert "destination one: ready" in run("init").output
    made = fan.snapshots()
    assert run("init").exit_code == 0
    assert fan.snapshots() == made, "a second init changes nothing"
    assert run("verify").exit_code == 3
    fan.poll()
    assert run("verify").exit_code == 0
    assert [r["same"] for r in json.loads(run("verify", "--json", "--destination", "two").output)] == [True]
    assert "at lake snapshot" in run("check").output
    with connect(fan.place("two"), "data_inlining_row_limit 5") as con:
        con.execute("delete from lake.t where id < 5")
    assert isinstance(run("verify").exception, VerifyDifferenceError)
    assert run("status").exit_code == 0


def test_check_names_what_is_wrong(fan: Fan, tmp_path: Path) -> None:
    """A missing column, a catalog out of reach, a path that cannot be written, a value of the wrong type."""
    wrong = document(fan)
    wrong["destinations"][0]["catalog"] = "postgres:host=127.0.0.1 port=1 dbname=x"
    wrong["destinations"][1]["data_path"] = "/proc/none/"
    parsed = parse_fanout(json.dumps(wrong), base_dir=tmp_path, env={})
    failed = {
        r.name: (r.error.code if r.error else "") for r in run_fanout_checks(parsed, env={}) if not r.ok
    }
    assert failed == {"destination one": "lake.catalog", "destination two": "lake.data_path"}
    [source] = [r for r in run_fanout_checks(config(fan, routing={"field": "nothing"}), env={}) if not r.ok]
    assert "nothing" in source.detail
    fan.change("create table lake.numbers (id int, c int)")
    numbers = config(fan, source={**document(fan)["source"], "table": "numbers"})
    assert any("not a valid INTEGER" in r.detail for r in run_fanout_checks(numbers, env={}) if not r.ok)


def test_check_compares_columns_as_a_seed_does(fan: Fan) -> None:
    """A table that existed before the first seed, or replaced ours, is refused with its code if its columns differ."""
    fan.poll("two")
    for name in ("one", "two"):
        with connect(fan.place(name), "data_inlining_row_limit 5") as con:
            con.execute("drop table if exists lake.t")
            con.execute("create table lake.t (id int, other int)")
    failed = {r.name: r.error.code for r in run_fanout_checks(config(fan), env={}) if r.error}
    assert failed == {"destination one": "lake.schema_change", "destination two": "lake.table_replaced"}
    for name in ("one", "two"):
        with connect(fan.place(name), "data_inlining_row_limit 5") as con:
            con.execute("drop table lake.t")
            con.execute("create table lake.t (v double, C varchar, id int)")
    assert [r for r in run_fanout_checks(config(fan), env={}) if not r.ok] == []
    fan.poll()
    assert sorted(fan.look("two", "select id, c, v from lake.t"), key=repr) == fan.source_rows("b")


@pytest.mark.parametrize("deep", [True, False])
def test_a_destination_without_its_table_is_not_compared(fan: Fan, deep: bool) -> None:
    """P-T01: the note has the code; a table of its name that we did not make is none of ours."""
    fan.poll()
    with connect(fan.place("one"), "data_inlining_row_limit 5") as con:
        con.execute("drop table lake.t")
    with connect(fan.place("two"), "data_inlining_row_limit 5") as con:
        con.execute("drop table lake.t")
        con.execute("create table lake.t (id int, other int)")
    found = {
        r.destination: (r.verdict, (r.note or "").split()[0])
        for r in verify_destinations(config(fan), env={}, deep=deep)
    }
    assert found == {
        "one": ("not compared", "[lake.table_missing]"),
        "two": ("not compared", "[lake.table_replaced]"),
    }


@pytest.mark.slow
def test_check_and_verify_in_an_object_store(s3: S3, tmp_path: Path, fan: Fan) -> None:
    """A bucket that is not there is found before the first write; verify reads files in S3."""
    place = fan.place("one").model_copy(
        update={"data_path": f"s3://{s3.make_bucket('checked')}/x/", "properties": s3.resolved}
    )
    fan.places["one"] = place
    written = document(fan, defaults={"properties": s3.properties})
    parsed = parse_fanout(json.dumps(written), base_dir=tmp_path, env=s3.env)
    assert [r for r in run_fanout_checks(parsed, env=s3.env) if not r.ok] == []
    fan.poll()
    found = {r.destination: r.verdict for r in verify_destinations(parsed, env=s3.env)}
    assert found == {"one": "identical", "two": "identical"}
    written["destinations"][0]["data_path"] = "s3://no-such-bucket/x/"
    parsed = parse_fanout(json.dumps(written), base_dir=tmp_path, env=s3.env)
    [failed] = [r for r in run_fanout_checks(parsed, env=s3.env) if not r.ok]
    assert (failed.name, failed.error and failed.error.code) == ("destination one", "lake.data_path")


@pytest.mark.slow
def test_maintenance_knows_the_cursors_of_listed_destinations(fan: Fan, tmp_path: Path) -> None:
    """P-F16: expiry knows the lake snapshots that a destination of the table still needs."""
    place = fan.place("three")
    fan.change(
        "create table lake.tenants (id varchar, routing_value varchar, catalog varchar, data_path varchar)",
        f"insert into lake.tenants values ('three', 'x', '{place.catalog}', '{place.data_path}')",
    )
    file = tmp_path / "viaduck.yaml"
    file.write_text(yaml.safe_dump(document(fan, destinations_table="tenants")))
    fan.values["three"] = "x"
    fan.poll()
    behind = fan.latest()
    fan.change("insert into lake.t values (900, 'a', 1)")
    fan.poll("one", "two")
    assert oldest_cursor([str(file)], fan.place("source").catalog) == (behind, "the destination three")
