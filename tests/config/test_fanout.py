"""A fan-out file is read as users of such files mean it, or refused with the name of the key."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from aqueduck.config.fanout import (
    DestinationConfig,
    FanoutConfig,
    PartitionConfig,
    assigned,
    is_fanout,
    load_fanout,
    parse_fanout,
)
from aqueduck.config.fanout_roster import LISTED_KEYS, Made, Roster, made_of, values_of
from aqueduck.config.lake_place import LakePlace, lake_address, resolve
from aqueduck.lake.source.allowed_places import AllowedPlaces
from aqueduck.model.errors import ConfigError

BASE = Path("/srv/shop")
ENV = {
    "SOURCE_POSTGRES_URI": "postgresql://u:geheim@db/source",
    "DEST_QUACKSWORTH_POSTGRES_URI": "host=db dbname=q password=geheim",
    "DEST_MALLARDINE_POSTGRES_URI": "postgres:host=db dbname=m",
    "S3_ACCESS_KEY_ID": "key",
    "S3_SECRET_ACCESS_KEY": "geheim",
}
REFERENCE = """
source:
  name: "source"
  postgres_uri_env: "SOURCE_POSTGRES_URI"
  data_path: "s3://source-bucket/data"
  table: "events"
  properties:
    s3_endpoint: "minio:9000"
    s3_access_key_id_env: "S3_ACCESS_KEY_ID"
    s3_secret_access_key_env: "S3_SECRET_ACCESS_KEY"
    s3_use_ssl: "false"
    s3_url_style: "path"
routing:
  field: "company"
  key_columns: ["event_id"]
  seed_mode: "scan"
destinations:
  - id: "quacksworth-lake"
    routing_value: "quacksworth"
    name: "quacksworth_catalog"
    postgres_uri_env: "DEST_QUACKSWORTH_POSTGRES_URI"
    data_path: "s3://quacksworth-data/"
    table: "events"
  - id: "mallardine-lake"
    routing_value: "mallardine"
    name: "mallardine_catalog"
    postgres_uri_env: "DEST_MALLARDINE_POSTGRES_URI"
    data_path: "s3://mallardine-data/"
defaults:
  properties:
    s3_endpoint: "minio:9000"
    s3_use_ssl: "false"
    s3_url_style: "path"
poll:
  interval_seconds: 5
server:
  port: 8000
instance:
  id: "viaduck-0"
  partition:
    mode: "all"
"""
SMALLEST: dict[str, Any] = {
    "source": {"catalog": "sqlite:s.db", "data_path": "s", "table": "events"},
    "routing": {"field": "company"},
    "destinations": [{"id": "a", "routing_value": "a", "catalog": "sqlite:a.db", "data_path": "a"}],
}


def parse(values: object, env: dict[str, str] | None = None) -> FanoutConfig:
    text = values if isinstance(values, str) else yaml.safe_dump(values)
    return parse_fanout(text, base_dir=BASE, env=ENV if env is None else env, name="viaduck.yaml")


def problem(values: object, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(values, env)
    return str(caught.value)


def smallest(section: str, **keys: Any) -> dict[str, Any]:
    return {**SMALLEST, section: {**SMALLEST.get(section, {}), **keys}}


def destination(*changes: dict[str, Any]) -> dict[str, Any]:
    return {**SMALLEST, "destinations": [{**SMALLEST["destinations"][0], **change} for change in changes]}


def test_the_configuration_that_users_know_is_read_unchanged() -> None:
    """The reference file: PostgreSQL catalogs by variable, S3 properties, a table that defaults to the source's."""
    config = parse(REFERENCE)
    assert [d.id for d in config.destinations] == ["quacksworth-lake", "mallardine-lake"]
    assert [config.target_of(d).qualified for d in config.destinations] == ["main.events", "main.events"]
    assert (config.routing.key_columns, config.poll.interval_seconds, config.server.port) == (
        ("event_id",),
        5,
        8000,
    )
    place = resolve(config.destinations[0], config.defaults.properties, ENV)
    assert place == LakePlace(
        catalog="postgres:host=db dbname=q password=geheim",
        data_path="s3://quacksworth-data/",
        properties=(("s3_endpoint", "minio:9000"), ("s3_url_style", "path"), ("s3_use_ssl", "false")),
    )
    source = dict(resolve(config.source, {}, ENV).properties)
    assert source["s3_secret_access_key"] == "geheim"


