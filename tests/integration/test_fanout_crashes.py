"""Hazard 8 for the fan-out: kill -9 at every durable step, start again, compare everything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import psutil
import psycopg
import pytest
import yaml

from aqueduck.config.lake_place import LakePlace
from aqueduck.lab.embedded import EmbeddedPostgres
from tests.fanout_lakes import Fan
from tests.fix_postgres import wait_until
from tests.fix_service import START_SECONDS, passing

IDLE_SECONDS = 40
POINTS = ("fanout.before_commit", "fanout.before_commit:2", "fanout.after_commit", "fanout.after_commit:2")
SEED_POINTS = ("fanout.before_seed", "fanout.before_seed:2", "fanout.after_seed")


def _first_in_the_normal_run(points: Sequence[str]) -> list[Any]:
    return [points[0], *(pytest.param(point, marks=pytest.mark.faults) for point in points[1:])]


POLL = """
import json, sys
from pathlib import Path
from aqueduck.config.lake_place import LakePlace
from tests.fanout_lakes import Fan
directory, values, places = json.loads(sys.argv[1])
Fan(Path(directory), values, places={k: LakePlace(**v) for k, v in places.items()}).poll()
"""

HISTORY = (
    "insert into lake.t select i, (['a','b','x'])[1 + i % 3], i from range(2000) r(i) where i not in (select id from lake.t)",
    "update lake.t set v = v + 1, c = (['a','b','x'])[1 + v % 3] where id % 7 = 0",
    "update lake.t set id = id + 10000 where id % 11 = 0 and id < 2000 and id + 10000 not in (select id from lake.t)",
    "delete from lake.t where id % 13 = 0",
)


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.slow), "postgres"])
def fan(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fan]:
    places = {}
    if request.param == "postgres":
        server: EmbeddedPostgres = request.getfixturevalue("pg")
        name = f"fan_{tmp_path.name[-8:]}_{os.getpid()}".replace("-", "_").lower()
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute(f'drop database if exists "{name}" with (force)'.encode())
            admin.execute(f'create database "{name}"'.encode())
        for lake in ("source", "one", "two"):
            places[lake] = LakePlace(
                catalog=f"postgres:{server.dsn_for(name)}",
                metadata_schema=f"lake_{lake}",
                data_path=f"{tmp_path}/{lake}_data/",
            )
    fan = Fan(tmp_path, {"one": "a", "two": "b"}, places=places)
    fan.change("create table lake.t (id int, c varchar, v int)")
    yield fan
    fan.close()


def poll_elsewhere(fan: Fan, fault: str) -> int:
    """A poll by another process, which dies at the fault."""
    places = {name: fan.place(name).model_dump() for name in ("source", *fan.values)}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AQUEDUCK_FAULT": fault}
    argument = json.dumps([str(fan.directory), fan.values, places])
    return subprocess.run(
        [sys.executable, "-c", POLL, argument], env=env, timeout=120, check=False
    ).returncode


@pytest.mark.kills("fanout")
@pytest.mark.parametrize("point", _first_in_the_normal_run(POINTS))
def test_a_kill_in_a_cycle_loses_and_doubles_nothing(fan: Fan, point: str) -> None:
    """P-F01, P-F05: destinations that committed are left out by their cursors, the others get the same range again."""
    fan.change(*HISTORY)
    fan.poll()
    fan.change(*HISTORY, "insert into lake.t values (5000, 'a', 1), (5001, 'b', 1)")
    assert poll_elsewhere(fan, point) == -signal.SIGKILL
    fan.change("update lake.t set v = -1 where id % 5 = 0")
    fan.poll()
    assert fan.differing() == {}


@pytest.mark.kills("fanout")
@pytest.mark.parametrize("point", _first_in_the_normal_run(SEED_POINTS))
def test_a_kill_in_a_seed_repeats_it_safely(fan: Fan, point: str) -> None:
    """P-F10: a seed is there as a whole or not at all; the next start repeats what is missing."""
    fan.change(*HISTORY)
    assert poll_elsewhere(fan, point) == -signal.SIGKILL
    fan.change("delete from lake.t where id % 3 = 1")
    fan.poll()
    assert fan.differing() == {}


def test_a_destination_catalog_that_was_down_catches_up(
    tmp_path: Path, new_server: Callable[..., EmbeddedPostgres]
) -> None:
    """P-F09: while a destination's server is stopped the others continue; afterwards it gets its own range, once."""
    server = new_server(durable=True)
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    fan.places["two"] = LakePlace(catalog=f"postgres:{server.dsn}", data_path=f"{tmp_path}/two_data/")
    fan.change("create table lake.t (id int, c varchar, v int)", *HISTORY)
    fan.poll()
    cursors = {name: fan.cursor(name) for name in fan.values}
    server.stop(mode="immediate")
    fan.change(*HISTORY)
    fan.cursor = lambda destination: cursors[destination]  # type: ignore[method-assign]
    done = {applied.id: applied for applied in fan.poll()}
    assert done["one"].error is None
    assert (done["two"].error or "").startswith("[lake.")
    server.start()
    del fan.cursor
    fan.change("delete from lake.t where id % 3 = 1")
    fan.poll()
    assert fan.differing() == {}
    fan.close()


