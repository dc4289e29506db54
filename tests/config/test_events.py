"""The file of the flow `events`: existing files of such tools run unchanged, every mistake is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aqueduck.config.events import (
    DuckLakeSinkConfig,
    EventsConfig,
    FileStateConfig,
    HttpSinkConfig,
    JsonlSinkConfig,
    KafkaSinkConfig,
    PostgresSinkConfig,
    is_events,
    parse_events,
    setting_names,
)
from aqueduck.model.errors import ConfigError

REFERENCE = """
version: 1
source:
  type: postgres-cdc
  config:
    connection_url: postgres://user:pass@localhost:5432/appdb
    slot_name: faucet_slot
    publication_name: faucet_pub
    create_slot_if_missing: true
    idle_timeout: 30
sink:
  type: jsonl
  config:
    path: ./changes.jsonl
state:
  type: file
  config:
    path: ./state
"""

SOURCE = {"connection_url": "host=x", "slot_name": "s", "publication_name": "p"}


def parse(
    source: dict[str, Any] | None = None,
    sink: dict[str, Any] | None = None,
    state: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    **more: Any,
) -> EventsConfig:
    values: dict[str, Any] = {
        "source": {"type": "postgres-cdc", "config": {**SOURCE, **(source or {})}},
        "sink": sink or {"type": "stdout"},
        **more,
    }
    if state:
        values["state"] = state
    return parse_events(json.dumps(values), base_dir=Path("/base"), env=env or {})


def test_the_reference_file_is_read_unchanged() -> None:
    """The file that users have runs unchanged; paths are relative to it."""
    config = parse_events(REFERENCE, base_dir=Path("/base"), env={})
    assert config.source.idle_timeout == 30
    assert config.envelope == "default"
    assert isinstance(config.sink, JsonlSinkConfig)
    assert (config.sink.path, config.sink.rotates) == ("/base/changes.jsonl", False)
    assert isinstance(config.state, FileStateConfig)
    assert config.state.path == config.state_dir == "/base/state"
    assert "pass" not in repr(config)


def test_the_flow_is_known_by_the_keys() -> None:
    """`aqueduck run` takes any file."""
    assert is_events({"source": {"type": "postgres-cdc"}, "sink": {}})
    assert not is_events({"source": {"dsn": "x"}, "lake": {}, "groups": []})
    assert not is_events({"source": {"name": "x"}, "destinations": []})


def test_every_option_of_the_source_is_taken() -> None:
    """P-E04: the options of similar tools."""
    config = parse(
        {
            "slot_type": "temporary", "tls": {"mode": "verify_full", "ca_path": "ca.pem"}, "start_lsn": "0/16A4F88",
            "proto_version": 1, "idle_timeout": 5, "max_messages": 10, "max_staged_records": 1000,
            "status_update_interval": 2, "tcp_keepalive": 30, "slot_acquire_retries": 0, "create_slot_if_missing": False,
        }
    )  # fmt: skip
    assert config.source.tls is not None
    assert config.source.tls.ca_path == "/base/ca.pem"
    assert parse({"tls": "require"}).source.tls == config.source.tls.model_copy(
        update={"mode": "require", "ca_path": None}
    )


def test_the_reader_follows_from_the_slot() -> None:
    """What only one reader can read needs no setting."""
    assert parse({}).source.capture == "auto"
    assert parse({"slot_type": "temporary"}).source.capture == "stream"
    assert parse({"plugin": "test_decoding"}).source.capture == "poll"


def test_a_table_sink_keeps_the_bookmark_and_takes_the_directory_of_a_file_state() -> None:
    """P-E03: a file whose sink becomes a table runs with the state that it had; names are as the database spells them."""
    state = {"type": "file", "config": {"path": "./state"}}
    config = parse(sink={"type": "postgres", "config": {"table": "Log.Events"}}, state=state)
    assert isinstance(config.sink, PostgresSinkConfig)
    assert (config.sink.table, config.sink.connection_url) == ("log.events", None)
    assert config.state_dir == "/base/state"
    lake = {"catalog": "sqlite:lake.sqlite", "data_path": "lake", "table": "Events"}
    config = parse(sink={"type": "ducklake", "config": lake})
    assert isinstance(config.sink, DuckLakeSinkConfig)
    assert (config.sink.table, config.sink.catalog) == ('main."Events"', "sqlite:/base/lake.sqlite")
    assert config.state_dir == "/base/.aqueduck"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"source": {"slot_nam": "x"}}, r"source\.config\.slot_nam: unknown key \(did you mean slot_name\?\)"),
    ({"source": {"slot_name": "Bad-Name"}}, r"source\.config\.slot_name: .*a-z"),
    ({"source": {"slot_name": "x" * 64}}, r"source\.config\.slot_name"),
    ({"source": {"proto_version": 2}}, r"source\.config\.proto_version: must be 1"),
    ({"source": {"start_lsn": "zzz"}}, r"source\.config\.start_lsn"),
    ({"source": {"tls": "maybe"}}, r"source\.config\.tls\.mode: must be 'disable'"),
    ({"source": {"idle_timeout": 5, "status_update_interval": 5}}, "status_update_interval must be less than"),
    ({"source": {"status_update_interval": 0.5}}, r"source\.config\.status_update_interval"),
    ({"source": {"idle_timeout": 0}}, r"source\.config\.idle_timeout"),
    ({"source": {"max_messages": 0}}, r"source\.config\.max_messages"),
    ({"source": {"connection_url_env": "NOT_SET", "connection_url": None}}, "the variable NOT_SET is not set"),
    ({"source": {"connection_url_env": "A"}}, "has both connection_url and connection_url_env"),
    ({"sink": {"type": "ftp"}}, r"sink\.type: must be one of jsonl, stdout, http, kafka, postgres, ducklake"),
    ({"sink": {"type": "jsonl"}}, r"sink\.config\.path: is missing"),
    ({"sink": {"type": "jsonl", "config": {"path": "x", "rotate_byte": 1}}}, "did you mean rotate_bytes"),
    ({"sink": {"type": "jsonl", "config": {"path": "x", "rotate_bytes": 0}}}, "rotate_bytes"),
    ({"sink": {"type": "http", "config": {"url": "ftp://x"}}}, r"sink\.config\.url: must be a URL"),
    ({"sink": {"type": "http", "config": {"url": "http://x", "headers": {"A\nB": "c"}}}}, "headers"),
    ({"sink": {"type": "kafka", "config": {"brokers": "x"}}}, r"sink\.config\.topic: is missing"),
    ({"sink": {"type": "postgres"}}, r"sink\.config\.table: is missing"),
    ({"sink": {"type": "postgres", "config": {"table": "a.b.c"}}}, r"sink\.config\.table: must be a table name"),
    ({"sink": {"type": "ducklake", "config": {"table": "t", "data_path": "d"}}}, r"sink\.config\.catalog: is missing"),
    (
        {"sink": {"type": "postgres", "config": {"table": "t"}}, "state": {"type": "postgres"}},
        "a sink of type postgres keeps the bookmark itself",
    ),
    ({"state": {"type": "redis"}}, r"state\.type: must be one of file, postgres, lake"),
    ({"state": {"type": "file"}}, r"state\.config\.path: is missing"),
    ({"state": {"type": "postgres", "config": {"table": "a.b.c"}}}, r"state\.config\.table"),
    ({"envelope": "round"}, "envelope: must be 'default', 'flat' or 'debezium'"),
    ({"envelope": "flat", "source": {"envelope": "flat"}}, "envelope is set twice"),
    ({"version": 2}, "version: must be 1"),
    ({"sinks": {}}, r"sinks: unknown key \(did you mean sink\?\)"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), BAD)
def test_a_mistake_is_named(values: dict[str, Any], message: str) -> None:
    """Unknown keys are refused with a suggestion, wrong values with what is right; all as a ConfigError."""
    with pytest.raises(ConfigError, match=message):
        parse(**values)


def test_secrets_may_be_in_the_environment_and_are_never_shown() -> None:
    """A password in a file or a variable appears in no error and no repr."""
    env = {"URL": "https://user:hunter2@host/x", "TOKEN": "hunter2", "DSN": "postgres://u:hunter2@h/db"}
    config = parse(
        {"connection_url_env": "DSN", "connection_url": None},
        {"type": "http", "config": {"url_env": "URL", "headers_env": {"Authorization": "TOKEN"}}},
        env=env,
    )
    assert isinstance(config.sink, HttpSinkConfig)
    assert config.sink.headers == {"Authorization": "hunter2"}
    kafka = parse(
        sink={
            "type": "kafka",
            "config": {"brokers": "b", "topic": "t", "options": {"enable.idempotence": False}, "options_env": {"sasl.password": "TOKEN"}},
        },
        env=env,
    )  # fmt: skip
    assert isinstance(kafka.sink, KafkaSinkConfig)
    assert kafka.sink.options == {"enable.idempotence": "false", "sasl.password": "hunter2"}
    assert "hunter2" not in repr(config) + repr(kafka)
    with pytest.raises(ConfigError) as error:
        parse(
            {"connection_url": "postgres://u:hunter2@h/db", "nonsense": "hunter2"},
            {"type": "x", "config": {"url": "hunter2"}},
        )
    assert "hunter2" not in str(error.value)


def test_every_setting_is_documented() -> None:
    """docs/events.md has every key, and none that does not exist."""
    text = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")
    documented = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    parts = ("source.", "sink.", "state.")
    assert set(setting_names()) - documented == set()
    assert {name for name in documented if name.startswith(parts)} <= set(setting_names())


@pytest.mark.parametrize("kind", ["env", "file"])
def test_the_catalog_of_a_lake_may_be_elsewhere(kind: str, tmp_path: Path) -> None:
    """The connection string of sink and state may be in a variable or in a file; it is not shown."""
    secret = "postgres:host=db password=hunter2"
    (tmp_path / "catalog").write_text(f"{secret}\n")
    place = {"data_path": "lake", f"catalog_{kind}": "catalog"}
    values = {
        "source": {"type": "postgres-cdc", "config": SOURCE},
        "sink": {"type": "ducklake", "config": {**place, "table": "e"}},
    }
    config = parse_events(json.dumps(values), base_dir=tmp_path, env={"catalog": secret})
    assert isinstance(config.sink, DuckLakeSinkConfig)
    assert config.sink.catalog == secret
    assert "hunter2" not in repr(config)
