"""The service of a fan-out, with real lakes and a small Spark: which destinations it serves, and which failures it survives."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from aqueduck.config.fanout import parse_fanout
from aqueduck.fanout import destinations as fanout_tenants
from aqueduck.fanout import run as fanout_run
from aqueduck.fanout.check import run_fanout_checks
from aqueduck.fanout.maintain import only_instance
from aqueduck.fanout.service import FanoutService
from aqueduck.fanout.verify import verify_destinations
from aqueduck.lake.destinations.destination import make_tables
from aqueduck.lake.upkeep.lake_readers import destinations_of, oldest_cursor
from aqueduck.model.errors import CatalogUnreachableError, ConfigError, LakeWriteError, RoutingError
from aqueduck.model.routing import may_touch
from aqueduck.model.schema import TableName
from aqueduck.spark.query.fanout_query import Workers
from aqueduck.state_files.destinations import state_path
from tests.fanout_lakes import Fan, config, connect, document
from tests.fix_postgres import Database
from tests.small_spark import SmallSpark, SmallTaskContext

ROWS = "insert into lake.t values (1, 'a', 1), (2, 'b', 2), (3, 'p', 3), (4, 'p', 4)"


@pytest.fixture
def fan(tmp_path: Path) -> Iterator[Fan]:
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    fan.change("create table lake.t (id int, c varchar, v int)", ROWS)
    yield fan
    fan.close()


Serve = Callable[..., FanoutService]


@pytest.fixture
def serve(fan: Fan, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a service of the fan's destinations, prepared."""
    monkeypatch.setattr("aqueduck.spark.query.fanout_query.TaskContext", SmallTaskContext)
    services: list[FanoutService] = []

    def start(env: dict[str, str] | None = None, **sections: Any) -> FanoutService:
        services.append(FanoutService(config(fan, **sections), env=env or {}, spark=SmallSpark()))
        services[-1].prepare()
        return services[-1]

    yield start
    for service in services:
        service.source.close()


def pattern(fan: Fan, **keys: str) -> dict[str, str]:
    return {
        "catalog": f"sqlite:{fan.directory}/{{value}}.sqlite",
        "data_path": f"{fan.directory}/{{value}}_data/",
        **keys,
    }


def tenants(fan: Fan, *rows: dict[str, str]) -> None:
    """A table of destinations with these rows."""
    keys = ("id", "routing_value", "catalog", "catalog_env", "data_path", "table")
    fan.change(
        "create table if not exists lake.tenants (" + ", ".join(f'"{key}" varchar' for key in keys) + ")"
    )
    for row in rows:
        values = ", ".join(f"'{row[key]}'" if key in row else "null" for key in keys)
        fan.change(f"insert into lake.tenants values ({values})")


def row(fan: Fan, name: str, value: str, **keys: str) -> dict[str, str]:
    place = fan.place(name)
    return {
        "id": name,
        "routing_value": value,
        "catalog": str(place.catalog),
        "data_path": place.data_path,
        **keys,
    }


def catch_up(service: FanoutService) -> None:
    fanout_run.catch_up(service, threading.Event())


def ids(service: FanoutService) -> set[str]:
    return {one.destination.id for one in service.served}


# -- who is served


def test_a_row_that_claims_a_table_of_another_is_left_out(fan: Fan, serve: Serve) -> None:
    """P-F14: two destinations that write one table would remove each other's rows; the first stays, the others are served."""
    tenants(
        fan,
        row(fan, "three", "p"),
        {**row(fan, "three", "x"), "id": "again"},
        {**row(fan, "one", "y"), "id": "listed"},
        {**row(fan, "three", "z"), "id": "beside", "table": "other"},
    )
    service = serve(destinations_table="tenants")
    assert ids(service) == {"one", "two", "three", "beside"}
    problems = service.status.left_out
    assert set(problems) == {"again", "listed"}
    assert "three" in problems["again"]
    assert "same table" in problems["again"]
    catch_up(service)
    fan.values["three"] = "p"
    assert fan.differing() == {}


@pytest.mark.slow
def test_a_pattern_leaves_the_tables_of_others_alone(fan: Fan, serve: Serve) -> None:
    """P-F14: a value is left out and reported if its lake would be the source or that of a listed destination."""
    fan.change("insert into lake.t values (5, 'one', 5), (6, 'source', 6)")
    service = serve(dynamic=pattern(fan, id="tenant-{value}"))
    assert ids(service) == {"one", "two", "tenant-p"}
    assert set(service.status.left_out) == {"tenant-one", "tenant-source"}
    catch_up(service)
    assert fan.differing() == {}


def test_a_value_that_is_the_id_of_a_listed_destination_takes_nothing_from_it(fan: Fan, serve: Serve) -> None:
    """P-F14: the listed destination does not change: at the start, after a change and after a new list."""
    elsewhere = pattern(fan, catalog=f"sqlite:{fan.directory}/d_{{value}}.sqlite")
    fan.change("insert into lake.t values (5, 'one', 5)")
    service = serve(dynamic=elsewhere)
    assert service.served["one"].destination.value == "a"
    assert "already has this id" in service.status.left_out["one"]
    catch_up(service)
    fan.change("insert into lake.t values (6, 'two', 6)")
    service.poll()
    assert service.served["two"].destination.value == "b"
    assert "already has this id" in service.status.left_out["two"]
    new = document(fan, dynamic=elsewhere)
    new["destinations"].append({**new["destinations"][0], "id": "p", "routing_value": "q", "table": "q"})
    service.take_over(parse_fanout(json.dumps(new), base_dir=fan.directory, env={}))
    assert service.served["p"].destination.value == "q"
    assert "already has this id" in service.status.left_out["p"]
    catch_up(service)
    assert fan.differing() == {}