class Service:
    """`aqueduck run` on a fan-out file, as a process of its own."""

    def __init__(self, fan: Fan) -> None:
        self.fan = fan
        self.file = fan.directory / "viaduck.yaml"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.write()

    def write(self, **sections: Any) -> None:
        def lake(name: str) -> dict[str, Any]:
            place = self.fan.place(name)
            found = {"catalog": str(place.catalog), "data_path": place.data_path}
            return {**found, "metadata_schema": place.metadata_schema} if place.metadata_schema else found

        document = {
            "source": {**lake("source"), "table": "t"},
            "routing": {"field": "c", "key_columns": ["id"]},
            "destinations": [{"id": i, "routing_value": v, **lake(i)} for i, v in self.fan.values.items()],
            "poll": {"interval_seconds": 0.5},
            "spark": {"master": "local[2]"},
            "server": {"port": 0},  # several services run side by side
            **sections,
        }
        self.file.write_text(yaml.safe_dump(document))

    def start(self, *arguments: str, fault: str = "") -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AQUEDUCK_FAULT": fault}
        command = [sys.executable, "-m", "aqueduck.cli", "run", "-c", str(self.file), *arguments]
        with open(self.fan.directory / "log.txt", "ab") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def die(self, point: str) -> None:
        """Run until a process of the service dies at the fault point, then kill -9 of everything that is left."""
        passed = passing(self.fan.directory / "log.txt", point)
        process = self.start(fault=point)
        wait_until(lambda: passed() or process.poll() is not None, point, START_SECONDS, log=self.log)
        self.kill()
        assert passed(), f"it did not die at {point}\n{self.log()}"

    def log(self) -> str:
        return (self.fan.directory / "log.txt").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        for process in self.processes:
            try:
                parent = psutil.Process(process.pid)
                family = [*parent.children(recursive=True), parent]
            except psutil.NoSuchProcess:
                continue
            for member in family:
                if member.is_running():
                    member.kill()
            process.wait(timeout=60)

    def wait_same(self) -> None:
        wait_until(lambda: not self.different(), "destinations are the source", 240, log=self.log)

    def different(self) -> bool:
        try:
            return bool(self.fan.differing())
        except duckdb.Error:
            return True  # a lake or its table is not there yet


@pytest.fixture
def service(fan: Fan) -> Iterator[Service]:
    service = Service(fan)
    yield service
    service.kill()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.kills("fanout")
@pytest.mark.parametrize(
    "point", ["fanout.read:2", "fanout.before_commit", "fanout.after_commit:2", "fanout.after_seed"]
)
def test_a_killed_service_continues_where_its_destinations_are(
    fan: Fan, service: Service, point: str
) -> None:
    """Hazard 8: a worker dies at a durable step, then the driver and everything with it; nothing is lost or doubled."""
    fan.change(*HISTORY)
    passed = passing(fan.directory / "log.txt", point)
    process = service.start(fault=point)
    if "seed" not in point:
        service.wait_same()
        fan.change(*HISTORY)
    wait_until(lambda: passed() or process.poll() is not None, point, 240, log=service.log)
    service.kill()
    assert passed(), service.log()
    fan.change("update lake.t set v = -1 where id % 5 = 0")
    assert service.start("--once").wait(timeout=240) == 0, service.log()
    assert fan.differing() == {}


