"""The connection has the settings of the events file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aqueduck.events.wiring import source_dsn
from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.model.errors import ConfigError
from aqueduck.postgres.session.connection import connect, connection_parameters
from tests.config.test_events import parse
from tests.tls_proxy import make_certificates, tls_proxy


def dsn_of(url: str, **keys: Any) -> str:
    return source_dsn(parse({"connection_url": url, **keys}).source)


def test_the_tls_of_the_file_is_that_of_the_connection(pg: EmbeddedPostgres, tmp_path: Path) -> None:
    """P-E04: require takes any certificate, verify_ca one of the authority, verify_full one for the host."""
    files = make_certificates(tmp_path, "elsewhere.invalid")
    with tls_proxy(pg.port, files.server) as port:
        url = pg.dsn_for("postgres", port=port)
        trusted = {"ca_path": str(files.authority)}
        for tls in ("require", {"mode": "require"}, {"mode": "verify_ca", **trusted}):
            with connect(dsn_of(url, tls=tls)) as conn:
                assert conn.pgconn.ssl_in_use
        with pytest.raises(ConfigError, match="certificate"):
            connect(dsn_of(url, tls={"mode": "verify_full", **trusted}))
    with tls_proxy(pg.port, make_certificates(tmp_path, "127.0.0.1").server) as port:
        url = pg.dsn_for("postgres", port=port)
        with connect(dsn_of(url, tls={"mode": "verify_full", **trusted})) as conn:
            assert conn.pgconn.ssl_in_use
    with connect(dsn_of(f"{pg.dsn} sslmode=require", tls="disable")) as conn:
        assert not conn.pgconn.ssl_in_use


def test_keepalives_of_the_file_are_those_of_the_connection() -> None:
    """P-E04: a number of seconds, no limit with 0; a setting in the connection string takes precedence."""
    for keys, wanted in [
        ({}, {"keepalives_idle": "10"}),
        ({"tcp_keepalive": 7}, {"keepalives_idle": "7"}),
        ({"tcp_keepalive": 0}, {"keepalives": "0"}),
    ]:
        given = connection_parameters(dsn_of("host=x", **keys))
        assert {key: value for key, value in given.items() if key.startswith("keep")} == wanted
    given = connection_parameters(dsn_of("host=x keepalives_idle=5", tcp_keepalive=7))
    assert given["keepalives_idle"] == "5"
