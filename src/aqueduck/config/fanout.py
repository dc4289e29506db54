"""
The configuration of the flow `fanout`: its keys, defaults and rules.

docs/fanout.md describes all keys. `parse_fanout` is pure: from a text and an environment it returns a
`FanoutConfig` with complete lakes and all variables read. `is_fanout` recognizes a file of this flow by its
keys.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from aqueduck.config.lake_place import LakeKeys, LakePlace, PlainText, lake_address, resolve
from aqueduck.config.layout import FileSize, PartitionKeys, SortKeys, wanted_layout
from aqueduck.config.object_store import Properties, VariableName
from aqueduck.config.sections import (
    RESERVED_SCHEMA,
    DataPath,
    Interval,
    Section,
    Sections,
    Text,
    absolute,
    absolute_catalog,
    absolute_data_path,
    describe_problems,
    read_file,
    read_yaml,
    refuse_repeated,
)
from aqueduck.config.server import ServerConfig, TokenConfig
from aqueduck.config.sync import MaintenanceConfig, SparkConfig, VerifyConfig
from aqueduck.model.errors import ConfigError
from aqueduck.model.layout import WantedLayout
from aqueduck.model.schema import TableName, parse_table_name

__all__ = [
    "PLACEHOLDER",
    "DestinationConfig",
    "DestinationsAllowConfig",
    "DynamicConfig",
    "FanoutConfig",
    "Naming",
    "PartitionConfig",
    "SourceLakeConfig",
    "assigned",
    "file_is_fanout",
    "is_fanout",
    "load_fanout",
    "parse_fanout",
    "refuse_shared",
]

PLACEHOLDER = "{value}"
"""The placeholder for a routing value in patterns."""
_HINT = "see docs/fanout.md for every key"
_UPPER = re.compile("[A-Z]")

Naming = Literal["now", "before", "apart"]
"""
How a pattern names the lake of a value: as for a new value, as an earlier version did, or distinct from a
lake of the same name.
"""


class SourceLakeConfig(LakeKeys):
    """The lake table to read."""

    table: Text

    @property
    def table_name(self) -> TableName:
        return parse_table_name(self.table, default_schema="main", fold_case=False)


class RoutingConfig(Section):
    """The column that routes rows, and the key columns that identify them."""

    field: Text
    key_columns: tuple[Text, ...] = ()
    """If empty, destinations are append-only: rows are never updated or deleted there."""
    seed_mode: Literal["scan", "cdc_replay"] = "scan"

    @field_validator("key_columns", mode="before")
    @classmethod
    def _may_be_left_out(cls, value: Any) -> Any:
        return () if value is None else value

    @field_validator("key_columns")
    @classmethod
    def _has_no_column_twice(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        refuse_repeated("column", (name.lower() for name in value))
        return value


class DestinationConfig(LakeKeys):
    """One lake and the rows that belong to it."""

    id: Text
    routing_value: PlainText
    table: Text | None = None
    """By default the source table's name."""
    partition_by: PartitionKeys = None
    sort_by: SortKeys = None
    target_file_size: FileSize = None

    @field_validator("routing_value", mode="before")
    @classmethod
    def _is_not_null(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("must not be empty; rows without a routing value belong to no destination")
        return value


def _path_part(value: str) -> str:
    """
    A text as one part of a path: characters other than plain letters, digits, - and _ are written as their
    bytes.
    """
    kept = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
    return "".join(chr(b) if b in kept else f"%{b:02X}" for b in value.encode("utf-8", "surrogatepass"))


class DynamicConfig(LakeKeys):
    """A pattern for destinations that are created when their value first appears; `{value}` is the placeholder."""

    id: Text = PLACEHOLDER
    table: Text | None = None
    partition_by: PartitionKeys = None
    sort_by: SortKeys = None
    target_file_size: FileSize = None

    @model_validator(mode="after")
    def _has_placeholders(self) -> DynamicConfig:
        if PLACEHOLDER not in self.id:
            raise ValueError("id needs {value}, so that every destination has its own")
        if PLACEHOLDER not in self.data_path:
            raise ValueError("data_path needs {value}, so that every destination has its own")
        if PLACEHOLDER not in (self.catalog or "") and PLACEHOLDER not in (self.metadata_schema or ""):
            raise ValueError(
                "catalog or metadata_schema needs {value}, so that every lake has its own catalog"
            )
        return self

    def destination(self, value: str, naming: Naming = "now") -> DestinationConfig:
        """The destination of a routing value that is not listed in the file; see `Naming`."""
        safe = _path_part(value)
        digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
        # File names have at most 255 bytes, PostgreSQL names 63; truncated names would turn two lakes into
        # one.
        part = safe if naming == "before" or len(safe) <= 200 else f"{safe[:120]}-{digest[:40]}"
        schema = safe if len(safe) <= 40 else digest[:40]
        # DuckLake accepts only one of several schemas whose names differ only in case.
        if naming == "apart" or (naming == "now" and schema == safe and _UPPER.search(value)):
            schema = f"{safe.lower()[:23]}-{digest[:16]}"
        return DestinationConfig(
            id=self.id.replace(PLACEHOLDER, value),
            routing_value=value,
            postgres_uri_env=self.postgres_uri_env,
            catalog=self.catalog and self.catalog.replace(PLACEHOLDER, part),
            catalog_env=self.catalog_env,
            catalog_file=self.catalog_file,
            metadata_schema=self.metadata_schema and self.metadata_schema.replace(PLACEHOLDER, schema),
            data_path=self.data_path.replace(PLACEHOLDER, part),
            table=self.table,
            properties=self.properties,
            partition_by=self.partition_by,
            sort_by=self.sort_by,
            target_file_size=self.target_file_size,
        )


class DestinationsAllowConfig(Section):
    """
    Places that rows of `destinations_table` may name; missing keys are derived from the file's own
    destinations.
    """

    catalogs: tuple[Text, ...] | None = None
    data_paths: tuple[DataPath, ...] | None = None
    env: tuple[VariableName, ...] | None = None

    @property
    def is_given(self) -> bool:
        return bool(self.model_fields_set)


class DefaultsConfig(Section):
    """Settings that all destinations share."""

    properties: Properties = Field(default_factory=dict, repr=False)
    partition_by: PartitionKeys = None
    sort_by: SortKeys = None
    target_file_size: FileSize = None


class PollConfig(Section):
    """How often the source is polled, and how much one cycle may read."""

    interval_seconds: float = Field(default=5.0, gt=0, le=86_400)
    max_snapshots: int = Field(default=1000, ge=1)


class PoolConfig(Section):
    """Sessions with destinations that a worker keeps open."""

    max_open: int = Field(default=50, ge=1)


class PartitionConfig(Section):
    """The destinations that this instance serves."""

    mode: Literal["all", "explicit", "hash"] = "all"
    include: tuple[Text, ...] = ()
    total: int = Field(default=1, ge=1)
    ordinal: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _is_complete(self) -> PartitionConfig:
        if self.mode == "explicit" and not self.include:
            raise ValueError("include needs the ids of destinations when mode is explicit")
        if self.mode != "explicit" and self.include:
            raise ValueError("include is for mode explicit")
        if self.mode == "hash" and self.ordinal >= self.total:
            raise ValueError("ordinal must be less than total")
        refuse_repeated("id", self.include)
        return self


class InstanceConfig(Section):
    """One of the processes that share the work."""

    id: Text = "aqueduck-0"
    partition: PartitionConfig = PartitionConfig()


class FanoutServerConfig(ServerConfig):
    """The `server` section; its port is that of other DuckLake fan-out tools."""

    port: int = Field(default=8000, ge=0, le=65535)


class FanoutVerifyConfig(VerifyConfig):
    """On by default: a comparison reads only lakes, not a database under load."""

    interval: Interval = 86_400.0
    on_difference: Literal["reseed", "report"] = "reseed"


class FanoutConfig(Section):
    """A whole file of the flow `fanout`."""

    source: SourceLakeConfig
    routing: RoutingConfig
    destinations: tuple[DestinationConfig, ...] = ()
    destinations_table: Text | None = None
    """A table of the source lake whose rows define destinations; its columns are named like their keys."""
    destinations_allow: DestinationsAllowConfig = DestinationsAllowConfig()
    dynamic: DynamicConfig | None = None
    defaults: DefaultsConfig = DefaultsConfig()
    poll: PollConfig = PollConfig()
    pool: PoolConfig = PoolConfig()
    server: FanoutServerConfig = FanoutServerConfig()
    instance: InstanceConfig = InstanceConfig()
    spark: SparkConfig = SparkConfig()
    maintenance: MaintenanceConfig = MaintenanceConfig()
    """Maintenance of the destinations' lakes."""
    verify: FanoutVerifyConfig = FanoutVerifyConfig()
    state_dir: Text = ".aqueduck"

    @model_validator(mode="after")
    def _has_destinations_and_nothing_twice(self) -> FanoutConfig:
        found_later = self.dynamic is not None or self.destinations_table is not None
        if not self.destinations and not found_later:
            raise ValueError(
                "destinations: needs at least one destination, or the key destinations_table or dynamic"
            )
        self._refuse_rows_from_nowhere()
        refuse_repeated("id", (d.id for d in self.destinations))
        refuse_repeated("routing_value", (d.routing_value for d in self.destinations))
        if self.maintenance.readers:
            raise ValueError(
                "maintenance.readers is only for files of sync: it lists the readers of that lake"
            )
        unknown = set(self.instance.partition.include) - {d.id for d in self.destinations}
        if unknown and not found_later:
            raise ValueError(f"instance.partition.include: no destination has the id {min(unknown)}")
        return self

    def _refuse_rows_from_nowhere(self) -> None:
        """
        Require limits for `destinations_table`: its authors must not choose hosts, paths and variables
        freely.
        """
        allow, listed = self.destinations_allow, self.destinations_table is not None
        if allow.is_given and not listed:
            raise ValueError("destinations_allow needs destinations_table")
        if listed and not (allow.is_given or self.destinations or self.dynamic):
            raise ValueError(
                "destinations_table needs destinations_allow with catalogs or env, and data_paths, because the"
                " file lists no destinations that show where lakes may be"
            )

    def place_of(
        self, destination: DestinationConfig, env: Mapping[str, str], where: str | None = None
    ) -> LakePlace:
        """
        The location of the destination's lake; `where` names the place in error messages.

        A destination without credentials in the source's object store uses the source's credentials.
        """
        properties = {**self.defaults.properties, **destination.properties}
        source = self.source.properties
        named = any(key.startswith("s3_access_key_id") for key in properties)
        if not named and properties.get("s3_endpoint") == source.get("s3_endpoint"):
            properties |= {key: value for key, value in source.items() if key.endswith("_env")}
        return resolve(destination, properties, env, where or f"destinations ({destination.id})")

    def target_of(self, destination: DestinationConfig) -> TableName:
        """The destination's table."""
        given = destination.table or self.source.table
        target = parse_table_name(given, default_schema="main", fold_case=False)
        if target.schema.lower() == RESERVED_SCHEMA:
            raise ConfigError(
                f"the table of destination {destination.id} is in the schema {RESERVED_SCHEMA}, which is reserved",
                hint="set the key table of the destination to a table in another schema",
            )
        return target

    def layout_of(self, destination: DestinationConfig) -> WantedLayout:
        """The layout of the destination's table: its own keys, then the defaults."""
        own, default = destination, self.defaults
        return wanted_layout(
            default.partition_by if own.partition_by is None else own.partition_by,
            default.sort_by if own.sort_by is None else own.sort_by,
            default.target_file_size if own.target_file_size is None else own.target_file_size,
        )

    def address_of(self, destination: DestinationConfig, env: Mapping[str, str]) -> str:
        """A text that is equal for the same table of the same lake."""
        return f"{lake_address(destination, env)} {self.target_of(destination).folded}"

    def lake_of(self, lake: LakeKeys, env: Mapping[str, str]) -> str:
        """A text that is equal for lakes that DuckLake treats as the same."""
        return lake_address(_folded(lake), env)

    def claim_of(self, destination: DestinationConfig, env: Mapping[str, str]) -> str:
        """A text that is equal for tables that DuckLake treats as the same: it ignores the case of catalog schemas."""
        return f"{self.lake_of(destination, env)} {self.target_of(destination).folded}"

    def source_claim(self, env: Mapping[str, str]) -> str:
        """The `claim_of` text of the source table."""
        return f"{self.lake_of(self.source, env)} {self.source.table_name.folded}"

    def source_address(self, env: Mapping[str, str]) -> str:
        """The `address_of` text of the source table."""
        return f"{lake_address(self.source, env)} {self.source.table_name.folded}"


def _folded(lake: LakeKeys) -> LakeKeys:
    return lake.model_copy(update={"metadata_schema": lake.metadata_schema and lake.metadata_schema.lower()})


def refuse_shared(taken: dict[str, str], destination_id: str, address: str) -> None:
    """
    Raise if the destination's table is already in `taken`, by address; otherwise add it.

    Two destinations that write one table would delete each other's rows where their keys meet, and change its
    columns.
    """
    if address in taken:
        raise ConfigError(
            f"destinations ({destination_id}): writes the same table of the same lake as {taken[address]}",
            hint="give it another table, metadata_schema or catalog",
        )
    taken[address] = f"the destination {destination_id}"


_SECTIONS: Sections = {
    (): FanoutConfig,
    ("source",): SourceLakeConfig,
    ("routing",): RoutingConfig,
    ("destinations",): DestinationConfig,
    ("destinations_allow",): DestinationsAllowConfig,
    ("dynamic",): DynamicConfig,
    ("defaults",): DefaultsConfig,
    ("poll",): PollConfig,
    ("pool",): PoolConfig,
    ("server",): FanoutServerConfig,
    ("server", "tokens"): TokenConfig,
    ("instance",): InstanceConfig,
    ("instance", "partition"): PartitionConfig,
    ("spark",): SparkConfig,
    ("maintenance",): MaintenanceConfig,
    ("verify",): FanoutVerifyConfig,
}


def is_fanout(values: Mapping[str, Any]) -> bool:
    """Whether the keys of a file belong to this flow."""
    return not {"routing", "destinations", "destinations_table"}.isdisjoint(values)


def assigned(partition: PartitionConfig, destination_id: str) -> bool:
    """
    Whether this instance serves a destination. Every instance computes the same answer; each destination has
    exactly one.
    """
    match partition.mode:
        case "all":
            return True
        case "explicit":
            return destination_id in partition.include
        case "hash":
            digest = hashlib.md5(destination_id.encode(), usedforsecurity=False).hexdigest()
            return int(digest, 16) % partition.total == partition.ordinal


def file_is_fanout(path: Path) -> bool:
    """Whether the file at `path` belongs to this flow; False if it cannot be read."""
    try:
        return is_fanout(read_yaml(read_file(path), str(path)))
    except ConfigError:
        return False


def load_fanout(path: str | os.PathLike[str]) -> FanoutConfig:
    """Read the file at `path` with the environment of this process."""
    return parse_fanout(
        read_file(path), base_dir=Path(path).absolute().parent, env=os.environ, name=str(path)
    )


def parse_fanout(text: str, *, base_dir: Path, env: Mapping[str, str], name: str = "config") -> FanoutConfig:
    """Parse the text of a configuration file; the variables that it names must be set."""
    values = read_yaml(text, name)
    try:
        config = FanoutConfig.model_validate(values)
        config = _with_absolute_paths(config, base_dir)
        _check_places(config, env)
    except ValidationError as exc:
        raise ConfigError(f"{name}: {describe_problems(exc, _SECTIONS)}", hint=_HINT) from None
    except ValueError as exc:
        raise ConfigError(f"{name}: table: {exc}", hint=_HINT) from None
    return config


def _check_places(config: FanoutConfig, env: Mapping[str, str]) -> None:
    """Check that table names are valid, variables are set, and no two destinations write the same table."""
    resolve(config.source, {}, env)
    taken = {config.source_claim(env): "the source"}
    for destination in config.destinations:
        refuse_shared(taken, destination.id, config.claim_of(destination, env))
        if assigned(config.instance.partition, destination.id):
            config.place_of(destination, env)
    if config.dynamic is not None:
        example = config.dynamic.destination("value")
        config.target_of(example)
        config.place_of(example, env, "dynamic")
    if config.destinations_table is not None:
        parse_table_name(config.destinations_table, default_schema="main", fold_case=False)


def _with_absolute_paths(config: FanoutConfig, base_dir: Path) -> FanoutConfig:
    def moved(lake: Any) -> Any:
        update = {
            "data_path": absolute_data_path(lake.data_path, base_dir),
            "catalog": lake.catalog and absolute_catalog(lake.catalog, base_dir),
            "catalog_file": lake.catalog_file and absolute(lake.catalog_file, base_dir),
        }
        return lake.model_copy(update=update)

    allow = config.destinations_allow
    allowed = {
        "catalogs": allow.catalogs and tuple(absolute_catalog(p, base_dir) for p in allow.catalogs),
        "data_paths": allow.data_paths and tuple(absolute_data_path(p, base_dir) for p in allow.data_paths),
    }
    return config.model_copy(
        update={
            "destinations_allow": allow.model_copy(update=allowed),
            "server": config.server.with_absolute_paths(base_dir),
            "source": moved(config.source),
            "destinations": tuple(map(moved, config.destinations)),
            "dynamic": config.dynamic and moved(config.dynamic),
            "state_dir": absolute(config.state_dir, base_dir),
        }
    )
