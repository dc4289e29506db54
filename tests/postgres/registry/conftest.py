"""A database with the registry in it, and a role without rights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from aqueduck.postgres.registry.registry import (
    install,
)
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.quoting import identifier
from tests.fix_postgres import Database

Connection = psycopg.Connection[Any]


@pytest.fixture
def conn(any_db: Database) -> Iterator[Connection]:
    """A connection to a database with the registry, and the tables a and b."""
    any_db.execute("create table a (id int primary key); create table b (id int primary key)")
    with connect(any_db.dsn) as made:
        install(made)
        yield made


@pytest.fixture
def user(any_db: Database) -> Iterator[str]:
    """A role that may log in and nothing else, on the server of `any_db`."""
    name = f"{any_db.name} user"
    any_db.execute(f"create role {identifier(name)} login")
    yield name
    any_db.execute(f"drop owned by {identifier(name)} cascade; drop role {identifier(name)}")
