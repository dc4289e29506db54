"""Input that was made to break something is refused as bad input, or means exactly what it says."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from aqueduck.model.errors import AqueduckError, ConfigError
from aqueduck.postgres.publications.slots import create_slot
from aqueduck.postgres.registry.registry import call, install
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.quoting import identifier, literal
from aqueduck.postgres.session.wire import connect_wire, start_stream
from aqueduck.service.check_server import encryption
from tests.fix_postgres import Database

ODD = """it's "odd", and \\ more"""


def test_a_publication_may_have_any_name(db: Database) -> None:
    """In the replication protocol's language it is a name within a text: nothing in it ends either."""
    db.execute(f"create table public.t (id int); create publication {identifier(ODD)} for table public.t")
    with connect(db.dsn) as conn:
        begin = create_slot(conn, "odd")
    stream = start_stream(db.dsn, "odd", ODD, begin)
    try:
        db.execute("insert into public.t values (1)")
        buffer, filled = np.empty(1 << 16, np.uint8), 0
        deadline = time.monotonic() + 30
        while b"public\x00t\x00" not in bytes(buffer[:filled]):
            assert time.monotonic() < deadline, "the change did not come"
            filled += stream.read_into(buffer, filled, 0.5)
    finally:
        stream.close()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("options", json.dumps({"exclude": ["a\x00b"]})),
        ("options", json.dumps({"mask": {"a": {"constant": "\ud800"}}})),
        ("options", json.dumps({"where": float("nan")})),
        ("options", "{"),
        ("target", "a\x00b"),
        ("target", "a\udcffb"),
        ("mode", "\x00"),
    ],
)
def test_text_that_no_postgresql_holds_is_bad_input(db: Database, argument: str, value: str) -> None:
    """Zero bytes, lone surrogates and NaN, from a command line, a file or an HTTP request."""
    db.execute("create table public.t (id int primary key)")
    with connect(db.dsn) as conn:
        install(conn)
        with pytest.raises(ConfigError, match=argument) as caught:
            call(conn, "add_table", source="public.t", **{argument: value})
    assert caught.value.hint is not None


def test_what_looks_odd_and_is_text_is_taken(db: Database) -> None:
    """A whole surrogate pair is a character, and the word NaN a word."""
    db.execute("create table public.t (id int primary key, v text)")
    options = {"mask": {"v": {"constant": "NaN \U0001f600 \\u0000 " + literal(ODD)}}}
    with connect(db.dsn) as conn:
        install(conn)
        call(conn, "add_table", source="public.t", options=json.dumps(options))
    assert db.value("select options from aqueduck.tables()") == options


def test_gssapi_encryption_is_refused_instead_of_left_out(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection string that requires encryption gets no unencrypted connection."""
    for open_it in (connect, connect_wire):
        with pytest.raises(ConfigError, match="gssencmode"):
            open_it(f"{db.dsn} gssencmode=require")
    monkeypatch.setenv("PGGSSENCMODE", "require")
    for open_it in (connect, connect_wire):
        with pytest.raises(AqueduckError, match="gssencmode"):
            open_it(db.dsn)


@pytest.mark.parametrize("address", ["10.1.2.3", "2001:db8::1", "fe80::1%eth0"])
def test_rows_in_clear_on_a_network_are_noted(address: str) -> None:
    """`aqueduck check` warns and says what to set; it is no failure."""
    found = encryption(encrypted=False, address=address)
    assert found.ok
    assert "in clear" in found.detail
    assert "sslmode=verify-full" in str(found.fix)


@pytest.mark.parametrize(
    ("encrypted", "address"), [(True, "10.1.2.3"), (False, ""), (False, "127.0.0.1"), (False, "::1")]
)
def test_protected_and_local_connections_are_no_matter(encrypted: bool, address: str) -> None:
    """No hint where no other machine can connect."""
    assert encryption(encrypted=encrypted, address=address).fix is None
