from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqueduck.lab.embedded import EmbeddedPostgres
from aqueduck.model.errors import (
    AqueduckError,
    AuthenticationError,
    ConfigError,
    ConnectionLostError,
    PrivilegeError,
    Retry,
    SlotActiveError,
    SlotLimitError,
    SourceQueryError,
    SourceUnreachableError,
    TableMissingError,
    WalLevelError,
)
from aqueduck.postgres.copy.table_copy import export_snapshot
from aqueduck.postgres.session.connection import classify_connect_failure, connect, translate_errors
from aqueduck.postgres.session.failures import classify_server_error
from aqueduck.postgres.session.quoting import identifier, literal
from tests.fix_postgres import Database
from tests.tls_proxy import make_certificates, tls_proxy

PASSWORD = "s3cr3t pass'word@/:"


@pytest.fixture(scope="module")
def scram() -> Iterator[EmbeddedPostgres]:
    """A server that asks for passwords."""
    with EmbeddedPostgres(password=PASSWORD, settings={"max_wal_senders": 1}) as server:
        yield server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def shown(error: BaseException) -> str:
    """All that a printed traceback of the error would say, but for lines of source."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return f"{error!r} {error}" + (shown(cause) if cause else "")


# -- connect


def test_keyword_and_uri_strings_both_connect(scram: EmbeddedPostgres) -> None:
    """P-S23: libpq's two forms of connection string work, including with a password that needs escaping."""
    quoted = "s3cr3t%20pass%27word%40%2F%3A"
    for dsn in (scram.dsn, f"postgresql://postgres:{quoted}@127.0.0.1:{scram.port}/postgres"):
        with connect(dsn) as conn:
            assert conn.execute("select current_user").fetchone() == ("postgres",)


def test_the_string_wins_over_our_defaults(pg: EmbeddedPostgres) -> None:
    """Defaults fill in what the string leaves out, and nothing else."""
    with connect(pg.dsn) as conn:
        assert conn.autocommit
        assert conn.info.get_parameters()["connect_timeout"] == "10"
        assert conn.execute("show application_name").fetchone() == ("aqueduck",)
    with connect(f"{pg.dsn} application_name=mine connect_timeout=3", autocommit=False) as conn:
        assert not conn.autocommit
        assert conn.info.get_parameters()["connect_timeout"] == "3"
        assert conn.execute("show application_name").fetchone() == ("mine",)


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1", "KLINGON"])
def test_texts_are_read_in_utf8_whatever_the_string_says(pg: EmbeddedPostgres, encoding: str) -> None:
    """Values and names are passed on as they are read: in another encoding they would differ."""
    with connect(f"{pg.dsn} client_encoding={encoding}") as conn:
        assert conn.execute("select 'ä', current_setting('client_encoding')").fetchone() == ("ä", "UTF8")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("connect_timeout=hunter2", "a value in the connection string is not valid"),
        ("options='-c hunter=2'", "does not take the connection string: unrecognized"),
        ("options='-c work_mem=hunter'", 'invalid value for parameter "work_mem"'),
        ("service=hunter", 'definition of service "hunter" not found'),
    ],
)
def test_what_is_wrong_in_the_string_is_no_server_out_of_reach(
    pg: EmbeddedPostgres, wrong: str, words: str
) -> None:
    """Trying again would not help: the key is to be corrected."""
    with pytest.raises(ConfigError, match=words) as caught:
        connect(f"{pg.dsn} {wrong}")
    assert "hunter2" not in shown(caught.value)


def test_a_server_of_the_other_kind_says_what_was_asked_for(pg: EmbeddedPostgres) -> None:
    """After a failover the next try may find it: it is retried."""
    with pytest.raises(SourceUnreachableError, match="target_session_attrs"):
        connect(f"{pg.dsn} target_session_attrs=standby")


