"""Which lakes the rows of a table of destinations may name: compared by parts and settings, never by prefix of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from aqueduck.config.fanout import DestinationConfig, FanoutConfig, parse_fanout
from aqueduck.config.fanout_roster import NOTHING_MADE, Made, Roster, made_of
from aqueduck.lake.source.allowed_places import AllowedPlaces
from aqueduck.model.errors import ConfigError

ENV = {"TENANTS": "postgres:dbname=tenants", "SECRET": "geheim", "SOURCE": "postgres:dbname=source"}
OWN = {"id": "a", "routing_value": "a", "catalog": "sqlite:a.db", "data_path": "data/a/"}


def config(**sections: Any) -> FanoutConfig:
    values = {
        "source": {"catalog_env": "SOURCE", "data_path": "s", "table": "events"},
        "routing": {"field": "company"},
        "destinations_table": "tenants",
        **sections,
    }
    return parse_fanout(yaml.safe_dump(values), base_dir=Path("/srv/shop"), env=ENV)


def row(**keys: Any) -> DestinationConfig:
    place = {"catalog": "sqlite:/srv/shop/b.db", "data_path": "/srv/shop/data/b"}
    if {"catalog_env", "postgres_uri_env"} & keys.keys():
        del place["catalog"]
    return DestinationConfig(id="b", routing_value="b", **{**place, **keys})


def allows(file: FanoutConfig, **keys: Any) -> bool:
    try:
        AllowedPlaces(file).refuse(row(**keys))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("keys", "allowed"),
    [
        ({}, True),
        ({"data_path": "/srv/shop/data/b/deeper/"}, True),
        ({"data_path": "/srv/shop/data/"}, False),
        ({"data_path": "/srv/shop/data-evil/b"}, False),
        ({"data_path": "/srv/shop/data/../b"}, False),
        ({"data_path": "/srv/shop/data/b/../../../../etc"}, False),
        ({"data_path": "/srv/shop/data/.."}, False),
        ({"data_path": "/srv/shop/data/*"}, False),
        ({"data_path": "/etc/b"}, False),
        ({"data_path": "s3://evil/b"}, False),
        ({"catalog": "sqlite:/srv/b.db"}, False),
        ({"catalog": "/srv/shop/b.db"}, False),
        ({"catalog": "sqlite:/srv/shop/../b.db"}, False),
        ({"catalog": "sqlite:file:///srv/shop/b.db"}, False),
        ({"catalog": "postgres:host=evil dbname=tenants"}, False),
        ({"catalog": "postgresql://evil/tenants"}, False),
        ({"catalog": "postgres:host='"}, False),
        ({"catalog_env": "SECRET"}, False),
        ({"postgres_uri_env": "SOURCE"}, False),
    ],
)
def test_without_a_list_rows_lie_beside_the_files_own_destinations(
    keys: dict[str, Any], allowed: bool
) -> None:
    """Same kind, same directory, and no variable that the destinations do not name."""
    assert allows(config(destinations=[OWN]), **keys) == allowed


def test_without_a_list_the_pattern_and_variables_of_the_file_count() -> None:
    """What `dynamic` could make is allowed to rows, too; the inline PostgreSQL catalogs of a file are not."""
    file = config(
        dynamic={
            "catalog_env": "TENANTS",
            "metadata_schema": "{value}",
            "data_path": "s3://lakes/t-{value}/x/",
        },
        destinations=[{**OWN, "catalog": "postgres:host=db dbname=x", "data_path": "s3://own/"}],
    )
    assert allows(file, catalog_env="TENANTS", data_path="s3://lakes/t-b/x/")
    assert allows(file, postgres_uri_env="TENANTS", data_path="s3://own")
    for data_path in (
        "s3://own/b", "s3://lakes/b/x", "s3://lakes/t-b", "s3://lakes/t-b/x/../../y", "s3://lakes//t-b/x",
        "s3://lakes/t-b/x/?s3_endpoint=evil", "s3://lakes/t-?s3_endpoint=evil/x", "gs://lakes/t-b/x",
    ):  # fmt: skip
        assert not allows(file, catalog_env="TENANTS", data_path=data_path), data_path
    assert not allows(file, catalog="postgres:host=db dbname=x", data_path="s3://own")


LISTED: dict[str, Any] = {
    "catalogs": ["sqlite:lakes/", "postgres:host=db-{value} dbname=t_{value} user=aqueduck"],
    "data_paths": ["/data/tenants", "s3://lakes/eu/"],
    "env": ["SECRET"],
}


@pytest.mark.parametrize(
    ("keys", "allowed"),
    [
        ({"catalog": "sqlite:/srv/shop/lakes/x/y.db"}, True),
        ({"catalog": "sqlite:/srv/shop/b.db"}, False),
        ({"catalog": "postgres:user=aqueduck dbname=t_7 host=db-1"}, True),
        ({"catalog": "postgresql://aqueduck@db-1/t_7"}, True),
        ({"catalog": "postgres:host=db-1.evil dbname=t_7 user=aqueduck"}, False),
        ({"catalog": "postgres:host=db-1,evil dbname=t_7 user=aqueduck"}, False),
        ({"catalog": "postgres:host=db-1 dbname=t_7 user=postgres"}, False),
        ({"catalog": "postgres:host=db-1 dbname=t_7 user=aqueduck hostaddr=10.6.6.6"}, False),
        ({"catalog": "postgres:host=db-1 dbname='t_7 host=evil' user=aqueduck"}, False),
        ({"catalog": "postgres:host=db-1 dbname=t_7 user=aqueduck service=evil"}, False),
        ({"catalog": "postgres:host=db-1 dbname=t_7"}, False),
        ({"catalog_env": "SECRET"}, True),
        ({"catalog_env": "TENANTS"}, False),
        ({"data_path": "/data/tenants"}, True),
        ({"data_path": "/data//tenants/b/"}, True),
        ({"data_path": "/data/tenants-evil"}, False),
        ({"data_path": "/data/tenants/../x"}, False),
        ({"data_path": "s3://lakes/eu/b"}, True),
        ({"data_path": "s3://lakes/europe"}, False),
        ({"data_path": "s3://lakes.evil/eu/b"}, False),
    ],
)
def test_a_list_says_it_all(keys: dict[str, Any], allowed: bool) -> None:
    """A directory allows everything beneath it; a connection string allows exactly its settings."""
    file = config(
        destinations=[{**OWN, "catalog_env": "TENANTS", "catalog": None}], destinations_allow=LISTED
    )
    place = {"catalog": "sqlite:/srv/shop/lakes/b.db", "data_path": "/data/tenants/b"}
    if "catalog_env" in keys:
        del place["catalog"]
    assert allows(file, **place | keys) == allowed


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({}, "destinations_table needs destinations_allow"),
        ({"destinations_allow": {"env": ["host=db password=geheim"]}}, "destinations_allow.env[0]"),
        ({"destinations_allow": {"path": []}}, "destinations_allow.path: unknown key"),
        (
            {"destinations": [OWN], "destinations_table": None, "destinations_allow": {"env": []}},
            "destinations_allow needs destinations_table",
        ),
    ],
)
def test_a_file_without_any_places_is_refused(sections: dict[str, Any], named: str) -> None:
    """Nothing would be allowed, so that all rows would be left out."""
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert named in str(caught.value)
    assert "geheim" not in str(caught.value)


def roster(file: FanoutConfig, *rows: dict[str, str], made: Made = NOTHING_MADE) -> Roster:
    """Rows without a catalog have one of their own."""
    found = Roster(file, ENV, lambda values: list(values), made)
    place = {"data_path": "/srv/shop/data/b"}
    given = [
        {"id": f"row {i}", "routing_value": f"v{i}", **place, **row}
        | ({} if {"catalog", "catalog_env"} & row.keys() else {"catalog": f"sqlite:/srv/shop/row{i}.db"})
        for i, row in enumerate(rows)
    ]
    found.add_rows(given, AllowedPlaces(file))
    return found


@pytest.mark.parametrize(
    ("row", "owner"),
    [
        ({"data_path": "/srv/shop/data/a"}, "data_path overlaps the data_path of the destination a"),
        (
            {"data_path": "/srv/shop/data//a/main/t/"},
            "data_path overlaps the data_path of the destination a",
        ),
        (
            {"data_path": "/srv/shop/data/deep"},
            "data_path overlaps the data_path of the destination deep",
        ),
        ({"data_path": "/srv/shop/data/s/t"}, "data_path overlaps the data_path of the source"),
        ({"catalog": "sqlite:/srv/shop/a.db", "table": "more"}, "belongs to the destination a"),
        (
            {"catalog_env": "TENANTS", "metadata_schema": "Theirs", "table": "more"},
            "belongs to the destination pg",
        ),
        ({"catalog_env": "SOURCE", "metadata_schema": "SRC", "table": "more"}, "belongs to the source"),
    ],
)
def test_a_row_gets_nothing_that_others_have(row: dict[str, str], owner: str) -> None:
    """The attack: a row named another tenant's lake or the source's with a table of its own, or a directory in which their files lie."""
    file = config(
        source={"catalog_env": "SOURCE", "metadata_schema": "src", "data_path": "data/s", "table": "events"},
        destinations=[
            OWN,
            {"id": "deep", "routing_value": "d", "catalog": "sqlite:d.db", "data_path": "data/deep/er/"},
            {"id": "pg", "routing_value": "p", "catalog_env": "TENANTS", "metadata_schema": "theirs", "data_path": "pg/"},
        ],
        destinations_allow={"catalogs": ["sqlite:."], "data_paths": ["data"], "env": ["TENANTS", "SOURCE"]},
    )  # fmt: skip
    found = roster(file, row, {"data_path": "/srv/shop/data/well"})
    assert [d.id for d in found.destinations] == ["a", "deep", "pg", "row 1"]
    assert owner in found.left_out["row 0"]


def test_rows_share_a_lake_but_no_directory_of_another_lake() -> None:
    """Several tables of one lake are one lake; two catalogs in one directory are not."""
    lake = {"catalog": "sqlite:/srv/shop/x.db", "data_path": "/srv/shop/data/x"}
    found = roster(
        config(destinations=[OWN]),
        lake,
        {**lake, "table": "more"},
        {"data_path": "/srv/shop/data/x"},
        {"data_path": "/srv/shop/data/x/y"},
    )
    assert [d.id for d in found.destinations] == ["a", "row 0", "row 1"]
    assert set(found.left_out) == {"row 2", "row 3"}


def test_a_row_gets_no_lake_that_the_pattern_made() -> None:
    """A tenant of the pattern keeps its lake, unless the row is for the same value."""
    file = config(dynamic={"catalog": "sqlite:t/{value}.db", "data_path": "t/{value}/"})
    assert file.dynamic is not None
    made = made_of(file, [file.dynamic.destination("acme")], ENV)
    acme = {"catalog": "sqlite:/srv/shop/t/acme.db", "data_path": "/srv/shop/t/acme"}
    found = roster(file, acme, {**acme, "routing_value": "acme"}, made=made)
    assert [d.id for d in found.destinations] == ["row 1"]
    assert "belongs to the destination acme" in found.left_out["row 0"]


def test_links_count_as_what_they_lead_to(tmp_path: Path) -> None:
    """The attack: a link in an allowed directory led rows out of it, or into another tenant's files."""
    for name in ("shop/data/a", "shop/data/b", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "srv").symlink_to(tmp_path / "shop")  # the administrator's own link
    (tmp_path / "shop/data/out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "shop/data/theirs").symlink_to("a")
    (tmp_path / "shop/link.db").symlink_to(tmp_path / "elsewhere/x.db")
    own = {
        "id": "a",
        "routing_value": "a",
        "catalog": f"sqlite:{tmp_path}/srv/a.db",
        "data_path": f"{tmp_path}/srv/data/a",
    }
    file = config(destinations=[own])
    data = f"{tmp_path}/srv/data"
    rows = [
        {"catalog": f"sqlite:{tmp_path}/srv/{name}.db", "data_path": path}
        for name, path in (
            ("b", f"{data}/b"), ("c", f"{data}/c/new"), ("d", f"{data}/out"), ("e", f"{data}/out/in"),
            ("f", f"{data}/theirs"), ("link", f"{data}/g"),
        )
    ]  # fmt: skip
    found = roster(file, *rows)
    assert [d.id for d in found.destinations] == ["a", "row 0", "row 1"]
    assert "overlaps the data_path of the destination a" in found.left_out["row 4"]
    assert all("does not allow" in found.left_out[f"row {i}"] for i in (2, 3, 5))
    wider = {"data_paths": [data, f"{tmp_path}/elsewhere"], "catalogs": [f"sqlite:{tmp_path}/srv"]}
    assert "row 2" in {
        d.id for d in roster(config(destinations=[own], destinations_allow=wider), *rows).destinations
    }
