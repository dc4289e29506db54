"""
A busy service reveals no secret: no password, no salt and no cell value.

Looked through are blocks that strangers may fetch, command lines and environments of all processes, everything that its ports say over
HTTP (plans on Spark's page among it), logs, event logs and all files.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aqueduck.config.lake_place import LakePlace
from tests.fanout_lakes import Fan
from tests.fix_events import Flow
from tests.fix_postgres import Database, _new_database, wait_until
from tests.fix_service import START_SECONDS
from tests.integration.test_fanout_crashes import Service
from tests.stranger import RefusedError, SilentError, fetch_block, listening_ports

pytestmark = pytest.mark.spark

PASSWORD, SALT, CELL = b"password-planted", b"salt-planted", b"cell-planted"
PLANTED = b"-planted"
PAGES = (
    "/jobs/", "/stages/", "/environment/", "/executors/", "/SQL/", "/StreamingQuery/", "/storage/",
    "/api/v1/applications", "/api/v1/applications/{app}/environment", "/api/v1/applications/{app}/jobs",
    "/api/v1/applications/{app}/stages", "/api/v1/applications/{app}/sql?details=true&length=1000",
    "/", "/metrics", "/healthz", "/readyz", "/api/v1/openapi.json",
)  # fmt: skip


def blocks(pid: int) -> Iterator[bytes]:
    """What a stranger gets from the ports of a service that does not authenticate."""
    for port in listening_ports(pid):
        for number in range(200):
            try:
                yield fetch_block(port, f"broadcast_{number // 2}{'_piece0' * (number % 2)}")
            except (SilentError, ConnectionError):
                break
            except RefusedError:
                continue


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def commands(pid: int) -> Iterator[str]:
    """What `ps` shows of a service."""
    for process in family(pid):
        with contextlib.suppress(psutil.Error):  # a worker may just have ended
            yield " ".join(process.cmdline())


def telling_variables(pid: int) -> set[str]:
    """The variables of a service and its workers that hold something planted."""
    found = set()
    for process in family(pid):
        with contextlib.suppress(psutil.Error):
            found |= {name for name, value in process.environ().items() if PLANTED.decode() in value}
    return found


def answer(port: int, path: str, seconds: float = 60) -> bytes:
    """The answer of a port over HTTP; empty if it speaks another protocol."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()


