"""Options of `ducklake` and `ducklake_changes`, without Spark: object stores and their credentials."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from aqueduck.config.lake_place import LakePlace
from aqueduck.model.errors import ConfigError
from aqueduck.spark.formats.lake_source import LakeOptions
from aqueduck.spark.formats.lake_writer import WriteOptions

LAKE = {"catalog": "sqlite:lake.sqlite", "table": "t", "data_path": "s3://bucket/data/"}
STORE = {
    "s3_endpoint": "127.0.0.1:9",
    "s3_access_key_id_env": "KEY_OF_TEST",
    "s3_secret_access_key_env": "SECRET_OF_TEST",
}

Read = Callable[[Mapping[str, str]], LakePlace]


def read_place(given: Mapping[str, str]) -> LakePlace:
    return LakeOptions.read(given).place


def written_place(given: Mapping[str, str]) -> LakePlace:
    return WriteOptions.read(given, overwrite=False).place


@pytest.mark.parametrize("place", [read_place, written_place])
def test_credentials_come_from_the_variables_that_options_name(
    place: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`s3_…_env` are the keys of a file: their values are those of the driver's variables."""
    monkeypatch.setenv("KEY_OF_TEST", "the key")
    monkeypatch.setenv("SECRET_OF_TEST", "the secret")
    assert dict(place({**LAKE, **STORE}).properties) == {
        "s3_endpoint": "127.0.0.1:9",
        "s3_access_key_id": "the key",
        "s3_secret_access_key": "the secret",
    }


@pytest.mark.parametrize("place", [read_place, written_place])
def test_a_variable_that_is_not_set_is_named_and_a_value_is_not(
    place: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad input: the value may be the secret itself."""
    monkeypatch.setenv("KEY_OF_TEST", "the key")
    monkeypatch.delenv("SECRET_OF_TEST", raising=False)
    with pytest.raises(
        ConfigError, match="option s3_secret_access_key_env: the variable SECRET_OF_TEST is not set"
    ) as caught:
        place({**LAKE, **STORE})
    assert "the key" not in str(caught.value)
    with pytest.raises(ConfigError, match="must be the name of an environment variable") as caught:
        place({**LAKE, **STORE, "s3_secret_access_key_env": "wJalr/geheim+key"})
    assert "geheim" not in str(caught.value)


def test_the_schema_of_our_own_tables_can_be_read_and_not_written() -> None:
    """The positions of flows and queries are there."""
    given = {**LAKE, "table": "Aqueduck.spark_writes"}
    assert LakeOptions.read(given).table.name == "spark_writes"
    with pytest.raises(ConfigError, match="is reserved"):
        WriteOptions.read(given, overwrite=True)