def test_the_flow_is_inferred_from_the_keys() -> None:
    """A file with routing or destinations is a fan-out."""
    assert is_fanout(yaml.safe_load(REFERENCE))
    assert not is_fanout({"source": {}, "lake": {}, "groups": []})


def test_paths_start_at_the_file() -> None:
    """Relative paths and catalogs are those beside the file."""
    config = parse(SMALLEST)
    assert config.source.catalog == "sqlite:/srv/shop/s.db"
    assert config.destinations[0].data_path == "/srv/shop/a"


def test_the_servers_files_are_beside_the_file() -> None:
    """A certificate and its key, too, wherever the service is started."""
    server = parse(smallest("server", tls_cert="tls/cert.pem", tls_key="/etc/key.pem")).server
    assert (server.tls_cert, server.tls_key) == ("/srv/shop/tls/cert.pem", "/etc/key.pem")


@pytest.mark.parametrize("server", [None, {}, {"host": "localhost"}, {"stall_seconds": 60}])
def test_a_fan_out_listens_on_8000(server: dict[str, Any] | None) -> None:
    """The documented port is the default; a port in the section replaces it."""
    values = SMALLEST if server is None else {**SMALLEST, "server": server}
    assert parse(values).server.port == 8000
    assert parse(smallest("server", port=8642)).server.port == 8642


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (1.5, "1.5"), (True, "true"), ("x", "x")],
    ids=["int", "float", "bool", "text"],
)
def test_routing_values_may_be_written_without_quotes(value: object, text: str) -> None:
    """P-F08: a value that YAML reads as a number or a boolean keeps the text that is in the file."""
    assert parse(destination({"routing_value": value})).destinations[0].routing_value == text


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (destination({}, {}), "the id a appears 2 times"),
        (destination({}, {"id": "b"}), "the routing_value a appears 2 times"),
        (destination({"id": ""}), "destinations[0].id"),
        (destination({"routing_value": ""}), "destinations[0].routing_value"),
        (destination({"routing_value": None}), "destinations[0].routing_value"),
        (destination({"table": "a.b.c"}), "table"),
        (destination({"catalog": None}), "destinations[0]"),
        (destination({"catalog_env": "X"}), "exactly one of"),
        (smallest("routing", field=""), "routing.field"),
        (smallest("routing", key_columns="id"), "routing.key_columns"),
        (smallest("routing", key_columns=["id", "ID"]), "appears 2 times"),
        (smallest("routing", seed_mode="magic"), "routing.seed_mode"),
        (smallest("poll", interval_seconds=0), "poll.interval_seconds"),
        (smallest("poll", interval_seconds="often"), "poll.interval_seconds"),
        (smallest("pool", max_open=0), "pool.max_open"),
        (smallest("source", table=""), "source.table"),
        ({**SMALLEST, "destinations_table": "a.b.c"}, "table"),
        ({**SMALLEST, "dynamic": {"catalog": "{value}", "data_path": "{value}", "table": "a.b.c"}}, "table"),
        ({**SMALLEST, "dynamic": {"catalog_env": "NONE", "metadata_schema": "{value}", "data_path": "{value}"}}, "dynamic: catalog_env"),
        (smallest("instance", partition={"mode": "hash", "total": 2, "ordinal": 2}), "ordinal"),
        (smallest("instance", partition={"mode": "explicit"}), "include"),
        (smallest("instance", partition={"mode": "explicit", "include": ["nobody"]}), "nobody"),
        ({**SMALLEST, "destinations": []}, "destinations"),
        ({**SMALLEST, "sink": {}}, "sink"),
        (smallest("source", tabel="t"), "source.tabel: unknown key (did you mean table?)"),
        (smallest("routing", zzz=1), "routing.zzz: unknown key (known here: field, key_columns,"),
        (destination({"routing_valu": "a"}), "destinations[0].routing_valu: unknown key (did you mean routing_value?)"),
        (smallest("instance", partition={"modus": "all"}), "instance.partition.modus: unknown key (did you mean mode?)"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_by_the_name_of_its_key(values: object, named: str) -> None:
    """P-F14: duplicates, empty strings, wrong types and unknown keys; one line that names the key."""
    text = problem(values)
    assert named in text
    assert "\n" not in text


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """P-F14: each bad file gives one line with a code."""
    (tmp_path / "fanout.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        load_fanout(tmp_path / "fanout.yaml")


def test_a_missing_variable_is_refused_by_name() -> None:
    """P-F14: the message says which variable to set, and for which destination."""
    env = {key: value for key, value in ENV.items() if key != "DEST_MALLARDINE_POSTGRES_URI"}
    text = problem(REFERENCE, env)
    assert "DEST_MALLARDINE_POSTGRES_URI" in text
    assert "mallardine-lake" in text


def test_an_instance_needs_only_the_variables_of_its_own_destinations() -> None:
    """P-F12: an instance that serves half of the destinations has the credentials of that half."""
    mine = REFERENCE.replace('mode: "all"', 'mode: "explicit"\n    include: ["quacksworth-lake"]')
    env = {key: value for key, value in ENV.items() if key != "DEST_MALLARDINE_POSTGRES_URI"}
    assert parse(mine, env).instance.partition.include == ("quacksworth-lake",)


@pytest.mark.parametrize(
    "values",
    [
        smallest("source", properties={"s3_secret_access_key": "geheim"}),
        smallest("defaults", properties={"s3_access_key_id": "geheim"}),
        destination({"catalog": "postgres:host=db password=geheim"}),
        destination({"catalog": "postgresql://u:geheim@db/x"}),
        destination({"catalog": None, "catalog_env": "postgresql://u:geheim@db/x"}),
        destination({"catalog": None, "postgres_uri_env": "host=db password=geheim"}),
    ],
)
def test_credentials_come_through_variables_only(values: object) -> None:
    """P-F14: a secret in the file is refused, and not repeated in the message."""
    assert "geheim" not in problem(values)


def test_secrets_are_not_shown() -> None:
    """Neither a configuration nor a lake's place prints the values of variables."""
    config = parse(REFERENCE)
    place = resolve(config.source, {}, ENV)
    assert "geheim" not in repr(config) + repr(place)


@given(st.lists(st.text(min_size=1), unique=True, max_size=30), st.integers(1, 7))
def test_hash_partitions_share_without_overlap(ids: Iterable[str], total: int) -> None:
    """P-F12: every destination has exactly one instance, the same one each time."""
    parts = [PartitionConfig(mode="hash", total=total, ordinal=n) for n in range(total)]
    for name in ids:
        assert sum(assigned(part, name) for part in parts) == 1


def test_hash_partitions_are_those_that_users_know() -> None:
    """P-F12: md5 of the id modulo the number of instances, so that other tools agree."""
    known = {"a": 0x0CC175B9C0F1B6A831C399E269772661, "abc": 0x900150983CD24FB0D6963F7D28E17F72}  # RFC 1321
    for name, digest in known.items():
        assert assigned(PartitionConfig(mode="hash", total=7, ordinal=digest % 7), name)


@given(st.text(min_size=1), st.text(min_size=1))
def test_a_pattern_gives_every_value_its_own_place(one: str, two: str) -> None:
    """Any value becomes a path below the pattern's; different values never share a lake."""
    values = {**SMALLEST, "dynamic": {"catalog": "sqlite:lakes/{value}.db", "data_path": "lakes/{value}/"}}
    pattern = parse(values).dynamic
    assert pattern is not None
    first, second = pattern.destination(one), pattern.destination(two)
    assert (first.catalog == second.catalog) == (one == two)
    inner = first.data_path.removeprefix("/srv/shop/lakes/").removesuffix("/")
    assert re.fullmatch(r"[-\w%~]+", inner, re.ASCII)


def of_one_database(values: list[str], made: Made = Made()) -> Roster:  # noqa: B008 - a constant
    dynamic = {"catalog_env": "PG", "metadata_schema": "t_{value}", "data_path": "lakes/{value}/"}
    roster = Roster(parse({**SMALLEST, "dynamic": dynamic}, PG), PG, lambda values: list(values), made)
    roster.add_values(values)
    return roster


PG = {"PG": "postgres:dbname=lakes"}


@given(
    st.sets(
        st.text(alphabet="bBcCüÜ", min_size=1, max_size=4) | st.text(min_size=80, max_size=300), max_size=6
    )
)
def test_values_of_one_database_have_schemas_and_files_of_their_own(values: set[str]) -> None:
    """Schemas that differ only in case get different names, and a long value is cut to the length of a name."""
    roster = of_one_database(sorted(values))
    assert roster.left_out == {}
    found = roster.destinations[1:]
    assert len({(d.metadata_schema or "").lower() for d in found}) == len(values)
    assert len({d.data_path for d in found}) == len(values)
    assert max((len(part.encode()) for d in found for part in d.data_path.split("/")), default=0) <= 255
    assert max((len(d.metadata_schema or "") for d in found), default=0) <= 63


def test_what_was_made_under_another_name_keeps_it() -> None:
    """ADR 54: the lake of a value that an earlier version named stays; one that differs in case only gets a place apart."""
    config = parse(
        {
            **SMALLEST,
            "dynamic": {"catalog_env": "PG", "metadata_schema": "t_{value}", "data_path": "l/{value}/"},
        },
        PG,
    )
    assert config.dynamic is not None
    old = config.dynamic.destination("ACME", "before")
    assert old.metadata_schema == "t_ACME"
    assert config.dynamic.destination("acme").metadata_schema == "t_acme"
    made = made_of(config, [old], PG)
    assert values_of(config, made, PG) == ["ACME"]
    roster = Roster(config, PG, lambda values: list(values), made)
    roster.add_values(["ACME", "acme"])
    first, second = (d.metadata_schema or "" for d in roster.destinations[1:])
    assert first == "t_ACME"
    assert re.fullmatch("t_acme-[0-9a-f]{16}", second)
    again = Roster(
        config, PG, lambda values: list(values), made | made_of(config, roster.destinations[1:], PG)
    )
    again.add_values(["acme", "ACME"])
    assert [d.metadata_schema for d in again.destinations[1:]] == [second, first], "in either order"


def test_a_destination_in_the_sources_store_uses_its_credentials() -> None:
    """The reference names credentials for the source only; a destination elsewhere, or with its own, does not get them."""
    config = parse(REFERENCE)
    [first, _] = config.destinations
    inherited = dict(config.place_of(first, ENV).properties)
    assert (inherited["s3_access_key_id"], inherited["s3_secret_access_key"]) == ("key", "geheim")
    elsewhere = first.model_copy(update={"properties": {"s3_endpoint": "other:9000"}})
    assert "s3_access_key_id" not in dict(config.place_of(elsewhere, ENV).properties)
    own = first.model_copy(
        update={"properties": {"s3_access_key_id_env": "MINE", "s3_secret_access_key_env": "MINE"}}
    )
    assert dict(config.place_of(own, {**ENV, "MINE": "m"}).properties)["s3_secret_access_key"] == "m"


def test_rows_of_a_table_are_destinations_or_are_left_out_by_name() -> None:
    """P-F14: a wrong row is reported and does not affect the others; a value that is taken, in any spelling, is refused."""
    config = parse({**SMALLEST, "destinations_table": "tenants"})
    good = {"id": "b", "routing_value": "07", "catalog": "sqlite:/srv/shop/b.db", "data_path": "/srv/shop/b/"}
    rows = [
        good,
        {**good, "id": "same", "routing_value": "7"},
        {**good, "id": "a", "routing_value": "8"},
        {**good, "id": "relative", "data_path": "b/", "routing_value": "9"},
        {"id": "empty"},
        {**good, "id": "word", "routing_value": "seven"},
        {**good, "id": "leak", "routing_value": "10", "catalog": "postgres:dbname=x password=geheim"},
        {**good, "id": "shared", "routing_value": "11", "catalog": "sqlite:/srv/shop//b.db"},
        {**good, "id": "beside", "routing_value": "12", "table": "more"},
        {**good, "id": "elsewhere", "routing_value": "13", "data_path": "/srv/b/"},
    ]
    roster = Roster(
        config,
        {},
        lambda values: ["a" if v == "a" else str(int(v)) if v.isdigit() else None for v in values],
    )
    roster.add_rows(rows, AllowedPlaces(config))
    assert [d.id for d in roster.destinations] == ["a", "b", "beside"]
    assert {
        name: problem.startswith("[config.invalid]") for name, problem in roster.left_out.items()
    } == dict.fromkeys(("same", "a", "relative", "empty", "word", "leak", "shared", "elsewhere"), True)
    assert "geheim" not in str(roster.left_out)
    assert "same table of the same lake as the destination b" in roster.left_out["shared"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (destination({}, {"id": "b", "routing_value": "b"}), "(b): writes the same table of the same lake as the destination a"),
        (destination({"table": "x"}, {"id": "b", "routing_value": "b", "table": "main.X"}), "(b)"),
        (destination({}, {"id": "b", "routing_value": "b", "catalog": "sqlite:./x/../a.db"}), "(b)"),
        (destination({}, {"id": "b", "routing_value": "b", "catalog": None, "catalog_env": "SAME"}), "(b)"),
        (destination({"catalog": "sqlite:s.db"}), "(a): writes the same table of the same lake as the source"),
    ],
)  # fmt: skip
def test_two_that_write_one_table_are_refused(values: object, named: str) -> None:
    """P-F14: they would remove each other's rows; the table identifies them, however its lake is written."""
    text = problem(values, {"SAME": "sqlite:/srv/shop/a.db"})
    assert named in text
    assert "\n" not in text


def test_tables_of_one_lake_and_lakes_of_one_database_are_apart() -> None:
    """Two destinations may share a lake with a table each, or a database with a schema each."""
    two = destination({}, {"id": "b", "routing_value": "b", "table": "b"})
    assert len(parse(two).destinations) == 2
    catalog = {"catalog": "postgres:dbname=x"}
    schemas = destination(
        {**catalog, "metadata_schema": "a"},
        {**catalog, "id": "b", "routing_value": "b", "metadata_schema": "b"},
    )
    assert len(parse(schemas).destinations) == 2


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("postgres:host=db dbname=x", "postgres:dbname=x user=u host=DB port=5432", True),
        ("postgres:host=db dbname=x", "postgresql://u:geheim@db/x", True),
        ("postgres:host=db dbname='x y'", "postgres:postgresql://db:5432/x y?sslmode=require", True),
        ("postgres://db/x?port=5433", "postgres:host=db port=5433 dbname=x", True),
        ("postgres:host=db dbname=x", "postgres:host=db dbname=y", False),
        ("postgres:host=db dbname=x", "postgres:host=db dbname=x port=5433", False),
        ("postgres:host=db dbname=x", "postgres:host=other dbname=x", False),
        ("postgres:service=one", "postgres:service=two", False),
        ("postgres:odd", "postgres:strange", False),
        ("/srv/a.ducklake", "/srv//./a.ducklake", True),
        ("sqlite:/srv/a", "sqlite:/srv/b", False),
    ],
)
def test_a_lake_is_identified_by_its_database_not_by_its_spelling(one: str, two: str, same: bool) -> None:
    """The same address for each form of a connection string and each user; the text holds no credentials."""
    found = [
        lake_address(
            DestinationConfig(id="a", routing_value="a", catalog_env="C", data_path="/d"), {"C": text}
        )
        for text in (one, two)
    ]
    assert (found[0] == found[1]) == same
    assert "geheim" not in str(found)