def test_text_is_utf8_whatever_the_environment_says(
    pg: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client encoding in the environment does not change what we read."""
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with connect(pg.dsn) as conn:
        assert conn.execute("select 'Ω漢🦆'").fetchone() == ("Ω漢🦆",)


def test_a_wrong_password_is_an_authentication_error(scram: EmbeddedPostgres) -> None:
    """P-S23: a refused login says so, asks a person, and does not show the password."""
    with pytest.raises(AuthenticationError, match="password authentication failed") as caught:
        connect(scram.dsn_for("postgres", password="hunter2"))
    assert caught.value.retry is Retry.OPERATOR
    assert "hunter2" not in shown(caught.value)


@pytest.mark.parametrize("user", ["postgres", "nobody at all"])
def test_a_missing_password_is_an_authentication_error(scram: EmbeddedPostgres, user: str) -> None:
    """No password where one is asked for is a refused login."""
    with pytest.raises(AuthenticationError, match="no password supplied"):
        connect(scram.dsn_for("postgres", user, password=""))


def test_an_unknown_role_is_an_authentication_error(pg: EmbeddedPostgres) -> None:
    """A role that does not exist is a refused login, even where passwords are not asked for."""
    with pytest.raises(AuthenticationError, match='role "stranger" does not exist'):
        connect(pg.dsn_for("postgres", "stranger"))


def test_an_unreachable_server_is_tried_again() -> None:
    """A refused connection is an error that the service retries automatically, with the address in it."""
    port = free_port()
    with pytest.raises(SourceUnreachableError, match=f"127.0.0.1:{port}: Connection refused") as caught:
        connect(f"host=127.0.0.1 port={port} user=a")
    assert caught.value.retry is Retry.AUTO


def test_an_unknown_host_does_not_show_a_password_that_was_taken_for_it() -> None:
    """A URI with an unescaped @ in its password makes libpq look up a part of it as the host."""
    with pytest.raises(SourceUnreachableError) as caught:
        connect("postgresql://user:pa@ssw0rd@db.invalid/x")
    assert "ssw0rd" not in shown(caught.value)
    with pytest.raises(SourceUnreachableError, match=r"at db\.invalid: "):
        connect("postgresql://user:password@db.invalid/x")


def test_a_server_that_does_not_answer_is_given_up() -> None:
    """A peer that accepts and says nothing does not hold us for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(SourceUnreachableError, match="timeout"):
            connect(f"host=127.0.0.1 port={port} user=a connect_timeout=2 sslmode=disable")


def test_an_unknown_database_is_a_configuration_error(pg: EmbeddedPostgres) -> None:
    """A wrong dbname is for a person to correct."""
    with pytest.raises(ConfigError, match='database "nowhere" does not exist'):
        connect(pg.dsn_for("nowhere"))


@pytest.mark.parametrize(
    "dsn",
    [
        "host=a hunter2",
        "hunter2",
        "host=a hunter2=1",
        "postgresql://u:hunter2@[h",
        "host=127.0.0.1 port=hunter2",
        "host=127.0.0.1 user=a sslmode=hunter2",
        "postgresql://u:hunter2/rest@h/db",
    ],
)
def test_a_string_that_is_not_valid_is_not_shown(dsn: str) -> None:
    """Text that libpq does not understand may be a password: it is not repeated."""
    with pytest.raises(AqueduckError) as caught:
        connect(dsn)
    assert isinstance(caught.value, ConfigError)
    assert "hunter2" not in shown(caught.value)


def test_a_replication_connection_without_the_attribute_says_how_to_get_it(db: Database, role: str) -> None:
    """P-S24: the printed statement gives the role its right."""
    dsn = db.dsn_for(role, replication="database")
    with pytest.raises(PrivilegeError) as caught:
        connect(dsn)
    assert caught.value.hint == f'alter role "{role}" replication'
    db.execute(caught.value.hint)
    connect(dsn).close()


def test_a_server_without_free_walsenders_is_a_limit(scram: EmbeddedPostgres) -> None:
    """The setting that is too small is in the hint."""
    dsn = scram.dsn_for("postgres", replication="database")
    with connect(dsn), pytest.raises(SlotLimitError) as caught:
        connect(dsn)
    assert "max_wal_senders" in str(caught.value.hint)


# -- TLS


@pytest.fixture(scope="module", params=["127.0.0.1", "elsewhere.invalid"])
def tls(
    scram: EmbeddedPostgres, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, bool]]:
    """A TLS server: connection string, the authority's file, whether the certificate is for its address."""
    files = make_certificates(tmp_path_factory.mktemp("tls"), request.param)
    with tls_proxy(scram.port, files.server) as port:
        yield scram.dsn_for("postgres", port=port), str(files.authority), request.param == "127.0.0.1"


def test_tls_modes_are_passed_through(tls: tuple[str, str, bool]) -> None:
    """P-S23: require and verify-ca take any host name, verify-full only the right one."""
    dsn, authority, fits = tls
    for mode in ("prefer", "require", "verify-ca", *(["verify-full"] if fits else [])):
        with connect(f"{dsn} sslmode={mode} sslrootcert={authority}") as conn:
            assert conn.pgconn.ssl_in_use
    if not fits:
        with pytest.raises(ConfigError, match="certificate"):
            connect(f"{dsn} sslmode=verify-full sslrootcert={authority}")