@pytest.mark.slow
@pytest.mark.spark
def test_a_running_service_follows_its_source_and_its_file(fan: Fan, service: Service) -> None:
    """P-F09: a killed worker is replaced, SIGHUP brings a new destination and takes one away, SIGTERM ends the service."""
    if fan.place("source").catalog.startswith("sqlite"):
        pytest.skip("once is enough, on PostgreSQL catalogs")
    fan.change(*HISTORY)
    process = service.start()
    service.wait_same()
    for worker in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may just have ended
            if worker.name().startswith("python") and "worker_daemon" in " ".join(worker.cmdline()):
                worker.kill()
    fan.change(*HISTORY)
    service.wait_same()
    fan.values["three"] = "x"
    source = fan.place("source")
    fan.places["three"] = source.model_copy(
        update={"metadata_schema": "lake_three", "data_path": f"{fan.directory}/three_data/"}
    )
    service.write()
    process.send_signal(signal.SIGHUP)
    service.wait_same()
    del fan.values["two"]
    service.write()
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: "destination removed" in service.log(), service.log(), 120)
    fan.change("insert into lake.t values (900001, 'a', 1), (900002, 'b', 2), (900003, 'x', 3)")
    service.wait_same()
    assert fan.look("two", "select count(*) from lake.t where id = 900002") == [(0,)], "it is left alone"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0, service.log()


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_destination_that_hangs_does_not_hold_the_others(
    tmp_path: Path, new_server: Callable[..., EmbeddedPostgres]
) -> None:
    """P-F09: a server that takes connections and never answers is one failing destination; the others continue after a minute."""
    server = new_server()
    fan = Fan(tmp_path, {"one": "a", "two": "b"})
    fan.places["two"] = LakePlace(catalog=f"postgres:{server.dsn}", data_path=f"{tmp_path}/two_data/")
    fan.change("create table lake.t (id int, c varchar, v int)", *HISTORY)
    service = Service(fan)
    frozen: list[psutil.Process] = []
    try:
        service.start()
        service.wait_same()
        postmaster = psutil.Process(server.pid)
        frozen = [postmaster, *postmaster.children(recursive=True)]
        for process in frozen:
            process.suspend()
        fan.change(*HISTORY)
        wait_until(lambda: fan.rows("one") == fan.source_rows("a"), "one continues", 240, log=service.log)
        fan.change("delete from lake.t where id % 3 = 1")
        # The cycle that hangs is ended after a minute, then destinations are asked again.
        wait_until(lambda: fan.rows("one") == fan.source_rows("a"), "one continues", 240, log=service.log)
        _thaw(frozen)
        service.wait_same()
    finally:
        _thaw(frozen)
        service.kill()
        fan.close()


@pytest.mark.slow
@pytest.mark.spark
def test_an_idle_service_writes_nothing_and_hardly_computes(fan: Fan, service: Service) -> None:
    """P-F03, hazard 7: no new lake snapshot in any catalog, and less than 2 % of a core for all its processes."""
    if fan.place("source").catalog.startswith("sqlite"):
        pytest.skip("once is enough, on PostgreSQL catalogs")
    fan.change(*HISTORY)
    service.write(poll={"interval_seconds": 5})
    process = service.start()
    service.wait_same()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=20)  # what the start left to do, such as compiling, is done
    before, cpu, began = fan.snapshots(), _cpu(process.pid), time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=IDLE_SECONDS)
    used, seconds = _cpu(process.pid) - cpu, time.monotonic() - began
    assert fan.snapshots() == before, "an idle system writes nothing"
    assert used / seconds < 0.02, f"{100 * used / seconds:.1f} % of a core\n{service.log()}"
    fan.change("insert into lake.t values (900001, 'a', 1)")
    service.wait_same()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0, service.log()


def _thaw(frozen: list[psutil.Process]) -> None:
    for process in frozen:
        with contextlib.suppress(
            psutil.NoSuchProcess
        ):  # a backend whose client is gone ends as soon as it may
            process.resume()


def _cpu(pid: int) -> float:
    parent = psutil.Process(pid)
    times = [p.cpu_times() for p in (parent, *parent.children(recursive=True))]
    return sum(t.user + t.system for t in times)
