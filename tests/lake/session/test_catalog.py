from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import duckdb
import pytest

from aqueduck.config.sync import LakeConfig
from aqueduck.lake.session.catalog import open_lake
from aqueduck.lake.session.failures import lake_errors
from aqueduck.lake.session.sql import ident, literal, qualified
from aqueduck.model.errors import (
    AqueduckError,
    CatalogUnreachableError,
    ConfigError,
    DataPathError,
    LakeBusyError,
    LakeError,
    LakeFileMissingError,
)
from tests.fix_lake import Lake

SECRET = "hunter2"


def refused(config: LakeConfig) -> AqueduckError:
    with pytest.raises(AqueduckError) as failure:
        open_lake(config)
    error = failure.value
    assert SECRET not in str(error)
    assert error.__cause__ is None or SECRET not in str(error.__cause__)
    return error


def entries(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_a_lake_is_made_and_found_again(lake_config: LakeConfig) -> None:
    """The first session makes the lake and our schema, the second finds what the first wrote."""
    with open_lake(lake_config) as session, session.transaction():
        session.execute("create table lake.main.t as select 42 as x")
    with open_lake(lake_config) as session:
        assert session.query("select x from lake.main.t") == ([(42,)], ["x"])
        assert session.query(
            "select 1 from duckdb_schemas() where database_name = 'lake' and schema_name = 'aqueduck'"
        )[0]


def test_nothing_is_ever_downloaded(lake: Lake) -> None:
    """Extensions come from wheels; DuckDB may neither install nor load others on its own."""
    settings = dict(
        lake.session.query("select name, value from duckdb_settings() where name like 'auto%extensions'")[0]
    )
    assert settings == {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}


def test_a_failed_transaction_leaves_nothing(lake: Lake) -> None:
    """An error inside `transaction` rolls everything in it back, and the session continues."""
    lake.session.execute("create table lake.main.t (x integer)")
    with pytest.raises(LakeError), lake.session.transaction():  # noqa: PT012 - the transaction is what fails
        lake.session.execute("insert into lake.main.t values (1)")
        lake.session.execute("insert into lake.main.missing values (1)")
    with lake.session.transaction():
        lake.session.execute("insert into lake.main.t values (2)")
    assert lake.read("select x from lake.main.t") == [(2,)]


def test_a_transaction_keeps_other_threads_out(lake: Lake) -> None:
    """A statement of another thread waits for the transaction's end; it never becomes part of it."""
    lake.session.execute("create table lake.main.t (x integer)")
    other = threading.Thread(target=lambda: lake.session.execute("insert into lake.main.t values (2)"))
    with pytest.raises(ZeroDivisionError), lake.session.transaction():  # noqa: PT012 - the transaction is what fails
        lake.session.execute("insert into lake.main.t values (1)")
        other.start()
        other.join(0.2)
        assert other.is_alive()
        raise ZeroDivisionError
    other.join(20)
    assert lake.read("select x from lake.main.t") == [(2,)]


def test_two_writers_of_a_table_conflict_by_name(lake: Lake) -> None:
    """The second of two concurrent updates fails as `lake.conflict`, which is retried."""
    if lake.kind == "duckdb":
        pytest.skip("a DuckDB file has one process and one session")
    lake.session.execute("create table lake.main.t as select 1 as x")
    with lake.second_session() as other, pytest.raises(LakeBusyError), other.transaction():  # noqa: PT012 - the transaction is what fails
        other.execute("update lake.main.t set x = 2")
        lake.session.execute("update lake.main.t set x = 3")
    assert lake.read("select x from lake.main.t") == [(3,)]


def test_readers_do_not_block_commits(lake: Lake) -> None:
    """Somebody who reads the lake in an open transaction neither blocks nor sees a commit."""
    if lake.kind == "duckdb":
        pytest.skip("a DuckDB file has one process and one session")
    lake.session.execute("create table lake.main.t as select 1 as x")
    with open_lake(lake.config, read_only=True) as reader, reader.transaction():
        assert reader.query("select x from lake.main.t")[0] == [(1,)]
        lake.session.execute("insert into lake.main.t values (2)")
        assert reader.query("select x from lake.main.t")[0] == [(1,)]
    assert lake.read("select count(*) from lake.main.t") == [(2,)]


def test_a_session_can_be_opened_again(lake: Lake) -> None:
    """`reopen` gives a working connection, including in the middle of a transaction and after `close`."""
    lake.session.execute("create table lake.main.t (x integer)")
    lake.session.execute("begin")
    lake.session.execute("insert into lake.main.t values (1)")
    lake.session.reopen()
    assert lake.read("select count(*) from lake.main.t") == [(0,)]
    lake.session.close()
    lake.session.close()
    lake.session.reopen()
    assert lake.session.query("select count(*) from lake.main.t")[0] == [(0,)]


def test_read_only_makes_nothing(lake_config: LakeConfig, tmp_path: Path) -> None:
    """Looking for a lake that does not exist is an error and does not make it."""
    before = entries(tmp_path)
    with pytest.raises(CatalogUnreachableError):
        open_lake(lake_config, read_only=True)
    assert entries(tmp_path) == before


def test_a_data_path_that_cannot_be_written_leaves_nothing_behind(
    lake_config: LakeConfig, tmp_path: Path
) -> None:
    """The data path is tried first: a failure leaves neither a catalog nor a directory."""
    (tmp_path / "file").touch()
    before = entries(tmp_path)
    for place in (tmp_path / "file" / "data", Path("/proc/aqueduck")):
        error = refused(lake_config.model_copy(update={"data_path": str(place)}))
        assert isinstance(error, DataPathError)
        assert error.hint
    assert entries(tmp_path) == before
    with open_lake(lake_config) as session:
        assert session.query("select count(*) from lake.snapshots() where schema_version > 1")[0] == [(0,)]


def test_another_data_path_than_the_lakes_own_is_refused(lake_config: LakeConfig, tmp_path: Path) -> None:
    """A lake keeps the data path it was created with; another path is refused, and its directory is not left behind."""
    open_lake(lake_config).close()
    error = refused(lake_config.model_copy(update={"data_path": str(tmp_path / "other")}))
    assert isinstance(error, DataPathError)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "catalog",
    [
        f"postgres:host=127.0.0.1 port=1 user=u dbname=d password={SECRET}",
        f"postgres://u:{SECRET}@127.0.0.1:1/d",
        f"postgresql://u:{SECRET}@host.invalid/d",
    ],
)
def test_an_unreachable_catalog_is_named_without_its_password(tmp_path: Path, catalog: str) -> None:
    """The error says what is wrong and never shows the connection string; no directory stays."""
    error = refused(LakeConfig(catalog=catalog, data_path=str(tmp_path / "data")))
    assert isinstance(error, CatalogUnreachableError)
    assert error.hint
    assert entries(tmp_path) == set()


