"""Which lakes the rows of a table of destinations may name: compared by parts and settings, never by prefix of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from aqueduck.config.fanout import DestinationConfig, FanoutConfig, parse_fanout
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
    """Directories with what is beneath them, and connection strings with these settings, no others and no fewer."""
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
            "destinations_allow is for destinations_table",
        ),
    ],
)
def test_a_file_without_any_places_is_refused(sections: dict[str, Any], named: str) -> None:
    """Nothing would be allowed, so that all rows would be left out."""
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert named in str(caught.value)
    assert "geheim" not in str(caught.value)
