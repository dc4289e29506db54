"""
Installing the registry, the rights on it, and what its errors mean.

The statements are in the folder `sql`: numbered migrations, which run once, and functions, which are
replaced when their text changes.  What is done with the registry is in `registry`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import psycopg
from psycopg.rows import class_row

from aqueduck.model.errors import (
    AqueduckError,
    ConfigError,
    NoKeyError,
    PrivilegeError,
    SourceQueryError,
    TableMissingError,
)
from aqueduck.postgres.session.connection import translate_errors
from aqueduck.postgres.session.quoting import identifier

__all__ = [
    "change",
    "check_registry",
    "exists",
    "install",
    "manage_grants",
    "may_use_groups",
    "migrations",
    "monitor_grants",
    "registry_errors",
    "statements",
]

Connection = psycopg.Connection[Any]

LOCK_SECONDS_MAX = 5

_WRITTEN_TABLES = "aqueduck.sync_groups, aqueduck.table_mappings, aqueduck.settings"
_MADE_MEANWHILE = (
    psycopg.errors.UniqueViolation,
    psycopg.errors.DuplicateSchema,
    psycopg.errors.DuplicateTable,
)
"""What two sessions that install at once see of each other, after the first has committed."""
_REFUSALS: dict[str, type[AqueduckError]] = {
    "QD001": ConfigError,
    "QD002": NoKeyError,
    "QD003": TableMissingError,
}


# -- Rights


def monitor_grants(role: str) -> tuple[str, ...]:
    """Privileges of a read-only role: `status()`, `groups()`, `tables()`, `get_setting()`."""
    to = identifier(role)
    return (
        f"grant usage on schema aqueduck to {to}",
        f"grant select on all tables in schema aqueduck to {to}",
    )


def manage_grants(role: str) -> tuple[str, ...]:
    """Privileges of a role that changes the configuration, and of a service that does not own the registry."""
    return (*monitor_grants(role), f"grant insert, update, delete on {_WRITTEN_TABLES} to {identifier(role)}")


# -- Installing


@dataclass(frozen=True, slots=True)
class _Found:
    """The registry's state, as one role sees it."""

    role: str
    database: str
    may_create_schema: bool
    has_schema: bool
    may_use_schema: bool
    """Whether the role may create objects in the schema."""
    is_superuser: bool
    foreign_owner: str | None
    """
    The schema's owner, if it is neither we nor an administrator: that role could change objects created in
    it, and its functions and triggers would run as us.
    """
    owner: str | None
    """The owner of the tables; `None` if there are none."""
    is_owner: bool
    may_write: bool


def install(conn: Connection) -> bool:
    """
    Install or upgrade the registry; returns whether anything was done.

    If the role may not, `PrivilegeError` names the statement that would permit it.
    """
    if check_registry(conn).endswith("is installed"):
        return False  # do not wait for a transaction that changes the configuration
    with change("install the registry", conn):
        try:
            with conn.transaction():
                return _install(conn)
        except _MADE_MEANWHILE:
            return _install(conn)


def _install(conn: Connection) -> bool:
    found = _look(conn)
    if found.owner is not None and found.may_write:
        conn.execute(
            "lock table aqueduck.settings in share update exclusive mode"
        )  # as in aqueduck._begin_change
    version = _version_to_upgrade(conn, found)
    if version is None:
        return False
    if not found.has_schema:
        conn.execute("create schema aqueduck")
    elif found.owner is not None and found.owner != found.role:
        conn.execute(f"set local role {identifier(found.owner)}".encode())
    for statements in [*migrations()[version:], *_functions()]:
        conn.execute(statements.encode())
    conn.execute(
        "insert into aqueduck.schema_version (version, functions_hash) values (%s, %s) "
        "on conflict (one_row) do update set version = excluded.version, installed_at = now(), "
        "functions_hash = excluded.functions_hash, installed_by = current_user",
        (len(migrations()), _functions_hash()),
    )
    return True


def check_registry(conn: Connection) -> str:
    """What `install` would find, in words; raises the same errors, and changes nothing."""
    with registry_errors("look at the registry", conn):
        found = _look(conn)
        version = _version_to_upgrade(conn, found)
    if version is None:
        return f"version {len(migrations())} is installed"
    return "will be upgraded" if version else "will be installed"


def exists(conn: Connection) -> bool:
    """Whether the database has a registry, even if the role may not read it; raises if the registry cannot be trusted."""
    with registry_errors("look for the registry", conn):
        found = _look(conn)
    if found.owner is not None:
        _refuse_to_trust(found)
    return found.owner is not None


def may_use_groups(conn: Connection, right: str) -> bool:
    """Whether there is a registry whose groups the role may `select` or `update`; a view in their place is none."""
    row = conn.execute(
        "select has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, %s) from pg_class c"
        " join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = 'aqueduck' and c.relname = 'sync_groups' and c.relkind = 'r'",
        (right,),
    ).fetchone()
    return row == (True,)


def _version_to_upgrade(conn: Connection, found: _Found) -> int | None:
    """The version to upgrade from, 0 if there is no registry; `None` if it is up to date."""
    if found.owner is None:
        _refuse_to_create(found)
        return 0
    _refuse_to_trust(found)
    if not found.may_write:
        raise PrivilegeError(
            f"the role {found.role} may not use the registry, the schema aqueduck in {found.database}",
            hint="; ".join(manage_grants(found.role)),
        )
    row = conn.execute("select version, functions_hash from aqueduck.schema_version").fetchone()
    assert row is not None
    version, functions_hash = row
    latest = len(migrations())
    if version > latest:
        raise ConfigError(
            f"the registry in {found.database} has version {version}, and this Aqueduck knows {latest} at most",
            hint="upgrade this Aqueduck: python -m pip install --upgrade aqueduck",
        )
    if version == latest and functions_hash == _functions_hash():
        return None
    if not found.is_owner:
        raise PrivilegeError(
            f"the registry in {found.database} has to be upgraded by its owner {found.owner}",
            hint=f"run aqueduck init as {found.owner}, or: "
            f"grant {identifier(found.owner)} to {identifier(found.role)}",
        )
    return int(version)


