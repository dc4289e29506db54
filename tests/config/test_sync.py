"""A configuration is read as it is meant, or refused with the name of the key."""

from __future__ import annotations

import contextlib
import pickle
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from aqueduck.config.sections import key_of
from aqueduck.config.sync import _SECTIONS, SyncConfig, load_config, parse_config
from aqueduck.model.errors import ConfigError
from aqueduck.model.schema import TableName

BASE = Path("/srv/shop")
SMALLEST: dict[str, Any] = {
    "source": {"dsn": "host=db"},
    "lake": {"catalog": "lake.ducklake", "data_path": "lake_data"},
    "groups": [{"name": "default", "tables": [{"source": "orders"}]}],
}


def parse(values: object, env: dict[str, str] | None = None) -> SyncConfig:
    text = values if isinstance(values, str) else yaml.safe_dump(values)
    return parse_config(text, base_dir=BASE, env=env or {}, name="aqueduck.yaml")


def problem(values: object, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(values, env)
    return str(caught.value)


def group(**keys: Any) -> dict[str, Any]:
    return {**SMALLEST, "groups": [{"name": "default", **keys}]}


def lake(**keys: Any) -> dict[str, Any]:
    return {**SMALLEST, "lake": {**SMALLEST["lake"], **keys}}


@pytest.mark.parametrize("kind", ["env", "file"])
def test_connection_strings_may_be_elsewhere(kind: str, tmp_path: Path) -> None:
    """In variables, or in files beside the configuration, and nothing that is printed shows them."""
    secrets = {"dsn": "host=db password=hunter2", "catalog": "postgres:host=db password=hunter2"}
    for key, text in secrets.items():
        (tmp_path / key).write_text(f"{text}\n")
    values = {
        **SMALLEST,
        "source": {f"dsn_{kind}": "dsn"},
        "lake": {"data_path": "lake", f"catalog_{kind}": "catalog"},
    }
    config = parse_config(yaml.safe_dump(values), base_dir=tmp_path, env=secrets)
    assert (config.source.dsn, config.lake.catalog) == tuple(secrets.values())
    assert "hunter2" not in repr(config)
    lost = {**secrets, "catalog": "host=db password=hunter2"}
    (tmp_path / "catalog").write_text(lost["catalog"])
    with pytest.raises(ConfigError, match="must begin with postgres:") as caught:
        parse_config(yaml.safe_dump(values), base_dir=tmp_path, env=lost)
    assert "hunter2" not in str(caught.value)


def test_the_smallest_file_gets_the_documented_defaults() -> None:
    """What is left out has the value that docs/configuration.md names."""
    config = parse(SMALLEST)
    (only,) = config.groups
    (table,) = only.tables
    assert (only.capture, only.flush_interval_ms) == ("auto", 1000)
    assert (only.stage_bytes_max, only.batch_bytes_max, only.segment_bytes) == (1 << 30, 1 << 29, 1 << 25)
    assert (only.slot_name, only.publication) == ("aqueduck_default", "aqueduck_default")
    assert (table.source, table.target, table.mode, table.initial_copy) == (
        "public.orders",
        "main.orders",
        "upsert",
        True,
    )
    assert (config.lake.inline_rows, config.spark.master, config.spark.conf) == (1000, "local[*]", {})
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8642)


def test_relative_paths_start_at_the_directory_of_the_file() -> None:
    """The same file means the same paths wherever the command runs."""
    config = parse(SMALLEST)
    assert config.lake.catalog == "/srv/shop/lake.ducklake"
    assert config.lake.data_path == "/srv/shop/lake_data"
    assert config.state_dir == "/srv/shop/.aqueduck"


def test_the_files_of_a_certificate_are_found_beside_the_file() -> None:
    """Paths of the server start there as well."""
    server = parse({**SMALLEST, "server": {"tls_cert": "tls/cert.pem", "tls_key": "/etc/key.pem"}}).server
    assert (server.tls_cert, server.tls_key) == ("/srv/shop/tls/cert.pem", "/etc/key.pem")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "[::1]", "localhost"])
def test_a_loopback_address_needs_no_token(host: str) -> None:
    """Only this machine can connect."""
    assert parse({**SMALLEST, "server": {"host": host}}).server.is_loopback


