"""A server that does not know the password receives none, on any connection of ours."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aqueduck.config.sync import LakeConfig
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.lake.session.catalog import open_lake
from aqueduck.model.connections import login_demands
from aqueduck.model.errors import AuthenticationError, CatalogUnreachableError
from aqueduck.postgres.session.connection import connect
from aqueduck.postgres.session.wire import connect_replication, connect_wire
from tests.fix_postgres import wait_until

CLEARTEXT = b"R" + struct.pack(">ii", 8, 3)
MD5 = b"R" + struct.pack(">ii", 12, 5) + b"salt"


@dataclass
class Impostor:
    """Takes connections, asks for the password in a form that it can use, and keeps what it is sent."""

    asks: bytes
    server: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    met: int = 0
    sent: bytes = b""

    @property
    def dsn(self) -> str:
        port = self.server.getsockname()[1]
        return f"host=127.0.0.1 port={port} dbname=shop user=u sslmode=disable connect_timeout=5"

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.server.accept()
                with client:
                    client.recv(4096)
                    self.met += 1
                    client.sendall(self.asks)
                    with contextlib.suppress(ConnectionResetError):
                        self.sent += client.recv(4096)


@pytest.fixture(params=[CLEARTEXT, MD5], ids=["cleartext", "md5"])
def impostor(request: pytest.FixtureRequest) -> Iterator[Impostor]:
    made = Impostor(request.param)
    threading.Thread(target=made.serve, daemon=True).start()
    yield made
    made.server.close()


@pytest.mark.parametrize("opens", [connect, connect_wire, connect_replication])
@pytest.mark.parametrize("variable", [False, True])
def test_an_impostor_gets_no_password_of_a_source(
    impostor: Impostor, opens: Callable[[str], object], variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: libpq gives a password, also that of the environment, to any server that asks for it."""
    if variable:
        monkeypatch.setenv("PGPASSWORD", "geheim")
    with pytest.raises(AuthenticationError, match="got no password") as caught:
        opens(impostor.dsn if variable else f"{impostor.dsn} password=geheim")
    assert "scram-sha-256" in (caught.value.hint or "")
    wait_until(lambda: impostor.met, "the impostor was asked", 10)
    assert (impostor.met, impostor.sent) == (1, b"")


def test_an_impostor_gets_no_password_of_a_lake(impostor: Impostor) -> None:
    """DuckDB has a libpq of its own, which gets the same settings."""
    catalog = f"postgres:{impostor.dsn} password=geheim"
    with pytest.raises(CatalogUnreachableError, match="form that could be intercepted") as caught:
        open_lake(LakeConfig(catalog=catalog, data_path="/nowhere/"), read_only=True)
    assert "scram-sha-256" in (caught.value.hint or "")
    wait_until(lambda: impostor.met, "the impostor was asked", 10)
    assert impostor.sent == b""


def test_a_server_that_knows_the_password_gets_in(tmp_path: Path) -> None:
    """SCRAM works on every connection, and where the string asks for it alone."""
    with EmbeddedPostgres(password="geheim") as server:
        for dsn in (server.dsn, f"{server.dsn} require_auth=scram-sha-256"):
            connect(dsn).close()
            connect_wire(dsn).finish()
            open_lake(LakeConfig(catalog=f"postgres:{dsn}", data_path=str(tmp_path))).close()


@pytest.mark.parametrize(
    ("given", "env", "demanded"),
    [
        ({"host": "db", "password": "p"}, {}, "scram-sha-256"),
        ({"host": "db"}, {"PGPASSWORD": "p"}, "scram-sha-256"),
        ({"password": "p"}, {"PGHOST": "10.0.0.1"}, "scram-sha-256"),
        ({"host": "localhost,db", "password": "p"}, {}, "scram-sha-256"),
        ({"host": "localhost", "hostaddr": "10.0.0.1", "password": "p"}, {}, "scram-sha-256"),
        ({"host": "db", "password": "p", "sslmode": "require"}, {}, "scram-sha-256"),
        ({"host": "/tmp", "password": "p"}, {}, "scram-sha-256,none"),
        ({"host": "::1", "password": "p"}, {}, "scram-sha-256,none"),
        ({"password": "p"}, {}, "scram-sha-256,none"),
        ({"host": "db"}, {}, None),
        ({"host": "db", "password": "p", "sslmode": "verify-full"}, {}, None),
        ({"host": "db", "password": "p"}, {"PGSSLMODE": "verify-full"}, None),
        ({"host": "db", "password": "p", "require_auth": "md5"}, {}, None),
        ({"host": "db", "password": "p"}, {"PGREQUIREAUTH": "password"}, None),
        ({"service": "shop", "password": "p"}, {}, None),
    ],
)
def test_what_is_demanded(given: dict[str, str], env: dict[str, str], demanded: str | None) -> None:
    """SCRAM wherever a password is known, unless the string says otherwise or the server proves its name."""
    assert login_demands(given, env).get("require_auth") == demanded