@pytest.mark.slow
def test_a_listed_value_in_another_spelling_ends_what_the_pattern_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-F08: 07 and 7 are one number, so that a value has one destination after the file was read again, too."""
    fan = Fan(tmp_path, {"one": "1"})
    fan.change("create table lake.t (id int, c int)", "insert into lake.t values (1, 1), (2, 7)")
    service = FanoutService(config(fan, dynamic=pattern(fan)), env={})
    service.prepare()
    assert ids(service) == {"one", "7"}
    fan.values["seven"] = "07"
    service.take_over(config(fan, dynamic=pattern(fan)))
    assert ids(service) == {"one", "seven"}
    service.source.close()
    fan.close()


def test_a_row_that_names_an_unset_variable_is_left_out(fan: Fan, serve: Serve) -> None:
    """P-F14, P-T07: the row is reported by the variable's name, also by `verify` and `run --once`; the others are served."""
    unset = {"id": "three", "routing_value": "p", "catalog_env": "NOT_SET", "data_path": "/srv/three/"}
    tenants(fan, unset)
    service = serve(destinations_table="tenants")
    assert ids(service) == {"one", "two"}
    assert "NOT_SET" in service.status.left_out["three"]
    catch_up(service)
    tenants(fan, {**unset, "id": "four", "routing_value": "q"})
    service.poll()
    assert set(service.status.left_out) == {"three", "four"}
    assert [d.id for d in destinations_of(service.config, {})] == ["one", "two"]
    catch_up(service)
    assert fan.differing() == {}
    told = {c.destination: (c.verdict, c.note or "") for c in verify_destinations(service.config, env={})}
    assert {name: verdict for name, (verdict, _) in told.items()} == {
        "one": "identical", "two": "identical", "three": "not compared", "four": "not compared",
    }  # fmt: skip
    assert "NOT_SET" in told["four"][1]
    [only] = verify_destinations(service.config, env={}, only=["three"])
    assert only.verdict == "not compared"
    with pytest.raises(LakeWriteError, match=r"2 destinations could not be written: .*NOT_SET"):
        fanout_run.run_once(service, threading.Event())


@pytest.fixture
def stranger() -> Iterator[tuple[int, list[Any]]]:
    """A server on loopback that no configuration names, and all who connected to it."""
    met: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def meet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, address = server.accept()
                    met.append(address)
                    client.close()

        threading.Thread(target=meet, daemon=True).start()
        yield server.getsockname()[1], met