def _refuse_to_trust(found: _Found) -> None:
    if found.foreign_owner is not None and not found.is_superuser:
        raise PrivilegeError(
            f"the registry belongs to {found.foreign_owner}, who could have functions run as {found.role}",
            hint=f"if {found.foreign_owner} is to be trusted with that: "
            f"grant {identifier(found.foreign_owner)} to {identifier(found.role)}; if not: drop schema aqueduck cascade",
        )


def _refuse_to_create(found: _Found) -> None:
    to = identifier(found.role)
    if not found.has_schema and not found.may_create_schema:
        raise PrivilegeError(
            f"the role {found.role} may not create the registry, the schema aqueduck in {found.database}",
            hint=f"create schema aqueduck authorization {to}",
        )
    if found.has_schema and not found.may_use_schema:
        raise PrivilegeError(
            f"the role {found.role} may not create the registry in the schema aqueduck of {found.database}",
            hint=f"grant usage, create on schema aqueduck to {to}",
        )
    if found.foreign_owner is not None:
        raise PrivilegeError(
            f"the schema aqueduck belongs to {found.foreign_owner}, who could have functions run as {found.role}",
            hint=f"run aqueduck init as {found.foreign_owner}, or: alter schema aqueduck owner to {to}",
        )


def _look(conn: Connection) -> _Found:
    with conn.cursor(row_factory=class_row(_Found)) as cursor:
        found = cursor.execute(_LOOK).fetchone()
    assert found is not None
    return found


def statements() -> str:
    """All statements that create or change the registry."""
    return "".join([*migrations(), *_functions()])


def migrations() -> list[str]:
    return _texts("migrations")


def _functions() -> list[str]:
    return _texts("functions")


def _functions_hash() -> str:
    return hashlib.sha256("".join(_functions()).encode()).hexdigest()[:16]


def _texts(folder: str) -> list[str]:
    files = resources.files("aqueduck.postgres.registry").joinpath("sql", folder).iterdir()
    return [file.read_text(encoding="utf-8") for file in sorted(files, key=lambda file: file.name)]


# -- Errors


@contextlib.contextmanager
def change(what: str, conn: Connection) -> Iterator[None]:
    """A transaction with limited waiting for transactions that were left open."""
    with registry_errors(what, conn), conn.transaction():
        conn.execute(f"set local lock_timeout = '{LOCK_SECONDS_MAX}s'".encode())
        yield


@contextlib.contextmanager
def registry_errors(what: str, conn: Connection) -> Iterator[None]:
    """Translate refusals of our own functions, with their hints; other errors as usual."""
    fix = "; ".join(manage_grants(conn.info.user))
    with translate_errors(what, conn=conn, fix=fix):
        try:
            yield
        except psycopg.Error as exc:
            error = _refusal(exc, conn)
            if error is None:
                raise
            raise error from None


def _refusal(exc: psycopg.Error, conn: Connection) -> AqueduckError | None:
    if exc.sqlstate == "55P03":
        return SourceQueryError(
            "another transaction that changes the registry has been open for long",
            hint="end it; it is among: select pid, state, query from pg_stat_activity "
            "where pid in (select pid from pg_locks where locktype = 'transactionid' or relation = 'aqueduck.settings'::regclass)",
        )
    if exc.sqlstate in ("3F000", "42883"):
        return SourceQueryError(
            f"the registry is not installed in the database {conn.info.dbname}, or is another version",
            hint="run: aqueduck init",
        )
    refusal = _REFUSALS.get(exc.sqlstate or "")
    return refusal(exc.diag.message_primary or "", hint=exc.diag.message_hint) if refusal else None


_LOOK = """
    select current_user::text as role, current_database()::text as database,
           has_database_privilege(current_database(), 'create') as may_create_schema,
           n.oid is not null as has_schema,
           coalesce(has_schema_privilege(n.oid, 'create') and has_schema_privilege(n.oid, 'usage'), false)
               as may_use_schema,
           r.rolsuper as is_superuser,
           case when n.nspowner in (d.datdba, r.oid) or o.rolsuper or not r.rolsuper and pg_has_role(n.nspowner, 'usage')
                then null else o.rolname::text end as foreign_owner,
           pg_get_userbyid(v.relowner)::text as owner,
           coalesce(pg_has_role(v.relowner, 'usage'), false) as is_owner,
           coalesce(has_schema_privilege(n.oid, 'usage') and (
               select bool_and(case when c.relname = 'schema_version' then has_table_privilege(c.oid, 'select')
                   else has_table_privilege(c.oid, 'select') and has_table_privilege(c.oid, 'insert')
                       and has_table_privilege(c.oid, 'update') and has_table_privilege(c.oid, 'delete') end)
               from pg_class c where c.relnamespace = n.oid and c.relkind = 'r'), false) as may_write
    from pg_database d join pg_roles r on r.rolname = current_user
    left join pg_namespace n on n.nspname = 'aqueduck' left join pg_roles o on o.oid = n.nspowner
    -- A view may call functions of its owner as us, a table may not.
    left join pg_class v on v.relnamespace = n.oid and v.relname = 'schema_version' and v.relkind = 'r'
    where d.datname = current_database()
"""
