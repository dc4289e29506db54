from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest

from aqueduck.lab import installation
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lab.installation import Owner, can_enter
from aqueduck.model.errors import ConfigError, SourceUnreachableError
from tests.fix_postgres import wait_until

NewServer = Callable[..., EmbeddedPostgres]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who lends the server another user")


def query(server: EmbeddedPostgres, statement: str) -> object:
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        row = conn.execute(statement.encode()).fetchone()
    return row and row[0]


def execute(server: EmbeddedPostgres, statement: str) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute(statement.encode())


@pytest.mark.parametrize("version", [18, 16])
def test_a_server_starts_with_logical_decoding(new_server: NewServer, version: int) -> None:
    """Both versions of the wheel start and are ready for slots."""
    server = new_server(version=version)
    assert str(query(server, "show server_version")).startswith(f"{version}.")
    assert query(server, "show wal_level") == "logical"
    assert query(server, "show max_replication_slots") == "20"
    assert query(server, "show max_wal_senders") == "20"
    assert query(server, "show fsync") == "off"


def test_a_durable_server_syncs_its_files(new_server: NewServer) -> None:
    """With durable=True PostgreSQL's own defaults for durability hold."""
    server = new_server(durable=True)
    assert (query(server, "show fsync"), query(server, "show full_page_writes")) == ("on", "on")


def test_data_and_port_survive_restart_and_kill(new_server: NewServer) -> None:
    """What is committed is there after a restart, an immediate stop and kill -9, under the same address."""
    server = new_server()
    dsn = server.dsn
    execute(server, "create table t (n int)")
    for count, stop in enumerate((server.stop, lambda: server.stop("immediate"), server.kill9), start=1):
        execute(server, "insert into t values (1)")
        stop()
        assert not server.running
        server.start()
        assert server.dsn == dsn
        assert query(server, "select count(*) from t") == count


def test_a_killed_server_leaves_no_backend(new_server: NewServer) -> None:
    """kill9 takes all backends with the server."""
    server = new_server()
    with psycopg.connect(server.dsn) as conn:
        backends = psutil.Process(server.pid).children(recursive=True)
        assert conn.info.backend_pid in [process.pid for process in backends]
        server.kill9()
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in backends)


def test_settings_are_overridden_by_alter_system(new_server: NewServer) -> None:
    """Settings go to a file, so what a test changes by SQL holds after a restart."""
    server = new_server(settings={"wal_level": "replica", "search_path": "it's, ours"})
    assert query(server, "show wal_level") == "replica"
    assert query(server, "show search_path") == "it's, ours"
    execute(server, "alter system set wal_level = 'logical'")
    server.restart()
    assert query(server, "show wal_level") == "logical"
    server.restart(settings={"max_wal_senders": 3})
    assert query(server, "show max_wal_senders") == "3"


def test_the_unix_socket_works_and_goes_with_the_server(new_server: NewServer) -> None:
    """The server listens on a socket in a short temporary folder too."""
    server = new_server()
    folder = server.socket_dir
    assert folder is not None
    with psycopg.connect(server.dsn_for("postgres", host=str(folder))) as conn:
        assert conn.execute("select 1").fetchone() == (1,)
    server.stop()
    assert not folder.exists()


def test_programs_of_the_same_version_are_at_hand(pg16: EmbeddedPostgres) -> None:
    """pg_recvlogical, psql and the others can be run from the wheel."""
    for name in ("psql", "pg_recvlogical"):
        done = subprocess.run([pg16.bin(name), "--version"], capture_output=True, text=True, check=True)
        assert "16." in done.stdout


def test_a_password_is_asked_for_by_scram(new_server: NewServer) -> None:
    """With a password, connections without it are refused."""
    server = new_server(password="it's a secret")
    assert query(server, "select rolpassword like 'SCRAM-SHA-256%' from pg_authid where rolname = 'postgres'")
    with pytest.raises(psycopg.OperationalError, match="no password supplied"):
        psycopg.connect(server.dsn_for("postgres", password=""))


def test_a_temporary_cluster_leaves_nothing_behind() -> None:
    """Without data_dir, cluster and socket are gone with the context."""
    with EmbeddedPostgres() as server:
        folders = [server.data_dir, server.socket_dir]
    assert not server.running
    assert not any(folder and folder.exists() for folder in folders)


def test_a_cluster_of_the_callers_is_kept_and_found_again(tmp_path: Path) -> None:
    """With data_dir the data outlives the object, even where root has to put it elsewhere."""
    place = tmp_path / "deep" / "cluster"
    with EmbeddedPostgres(place) as server:
        execute(server, "create table kept ()")
    again = EmbeddedPostgres(place)
    with again:
        assert query(again, "select count(*) from pg_class where relname = 'kept'") == 1
    again.destroy()
    assert not place.exists()
    assert not place.is_symlink()


def test_a_port_that_is_taken_is_a_named_error(pg: EmbeddedPostgres, new_server: NewServer) -> None:
    """A port that was asked for is not silently replaced."""
    with pytest.raises(SourceUnreachableError, match="Address already in use"):
        new_server(port=pg.port)


