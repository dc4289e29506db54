"""
`aqueduck new`: a first configuration file for a database, with what a person needs to know in its comments.

Each table is described as `check` does it. A table that cannot be replicated as it is comes as a comment, with
the reason and the fix. The file names the variable of the connection string and never has a password.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import yaml
from psycopg.conninfo import make_conninfo

from aqueduck.model.errors import AqueduckError, Retry
from aqueduck.model.schema import TableSchema
from aqueduck.postgres.catalog.row_security import refuse_row_security
from aqueduck.postgres.catalog.tables import describe_table
from aqueduck.postgres.catalog.user_tables import UserTable, user_tables
from aqueduck.postgres.publications.publications import refuse_without_columns, refuse_without_identity
from aqueduck.postgres.session.connection import connect, connection_parameters
from aqueduck.postgres.session.server import ServerInfo, read_server
from aqueduck.service.check_server import Connection

__all__ = ["NewFile", "look_at_database"]

VARIABLE = "PG_DSN"
_PUBLIC = ("host", "hostaddr", "port", "dbname", "user", "service", "sslmode", "sslrootcert")
"""The parameters of a connection string that may be shown."""


@dataclass(frozen=True, slots=True)
class NewFile:
    """The text of a file, and how many tables are in it or left out."""

    text: str
    export: str
    """The command that sets the variable, without the password."""
    tables: int
    left_out: int


def look_at_database(dsn: str, *, schemas: Collection[str] = ()) -> NewFile:
    """A file for the database's tables, or for those in these schemas."""
    with connect(dsn) as conn:
        server = read_server(conn)
        listed = [one for one in user_tables(conn) if not schemas or one.schema in schemas]
        described = [(one, _describe(conn, one)) for one in listed]
    given = {key: value for key, value in connection_parameters(dsn).items() if key in _PUBLIC and value}
    export = f'export {VARIABLE}="{make_conninfo(**given)}"'
    left_out = sum(isinstance(found, AqueduckError) for _, found in described)
    return NewFile(_text(server, export, described), export, len(described) - left_out, left_out)


Described = tuple[UserTable, TableSchema | AqueduckError]


def _describe(conn: Connection, one: UserTable) -> TableSchema | AqueduckError:
    """The table, or why it cannot be replicated as it is."""
    try:
        table = describe_table(conn, str(one.table))
        refuse_without_columns(table)
        refuse_without_identity(table)
        refuse_row_security(conn, table)
    except AqueduckError as exc:
        if exc.retry is Retry.AUTO:
            raise
        return exc
    return table


def _text(server: ServerInfo, export: str, described: Sequence[Described]) -> str:
    version = f"{server.version_num // 10000}.{server.version_num % 10000}"
    usable = [one for one, found in described if not isinstance(found, AqueduckError)]
    names = Counter(one.name.lower() for one in usable)
    lines = list(_table_lines(described, names))
    return f"""\
# Tables of the database {_comment(server.database)} (PostgreSQL {version}), written by `aqueduck new`.
# Next: remove what you do not need, then run `aqueduck check` and `aqueduck run`.
# Every key is in docs/configuration.md; modes such as `history`, masks and row filters in docs/modes.md and
# docs/columns.md.

source:
  # {export}
  # The password goes there, too, or into ~/.pgpass; never into this file.
  dsn_env: {VARIABLE}

lake:
  catalog: sqlite:lake.sqlite  # or postgres:dbname=lake host=…, or the path of a DuckDB file
  data_path: ./lake_data       # or s3://bucket/prefix

groups:
  - name: default
    tables:{"" if usable else " []"}
""" + "".join(f"{line}\n" for line in lines)


def _table_lines(described: Sequence[Described], names: Counter[str]) -> Iterator[str]:
    for one, found in described:
        if isinstance(found, AqueduckError):
            yield f"      # {_comment(str(one.table))} is left out: {_comment(found.message)}"
            if found.hint:
                yield f"      #   fix: {_comment(found.hint)}"
            yield f"      # - source: {_comment(_scalar(str(one.table)))}"
            continue
        yield f"      # {_comment(_identity(found))}; {_size(one)}"
        yield f"      - source: {_scalar(str(one.table))}"
        if names[one.name.lower()] > 1:  # the default target would be the same
            yield f"        target: {_scalar(str(one.table))}"


def _identity(table: TableSchema) -> str:
    """How rows are identified: the key, and the replica identity if it is not the default."""
    if not table.key:
        return "no key, replica identity full: rows are identified by all columns"
    key = f"key {', '.join(table.key)}"
    return key + {"i": ", a replica identity index", "f": ", replica identity full"}.get(table.identity, "")


def _size(one: UserTable) -> str:
    rows = "" if one.rows is None else f"about {one.rows:,} rows, "
    return f"{rows}{one.bytes / (1 << 20):,.1f} MiB"


def _scalar(text: str) -> str:
    """A text as YAML writes it on one line."""
    return str(yaml.safe_dump(text, width=10_000, allow_unicode=True)).splitlines()[0]


def _comment(text: str) -> str:
    """A text that stays in its comment."""
    return " ".join(text.split())