def test_rows_of_the_table_lead_nowhere_that_the_file_does_not_allow(
    fan: Fan, serve: Serve, stranger: tuple[int, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """People who write the table of destinations get no connection to a host of theirs, no variable, and no rows elsewhere."""
    port, met = stranger
    place = f"host=127.0.0.1 port={port} dbname=lake user=u sslmode=disable connect_timeout=2"
    monkeypatch.setenv("PGPASSWORD", "geheim")
    env = {"OTHER": f"postgres:{place}"}
    evil = {"data_path": f"{fan.directory}/evil/"}
    tenants(
        fan,
        {"id": "host", "routing_value": "p", "catalog": f"postgres:{place}", **evil},
        {"id": "uri", "routing_value": "p", "catalog": f"postgresql://u@127.0.0.1:{port}/lake", **evil},
        {"id": "variable", "routing_value": "p", "catalog_env": "OTHER", **evil},
        row(fan, "out", "p", data_path=f"{fan.directory}/../evil_data/"),
        row(fan, "away", "p", catalog=f"sqlite:{fan.directory}-evil/away.sqlite"),
        row(fan, "three", "q"),
    )
    wrong = {"host", "uri", "variable", "out", "away"}
    file = config(fan, destinations_table="tenants")
    failed = [r for r in run_fanout_checks(file, env=env) if not r.ok]
    assert ["5 of the table" in r.detail for r in failed] == [True]
    service = serve(env, destinations_table="tenants")
    assert (ids(service), set(service.status.left_out)) == ({"one", "two", "three"}, wrong)
    assert [d.id for d in destinations_of(file, env)] == ["one", "two", "three"]
    catch_up(service)
    assert met == []
    assert not any((fan.directory / name).exists() for name in ("evil", "../evil_data", "away_data"))
    allowed = {"env": ["OTHER"], "data_paths": [str(fan.directory)], "catalogs": [f"sqlite:{fan.directory}"]}
    trusting = config(fan, destinations_table="tenants", destinations_allow=allowed)
    assert not all(r.ok for r in run_fanout_checks(trusting, env=env))
    assert met, "the variable is allowed now, so that this test sees who connects"


def test_rows_of_the_table_write_into_nothing_that_others_have(fan: Fan, serve: Serve) -> None:
    """The attack: a link out of the allowed directory, a table of a tenant's or the source's lake, a directory with a tenant's files."""
    outside = fan.directory.parent / f"{fan.directory.name}-outside"
    outside.mkdir()
    (fan.directory / "link").symlink_to(outside)
    tenants(
        fan,
        row(fan, "link", "p", data_path=f"{fan.directory}/link/"),
        row(fan, "one", "q") | {"id": "tenant", "table": "mine"},
        row(fan, "source", "r") | {"id": "origin", "table": "mine"},
        row(fan, "four", "s", data_path=f"{fan.directory}/one_data/main/"),
        row(fan, "three", "p"),
    )
    before = fan.look("source", "from lake.current_snapshot()")
    service = serve(destinations_table="tenants")
    assert (ids(service), set(service.status.left_out)) == (
        {"one", "two", "three"}, {"link", "tenant", "origin", "four"},
    )  # fmt: skip
    catch_up(service)
    fan.values["three"] = "p"
    assert fan.differing() == {}
    assert fan.look("source", "from lake.current_snapshot()") == before
    assert not list(outside.iterdir())
    assert not (fan.directory / "four.sqlite").exists()


def test_a_tenant_that_lost_its_last_row_meanwhile_is_emptied(fan: Fan, serve: Serve) -> None:
    """P-F02: rows that were deleted or moved away while no service ran leave the lake that the pattern made for them."""
    fan.change("insert into lake.t values (5, 'q', 5)")
    catch_up(serve(dynamic=pattern(fan)))
    fan.values |= {"p": "p", "q": "q"}
    assert fan.differing() == {}
    fan.values = {"one": "a", "two": "b"}
    behind = fan.latest()
    fan.change("insert into lake.t values (6, 'never', 6)", "delete from lake.t where c in ('p', 'never')")
    fan.change("update lake.t set c = 'a' where c = 'q'")
    again = serve(dynamic=pattern(fan))
    assert ids(again) == {"one", "two", "p", "q"}, "a value that comes only with deletions gets no lake"
    file = fan.directory / "fanout.yaml"
    file.write_text(yaml.safe_dump(document(fan, dynamic=pattern(fan))))
    assert oldest_cursor([str(file)], fan.place("source").catalog, {})[0] == behind
    catch_up(again)
    fan.values |= {"p": "p", "q": "q"}
    assert fan.differing() == {}
    assert fan.rows("p") == []


@pytest.mark.slow
def test_what_another_pattern_made_is_not_made_again(fan: Fan, serve: Serve) -> None:
    """The lake of a value that is gone stays where it is; a changed pattern creates none for it."""
    catch_up(serve(dynamic=pattern(fan)))
    fan.change("delete from lake.t where c = 'p'")
    moved = serve(dynamic=pattern(fan, catalog=f"sqlite:{fan.directory}/moved_{{value}}.sqlite"))
    assert ids(moved) == {"one", "two"}


# -- what it survives


def test_a_reload_while_the_source_is_away_changes_nothing(
    fan: Fan, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-F09: SIGHUP is answered with a warning, and the service continues with what it had."""
    service = serve()
    catch_up(service)
    before = service.config
    file = fan.directory / "fanout.yaml"
    fan.values["three"] = "p"
    file.write_text(yaml.safe_dump(document(fan)))

    def away() -> None:
        raise CatalogUnreachableError("the source's catalog does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(service.source, "_session", away)
        fanout_run.reload_file(service, file)
    assert service.config is before
    assert ids(service) == {"one", "two"}
    fanout_run.reload_file(service, file)
    assert ids(service) == {"one", "two", "three"}
    catch_up(service)
    assert fan.differing() == {}


@pytest.mark.parametrize(
    "change",
    [{"destinations_table": "a.b.c"}, {"dynamic": "table"}, {"destinations": "value"}],
    ids=lambda change: next(iter(change)),
)
def test_a_reload_of_a_wrong_file_changes_nothing(fan: Fan, serve: Serve, change: dict[str, str]) -> None:
    """P-F14: whatever is wrong with the file, the service continues with what it had."""
    fan.change("alter table lake.t add column n int", "update lake.t set n = id")
    routing = {"field": "n", "key_columns": ["id"]}
    fan.values = {"one": "1", "two": "2"}
    service = serve(routing=routing)
    before = service.config
    new = document(fan, routing=routing)
    match change:
        case {"dynamic": _}:
            new["dynamic"] = pattern(fan, table="a.b.c")
        case {"destinations": _}:
            new["destinations"][1]["routing_value"] = "two"
        case _:
            new |= change
    file = fan.directory / "fanout.yaml"
    file.write_text(yaml.safe_dump(new))
    fanout_run.reload_file(service, file)
    assert service.config is before
    assert {t.destination.value for t in service.served} == {"1", "2"}


# -- what a cursor is a cursor of


def one(fan: Fan, **keys: str) -> list[dict[str, Any]]:
    """The destination `one` only, with these keys."""
    return [{**document(fan)["destinations"][0], **keys}]


def test_a_changed_table_is_seeded(fan: Fan, serve: Serve) -> None:
    """P-F16: the cursor of another table does not count for this one; rows in the old table and rows of others stay."""
    catch_up(serve(destinations=one(fan)))
    with connect(fan.place("one"), "data_inlining_row_limit 5") as con:
        con.execute("create table lake.u (id int, c varchar, v int)")
        con.execute("insert into lake.u values (100, 'mine', 1)")
    fan.change("insert into lake.t values (5, 'a', 5)")
    catch_up(serve(destinations=one(fan, table="u")))
    assert sorted(fan.look("one", "from lake.u")) == [(1, "a", 1), (5, "a", 5), (100, "mine", 1)]
    assert fan.rows("one") == [(1, "a", 1)]
    again = serve(destinations=one(fan, table="main.U"))
    catch_up(again)
    assert again.status.destinations["one"].seeds == 0, "the same table in another spelling"


@pytest.mark.slow
def test_a_changed_table_is_not_dropped_for_its_columns(fan: Fan, serve: Serve) -> None:
    """A table that is not ours is refused with its columns, however the source's columns changed meanwhile."""
    catch_up(serve(destinations=one(fan)))
    with connect(fan.place("one"), "data_inlining_row_limit 5") as con:
        con.execute("create table lake.u (something int)")
        con.execute("insert into lake.u values (7)")
    fan.change("alter table lake.t add column w int")
    service = serve(destinations=one(fan, table="u"))
    for _ in range(2):
        service.help_others()
    assert "other columns" in (service.status.destinations["one"].last_error or "")
    assert fan.look("one", "from lake.u") == [(7,)]


def test_a_changed_routing_field_is_seeded(fan: Fan, serve: Serve) -> None:
    """P-F02: rows that the former routing column sent here are removed, and rows of the new one are added."""
    fan.change("alter table lake.t add column d varchar", "update lake.t set d = c where id <> 1")
    fan.change("update lake.t set d = 'a' where id in (2, 3)", "insert into lake.t values (9, 'a', 9, null)")
    catch_up(serve())
    assert fan.differing() == {}
    service = serve(routing={"field": "d", "key_columns": ["id"]})
    catch_up(service)
    fan.routing_field = "d"
    assert fan.differing() == {}
    assert [row[0] for row in fan.rows("one")] == [2, 3]


@pytest.mark.parametrize(
    "before",
    [pytest.param([], id="append-only", marks=pytest.mark.slow), pytest.param(["id", "c"], id="other keys")],
)
def test_changed_keys_are_seeded(fan: Fan, serve: Serve, before: list[str]) -> None:
    """P-F01: removed rows that an append-only destination kept are gone once rows are matched by keys."""
    catch_up(serve(routing={"field": "c", "key_columns": before}))
    fan.change("update lake.t set v = v + 1", "delete from lake.t where id = 1")
    catch_up(serve(routing={"field": "c", "key_columns": before}))
    service = serve()
    catch_up(service)
    assert fan.differing() == {}
    assert service.status.destinations["one"].seeds == 1
    again = serve(routing={"field": "C", "key_columns": ["ID"]})
    catch_up(again)
    assert again.status.destinations["one"].seeds == 0


@pytest.mark.slow
def test_a_renamed_routing_column_is_the_same_column(fan: Fan, serve: Serve) -> None:
    """The source renames it, the file follows: nothing has to be seeded."""
    catch_up(serve())
    fan.change("alter table lake.t rename column c to company", "insert into lake.t values (8, 'a', 8)")
    fan.routing_field = "company"
    service = serve(routing={"field": "company", "key_columns": ["id"]})
    catch_up(service)
    assert fan.differing() == {}
    assert [d.seeds for d in service.status.destinations.values()] == [0, 0]


def test_a_state_of_an_earlier_version_fits_and_is_completed(fan: Fan, serve: Serve) -> None:
    """P-F16: an upgrade seeds nothing; from the next commit on the state names table, field and keys."""
    catch_up(serve())

    def stored() -> dict[str, Any]:
        [[text]] = fan.look("one", "select source_columns from lake.aqueduck.fanout_state")
        return dict(json.loads(text))

    new = {"target", "field", "keys"}
    assert new <= set(stored())
    with connect(fan.place("one"), "data_inlining_row_limit 5") as con:
        old = json.dumps({key: value for key, value in stored().items() if key not in new})
        con.execute("update lake.aqueduck.fanout_state set source_columns = ?", [old])
    assert new.isdisjoint(stored())
    fan.change("insert into lake.t values (5, 'a', 5)")
    service = serve()
    # A process that starts anew knows nothing of the lake yet.
    Workers("test", tasks=1).pool().forget(service.served["one"].destination.place)
    catch_up(service)
    assert service.status.destinations["one"].seeds == 0
    assert fan.differing() == {}
    assert new <= set(stored())


# -- while the source is away


class Away:
    """Takes the source away from a service, and counts how often it is asked; a loop without pauses fails the test."""

    def __init__(self, service: FanoutService, patch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        patch.setattr(service.source, "_session", self._session)

    def _session(self) -> None:
        self.asked += 1
        assert self.asked < 50, "the loop does not rest"
        raise CatalogUnreachableError("the source's catalog does not answer")


class Turns(threading.Event):
    """Stops a loop after so many waits, which take no time."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    def wait(self, timeout: float | None = None) -> bool:
        self.turns -= 1
        if self.turns <= 0:
            self.set()
        return self.is_set()


def test_destinations_that_are_behind_wait_for_the_source(
    fan: Fan, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-F03: the main lane looks once an interval for a source that went away before everything was read."""
    service = serve(poll={"interval_seconds": 60})
    catch_up(service)
    service.status.source_snapshot = fan.latest() + 1
    away = Away(service, monkeypatch)
    fanout_run.main_lane(service, Turns(3), threading.Event(), None, [])
    assert away.asked == 1


def test_a_failing_destination_waits_for_the_source(
    fan: Fan, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-F09: the side lane rests as long as the main lane; the destination's own tries are not used up."""
    service = serve(poll={"interval_seconds": 60})
    catch_up(service)
    service.served.failed([service.served["two"]], "[lake.write] no")
    service.served["two"].status.retry_at = None
    with monkeypatch.context() as patch:
        away = Away(service, patch)
        fanout_run.side_lane(service, Turns(3), [])
    assert away.asked == 1
    status = service.served["two"].status
    assert status.failures == 1
    assert status.retry_at is not None
    status.retry_at = None
    assert service.help_others()
    assert service.served["two"].well


@pytest.mark.slow
def test_catching_up_once_ends_when_the_source_goes_away(
    fan: Fan, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--once` says that the source cannot be read, even if only failing destinations are left."""
    service = serve()
    catch_up(service)
    fan.change("insert into lake.t values (5, 'a', 5)")
    for one in service.served:
        service.served.failed([one], "[lake.write] no")
        one.status.retry_at = None
    latest = fan.latest()
    away = Away(service, monkeypatch)
    monkeypatch.setattr(service.source, "latest", lambda: latest)
    with pytest.raises(LakeWriteError, match="source cannot be read"):
        catch_up(service)
    assert away.asked == 1


def test_catching_up_once_ends_after_its_tries(fan: Fan, serve: Serve) -> None:
    """P-F09: rows that cannot be read fail every destination; `--once` ends with their names and the error."""
    service = serve()
    catch_up(service)
    before = set(fan.directory.glob("source_data/**/*.parquet"))
    fan.change("insert into lake.t select i, 'a', i from range(100, 200) r(i)")
    for file in set(fan.directory.glob("source_data/**/*.parquet")) - before:
        file.unlink()
    with pytest.raises(LakeWriteError, match=r"2 destinations could not be written: one, two: \[lake\."):
        catch_up(service)
    assert {t.status.failures for t in service.served} == {3}


def test_a_source_that_goes_away_while_a_gap_is_looked_at_ends_nothing(
    fan: Fan, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-F16: expired lake snapshots are detected later; until then the destination keeps its cursor."""
    service = serve()
    catch_up(service)
    fan.change("insert into lake.t values (5, 'a', 5)", "insert into lake.t values (6, 'a', 6)")
    fan.change("call ducklake_expire_snapshots('lake', older_than => now())")

    def away(_latest: int) -> int:
        raise CatalogUnreachableError("the source's catalog does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(service.source, "readable_from", away)
        service.poll()
    assert service.status.source_error is not None
    assert service.served["one"].well
    catch_up(service)
    assert fan.differing() == {}
    assert service.status.reseeds == 2


def test_a_column_that_had_a_reserved_name_for_a_while_leads_to_a_seed(fan: Fan, serve: Serve) -> None:
    """P-F15: changes under that name cannot be read, neither by a running service nor by one that replays history."""
    service = serve()
    catch_up(service)
    fan.change(
        "alter table lake.t add column rowid int", "insert into lake.t values (5, 'a', 5, 1), (6, 'a', 6, 1)"
    )
    fan.change("update lake.t set c = 'b' where id = 5", "alter table lake.t rename column rowid to x")
    service.poll()
    catch_up(service)
    assert fan.differing() == {}
    assert [d.seeds for d in service.status.destinations.values()] == [2, 2]
    fan.values["three"] = "p"
    again = serve(routing=REPLAY)
    catch_up(again)
    assert fan.differing() == {}
    assert [d.seeds for d in again.status.destinations.values()] == [0, 0, 1]


# -- history instead of a scan

REPLAY = {"field": "c", "key_columns": ["id"], "seed_mode": "cdc_replay"}


def test_a_replay_in_small_cycles_follows_the_columns_of_then(fan: Fan, serve: Serve) -> None:
    """P-F10: columns that came, went and changed within the history arrive in its order, however short the cycles are."""
    fan.change("alter table lake.t add column w varchar", "insert into lake.t values (5, 'a', 5, 'x')")
    fan.change("alter table lake.t rename column v to n", "alter table lake.t alter n set data type bigint")
    fan.change("alter table lake.t drop column w", "update lake.t set n = 5000000000 where id = 5")
    service = serve(routing=REPLAY, poll={"max_snapshots": 1})
    catch_up(service)
    assert [d.last_error for d in service.status.destinations.values()] == [None, None]
    assert [d.seeds for d in service.status.destinations.values()] == [1, 1]
    assert fan.differing() == {}


@pytest.mark.slow
def test_a_history_that_begins_without_the_routing_column_is_scanned(fan: Fan, serve: Serve) -> None:
    """P-F10: rows from before the column have no destination; a service that replays them would stop with an error."""
    fan.change("alter table lake.t add column d varchar", "update lake.t set d = c")
    fan.routing_field = "d"
    service = serve(routing={**REPLAY, "field": "d"}, poll={"max_snapshots": 1})
    catch_up(service)
    assert fan.differing() == {}


@pytest.mark.slow
def test_a_history_that_begins_under_another_name_is_scanned(fan: Fan, serve: Serve) -> None:
    """P-F10: a table that was renamed since then is seeded from its current rows, instead of failing in every cycle."""
    fan.change("alter table lake.t rename to u")
    source = {**document(fan)["source"], "table": "u"}
    catch_up(serve(source=source, routing=REPLAY, poll={"max_snapshots": 1}))
    assert fan.look("one", "from lake.u") == [(1, "a", 1)]


# -- values that come at an awkward time


def test_a_pattern_finds_the_first_value_of_an_empty_source(fan: Fan, serve: Serve) -> None:
    """A service that has no destination yet looks for values, too."""
    fan.change("delete from lake.t")
    service = serve(destinations=[], dynamic=pattern(fan))
    catch_up(service)
    assert ids(service) == set()
    fan.change("insert into lake.t values (1, 'p', 1)")
    service.poll()
    assert ids(service) == {"p"}
    catch_up(service)
    assert fan.rows("p") == [(1, "p", 1)]


@pytest.mark.slow
def test_a_value_that_comes_while_another_is_seeded_is_found(fan: Fan, serve: Serve) -> None:
    """What a seed's lake snapshot has of others is still new to the main lane."""
    service = serve(dynamic=pattern(fan))
    catch_up(service)
    fan.change("insert into lake.t values (5, 'q', 5)")
    service.poll()
    fan.change("insert into lake.t values (6, 'r', 6)")
    service.help_others()
    service.help_others()
    assert service.status.destinations["q"].seeds == 1
    service.poll()
    assert "r" in ids(service)
    unrouted = service.status.unrouted_rows
    service.poll()
    assert (unrouted, service.status.unrouted_rows) == (2, 2), "each is counted once"


@pytest.mark.slow
def test_a_value_that_comes_before_the_first_seed_is_found(fan: Fan, serve: Serve) -> None:
    """Between the look at the start and the lake snapshot of the first seed nothing gets lost."""
    service = serve(dynamic=pattern(fan))
    fan.change("insert into lake.t values (5, 'q', 5)")
    service.help_others()
    service.help_others()
    service.poll()
    assert "q" in ids(service)


# -- a source that was put back, or changed its names meanwhile


def put_back(fan: Fan, change: Callable[[], None]) -> None:
    """Take a backup of the source, let something happen to it, and put the backup in its place."""
    kept, lake = fan.directory / "backup.sqlite", fan.directory / "source.sqlite"
    fan.let_go()
    shutil.copy(lake, kept)
    change()
    fan.let_go()
    shutil.copy(kept, lake)


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("written", [1, 2, 3], ids=["behind", "same", "past"])
def test_a_source_that_was_put_back_and_written_on_seeds_again(
    fan: Fan, serve: Serve, restart: bool, written: int
) -> None:
    """P-F16: rows that never were go, and rows that were not read come, whether the source is behind or past the cursor."""
    service = serve()
    catch_up(service)

    def lost() -> None:
        fan.change("insert into lake.t values (5, 'a', 5)", "alter table lake.t add column lost int")
        catch_up(service)
        assert fan.differing() == {}

    put_back(fan, lost)
    fan.change(
        *["alter table lake.t add column kept int", "insert into lake.t values (6, 'a', 6, 6)"][:written]
    )
    fan.change(*(f"insert into lake.t values ({n}, 'b', {n}, {n})" for n in range(7, 7 + written - 2)))
    if restart:
        service = serve()
    catch_up(service)
    assert fan.differing() == {}
    assert service.status.reseeds == 2
    assert {d.last_error for d in service.status.destinations.values()} == {None}
    before = fan.snapshots()
    catch_up(serve())
    assert fan.snapshots() == before, "the cursor is one of the new history"


def test_a_source_that_was_restored_to_before_the_cursor_continues(fan: Fan, serve: Serve) -> None:
    """P-F16: a destination that had not read the lost changes keeps its rows and continues."""
    service = serve()
    catch_up(service)
    put_back(
        fan, lambda: fan.change("insert into lake.t values (5, 'a', 5)", "delete from lake.t where id = 1")
    )
    fan.change("insert into lake.t values (6, 'a', 6)")
    catch_up(service)
    assert fan.differing() == {}
    assert service.status.reseeds == 0


def test_a_cursor_of_an_earlier_version_is_adopted(fan: Fan, serve: Serve) -> None:
    """P-F16: a state without a stamp seeds nothing, and has one from the next commit on."""
    catch_up(serve())

    def stored() -> dict[str, Any]:
        [[text]] = fan.look("one", "select source_columns from lake.aqueduck.fanout_state")
        return dict(json.loads(text))

    with connect(fan.place("one"), "data_inlining_row_limit 5") as con:
        old = json.dumps({key: value for key, value in stored().items() if key != "stamp"})
        con.execute("update lake.aqueduck.fanout_state set source_columns = ?", [old])
    fan.change("insert into lake.t values (5, 'a', 5)")
    service = serve()
    catch_up(service)
    assert service.status.reseeds == 0
    assert stored()["stamp"] == service.served["one"].stamp is not None


@pytest.mark.parametrize("replay", [False, True], ids=["scan", "replay"])
@pytest.mark.parametrize(
    "away",
    [
        ["alter table lake.t rename to other", "alter table lake.other rename to t"],
        ["drop table lake.t", "create table lake.t (id int, c varchar, v int)"],
        ["alter table lake.t rename column c to d", "alter table lake.t rename column d to c"],
    ],
    ids=["renamed", "made anew", "another column"],
)
def test_a_name_that_was_away_in_the_middle_of_history_seeds_again(
    fan: Fan, serve: Serve, away: list[str], replay: bool
) -> None:
    """P-F16: if the table or a column has another name at the end of a cycle, the destination is seeded with the current rows."""
    keys = {"routing": REPLAY} if replay else {}
    catch_up(serve(**keys))
    other = "create table if not exists lake.beside (i int)"
    fan.change("insert into lake.t values (5, 'a', 5)", away[0], other, "insert into lake.beside values (1)")
    fan.change(away[1], ROWS)
    service = serve(poll={"max_snapshots": 2}, **keys)
    catch_up(service)
    assert fan.differing() == {}
    fan.change("alter table lake.t rename column c to gone")
    with pytest.raises(RoutingError, match="no column c"):
        catch_up(service)


def test_a_destination_is_seeded_again_beside_one_that_fails(fan: Fan, serve: Serve, tmp_path: Path) -> None:
    """P-F09: all are to be seeded again while one lake cannot be written; the others are seeded at once, that one later."""
    service = serve()
    catch_up(service)

    def lost() -> None:
        fan.change("insert into lake.t values (5, 'b', 5)")
        catch_up(service)

    put_back(fan, lost)
    fan.change("insert into lake.t values (6, 'a', 6)", "insert into lake.t values (7, 'b', 7)")
    lake, aside = fan.directory / "two.sqlite", fan.directory / "aside"
    lake.rename(aside)
    lake.mkdir()
    with pytest.raises(LakeWriteError, match="1 destinations could not be written: two"):
        catch_up(service)
    lake.rmdir()
    aside.rename(lake)
    assert fan.rows("one") == fan.source_rows("a")
    again = serve()
    catch_up(again)
    assert fan.differing() == {}


# -- lake snapshots that are no news


def test_a_destination_in_the_sources_own_lake_is_idle_when_the_table_is(fan: Fan, serve: Serve) -> None:
    """P-F03: its own commits are no news, neither to the running service nor to the next start."""
    place = fan.place("source")
    lake = {"catalog": str(place.catalog), "data_path": place.data_path}
    mine = [{"id": i, "routing_value": v, "table": f"of_{i}", **lake} for i, v in fan.values.items()]

    def rows(name: str) -> list[Any]:
        return sorted(fan.look("source", f"from lake.of_{name}"))

    fan.let_go()
    service = serve(destinations=mine)
    catch_up(service)
    fan.change("insert into lake.t values (5, 'a', 5)")
    fan.let_go()
    assert service.poll()
    before = fan.latest()
    for each in (service, service, serve(destinations=mine)):
        catch_up(each)
        assert not each.poll()
    assert fan.latest() == before
    assert rows("one") == [(1, "a", 1), (5, "a", 5)]
    assert rows("two") == [(2, "b", 2)]
    assert {t.status.lag_snapshots for t in service.served} == {0}


def test_commits_to_other_tables_are_no_news(fan: Fan, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """P-F03: no destination is written for them, until so many have come that the cursor must not stay behind."""
    service = serve()
    catch_up(service)
    before = fan.snapshots()
    fan.change("create table lake.beside (i int)", *["insert into lake.beside values (1)"] * 3)
    assert not service.poll()
    assert fan.snapshots() == before | {"source": fan.latest()}
    assert {t.status.lag_snapshots for t in service.served} == {0}
    fan.change(
        "call ducklake_expire_snapshots('lake', older_than => now())", "insert into lake.t values (5, 'a', 5)"
    )
    assert service.poll()
    assert fan.differing() == {}
    assert service.status.reseeds == 0, "that what was no news expired is no gap"
    fan.change(*["insert into lake.beside values (1)"] * 3)
    assert not service.poll()
    monkeypatch.setattr(fanout_tenants, "STILL_SNAPSHOTS", -2)
    assert service.poll()
    assert {t.cursor for t in service.served} == {fan.latest()}


def test_no_news_of_a_history_that_is_gone_hides_nothing(fan: Fan, serve: Serve) -> None:
    """P-F16: skipped lake snapshots are forgotten when the source is restored to before them; the cursor stays valid."""
    service = serve()
    catch_up(service)

    def lost() -> None:
        fan.change("create table lake.beside (i int)", "insert into lake.beside values (1)")
        assert not service.poll()

    put_back(fan, lost)
    fan.change("insert into lake.t values (5, 'a', 5)", "create table lake.beside (i int)")
    fan.change("drop table lake.beside")
    catch_up(service)
    assert fan.differing() == {}
    assert service.status.reseeds == 0


@pytest.mark.parametrize(
    ("text", "touches"),
    [
        ("inserted_into_table:7", False),
        ("inserted_into_table:7,deleted_from_table:1", True),
        ("altered_table:1", True),
        ('created_table:"main"."t"', True),
        ('created_table:"other"."t"', False),
        ("", True),
    ],
)
def test_what_may_touch_a_table(text: str, touches: bool) -> None:
    """P-F16: a commit is no news only if everything that it did is known to be about other tables."""
    assert may_touch(text, 1, TableName("main", "t")) is touches


def test_long_values_and_values_that_differ_in_case_have_a_lake_each(
    fan: Fan, serve: Serve, db: Database
) -> None:
    """P-F14: in one PostgreSQL catalog, where schemas that differ only in case collide, and with names longer than files may have."""
    fan.change("insert into lake.t values (5, 'acme', 5), (6, 'ACME', 6), (7, repeat('x', 300), 7)")
    for _ in ("first", "again"):
        service = serve(dynamic=pattern(fan, catalog=f"postgres:{db.dsn}", metadata_schema="{value}"))
        catch_up(service)
    assert service.status.destinations["ACME"].seeds == 0, "the second start finds what the first made"
    for name in ("acme", "ACME", "x" * 300):
        fan.values[name], fan.places[name] = name, service.served[name].destination.place
    assert fan.differing() == {}


def damage(fan: Fan) -> None:
    """Somebody removes a row of a destination."""
    with fan.pool.use(fan.place("one")) as lake:
        lake.execute(f"delete from {lake.alias}.t where id = 1")


def test_a_destination_with_another_number_of_rows_is_seeded_again(fan: Fan, serve: Serve) -> None:
    """P-T03, P-T01: missing rows are found and reported by the next cycle that counts, which commits nothing wrong."""
    service = serve()
    catch_up(service)
    damage(fan)
    fan.change("insert into lake.t values (5, 'a', 5), (6, 'b', 6)")
    service.poll()
    assert (service.served["one"].cursor, service.served["two"].cursor) == (None, fan.latest())
    catch_up(service)
    assert fan.differing() == {}
    assert (service.status.miscounts, service.status.reseeds) == (1, 1)
    assert service.status.counts().miscounts == 1


def test_what_was_applied_between_two_counts_is_counted_later(fan: Fan, serve: Serve) -> None:
    """P-T03, P-F03: even if the source has become idle; counting writes nothing, and is done once."""
    service = serve()
    catch_up(service)
    service._count_at = math.inf
    fan.change("insert into lake.t values (5, 'a', 5)")
    service.poll()
    damage(fan)
    before = fan.snapshots()
    assert not service.poll()
    service._count_at = 0
    assert service.poll()
    assert service.status.miscounts == 1
    assert fan.snapshots() == before
    catch_up(service)
    assert fan.differing() == {}


def test_counting_takes_a_small_share_of_the_time(fan: Fan, serve: Serve) -> None:
    """P-T03, P-F03: after a cycle that counted, there are many that do not."""
    service = serve()
    catch_up(service)
    fan.change("insert into lake.t values (5, 'a', 5)")
    service.poll()
    assert service._count_at > time.monotonic()
    damage(fan)
    fan.change("insert into lake.t values (6, 'a', 6)")
    service.poll()
    assert service.status.miscounts == 0


def test_destinations_that_only_gain_rows_are_not_counted(fan: Fan, serve: Serve) -> None:
    """P-F01: without key columns, rows that the source deletes stay at the destination."""
    service = serve(routing={"field": "c"})
    catch_up(service)
    fan.change("delete from lake.t where id = 1", "insert into lake.t values (5, 'a', 5)")
    catch_up(service)
    assert fan.rows("one") == [(1, "a", 1), (5, "a", 5)]
    assert service.status.reseeds == 0


# -- destinations' tables that people drop and replace


def by_hand(fan: Fan, *statements: str) -> None:
    with connect(fan.place("one"), "data_inlining_row_limit 5") as con:
        for statement in statements:
            con.execute(statement)


@pytest.mark.parametrize(
    "statements",
    [
        ["drop table lake.t"],
        ["alter table lake.t rename to elsewhere"],
        ["drop table lake.t", "create table lake.t (id int, c varchar, v int)"],
    ],
    ids=["dropped", "renamed", "made anew"],
)
def test_a_destination_that_lost_its_table_is_seeded_again(
    fan: Fan, serve: Serve, statements: list[str]
) -> None:
    """P-T01: even with the columns and the name of ours; nothing is written into a table that has none of our rows."""
    service = serve()
    catch_up(service)
    by_hand(fan, *statements)
    fan.change("insert into lake.t values (5, 'a', 5)")
    service.poll()
    one = service.status.destinations["one"]
    assert (service.served["one"].cursor, service.served["two"].cursor) == (None, fan.latest())
    assert "[lake.table_" in (one.last_error or "")
    catch_up(service)
    assert fan.differing() == {}
    assert (one.last_error, service.status.reseeds) == (None, 1)


@pytest.mark.parametrize("kind", ["table", "view"])
def test_another_table_in_the_place_of_a_destinations_is_refused(fan: Fan, serve: Serve, kind: str) -> None:
    """P-T01: the foreign table is neither written nor dropped, even when columns change; once it is gone, the destination is seeded."""
    service = serve()
    catch_up(service)
    made = {
        "table": "create table lake.t (id int, other int)",
        "view": "create view lake.t as select 7 as id",
    }
    by_hand(
        fan,
        "drop table lake.t",
        made[kind],
        *(["insert into lake.t values (7, 7)"] if kind == "table" else []),
    )
    before = fan.rows("one")
    fan.change("insert into lake.t values (5, 'a', 5)", "alter table lake.t add column w int")
    for _ in range(2):
        service.poll()
        service.help_others()
    one = service.status.destinations["one"]
    assert (one.state, service.served["two"].cursor) == ("errored", fan.latest())
    assert (one.last_error or "").startswith("[lake.table_replaced]")
    assert fan.rows("one") == before
    by_hand(fan, f"drop {kind} lake.t")
    one.retry_at = None
    catch_up(service)
    assert fan.differing() == {}


def test_a_table_that_a_state_of_an_earlier_version_had_is_not_taken_for_full(fan: Fan, serve: Serve) -> None:
    """P-T01: a seed that dies after it created the table leaves no cursor that claims its rows."""
    service = serve()
    catch_up(service)
    by_hand(
        fan,
        "update lake.aqueduck.fanout_state set source_columns = json_merge_patch(source_columns, '{\"table\": null}')",
        "drop table lake.t",
    )
    with fan.pool.use(fan.place("one")) as lake:
        plan = service.source.plan_scan()
        make_tables(lake, service.served["one"].destination, plan, "test")
    again = serve()
    catch_up(again)
    assert fan.differing() == {}


def test_the_state_of_a_fan_out_is_private(fan: Fan) -> None:
    """The attack: a link in the place of its directory had the lock file, and the values of tenants, written elsewhere."""
    place = state_path(config(fan)).parent
    place.mkdir(parents=True, mode=0o755)
    with only_instance(config(fan)):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    elsewhere = fan.directory / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="a link or belongs to another user"), only_instance(config(fan)):
        pass