def test_settings_that_postgres_refuses_are_a_named_error(new_server: NewServer) -> None:
    """The server's own complaint is in the error."""
    with pytest.raises(SourceUnreachableError, match="nonsense"):
        new_server(settings={"wal_level": "nonsense"})


def test_a_first_start_that_fails_leaves_nothing_and_a_later_one_keeps_the_data() -> None:
    """A new temporary cluster is removed if it fails; a used one survives bad settings."""
    server = EmbeddedPostgres(settings={"wal_level": "nonsense"})
    with pytest.raises(SourceUnreachableError):
        server.start()
    with pytest.raises(SourceUnreachableError, match="never started"):
        _ = server.data_dir
    server.settings["wal_level"] = "logical"
    with server:
        execute(server, "create table kept ()")
        with pytest.raises(SourceUnreachableError):
            server.restart(settings={"wal_level": "nonsense"})
        server.settings["wal_level"] = "logical"
        server.start()
        assert query(server, "select count(*) from pg_class where relname = 'kept'") == 1


def test_an_unknown_version_is_refused(new_server: NewServer) -> None:
    """Only versions in the wheel are available."""
    with pytest.raises(ConfigError, match="no embedded PostgreSQL 9"):
        new_server(version=9)


CHILD = """
    import sys, threading, time
    from aqueduck.lab.embedded import EmbeddedPostgres

    server = EmbeddedPostgres()
    starter = threading.Thread(target=server.start)  # the end of this thread is not the end of the server
    starter.start()
    starter.join()
    print(server.pid, server.data_dir, server.socket_dir, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def child() -> subprocess.Popen[str]:
    """Another Python process that has started a server."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True,
    )  # fmt: skip


def started(child: subprocess.Popen[str]) -> tuple[psutil.Process, list[Path]]:
    assert child.stdout is not None
    pid, *folders = child.stdout.readline().split()
    return psutil.Process(int(pid)), [Path(folder) for folder in folders]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a death signal")
def test_a_server_dies_with_a_process_that_was_killed(child: subprocess.Popen[str]) -> None:
    """SIGKILL of the process that started the server ends it, even if the thread that started it has ended."""
    server, folders = started(child)
    assert server.is_running()
    child.kill()
    child.communicate()
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "it has died")
    for folder in folders:
        shutil.rmtree(folder)


def test_a_server_ends_with_a_process_that_ends(child: subprocess.Popen[str]) -> None:
    """A process that just ends stops its server and removes a temporary cluster."""
    server, folders = started(child)
    child.communicate("go\n")
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "it has ended")
    assert not any(folder.exists() for folder in folders)


def test_ctrl_c_is_not_for_the_server(child: subprocess.Popen[str]) -> None:
    """The terminal's SIGINT reaches the process group, and the server is not in it."""
    server, _ = started(child)
    os.killpg(child.pid, signal.SIGWINCH)  # harmless, but proves that the group exists
    assert os.getpgid(server.pid) != child.pid
    child.communicate("go\n")


def test_many_threads_may_start_servers() -> None:
    """A server continues when the thread that started it has ended."""
    server = EmbeddedPostgres()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    with server:
        assert query(server, "select 1") == 1


@as_root
def test_root_runs_the_server_as_another_user(new_server: NewServer) -> None:
    """PostgreSQL refuses root, so its processes and files belong to another user."""
    server = new_server()
    assert psutil.Process(server.pid).uids().effective != 0
    assert server.data_dir.stat().st_uid == psutil.Process(server.pid).uids().effective


@as_root
def test_closed_folders_stay_closed(tmp_path: Path) -> None:
    """A cluster below a folder that the server's user cannot enter is put elsewhere, and no mode changes."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in (home, *home.parents)}
    server = EmbeddedPostgres(home / "cluster")
    with server:
        assert not server.data_dir.is_relative_to(home)
        assert (home / "cluster").resolve() == server.data_dir
    server.destroy()
    assert {folder: stat.S_IMODE(folder.stat().st_mode) for folder in modes} == modes


@as_root
def test_programs_in_a_closed_folder_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel below a closed home still works, from a copy that its user can read."""
    wheel = installation._wheel_programs(18).parent
    package = wheel.parent
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for folder in (wheel, package.with_name(f"{package.name}.libs")):
        copy = closed / folder.relative_to(package.parent)
        copy.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", folder, copy], check=True)
    subprocess.run(["chmod", "-R", "go-rwx", closed], check=True)
    monkeypatch.setattr(
        installation, "_wheel_programs", lambda version: closed / package.name / wheel.name / "bin"
    )
    installation._copied_programs.cache_clear()
    with EmbeddedPostgres() as server:
        assert query(server, "select 1") == 1
        assert not server.bin("postgres").is_relative_to(closed)
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    installation._copied_programs.cache_clear()


def test_reaching_a_folder_needs_every_folder_above(tmp_path: Path) -> None:
    """Whether a user can enter is decided by all folders on the way."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    stranger, owner = Owner(54321, 54321), Owner(os.geteuid(), os.getegid())
    for folder in (inner, inner.parent):
        folder.chmod(0o755)
    assert can_enter(inner, owner)
    inner.parent.chmod(0o750)
    assert not can_enter(inner, stranger)
