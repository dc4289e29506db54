"""
Fixtures around a real PostgreSQL server.

`pg18` and `pg16` are servers for the whole run, and `pg15` where the machine has one; `pg` is the one that
tests use by default, `db` a fresh database of their own, `system_db` one on the machine's own PostgreSQL.  Whoever needs other
settings or wants to break the server makes one with `new_server`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from aqueduck.lab.embedded import EmbeddedPostgres

_numbers = itertools.count(1)

# The rights that docs/start.md asks for, and no others.  What the superuser creates belongs to the role of the owner.
_SERVICE_ROLE = """
    create role {owner} nologin;
    create role {service} login replication;
    grant {owner} to {service};
    grant create on database {database} to {service};
    create schema of_tests;
    create function of_tests.hand_over() returns event_trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
    declare
        made record;
    begin
        if session_user = 'postgres' then
            for made in select * from pg_event_trigger_ddl_commands() c
                    where c.object_type in ('table', 'schema') and c.schema_name is distinct from 'pg_temp' loop
                execute format('alter %s %s owner to {owner}', made.object_type, made.object_identity);
            end loop;
        end if;
    end $$;
    create event trigger hand_over on ddl_command_end when tag in ('CREATE TABLE', 'CREATE TABLE AS', 'CREATE SCHEMA')
        execute function of_tests.hand_over();
    do $$
    declare
        made record;
    begin
        for made in select 'schema' as kind, format('%I', nspname) as name from pg_namespace
                where nspowner = 'postgres'::regrole and nspname not in ('information_schema', 'of_tests') and nspname !~ '^pg_'
            union all select 'table', format('%I.%I', nspname, relname) from pg_class c join pg_namespace n on n.oid = relnamespace
                where relowner = 'postgres'::regrole and relkind in ('r', 'p') and relpersistence <> 't'
                    and nspname <> 'information_schema' and nspname !~ '^pg_' loop
            execute format('alter %s %s owner to {owner}', made.kind, made.name);
        end loop;
    end $$;
"""


def wait_until(
    true: Callable[[], Any],
    what: str,
    seconds: float = 60.0,
    *,
    log: Callable[[], str] | None = None,
    pause: float = 0.02,
) -> None:
    """Wait for a condition; on timeout, fail with its name and the log."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            shown = f"\n{log()}" if log is not None else ""
            raise AssertionError(f"waited {seconds:.0f} s in vain until {what}{shown}")
        time.sleep(pause)


@dataclass
class Database:
    """A database for one test, and an observer that is independent of the code under test."""

    server: EmbeddedPostgres
    name: str
    observer: psycopg.Connection[Any] = field(init=False)
    _has_service_role: bool = False

    def __post_init__(self) -> None:
        self.observer = psycopg.connect(self.dsn, autocommit=True, application_name="observer")

    @property
    def dsn(self) -> str:
        """The superuser's connection string."""
        return self.dsn_for("postgres")

    def dsn_for(self, user: str, **parameters: str | int) -> str:
        return self.server.dsn_for(self.name, user, **parameters)

    @property
    def service_dsn(self) -> str:
        """The connection string of a role that may do what a service needs, and nothing else."""
        return self.dsn_for(self.service_role())

    def service_role(self) -> str:
        """That role; from the first call on, it is a member of the role that owns all tables."""
        if not self._has_service_role:
            self._has_service_role = True
            names = {name: sql.Identifier(f"{self.name} {name}") for name in ("owner", "service")}
            # A standby and a restored server have the roles of their primary.
            if not self.query(
                "select 1 from pg_catalog.pg_roles where rolname = %s", [f"{self.name} service"]
            ):
                self.observer.execute(
                    sql.SQL(_SERVICE_ROLE).format(database=sql.Identifier(self.name), **names)
                )
        return f"{self.name} service"

    def execute(self, statement: str, parameters: Any = None) -> None:
        """Run statements as the superuser; several at once if there are no parameters."""
        self.observer.execute(statement.encode(), parameters)

    def query(self, statement: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        return self.observer.execute(statement.encode(), parameters).fetchall()

    def value(self, statement: str, parameters: Any = None) -> Any:
        """The one value of a query."""
        [[value]] = self.query(statement, parameters)
        return value

    def connect(self, user: str = "postgres", **parameters: Any) -> psycopg.Connection[Any]:
        """A connection besides the observer's; the caller closes it."""
        return psycopg.connect(self.dsn_for(user), autocommit=True, **parameters)

    def drop(self) -> None:
        self.observer.close()
        with psycopg.connect(self.server.dsn, autocommit=True) as admin:
            readers = "select active_pid from pg_replication_slots where active and database = %s"
            admin.execute(f"select pg_terminate_backend(r.active_pid) from ({readers}) r", [self.name])
            wait_until(lambda: not admin.execute(readers, [self.name]).fetchall(), "the slots are free")
            name = sql.Identifier(self.name)
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(name))
            if self._has_service_role:
                names = [sql.Identifier(f"{self.name} {name}") for name in ("service", "owner")]
                admin.execute(sql.SQL("drop role {}, {}").format(*names))
            # Slots for physical replication are of no database, and the next test has slots of the same names.
            slots = "select slot_name from pg_replication_slots where slot_type = 'physical' and not active"
            admin.execute(f"select pg_drop_replication_slot(s.slot_name) from ({slots}) s")


