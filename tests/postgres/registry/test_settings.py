"""Settings resolve from default to table, and bad ones never get in."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import psycopg
import pytest

from aqueduck.config.sync import GroupConfig, LakeConfig
from aqueduck.model.errors import ConfigError, SourceQueryError
from aqueduck.postgres.registry.registry import (
    Settings,
    call,
    rows_of,
)
from aqueduck.postgres.session.connection import translate_errors
from tests.postgres.registry.wishes import config_of, group, refused, table

Connection = psycopg.Connection[Any]


def test_the_defaults_are_the_same_everywhere(conn: Connection) -> None:
    """P-S26: registry, service and file have the same defaults."""
    listed = {row["name"]: row["default_value"] for row in rows_of(conn, "list_settings")}
    assert {name: str(value) for name, value in asdict(Settings()).items()} == listed
    for section in (GroupConfig, LakeConfig):
        for name in section.model_fields.keys() & listed.keys():
            default = section.model_fields[name].default
            assert (default if isinstance(default, str) else str(int(default))) == listed[name]


def test_a_setting_resolves_from_default_to_table(conn: Connection) -> None:
    """P-S26: the narrowest level that is set counts, and taking it back uncovers the next."""
    call(conn, "add_table", source="a")
    levels: list[dict[str, str]] = [{}, {"group_name": "default"}, {"source": "a"}]
    expected = ["1000"] * 3
    for value, level in enumerate(levels):
        call(conn, "set_setting", name="inline_rows", value=str(value), **level)
        expected[value:] = [str(value)] * (3 - value)
        assert [call(conn, "get_setting", name="inline_rows", **at) for at in levels] == expected
    assert (group(conn).settings.inline_rows, table(conn).settings.inline_rows) == (1, 2)
    for level in reversed(levels):
        call(conn, "set_setting", name="inline_rows", value=None, **level)
    assert table(conn).settings == group(conn).settings == Settings()


@pytest.mark.parametrize(
    ("value", "stored"),
    [("1", 1), (4096, 4096), (" 64 MiB ", 64 << 20), ("1GB", 10**9), ("1.5 KiB", 1536), ("7b", 7)],
)
def test_sizes_are_written_as_in_the_file(conn: Connection, value: str | int, stored: int) -> None:
    """P-S26: numbers and units mean the same in SQL and YAML."""
    call(conn, "set_setting", name="segment_bytes", value=value)
    assert call(conn, "get_setting", name="segment_bytes") == str(stored)
    from_file = config_of({"name": "g", "segment_bytes": str(value).strip()}).groups[0]
    assert from_file.segment_bytes == stored


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("flush_interval", "1", "unknown setting flush_interval"),
        ("flush_interval_ms", "-1", "flush_interval_ms must be a number from 0 to 3600000"),
        ("flush_interval_ms", "3600001", "flush_interval_ms must be"),
        ("flush_interval_ms", "1.5", "flush_interval_ms must be"),
        ("flush_interval_ms", "9" * 30, "flush_interval_ms must be"),
        ("flush_interval_ms", "", "flush_interval_ms must be"),
        ("segment_bytes", "0", "segment_bytes must be"),
        ("segment_bytes", "1 parsec", "segment_bytes must be"),
        ("segment_bytes", "9" * 18 + " TiB", "segment_bytes must be"),
        ("copy_concurrency", "65", "copy_concurrency must be a number from 1 to 64"),
        ("on_slot_loss", "ignore", "on_slot_loss must be stop or resync"),
    ],
)
def test_bad_settings_are_refused_by_name(conn: Connection, name: str, value: str, problem: str) -> None:
    """P-S26: unknown keys and bad values never get into the registry."""
    error = refused(conn, "set_setting", name=name, value=value)
    assert isinstance(error, ConfigError)
    assert problem in error.message
    assert conn.execute("select count(*) from aqueduck.settings").fetchone() == (0,)


def test_a_setting_has_its_levels(conn: Connection) -> None:
    """P-S26: a setting on a level where it has no effect is refused."""
    call(conn, "add_table", source="a")
    problem = refused(conn, "set_setting", name="flush_interval_ms", value="1", source="a").message
    assert problem == "flush_interval_ms cannot be set for a table"
    problem = refused(conn, "set_setting", name="on_slot_loss", value="resync", source="a").message
    assert problem == "on_slot_loss cannot be set for a table"
    assert "unknown setting x" in refused(conn, "get_setting", name="x").message
    assert "unknown setting x" in refused(conn, "set_setting", name="x", value=None).message


def test_a_refusal_keeps_its_hint_in_each_form_of_the_server(conn: Connection) -> None:
    """P-S26: even if the registry's schema is on the search path, and so is not named in the error's context."""
    conn.execute("set search_path = aqueduck, public")
    with pytest.raises(ConfigError) as caught:
        call(conn, "set_setting", name="flush_interval", value="5")
    assert "flush_interval_ms" in str(caught.value.hint)


def test_a_hint_of_the_server_is_shown(conn: Connection) -> None:
    """An error that has no code and no hint of ours has PostgreSQL's."""
    with (
        pytest.raises(SourceQueryError, match=r"Fix: .*Perhaps you meant") as caught,
        translate_errors("look"),
    ):
        conn.execute("select relnam from pg_class")
    assert caught.value.hint