def test_every_key_is_documented() -> None:
    """docs/fanout.md names every key of a file."""
    text = (Path(__file__).parents[2] / "docs" / "fanout.md").read_text(encoding="utf-8")
    for section in FanoutConfig.model_fields:
        assert f"`{section}`" in text, section
    for name in (
        "field",
        "key_columns",
        "seed_mode",
        "routing_value",
        "metadata_schema",
        "max_open",
        "max_snapshots",
    ):
        assert f"`{name}`" in text, name


def test_every_whole_configuration_in_the_document_is_valid() -> None:
    """The examples of docs/fanout.md work unchanged."""
    text = (Path(__file__).parents[2] / "docs" / "fanout.md").read_text(encoding="utf-8")
    blocks = [
        b for b in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "routing:" in b and "source:" in b
    ]
    assert blocks
    for block in blocks:
        assert parse(block).routing.field


def test_the_reference_document_runs_in_form() -> None:
    """Every key of the reference file is supported; none is ignored."""
    known = yaml.safe_load(REFERENCE)
    assert set(known) <= set(FanoutConfig.model_fields)
    config = parse(REFERENCE)
    assert set(known["source"]) <= config.source.model_fields_set
    assert set(known["destinations"][0]) <= config.destinations[0].model_fields_set


def test_a_catalog_is_read_from_a_file(tmp_path: Path) -> None:
    """A mounted secret holds the text with its password: source, destinations and patterns take it, and nothing shows it."""
    (tmp_path / "catalog").write_text("postgres:host=db dbname=lakes password=geheim\n")
    lake = {"catalog_file": "catalog", "data_path": "x/"}
    values = {
        **SMALLEST,
        "source": {**lake, "metadata_schema": "source", "table": "events"},
        "destinations": [
            {**lake, "id": "a", "routing_value": "a", "metadata_schema": "a", "data_path": "a/"}
        ],
        "dynamic": {**lake, "metadata_schema": "t_{value}", "data_path": "t/{value}/"},
    }
    config = parse_fanout(yaml.safe_dump(values), base_dir=tmp_path, env={})
    assert config.dynamic is not None
    for lake_keys in (config.source, *config.destinations, config.dynamic.destination("v")):
        place = resolve(lake_keys, {}, {})
        assert place.catalog == "postgres:host=db dbname=lakes password=geheim"
        assert "geheim" not in repr(place) + repr(config)
    assert config.lake_of(config.source, {}) == "postgres:db:5432/lakes source"
    (tmp_path / "catalog").unlink()
    with pytest.raises(ConfigError, match="catalog_file: the file cannot be read") as refused:
        parse_fanout(yaml.safe_dump(values), base_dir=tmp_path, env={})
    assert str(tmp_path) not in str(refused.value)