def _new_database(server: EmbeddedPostgres) -> Database:
    name = f"test_{next(_numbers)}"
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    return Database(server, name)


@pytest.fixture(scope="session")
def pg18() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(version=18) as server:
        yield server


@pytest.fixture(scope="session")
def pg16() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(version=16) as server:
        yield server


class SystemPostgres(EmbeddedPostgres):
    """A server of the machine's own installation, with all that comes with it."""

    def __init__(self, programs: Path, **keywords: Any) -> None:
        super().__init__(version=_version(programs), **keywords)
        self._programs = programs

    def bin(self, name: str) -> Path:
        return self._programs / name


def system_programs(version: int | None = None) -> Path:
    """The programs of a version, else of the newest one that the machine has; skips the test without."""
    places = [*Path("/usr/lib/postgresql").glob("*/bin")]  # where Debian puts them
    if (found := shutil.which("postgres")) is not None:
        places.append(Path(found).resolve().parent)
    usable = [p for p in places if all((p / name).exists() for name in ("initdb", "postgres"))]
    fitting = [p for p in usable if version in (None, _version(p))]
    if not fitting:
        pytest.skip(f"no PostgreSQL {version or ''} is installed on this machine")
    return max(fitting, key=_version)


@functools.cache
def _version(programs: Path) -> int:
    version = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=True)
    return int(re.findall(r"\d+", version.stdout)[0])


@pytest.fixture(scope="session")
def pg15() -> Iterator[EmbeddedPostgres]:
    with SystemPostgres(system_programs(15)) as server:
        yield server


@pytest.fixture
def system_db() -> Iterator[Database]:
    """A database on the machine's own PostgreSQL, which has XML and the contributed extensions; skipped without one."""
    with SystemPostgres(system_programs()) as server:
        database = _new_database(server)
        yield database
        database.drop()


@pytest.fixture(scope="session")
def pg(pg18: EmbeddedPostgres) -> EmbeddedPostgres:
    """The server that tests use unless the version matters."""
    return pg18


@pytest.fixture
def db(pg: EmbeddedPostgres) -> Iterator[Database]:
    """A fresh database on `pg`, dropped afterwards together with its slots."""
    database = _new_database(pg)
    yield database
    database.drop()


@pytest.fixture
def databases(pg: EmbeddedPostgres) -> Callable[[], contextlib.AbstractContextManager[Database]]:
    """Makes databases for one test, one after the other."""

    @contextlib.contextmanager
    def database() -> Iterator[Database]:
        made = _new_database(pg)
        try:
            yield made
        finally:
            made.drop()

    return database


@pytest.fixture(params=[18, *(pytest.param(version, marks=pytest.mark.slow) for version in (16, 15))])
def any_db(request: pytest.FixtureRequest) -> Iterator[Database]:
    """A fresh database on each version that we have; the older ones in `make test-long`."""
    database = _new_database(request.getfixturevalue(f"pg{request.param}"))
    yield database
    database.drop()


@pytest.fixture
def new_server() -> Iterator[Callable[..., EmbeddedPostgres]]:
    """Makes servers for one test; takes the arguments of `EmbeddedPostgres`."""
    servers: list[EmbeddedPostgres] = []

    def make(*arguments: Any, **keywords: Any) -> EmbeddedPostgres:
        servers.append(EmbeddedPostgres(*arguments, **keywords))
        return servers[-1].start()

    yield make
    for server in servers:
        server.destroy()


@pytest.fixture
def role(db: Database) -> Iterator[str]:
    """A role that may log in and nothing else."""
    name = f"{db.name} role"  # with a space: statements have to quote it
    db.execute(f'create role "{name}" login')
    yield name
    db.execute(f'reassign owned by "{name}" to postgres; drop owned by "{name}"; drop role "{name}"')