def test_a_token_in_the_place_of_its_variable_is_never_shown() -> None:
    """Who writes the token itself into the file does not find it in a log."""
    text = problem({**SMALLEST, "server": {"token_env": "s3cret-token!"}})
    assert "server.token_env: must be the name of an environment variable" in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("catalog", "expected"),
    [
        ("sqlite:lake.db", "sqlite:/srv/shop/lake.db"),
        ("sqlite:/var/lake.db", "sqlite:/var/lake.db"),
        ("../lake.ducklake", "/srv/lake.ducklake"),
        ("postgres:dbname=lake host=127.0.0.1", "postgres:dbname=lake host=127.0.0.1"),
        ("postgresql://db/lake", "postgresql://db/lake"),
    ],
)
def test_only_the_file_in_a_catalog_is_resolved(catalog: str, expected: str) -> None:
    """A catalog database's connection string is left as it is."""
    assert parse(lake(catalog=catalog)).lake.catalog == expected


def test_object_storage_is_not_a_relative_path() -> None:
    """A URL stays a URL."""
    assert parse(lake(data_path="s3://bucket/prefix")).lake.data_path == "s3://bucket/prefix"


def test_names_are_read_as_sql_reads_them() -> None:
    """Quoted source names keep their case, and so does a target."""
    tables = [{"source": '"My Shop"."Orders"'}, {"source": "Items", "target": "Sales.Items"}]
    first, second = parse(group(tables=tables)).groups[0].tables
    assert first.source_table == TableName("My Shop", "Orders")
    assert first.target_table == TableName("main", "Orders")
    assert second.source_table == TableName("public", "items")
    assert second.target_table == TableName("Sales", "Items")


def test_sizes_may_have_units() -> None:
    """People write MiB, not digits."""
    assert parse(group(segment_bytes="8 MiB", stage_bytes_max=4096)).groups[0].segment_bytes == 8 << 20


def test_spark_settings_become_text() -> None:
    """YAML's booleans and numbers are what Spark expects as text."""
    config = parse({**SMALLEST, "spark": {"conf": {"a": True, "b": 2, "c": "x"}}})
    assert config.spark.conf == {"a": "true", "b": "2", "c": "x"}