def test_a_connection_string_that_is_none_is_a_configuration_error(tmp_path: Path) -> None:
    """Text that libpq cannot read is refused as configuration, without showing it."""
    error = refused(LakeConfig(catalog=f"postgres:passwrod={SECRET} host", data_path=str(tmp_path / "data")))
    assert isinstance(error, ConfigError)


@pytest.mark.parametrize("prefix", ["sqlite:", ""])
def test_a_file_that_is_no_catalog_is_left_alone(tmp_path: Path, prefix: str) -> None:
    """Somebody's file under the catalog's name is refused and not touched."""
    file = tmp_path / "notes.db"
    file.write_text("not a database " * 100)
    error = refused(LakeConfig(catalog=f"{prefix}{file}", data_path=str(tmp_path / "data")))
    assert isinstance(error, CatalogUnreachableError)
    assert file.read_text().startswith("not a database")
    assert entries(tmp_path) == {"notes.db"}


def test_a_sqlite_catalog_uses_the_write_ahead_log(tmp_path: Path) -> None:
    """Without it every reader blocks commits."""
    open_lake(LakeConfig(catalog=f"sqlite:{tmp_path}/c.sqlite", data_path=str(tmp_path / "data"))).close()
    with sqlite3.connect(tmp_path / "c.sqlite") as db:
        assert db.execute("pragma journal_mode").fetchone() == ("wal",)


def test_names_and_values_are_quoted() -> None:
    """Quotes in names and values stay what they are; a zero byte is refused."""
    assert qualified('a"b', "c d") == '"a""b"."c d"'
    assert (literal("it's"), literal(5), literal(None)) == ("'it''s'", "5", "null")
    for bad in ("", "a\x00"):
        with pytest.raises(ValueError, match="DuckDB"):
            ident(bad)


def test_a_file_of_the_lake_that_is_gone_is_said_with_the_way_out(tmp_path: Path) -> None:
    """Retried, as the files may come back; the message has no path, and the hint both ways."""
    with (
        pytest.raises(LakeFileMissingError, match="reading did not find a file of the lake") as caught,
        lake_errors("reading", table="main.t"),
    ):
        duckdb.sql(f"from read_parquet('{tmp_path}/gone.parquet')")
    assert str(tmp_path) not in str(caught.value)
    assert "--drop-target" in str(caught.value.hint)
