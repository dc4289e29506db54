"""
A PostgreSQL server of our own, for the demo, the benchmarks and the tests.

`EmbeddedPostgres` creates a cluster, starts it on loopback and stops it again. It works as root and as any
other user, needs only the wheel (see `installation`), and ends with the process that started it. The
product's data path does not depend on it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

from psycopg.conninfo import make_conninfo

from aqueduck.lab.installation import Owner, can_enter, open_temp_dir, programs, server_environment
from aqueduck.lab.server_process import ends_within, kill_family, spawn, wait_until
from aqueduck.model.errors import SourceUnreachableError

__all__ = ["EmbeddedPostgres"]

Setting = str | int | bool
StopMode = Literal["fast", "immediate"]

_HOST = "127.0.0.1"
_SUPERUSER = "postgres"
_SETTINGS_FILE = "embedded.conf"
_LOG_FILE = "server.log"
_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_START_SECONDS_MAX = 60.0
_STOP_SECONDS_MAX = 30.0
_PORT_TRIES = 5

_DEFAULTS: Mapping[str, Setting] = {
    "wal_level": "logical",
    "max_replication_slots": 20,
    "max_wal_senders": 20,
    "max_connections": 100,
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_NOT_DURABLE: Mapping[str, Setting] = {"fsync": False, "full_page_writes": False}


class EmbeddedPostgres:
    """
    One cluster and its server, on 127.0.0.1 and a Unix socket.

    Without `data_dir` the cluster is temporary and removed with the object. `settings` are written to a file
    that `alter system` overrides. With `password`, the superuser and all roles log in by SCRAM, and the
    superuser's connection strings contain the password unless `password_in_dsn` is false; without it,
    loopback is trusted. Unless `durable`, a power failure may damage the data; killing the server never does.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        version: int = 18,
        settings: Mapping[str, Setting] | None = None,
        *,
        port: int | None = None,
        password: str | None = None,
        password_in_dsn: bool = True,
        durable: bool = False,
    ) -> None:
        self.version = version
        self.settings = {**_DEFAULTS, **({} if durable else _NOT_DURABLE), **(settings or {})}
        self.socket_dir: Path | None = None
        self._wanted_dir = Path(data_dir).absolute() if data_dir is not None else None
        self._owner = Owner.for_data_dir(self._wanted_dir or Path("/"))
        self._data_dir: Path | None = None
        self._password = password
        self._password_in_dsn = password_in_dsn
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._maker_pid = os.getpid()

    # -- What users of the server need

    @property
    def data_dir(self) -> Path:
        """
        The cluster's directory, once it has been started.

        It may differ from the requested one: see `_reachable_data_dir`.
        """
        if self._data_dir is None:
            raise SourceUnreachableError("the embedded PostgreSQL was never started")
        return self._data_dir

    @property
    def port(self) -> int:
        """The TCP port, unchanged by restarts."""
        if self._port is None:
            raise SourceUnreachableError("the embedded PostgreSQL was never started")
        return self._port

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None:
            raise SourceUnreachableError("the embedded PostgreSQL is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server's main process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def dsn(self) -> str:
        """The superuser's connection string for the database `postgres`."""
        return self.dsn_for("postgres")

    def dsn_for(self, dbname: str, user: str = _SUPERUSER, **parameters: str | int) -> str:
        """The connection string for a database, as keywords; given parameters override ours."""
        ours: dict[str, str | int] = {"host": _HOST, "port": self.port, "user": user, "dbname": dbname}
        if user == _SUPERUSER and self._password is not None and self._password_in_dsn:
            ours["password"] = self._password
        return make_conninfo("", **{name: str(value) for name, value in (ours | parameters).items()})

    def bin(self, name: str) -> Path:
        """The path of a program of this version, such as `psql` or `pg_recvlogical`."""
        return programs(self.version, self._owner) / name

    # -- Life

    def start(self) -> EmbeddedPostgres:
        """Create the cluster if there is none, start the server, wait until it accepts connections."""
        if self.running:
            return self
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        is_first = self._data_dir is None
        try:
            self._data_dir = self._reachable_data_dir()
            if not (self.data_dir / "PG_VERSION").exists():
                self._init_cluster()
            self._launch_on_a_port()
        except BaseException:
            if is_first:  # keep a used cluster for another attempt
                self._at_exit()
            raise
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """
        Stop the server if it is running.

        A fast stop waits until walsenders are drained; after a while it becomes an immediate stop.
        """
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(_SIGNALS[mode])
            if not ends_within(_STOP_SECONDS_MAX, process):
                process.send_signal(signal.SIGQUIT)
                if not ends_within(_STOP_SECONDS_MAX, process):
                    self.kill9()
        self._forget_process()

    def restart(
        self, mode: StopMode = "fast", settings: Mapping[str, Setting] | None = None
    ) -> EmbeddedPostgres:
        """Stop, then start on the same port, with some settings changed."""
        self.stop(mode)
        self.settings.update(settings or {})
        return self.start()

    def kill9(self) -> None:
        """Kill the server and all its backends at once, as a crash would."""
        if self._process is not None:
            kill_family(self._process)
        self._forget_process()

    def destroy(self) -> None:
        """Stop the server and remove its cluster."""
        if self._data_dir is None:
            return
        self.stop("immediate")
        shutil.rmtree(self._data_dir, ignore_errors=True)
        if self._wanted_dir is not None and self._wanted_dir.is_symlink():
            self._wanted_dir.unlink()
        self._data_dir = None
        atexit.unregister(self._at_exit)

    def __enter__(self) -> EmbeddedPostgres:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wanted_dir is None:
            self.destroy()
        else:
            self.stop()

    def _at_exit(self) -> None:
        if os.getpid() != self._maker_pid:  # in a fork of ours, which must not stop the server
            return
        if self._wanted_dir is None:
            self.destroy()
        else:
            self.stop()

    # -- The cluster

    def _reachable_data_dir(self) -> Path:
        """
        The requested folder, or a temporary one in its place.

        Root starts the server as another user, who may not be able to enter the folder (for example below a
        private home). Then the cluster is in a temporary folder, and the requested place is a link to it, so
        that the cluster is found again.
        """
        if self._data_dir is not None:
            return self._data_dir
        wanted = self._wanted_dir
        if wanted is None:
            return open_temp_dir(self._owner, "aq-cluster-")
        if wanted.is_symlink() and not wanted.exists():
            wanted.unlink()  # the temporary folder is gone
        wanted.parent.mkdir(parents=True, exist_ok=True)
        if can_enter(wanted.resolve().parent, self._owner):
            return self._claimed(wanted.resolve())
        if wanted.is_dir() and any(wanted.iterdir()):
            raise SourceUnreachableError(
                f"user {self._owner.uid}, whom root starts PostgreSQL as, cannot enter {wanted.parent}",
                hint="use a data_dir below a folder that every user may enter",
            )
        if wanted.is_dir():
            wanted.rmdir()
        stand_in = open_temp_dir(self._owner, "aq-cluster-")
        wanted.symlink_to(stand_in)
        return stand_in

    def _claimed(self, folder: Path) -> Path:
        if not folder.exists():
            folder.mkdir(mode=0o700)
        if not any(folder.iterdir()):
            folder.chmod(0o700)
            self._owner.take(folder)
        return folder

    def _init_cluster(self) -> None:
        auth = "trust" if self._password is None else "scram-sha-256"
        command: list[str | Path] = [
            self.bin("initdb"), "-D", self.data_dir, "-U", _SUPERUSER, "-A", auth,
            "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions",
        ]  # fmt: skip
        with self._password_file() as file:
            done = subprocess.run(
                command if file is None else [*command, f"--pwfile={file}"], capture_output=True, cwd="/",
                text=True, env=server_environment(), check=False, **self._owner.process_arguments(),
            )  # fmt: skip
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise SourceUnreachableError(f"initdb failed: {reason}")
        with (self.data_dir / "postgresql.conf").open("a") as conf:
            conf.write(f"\ninclude_if_exists = '{_SETTINGS_FILE}'\n")

    @contextlib.contextmanager
    def _password_file(self) -> Iterator[Path | None]:
        """Write the password where only the server's user can read it, while initdb runs."""
        if self._password is None:
            yield None
            return
        folder = open_temp_dir(self._owner, "aq-init-")
        try:
            file = folder / "password"
            file.write_text(f"{self._password}\n")
            self._owner.take(file)
            yield file
        finally:
            shutil.rmtree(folder)

    # -- The process

    def _launch_on_a_port(self) -> None:
        """Start on the requested or previous port; otherwise try free ports until one works."""
        tries = 1 if self._port is not None else _PORT_TRIES
        for left in reversed(range(tries)):
            port = self._port or _free_port()
            try:
                self._launch(port)
            except SourceUnreachableError as exc:
                if left == 0 or "address already in use" not in exc.message.lower():
                    raise
            else:
                self._port = port
                return

    def _launch(self, port: int) -> None:
        self.socket_dir = open_temp_dir(self._owner, "aq-pg-")
        fixed: dict[str, Setting] = {
            "port": port,
            "listen_addresses": _HOST,
            "unix_socket_directories": str(self.socket_dir),
        }
        file = self.data_dir / _SETTINGS_FILE
        file.write_text("".join(f"{name} = {_quoted(v)}\n" for name, v in (self.settings | fixed).items()))
        self._owner.take(file)
        log = self.data_dir / _LOG_FILE
        with log.open("wb") as output:
            self._owner.take(log)
            self._process = spawn(
                [self.bin("postgres"), "-D", self.data_dir], stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, cwd="/", env=server_environment(), **self._owner.process_arguments(),
            )  # fmt: skip
        try:
            wait_until(self._ready_or_dead, _START_SECONDS_MAX, "PostgreSQL takes connections")
        except BaseException:
            self.kill9()
            raise
        if not self.running:
            self._forget_process()
            raise SourceUnreachableError(
                f"the embedded PostgreSQL did not start: {_complaint(log)}", hint=f"read {log}"
            )

    def _ready_or_dead(self) -> bool:
        if not self.running:
            return True
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _forget_process(self) -> None:
        self._process = None
        if self.socket_dir is not None:
            shutil.rmtree(self.socket_dir, ignore_errors=True)
            self.socket_dir = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _quoted(value: Setting) -> str:
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return "'" + text.replace("'", "''") + "'"


def _complaint(log: Path) -> str:
    """The server's own error messages in one line, causes first."""
    text = log.read_text(errors="replace")
    found = re.findall(
        r"(?:FATAL|PANIC|LOG):  ((?<=FATAL:  |PANIC:  ).*|(?:could not|invalid|unrec).*)", text
    )
    return "; ".join(found) or (text.strip().splitlines() or ["no reason given"])[-1]