def test_the_connection_string_comes_from_the_environment() -> None:
    """With dsn_env the file holds no secret."""
    config = parse({**SMALLEST, "source": {"dsn_env": "PG_DSN"}}, {"PG_DSN": "host=db password=secret"})
    assert config.source.dsn == "host=db password=secret"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**SMALLEST, "sorce": 1}, "sorce: unknown key (did you mean source?)"),
        (group(tabels=[]), "groups[0].tabels: unknown key (did you mean tables?)"),
        (
            group(tables=[{"source": "a", "copi": 1}]),
            "groups[0].tables[0].copi: unknown key (did you mean copy?)",
        ),
        (
            {**SMALLEST, "server": {"zzz": 1}},
            "server.zzz: unknown key (known here: enabled, host, port, token_env,",
        ),
        ({key: SMALLEST[key] for key in ("source", "groups")}, "lake: is missing"),
        ({**SMALLEST, "source": {}}, "source.dsn: is missing (or dsn_env)"),
        ({**SMALLEST, "source": {"dsn": "a", "dsn_env": "B"}}, "source: has both dsn and dsn_env"),
        ({**SMALLEST, "source": {"dsn_env": "PG_DSN"}}, "source.dsn_env: the variable PG_DSN is not set"),
        ({**SMALLEST, "source": {"dsn_file": "no/such"}}, "source.dsn_file: the file cannot be read"),
        (
            {**SMALLEST, "lake": {**SMALLEST["lake"], "catalog_env": "L"}},
            "lake: has both catalog and catalog_env",
        ),
        ({**SMALLEST, "groups": []}, "groups: needs at least one group"),
        ({**SMALLEST, "groups": [{}]}, "groups[0].name: is missing"),
        ({**SMALLEST, "groups": [{"name": "A b"}]}, "groups[0].name: must be 1 to 40"),
        (group(slot_name="Slot"), "groups[0].slot_name: must be 1 to 63"),
        (group(capture="magic"), "groups[0].capture: must be 'stream', 'poll' or 'auto'"),
        (
            group(capture="auto", plugin="test_decoding"),
            "groups[0]: plugin test_decoding needs capture: poll",
        ),
        (group(flush_interval_ms="soon"), "groups[0].flush_interval_ms: must be a whole number"),
        (group(segment_bytes=0), "groups[0].segment_bytes: input should be greater than or equal to 1"),
        (group(segment_bytes="8 ells"), "groups[0].segment_bytes: could not"),
        (group(tables=[{"source": "a.b.c"}]), "groups[0].tables[0].source: must be a table name"),
        (
            group(tables=[{"source": "a", "target": "x y"}]),
            "groups[0].tables[0].target: must be a table name",
        ),
        (group(tables=[{"source": "a"}, {"source": "public.A"}]), "source table public.a appears 2 times"),
        (
            group(tables=[{"source": "a", "target": "T"}, {"source": "b", "target": "t"}]),
            "the target table main.t appears 2 times",
        ),
        ({**SMALLEST, "groups": [{"name": "a"}, {"name": "a"}]}, "the group name a appears 2 times"),
        (lake(catalog="mysql:db"), "lake.catalog: must be postgres:"),
        (lake(data_path=""), "lake.data_path: must not be empty"),
        (
            lake(data_path="ftp://bucket/x"),
            "lake.data_path: must be a directory, or a URL that begins with s3,",
        ),
        (lake(data_path="file:///srv/x"), "lake.data_path: must be a directory"),
        (lake(inline_rows=-1), "lake.inline_rows: input should be greater than or equal to 0"),
        ({**SMALLEST, "server": {"port": 99999}}, "server.port: input should be less than or equal to 65535"),
        ({**SMALLEST, "server": {"host": "0.0.0.0"}}, "server: host is not a loopback address, so token_env"),
        ({**SMALLEST, "server": {"tls_cert": "a.pem"}}, "server: needs both tls_cert and tls_key"),
        (
            {**SMALLEST, "server": {"stall_seconds": 0}},
            "server.stall_seconds: input should be greater than or equal",
        ),
        ({**SMALLEST, "spark": {"master": "nonsense"}}, "spark.master: must be local[*]"),
        ("source: [", "is not valid YAML in line 1"),
        ("a: 1\na: 2", "duplicate key 'a'"),
        ({**SMALLEST, "source": "host=db"}, "source: must contain keys, such as dsn"),
        ({**SMALLEST, "groups": {"name": "a"}}, "groups: must be a list"),
        (group(tables=["public.orders"]), "groups[0].tables[0]: must contain keys, such as source"),
        (group(name=12), "groups[0].name: must be text"),
        ({**SMALLEST, "server": {"enabled": "maybe"}}, "server.enabled: must be true or false"),
        (group(tables=[{"source": "ä" * 32}]), "groups[0].tables[0].source: has more than the 63 bytes"),
        (
            group(tables=[{"source": "a", "mask": {"b": "hide"}}]),
            "groups[0].tables[0].mask.b: must be hash, redact or {constant: a value}. Fix",
        ),
        ("? [a, b]\n: 1", "is not valid YAML in line 1: a key is not text"),
        ("- 1", "must contain keys"),
        ("", "must contain keys"),
    ],
)
def test_a_mistake_is_refused_by_the_name_of_its_key(values: object, expected: str) -> None:
    """The message names the file, the key and what is wrong with it, in one line."""
    text = problem(values)
    assert expected in text
    assert text.startswith("[config.invalid] aqueduck.yaml")
    assert "\n" not in text


def test_every_mistake_of_a_file_is_named_at_once() -> None:
    """Nobody has to run a command once for each mistake."""
    text = problem({**group(capture="x"), "server": {"port": "y"}})
    assert "groups[0].capture" in text
    assert "server.port" in text


def test_no_secret_is_in_a_message_or_a_repr() -> None:
    """Connection strings are never shown, even if they are in the wrong place."""
    secret = "host=db password=hunter2"
    values = {
        **SMALLEST,
        "source": {"dsn": secret},
        "lake": {"catalog": f"postgres:{secret}", "data_path": "d"},
    }
    assert "hunter2" not in repr(parse(values))
    assert "hunter2" not in problem({**values, "source": {"dsn_env": secret}})
    assert "hunter2" not in problem({**values, "source": {"dsn": [secret]}})
    assert "hunter2" not in problem({**values, "lake": {"catalog": f"mysql:{secret}", "data_path": "d"}})