def test_tls_works_in_a_uri(tls: tuple[str, str, bool]) -> None:
    """P-S23: TLS parameters may be in a URI."""
    dsn, authority, _ = tls
    port = psycopg.conninfo.conninfo_to_dict(dsn)["port"]
    uri = f"postgresql://postgres:s3cr3t%20pass%27word%40%2F%3A@127.0.0.1:{port}/postgres"
    with connect(f"{uri}?sslmode=verify-ca&sslrootcert={authority}") as conn:
        assert conn.pgconn.ssl_in_use


def test_a_certificate_of_an_unknown_authority_is_refused(tls: tuple[str, str, bool], tmp_path: Path) -> None:
    """P-S23: verification is real, and its failure is for a person."""
    dsn, _, _ = tls
    other = make_certificates(tmp_path, "127.0.0.1")
    with pytest.raises(ConfigError, match="certificate verify failed"):
        connect(f"{dsn} sslmode=verify-full sslrootcert={other.authority}")
    with pytest.raises(ConfigError, match="root certificate file"):
        connect(f"{dsn} sslmode=verify-full sslrootcert={tmp_path / 'missing'}")


def test_a_server_without_tls_is_refused_where_tls_is_required(pg: EmbeddedPostgres) -> None:
    """P-S23: no silent fallback to plain text."""
    with pytest.raises(ConfigError, match="does not support SSL"):
        connect(f"{pg.dsn} sslmode=require")


# -- translate_errors


def failing(conn: psycopg.Connection[object], statement: str, table: str | None = None) -> AqueduckError:
    with pytest.raises(AqueduckError) as caught, translate_errors("do it", table, conn=conn):
        conn.execute(statement.encode())
    return caught.value


def refusal(conn: psycopg.Connection[object], statement: str, table: str) -> str | None:
    """The hint that comes with a missing right; None if the statement worked."""
    try:
        with translate_errors("do it", table, conn=conn):
            conn.execute(statement.encode())
    except PrivilegeError as exc:
        return str(exc.hint)
    return None


@pytest.mark.parametrize(
    "missing",
    [
        'select * from s."T"',
        "select * from closed.t",
        "select pg_create_logical_replication_slot('a', 'pgoutput')",
        "select pg_drop_replication_slot('a')",
        "create publication p",
        "create publication p for table t",
        "select pg_control_system()",
    ],
)
def test_a_missing_right_comes_with_the_statement_that_grants_it(any_db: Database, missing: str) -> None:
    """P-S24: granting what the hints say, one after another, makes the statement work."""
    role = f"{any_db.name} role"
    any_db.execute(
        f"""create role "{role}" login; create schema s; create schema closed; create table s."T" ();
        grant usage on schema s to "{role}"; create table closed.t (); create table t ();
        revoke execute on function pg_control_system from public"""
    )
    if "drop" in missing:
        any_db.execute("select pg_create_logical_replication_slot('a', 'pgoutput')")
    table = "s.T" if '"T"' in missing else "closed.t" if "closed" in missing else "public.t"
    granted: list[str] = []
    with any_db.connect(role) as conn:
        while (hint := refusal(conn, missing, table)) is not None:
            assert hint not in granted, "the hint did not help"
            granted.append(hint)
            any_db.execute(hint)
    assert granted, "nothing was missing"
    any_db.execute(
        f'drop owned by "{role}" cascade; drop role "{role}"; select pg_drop_replication_slot(slot_name) '
        f"from pg_replication_slots where database = current_database(); "
        f"grant execute on function pg_control_system to public"
    )


def test_server_errors_become_ours(db: Database) -> None:
    """Each condition that has a code of its own gets it."""
    with db.connect() as conn:
        error = failing(conn, "select * from nowhere", "public.nowhere")
        assert isinstance(error, TableMissingError)
        assert error.table == "public.nowhere"
        assert isinstance(failing(conn, "select * from nowhere.t"), TableMissingError)
        syntax = failing(conn, "selec")
        assert isinstance(syntax, SourceQueryError)
        assert "(SQLSTATE 42601)" in syntax.message
        assert pickle.loads(pickle.dumps(syntax)).message == syntax.message


@pytest.mark.parametrize(
    ("statement", "sqlstate"),
    [
        ("select 'hunter2'::text::int", "22P02"),
        ("do $$ begin raise 'hunter2'; end $$", "P0001"),
        ("insert into t values ('hunter2'), ('hunter2')", "23505"),
        ("insert into t values (null), ('hunter2')", "23502"),
    ],
)
def test_no_value_gets_into_an_error(db: Database, statement: str, sqlstate: str) -> None:
    """Promise 8: neither the message nor its traceback quotes data."""
    db.execute("create table t (a text primary key)")
    with db.connect() as conn:
        error = failing(conn, statement)
    assert f"(SQLSTATE {sqlstate})" in error.message
    assert "hunter2" not in shown(error)