def first_event(port: int) -> bytes:
    """All that the page is told: the first message of the stream of events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/api/v1/events")
        response = connection.getresponse()
        return b"".join(iter(response.readline, b"\n"))


def api(port: int) -> dict[str, bytes]:
    """What the service says at every address of its document, also about each table, group and destination."""
    paths = json.loads(answer(port, "/api/v1/openapi.json"))["paths"]
    plain = [path for path, verbs in paths.items() if "get" in verbs and "{" not in path]
    found = {f"{port} {path}": answer(port, path) for path in plain}
    status = json.loads(found[f"{port} /api/v1/status"])
    groups = [group for flow in status["flows"] for group in flow["groups"]]
    one = [f"groups/{group['name']}" for group in groups]
    one += [f"tables/{table['source']}" for group in groups for table in group["tables"]]
    one += [f"destinations/{each['name']}" for flow in status["flows"] for each in flow["destinations"]]
    assert one, status
    found |= {f"{port} {path}": answer(port, f"/api/v1/{path}") for path in one}
    return {**found, f"{port} events": first_event(port)}


def pages(pid: int) -> dict[str, bytes]:
    """Spark's page with its plans, and the service's own."""
    found: dict[str, bytes] = {}
    for port in listening_ports(pid):
        if not answer(port, "/jobs/", 5):
            continue
        with contextlib.suppress(ValueError, LookupError):
            app = json.loads(answer(port, "/api/v1/applications"))[0]["id"]
            found |= {f"execution {n}": answer(port, f"/SQL/execution/?id={n}") for n in range(10)}
            found |= {path: answer(port, path.format(app=app)) for path in PAGES if "{app}" in path}
        found |= {f"{port} {path}": answer(port, path) for path in PAGES if "{app}" not in path}
        if found[f"{port} /api/v1/openapi.json"].startswith(b"{"):
            found |= api(port)
    return found


def holding(directory: Path, text: bytes) -> Iterator[Path]:
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and text in path.read_bytes():
                yield path


def is_private(path: Path) -> bool:
    return not stat.S_IMODE(path.stat().st_mode) & 0o077 or any(
        not stat.S_IMODE(p.stat().st_mode) & 0o077 for p in path.parents
    )


def spark_settings(events: Path) -> dict[str, Any]:
    """Authentication is off, so that blocks can be read, and Spark logs as much as it can."""
    events.mkdir()
    conf = {
        "spark.authenticate": "false",
        "spark.broadcast.compress": "false",
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.sql.ui.explainMode": "extended",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": events.as_uri(),
        "spark.executorEnv.PLANTED_EXECUTOR": "variable-planted",
        "spark.hadoop.fs.s3a.secret.key": "hadoop-planted",
    }
    return {"master": "local[2]", "conf": conf}


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of the service, with a name that leaves room for those of sockets."""
    with tempfile.TemporaryDirectory(prefix="a", dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.delenv("AQUEDUCK_UMASK", raising=False)
        yield Path(directory)


def refuse_talk(pid: int, directory: Path, scratch: Path, log: str, given: set[str]) -> None:
    """Nothing planted is anywhere that is not documented; `given` are the variables that the user set."""
    got = list(blocks(pid))
    assert any(b"aqueduck" in block for block in got), "a closure of ours is among them"
    # Spark's own settings are in its closures: only authentication keeps these.
    leaked = [block for block in got for text in (PASSWORD, SALT, CELL) if text in block]
    assert not [block[:200] for block in leaked]
    assert not [command for command in commands(pid) if "-planted" in command]
    assert telling_variables(pid) == given | {"PLANTED_EXECUTOR"}
    shown = pages(pid)
    assert b"Physical Plan" in b"".join(shown.values())
    assert b"aqueduck_" in b"".join(text for path, text in shown.items() if path.endswith(" /metrics"))
    assert b"head" in b"".join(text for path, text in shown.items() if path.endswith(" events"))
    assert not [path for path, text in shown.items() if PLANTED in text]
    assert "-planted" not in log
    logged = [path for path in (directory / "events").rglob("*") if path.is_file()]
    assert logged
    assert not [path for path in logged if PLANTED in path.read_bytes()]
    # Among the files are those that Spark writes for itself; a fan-out shuffles rows through them.
    assert list(scratch.glob("aqueduck-*/blockmgr-*"))
    assert not [*holding(directory, SALT), *holding(scratch, SALT)]
    cells = [*holding(scratch, CELL)]
    assert not [path for path in cells if not path.name.startswith("shuffle_") or not is_private(path)]
    passwords = {*holding(directory, PASSWORD), *holding(scratch, PASSWORD)}
    assert {path.name.rpartition("-")[0] for path in passwords} <= {"capture", "secrets"}
    assert not [
        path for path in passwords if path.stat().st_mode & 0o077 or path.parent.stat().st_mode & 0o077
    ]


def test_a_busy_sync_reveals_no_secret(
    db: Database, sync_of: Any, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T10: passwords, salt, settings and cells, while it copies, streams, hashes and parks."""
    db.execute("create table t (id int primary key, v text); create table h (id int primary key, v text)")
    db.execute("create table late (id int primary key, v text)")
    for table in ("t", "h"):
        db.execute(f"insert into {table} select g, 'cell-planted' || g from generate_series(1, 2000) g")
    dsn = f"{db.dsn} password=password-planted"
    given = {"PLANTED_DSN": dsn, "PLANTED_CATALOG": f"postgres:{dsn}", "PLANTED_SALT": "salt-planted"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    sync = sync_of("public.t", copy=True)
    sync.catalog = f"postgres:{db.dsn}"
    sync.spark = spark_settings(tmp_path / "events")
    tables = [{"source": "public.t"}, {"source": "public.h", "mask": {"v": "hash"}}]
    sync.options = {
        "source": {"dsn_env": "PLANTED_DSN"},
        "lake": {"catalog_env": "PLANTED_CATALOG", "data_path": f"{tmp_path}/data"},
        "mask_salt_env": "PLANTED_SALT",
        "groups": [{"name": "test", "flush_interval_ms": 200, "segment_bytes": "1MiB", "tables": tables}],
    }
    process = sync.started()
    sync.wait_same()
    db.execute(
        "insert into t select g, 'cell-planted' || repeat('x', 400) from generate_series(10000, 18000) g"
    )
    db.execute(
        "insert into h select g, 'cell-planted' || repeat('x', 400) from generate_series(10000, 18000) g"
    )
    sync.wait_same()
    wait_until(lambda: sync.lake("select count(*) from lake.h") == [(10001,)], "masked rows are there")
    assert sync.lake("select count(*) from lake.h where length(v) = 64") == [(10001,)]

    refuse_talk(process.pid, tmp_path, scratch, sync.log(), set(given))
    cells = set(holding(tmp_path, CELL))
    documented = ("state", "data")
    assert {path.relative_to(tmp_path).parts[0] for path in cells} <= set(documented)
    assert not [path for path in cells if not is_private(path)]
    sync.stop(process)
    assert not [*holding(scratch, PASSWORD), *holding(tmp_path, PASSWORD)]


def _has(flow: Flow, lines: int) -> bool:
    return flow.count() == lines


@pytest.mark.slow
def test_a_busy_events_flow_reveals_no_secret(
    db: Database, flow_of: Callable[..., Flow], scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T10: the same for events, whose cells are in the sink and in the private stage only."""
    db.execute("create table t (id int primary key, v text); create publication faucet_pub for table t")
    monkeypatch.setenv("PLANTED_DSN", f"{db.dsn} password=password-planted")
    flow = flow_of(
        source={"connection_url_env": "PLANTED_DSN"},
        more={"spark": spark_settings(tmp_path / "events"), "server": {"port": 0}},
    )
    flow.write_config()
    document = json.loads(flow.config_file.read_text())
    del document["source"]["config"]["connection_url"]
    monkeypatch.setattr(flow, "write_config", lambda: flow.config_file.write_text(json.dumps(document)))
    process = flow.start()
    wait_until(flow.streams, "the slot is read", START_SECONDS, log=flow.log)
    rows = "insert into t select g, 'cell-planted' || repeat('x', 400) from generate_series({}, {}) g"
    for first, last in ((1, 8000), (8001, 16_000)):
        db.execute(rows.format(first, last))
        wait_until(functools.partial(_has, flow, last), f"{last} events", 60, log=flow.log)
    refuse_talk(process.pid, tmp_path, scratch, flow.log_file.read_text(), {"PLANTED_DSN"})
    cells = set(holding(tmp_path, CELL))
    assert tmp_path / "changes.jsonl" in cells
    assert not [path for path in cells if not is_private(path)]
    process.terminate()
    process.wait(timeout=60)
    assert not [*holding(scratch, PASSWORD), *holding(tmp_path, PASSWORD)]


@pytest.mark.slow
def test_a_busy_fan_out_reveals_no_secret(
    pg: Any, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-T10: the same for lakes behind passwords, while it seeds and polls."""
    database = _new_database(pg)
    place = {
        name: LakePlace(
            catalog=f"postgres:{database.dsn}", metadata_schema=name, data_path=f"{tmp_path}/{name}_data/"
        )
        for name in ("source", "one", "two")
    }
    fan = Fan(tmp_path, {"one": "a", "two": "b"}, places=place)
    fan.change("create table lake.t (id int, c varchar, v varchar)")
    rows = "insert into lake.t select i, (['a','b','x'])[1 + i % 3], 'cell-planted' from range({}) r(i)"
    fan.change(rows.format(2000))
    given = {"PLANTED_CATALOG": f"{database.dsn} password=password-planted", "PLANTED_KEY": "key-planted"}
    given["PLANTED_CATALOG"] = f"postgres:{given['PLANTED_CATALOG']}"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    service = Service(fan)

    def lake(name: str) -> dict[str, Any]:
        return {
            "catalog_env": "PLANTED_CATALOG",
            "metadata_schema": name,
            "data_path": f"{tmp_path}/{name}_data/",
        }

    service.write(
        source={**lake("source"), "table": "t"},
        destinations=[{"id": i, "routing_value": v, **lake(i)} for i, v in fan.values.items()],
        defaults={
            "properties": {"s3_access_key_id_env": "PLANTED_KEY", "s3_secret_access_key_env": "PLANTED_KEY"}
        },
        spark=spark_settings(tmp_path / "events"),
        state_dir=f"{tmp_path}/state",
    )
    process = service.start()
    try:
        service.wait_same()
        fan.change(rows.format(20000).replace("select i", "select i + 5000"))
        service.wait_same()
        refuse_talk(process.pid, tmp_path, scratch, service.log(), set(given))
        cells = {path.relative_to(tmp_path).parts[0] for path in holding(tmp_path, CELL)}
        assert cells <= {"source_data", "one_data", "two_data"}
        process.terminate()
        process.wait(timeout=60)
        assert not [*holding(scratch, PASSWORD), *holding(tmp_path, PASSWORD)]
    finally:
        service.kill()
        fan.close()
        database.drop()