def test_a_configuration_cannot_be_changed_and_can_be_pickled() -> None:
    """A configuration stays valid in another process."""
    config = parse(SMALLEST)
    with pytest.raises(ValueError, match="frozen"):
        config.groups[0].name = "other"
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_file_is_loaded_with_its_own_directory(tmp_path: Path) -> None:
    """Reading a file resolves its paths against the place where it is."""
    file = tmp_path / "aqueduck.yaml"
    file.write_text(yaml.safe_dump(SMALLEST))
    assert load_config(file).lake.data_path == str(tmp_path / "lake_data")


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    """A wrong path after -c is reported as such."""
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, reason in (
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path, "directory"),
        (binary, "UTF-8"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_config(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.text() | st.dictionaries(st.sampled_from([*SMALLEST, "spark", "server"]), json_values))
def test_whatever_the_file_holds_it_is_a_configuration_or_a_configuration_error(values: object) -> None:
    """No input makes anything but `ConfigError` escape."""
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(values), SyncConfig)


def test_a_plugin_that_only_polling_can_read_is_polled() -> None:
    """P-E09: test_decoding needs no second key."""
    [only] = parse(group(plugin="test_decoding")).groups
    assert only.capture == "poll"


def test_an_object_store_is_named_with_variables_for_its_credentials() -> None:
    """P-F14 for sync: properties are kept unchanged, a secret in the file is refused, a missing variable is named."""
    text = SMALLEST_LAKE.format("s3_secret_access_key_env: S3_SECRET")
    lake = parse_config(text, base_dir=Path("/srv"), env={"S3_SECRET": "geheim"}).lake
    assert (lake.data_path, lake.properties) == ("s3://b/x", {"s3_secret_access_key_env": "S3_SECRET"})
    with pytest.raises(ConfigError, match=r"properties\.s3_secret_access_key_env: the variable S3_SECRET"):
        parse_config(text, base_dir=Path("/srv"), env={})
    with pytest.raises(ConfigError, match="s3_secret_access_key is a credential") as caught:
        parse_config(SMALLEST_LAKE.format("s3_secret_access_key: geheim"), base_dir=Path("/srv"), env={})
    assert "geheim" not in str(caught.value)


SMALLEST_LAKE = """
source: {{ dsn: "dbname=a" }}
lake: {{ catalog: "sqlite:l.db", data_path: "s3://b/x", properties: {{ {} }} }}
groups: [{{ name: g }}]
"""


def documented_keys() -> dict[str, tuple[str, str]]:
    """Default and meaning of every key, from the tables of docs/configuration.md."""
    found: dict[str, tuple[str, str]] = {}
    section = ""
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        if heading := re.fullmatch(r"#+ `([^`]+)`", line):
            section = heading[1]
        elif row := re.fullmatch(r"\| `([^`]+)` \| (.*?) ?\| (.*) \|", line):
            found[f"{section}.{row[1]}"] = (row[2], row[3])
    return found


def model_keys() -> dict[str, FieldInfo]:
    """The fields of the models, by the keys of a file."""
    return {
        ".".join((*path, key_of(section, name))): field
        for path, section in _SECTIONS.items()
        for name, field in section.model_fields.items()
    }


def test_the_document_has_the_defaults_and_the_choices_of_the_models() -> None:
    """docs/configuration.md is written by hand, and compared with the models here."""
    documented, models = documented_keys(), model_keys()
    assert len(documented) > 40
    for key, (default, meaning) in documented.items():
        field = models[key]
        assert field.annotation is not None
        if key == "source.dsn":  # or `dsn_env`, from which it is filled in
            continue
        assert (default == "required") == field.is_required(), key
        if value := re.fullmatch(r"`([^`<]+)`", default):
            expected = TypeAdapter(field.annotation).validate_python(yaml.safe_load(value[1]))
            assert field.get_default(call_default_factory=True) == expected, key
        elif not default:
            assert not field.get_default(call_default_factory=True), key
        for choice in get_args(field.annotation):
            if isinstance(choice, str):
                assert f"`{choice}`" in f"{default} {meaning}", f"{key}: {choice}"