def test_a_lost_connection_is_tried_again(db: Database) -> None:
    """A connection that the server ended, and its use afterwards, are errors that the service retries."""
    with db.connect() as conn:
        db.execute(f"select pg_terminate_backend({conn.info.backend_pid}, 5000)")
        for _ in range(2):
            error = failing(conn, "select 1")
            assert isinstance(error, ConnectionLostError)
            assert error.retry is Retry.AUTO


def test_a_snapshot_that_went_with_its_connection_is_tried_again(any_db: Database) -> None:
    """P-T02: a copy whose snapshot is gone has lost a connection, for each error that the server may report."""
    snapshot = export_snapshot(any_db.dsn)
    any_db.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where datname = current_database() and application_name like 'aqueduck%'"
    )
    with pytest.raises(ConnectionLostError) as caught, snapshot.connect(any_db.dsn):
        pass
    assert caught.value.retry is Retry.AUTO


def test_misuse_of_psycopg_is_not_hidden(db: Database) -> None:
    """An error of our own code is not translated."""
    with db.connect() as conn, pytest.raises(psycopg.ProgrammingError), translate_errors("do it"):
        conn.execute("select %s", ())


def test_failed_connections_inside_keep_their_meaning() -> None:
    """A connection that psycopg itself could not make is unreachable, not lost."""
    with pytest.raises(SourceUnreachableError), translate_errors("do it"):
        psycopg.connect(f"host=127.0.0.1 port={free_port()} user=a")


@pytest.mark.parametrize(
    ("sqlstate", "message", "kind"),
    [
        ("55006", 'replication slot "s" is active for PID 7', SlotActiveError),
        ("53400", "all replication slots are in use", SlotLimitError),
        ("55000", "logical decoding requires wal_level >= logical", WalLevelError),
        ("57P01", "terminating connection due to administrator command", ConnectionLostError),
        ("08006", "whatever", ConnectionLostError),
        ("53300", "sorry, too many clients already", SourceUnreachableError),
        ("28000", "no pg_hba.conf entry for host", AuthenticationError),
        ("55000", "could not import the requested snapshot", ConnectionLostError),
        ("40P01", "deadlock detected", SourceQueryError),
    ],
)
def test_states_that_are_hard_to_provoke_have_their_class(
    sqlstate: str, message: str, kind: type[AqueduckError]
) -> None:
    """The table of SQLSTATEs, without a server."""
    assert type(classify_server_error(sqlstate, message, what="do it")) is kind


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            'connection to server at "h" (10.0.0.1), port 5 failed: FATAL:  sorry, too many clients already',
            SourceUnreachableError,
        ),
        (
            'connection to server at "h", port 5 failed: FATAL:  no pg_hba.conf entry for host "1.2.3.4"',
            AuthenticationError,
        ),
        (
            'connection to server at "h", port 5 failed: FATAL:  the database system is starting up',
            SourceUnreachableError,
        ),
        (
            'connection to server at "h", port 5 failed: SSL error: unexpected eof while reading',
            SourceUnreachableError,
        ),
        (
            'could not translate host name "hunter2@h" to address: Name or service not known',
            SourceUnreachableError,
        ),
        ("", SourceUnreachableError),
    ],
)
def test_libpq_messages_have_their_class(message: str, kind: type[AqueduckError]) -> None:
    """Connection failures carry no SQLSTATE: their words decide."""
    error = classify_connect_failure(message)
    assert type(error) is kind
    assert "hunter2" not in str(error)


# -- quoting


@given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=15))
def test_quoted_names_and_texts_mean_what_they_say(pg: EmbeddedPostgres, text: str) -> None:
    """Whatever a name or text holds, PostgreSQL reads back the same."""
    with connect(pg.dsn) as conn:
        cursor = conn.execute(f"select {literal(text)} as {identifier(text)}".encode())
        assert cursor.fetchone() == (text,)
        assert cursor.description is not None
        assert cursor.description[0].name == text


@pytest.mark.parametrize("name", ["", "a\x00b"])
def test_impossible_names_are_refused(name: str) -> None:
    """A name that PostgreSQL cannot have is a bug."""
    with pytest.raises(ValueError, match="name"):
        identifier(name)


def test_the_environment_may_name_the_server(pg: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty string leaves everything to libpq's variables, as psql does."""
    for name, value in psycopg.conninfo.conninfo_to_dict(pg.dsn).items():
        monkeypatch.setenv({"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}"), str(value))
    with connect("") as conn:
        assert conn.info.port == int(os.environ["PGPORT"])