def test_a_row_of_the_table_names_no_file(tmp_path: Path) -> None:
    """The attack: a user who could write the table could have a file of the host read."""
    (tmp_path / "secret").write_text("geheim")
    config = parse({**SMALLEST, "destinations_table": "tenants"})
    roster = Roster(config, {}, lambda values: list(values))
    row = {"id": "b", "routing_value": "b", "catalog_file": f"{tmp_path}/secret", "data_path": "/srv/shop/b/"}
    roster.add_rows([row], AllowedPlaces(config))
    assert "catalog_file is not for rows" in roster.left_out["b"]
    assert "catalog_file" not in LISTED_KEYS


@pytest.mark.parametrize("where", ["source", "destinations", "dynamic"])
def test_the_schema_of_our_own_tables_is_reserved(where: str) -> None:
    """A seed replaces a table: the cursors of destinations must not be one."""
    destination = {
        "catalog": "sqlite:{value}.sqlite",
        "data_path": "{value}/",
        "table": "Aqueduck.fanout_state",
    }
    ways: dict[str, dict[str, Any]] = {
        "source": {"source": {**SMALLEST["source"], "table": "aqueduck.fanout_state"}},
        "destinations": {"destinations": [{**destination, "id": "a", "routing_value": "a"}]},
        "dynamic": {"dynamic": destination},
    }
    with pytest.raises(ConfigError, match="is reserved"):
        parse({**SMALLEST, **ways[where]})
