"""
The configuration of the flow `sync`: its keys, defaults and rules.

`parse_config` is pure; `load_config` adds the file and the process environment. Every mistake is a
`ConfigError` that names the key. `sync.check` verifies that servers can be reached, tables exist and paths
can be written.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from aqueduck.config.credentials import with_secret
from aqueduck.config.layout import LAYOUT_KEYS, FileSize, PartitionKeys, SortKeys, wanted_layout
from aqueduck.config.object_store import Properties, VariableName, read_properties
from aqueduck.config.secret_text import SecretText
from aqueduck.config.sections import (
    MIB,
    SCHEME,
    DataPath,
    Interval,
    LakeTable,
    PostgresTable,
    Secret,
    Section,
    Sections,
    SlotName,
    Text,
    absolute,
    absolute_catalog,
    absolute_data_path,
    describe_problems,
    key_of,
    read_file,
    read_yaml,
    refuse_repeated,
)
from aqueduck.config.server import ServerConfig, TokenConfig
from aqueduck.model.columns.projection import Mask, Projection
from aqueduck.model.errors import ConfigError
from aqueduck.model.layout import WantedLayout
from aqueduck.model.modes import TableMode
from aqueduck.model.schema import TableName, parse_table_name

__all__ = [
    "GroupConfig",
    "LakeConfig",
    "MaintenanceConfig",
    "SourceConfig",
    "SparkConfig",
    "SyncConfig",
    "TableConfig",
    "TracingConfig",
    "VerifyConfig",
    "group_dir",
    "load_config",
    "parse_config",
]

_GROUP_NAME = re.compile(r"[a-z0-9_]{1,40}")
_MASTER = re.compile(r"local(\[(\d+|\*)(,\d+)?\])?|local-cluster\[[\d,]+\]|spark://.+|k8s://.+|yarn")
_PROJECTION = {"columns", "exclude", "rename", "mask", "where"}
_HINT = "see docs/configuration.md for every key"


def _spark_value(value: Any) -> Any:
    """Accept what YAML parses as a boolean or a number; Spark settings are text."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


SparkValue = Annotated[str, BeforeValidator(_spark_value)]


class SourceConfig(Section):
    """The PostgreSQL database to read."""

    dsn: Secret = Field(repr=False)
    """The connection string, also if it was read from the variable that `dsn_env` names."""
    dsn_env: str | None = None
    dsn_file: str | None = None
    """A file that contains the connection string."""
    silence_timeout_seconds: float = Field(default=30.0, ge=1, le=3600)


_PASSWORD = re.compile(r"password\s*=", re.IGNORECASE)


class LakeConfig(Section):
    """The DuckLake to write."""

    catalog: Secret = Field(repr=False)
    """`postgres:…`, `sqlite:PATH`, or the path of a DuckDB file; also if it was read from a variable or a file."""
    catalog_env: str | None = None
    catalog_file: str | None = None
    data_path: DataPath
    inline_rows: int = Field(default=1000, ge=0, le=1_000_000)
    properties: Properties = Field(default_factory=dict)
    """Settings of the object store if `data_path` is in one; credentials are given as names of variables."""

    @field_validator("catalog")
    @classmethod
    def _is_a_known_catalog(cls, value: str) -> str:
        scheme = SCHEME.match(value)
        if scheme and scheme[1] not in ("postgres", "postgresql", "sqlite"):
            raise ValueError("must be postgres:…, sqlite:PATH or the path of a DuckDB file")
        if not scheme and _PASSWORD.search(value):  # reported as a path, it would be shown
            raise ValueError("must begin with postgres: if it is a connection string")
        return value


class ConstantMask(Section):
    """Replaces the column with the same value in every row."""

    constant: Annotated[str, BeforeValidator(_spark_value)]


def _mask(value: Any) -> Any:
    """Report one mistake for a bad value, not one for each form of mask."""
    constant = value.get("constant") if isinstance(value, dict) and len(value) == 1 else None
    if (
        value in ("hash", "redact")
        or isinstance(value, ConstantMask)
        or isinstance(constant, str | int | float)
    ):
        return value
    raise ValueError("must be hash, redact or {constant: a value}")


class TableConfig(Section):
    """One source table and its target; `TableName` normalizes the names."""

    source: PostgresTable
    target: LakeTable = ""
    """By default the source's name in the schema `main`."""
    mode: Literal["upsert", "append", "history", "soft_delete"] = "upsert"
    source_column: Text | None = None
    """
    A column of the target that identifies the source of a row; with it, several tables may have the same
    target.
    """
    source_value: str | None = None
    """This source's value in that column; by default its name."""
    initial_copy: bool = Field(default=True, alias="copy")
    columns: tuple[Text, ...] = ()
    """Only these columns; all if empty."""
    exclude: tuple[Text, ...] = ()
    rename: dict[Text, Text] = Field(default_factory=dict)
    mask: dict[Text, Annotated[Literal["hash", "redact"] | ConstantMask, BeforeValidator(_mask)]] = Field(
        default_factory=dict
    )
    where: str = ""
    partition_by: PartitionKeys = None
    """Partition keys of the target, such as `month(created_at)`; an empty list for none; by default, as they are in the lake."""
    sort_by: SortKeys = None
    """Sort keys of the target, such as `created_at desc`; an empty list for none; by default, as they are in the lake."""
    target_file_size: FileSize = None
    """The size up to which DuckLake inserts into and merges one file; by default, as it is in the lake."""
    adopt: bool = False
    """Whether an existing lake table that Aqueduck did not create, with all its rows, may become the target."""

    @property
    def options(self) -> dict[str, Any]:
        """Columns, names, masks, row filter and layout as the file has them, without defaults."""
        given = self.model_dump(mode="json", include=_PROJECTION | LAYOUT_KEYS)
        return {n: value for n, value in given.items() if value or (n in LAYOUT_KEYS and value is not None)}

    @property
    def layout(self) -> WantedLayout:
        """The target's layout, as far as it is given."""
        return wanted_layout(self.partition_by, self.sort_by, self.target_file_size)

    @property
    def projection(self) -> Projection | None:
        """The options as values; None if the table is replicated unchanged."""
        if not self.options.keys() & _PROJECTION:
            return None
        masks = tuple(
            (name, Mask("constant", mask.constant) if isinstance(mask, ConstantMask) else Mask(mask))
            for name, mask in self.mask.items()
        )
        return Projection(self.columns, self.exclude, tuple(self.rename.items()), masks, self.where.strip())

    @model_validator(mode="after")
    def _names_columns_once(self) -> TableConfig:
        if self.columns and self.exclude:
            raise ValueError("has both columns and exclude: keep one of them")
        if self.where and self.mode != "upsert":
            raise ValueError(f"where filters rows of the mode upsert, not of {self.mode}")
        for key, names in (("columns", self.columns), ("exclude", self.exclude)):
            repeated = [name for name, count in Counter(names).items() if count > 1]
            if repeated:
                raise ValueError(f"{key} names {repeated[0]} more than once")
        for key, mapping in (("rename", self.rename), ("mask", self.mask)):
            for name in mapping:
                if name in self.exclude or (self.columns and name not in self.columns):
                    raise ValueError(f"{key} names {name}, which is not among the lake's columns")
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_in_target(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("target") is not None:
            return values
        try:
            source = parse_table_name(values["source"], default_schema="public")
        except (KeyError, TypeError, ValueError):
            return values  # reported under the key `source`
        return {**values, "target": str(TableName("main", source.name))}

    @model_validator(mode="after")
    def _has_a_column_for_its_value(self) -> TableConfig:
        if self.source_value is not None and self.source_column is None:
            raise ValueError("source_value needs a source_column")
        return self

    @property
    def table_mode(self) -> TableMode:
        """The mode with all its options."""
        value = self.source_table.qualified if self.source_value is None else self.source_value
        return TableMode(self.mode, self.source_column, value if self.source_column is not None else None)

    @property
    def source_table(self) -> TableName:
        """The source table's schema and name."""
        return parse_table_name(self.source, default_schema="public")

    @property
    def target_table(self) -> TableName:
        """The lake table's schema and name."""
        return parse_table_name(self.target, default_schema="main", fold_case=False)


class GroupConfig(Section):
    """Tables that share a slot, a publication and a streaming query, and are committed together."""

    name: str
    capture: Literal["stream", "poll", "auto"] = "auto"
    plugin: Literal["pgoutput", "test_decoding"] = "pgoutput"
    poll_interval_ms: int = Field(default=100, ge=10, le=60_000)
    poll_step_bytes: ByteSize = Field(default=ByteSize(64 * MIB), ge=1 << 16, le=1 << 40)
    catchup_bytes: ByteSize = Field(default=ByteSize(16 * MIB), ge=1, le=1 << 50)
    flush_interval_ms: int = Field(default=1000, ge=0, le=3_600_000)
    stage_bytes_max: ByteSize = Field(default=ByteSize(1024 * MIB), ge=1, le=1 << 50)
    batch_bytes_max: ByteSize = Field(default=ByteSize(512 * MIB), ge=1, le=1 << 50)
    segment_bytes: ByteSize = Field(default=ByteSize(32 * MIB), ge=1, le=1 << 40)
    max_queued_changes: int = Field(default=10_000_000, ge=1, le=1_000_000_000_000)
    fold_concurrency: int = Field(default=64, ge=1, le=1024)
    task_memory: ByteSize = Field(default=ByteSize(160_000_000), ge=64 * MIB, le=1 << 40)
    copy_concurrency: int = Field(default=2, ge=1, le=64)
    copy_chunk_bytes: ByteSize = Field(default=ByteSize(64 * MIB), ge=8192, le=1 << 40)
    on_slot_loss: Literal["stop", "resync"] = "stop"
    on_type_change: Literal["resync", "stop"] = "resync"
    large_transactions: Literal["stream", "whole"] = "stream"
    on_partition_change: Literal["resync", "keep"] = "resync"
    on_recreate: Literal["stop", "resync"] = "stop"
    heartbeat_interval_ms: int = Field(default=0, ge=0, le=3_600_000)
    publication_by: Literal["aqueduck", "user"] = "aqueduck"
    slot_name: SlotName = ""
    """By default `aqueduck_` followed by the group's name."""
    publication: str = Field(default="", min_length=1, max_length=63)
    """By default `aqueduck_` followed by the group's name."""
    partition_by: PartitionKeys = None
    """For tables of the file that have none of their own."""
    sort_by: SortKeys = None
    target_file_size: FileSize = None
    tables: tuple[TableConfig, ...] = ()

    @property
    def users_publication(self) -> str:
        """The publication if the user manages it; otherwise None."""
        return self.publication if self.publication_by == "user" else ""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_names(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not _GROUP_NAME.fullmatch(str(values.get("name"))):
            return values  # reported under the key `name`
        name = f"aqueduck_{values['name']}"
        given = {key: value for key, value in values.items() if value is not None}
        capture = {"capture": "poll"} if given.get("plugin") == "test_decoding" else {}
        return {"slot_name": name, "publication": name, **capture, **given}

    @model_validator(mode="before")
    @classmethod
    def _lays_out_its_tables(cls, values: Any) -> Any:
        """Give the group's layout to its tables, by which it is registered."""
        if not isinstance(values, dict) or not isinstance(values.get("tables"), list | tuple):
            return values
        defaults = {name: values[name] for name in sorted(LAYOUT_KEYS) if values.get(name) is not None}
        tables = [{**defaults, **t} if isinstance(t, dict) else t for t in values["tables"]]
        return {name: value for name, value in values.items() if name not in defaults} | {"tables": tables}

    @model_validator(mode="after")
    def _can_read_its_plugin(self) -> GroupConfig:
        if self.plugin != "pgoutput" and self.capture != "poll":
            raise ValueError(f"plugin {self.plugin} needs capture: poll")
        return self

    @field_validator("name")
    @classmethod
    def _is_a_group_name(cls, value: str) -> str:
        if not _GROUP_NAME.fullmatch(value):
            raise ValueError("must be 1 to 40 of the characters a-z, 0-9 and _")
        return value


class SparkConfig(Section):
    """Where Spark runs, and settings that are passed to it."""

    master: str = "local[*]"
    conf: dict[str, SparkValue] = Field(default_factory=dict)

    @field_validator("master")
    @classmethod
    def _is_a_master(cls, value: str) -> str:
        if not _MASTER.fullmatch(value):
            raise ValueError("must be local[*], local[2], spark://host:7077, k8s://…, yarn or alike")
        return value


class MaintenanceConfig(Section):
    """Limits the number of the lake's files and the age of its snapshots; see docs/maintenance.md."""

    enabled: bool = True
    """Whether the service runs maintenance; `aqueduck maintain` always does."""
    interval_seconds: float = Field(default=600.0, ge=1, le=86_400)
    budget_seconds: float = Field(default=30.0, gt=0, le=86_400)
    delete_share: float = Field(default=0.3, gt=0, le=1)
    """A file is rewritten when this share of its rows is deleted."""
    retention_hours: float | None = Field(default=None, gt=0)
    """Lake snapshots older than this expire; without a value, none expire."""
    readers: tuple[Text, ...] = ()
    """Files of fan-outs that read this lake; changes they have not read yet are kept."""
    grace_hours: float = Field(default=1.0, ge=0)
    """How long files without a lake snapshot are kept for queries that still read them."""
    orphan_hours: float = Field(default=24.0, ge=1)
    """The minimum age at which a file that is in no catalog is deleted."""


class VerifyConfig(Section):
    """When the service compares source and lake; see docs/verify.md."""

    interval: Interval = None
    """How often every table or destination is compared; off: only `aqueduck verify` compares."""
    deep: bool = True
    share: float = Field(default=0.1, gt=0, le=1)
    """The maximum share of time spent comparing, on one core; the service pauses for the rest."""
    pause_lag_seconds: float = Field(default=30.0, gt=0)
    """Comparisons pause while the flow lags by more than this."""


class TracingConfig(Section):
    """Where OpenTelemetry traces of batches are sent."""

    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """The base address of an OTLP receiver over HTTP, such as http://127.0.0.1:4318."""
    service_name: Text = "aqueduck"


class SyncConfig(Section):
    """A whole file of the flow `sync`."""

    source: SourceConfig
    lake: LakeConfig
    groups: tuple[GroupConfig, ...]
    spark: SparkConfig = SparkConfig()
    server: ServerConfig = ServerConfig()
    maintenance: MaintenanceConfig = MaintenanceConfig()
    verify: VerifyConfig = VerifyConfig()
    tracing: TracingConfig = TracingConfig()
    state_dir: Text = ".aqueduck"
    mask_salt_env: VariableName | None = None
    """The name of the variable that holds the salt of masks by hash; never the salt itself."""

    @model_validator(mode="after")
    def _has_groups_and_nothing_twice(self) -> SyncConfig:
        if not self.groups:
            raise ValueError("groups: needs at least one group")
        tables = [table for group in self.groups for table in group.tables]
        refuse_repeated("group name", (group.name for group in self.groups), " under groups")
        refuse_repeated("slot_name", (group.slot_name for group in self.groups), " under groups")
        refuse_repeated("publication", (group.publication for group in self.groups), " under groups")
        refuse_repeated("source table", (table.source for table in tables), " under groups")
        _refuse_shared_targets(tables)
        return self


_SECTIONS: Sections = {
    (): SyncConfig,
    ("source",): SourceConfig,
    ("lake",): LakeConfig,
    ("groups",): GroupConfig,
    ("groups", "tables"): TableConfig,
    ("spark",): SparkConfig,
    ("server",): ServerConfig,
    ("server", "tokens"): TokenConfig,
    ("maintenance",): MaintenanceConfig,
    ("verify",): VerifyConfig,
    ("tracing",): TracingConfig,
}


def load_config(path: str | os.PathLike[str]) -> SyncConfig:
    """Read the file at `path` with the environment of this process."""
    text = read_file(path)
    return parse_config(text, base_dir=Path(path).absolute().parent, env=os.environ, name=str(path))


def parse_config(text: str, *, base_dir: Path, env: Mapping[str, str], name: str = "config") -> SyncConfig:
    """Parse the text of a configuration file; relative paths are resolved against `base_dir`."""
    values = read_yaml(text, name)
    try:
        config = SyncConfig.model_validate(_with_secrets(values, base_dir, env, name))
    except ValidationError as exc:
        raise ConfigError(f"{name}: {describe_problems(exc, _SECTIONS)}", hint=_HINT) from None
    read_properties(config.lake.properties, env, f"{name}: lake: properties.")
    return _with_absolute_paths(config, base_dir)


def setting_names() -> list[str]:
    """Every key as a path such as `groups.tables.source`."""
    return sorted(
        ".".join((*path, key_of(section, field)))
        for path, section in _SECTIONS.items()
        for field in section.model_fields
    )


def _with_secrets(
    values: dict[str, Any], base_dir: Path, env: Mapping[str, str], name: str
) -> dict[str, Any]:
    """Read `source.dsn` and `lake.catalog` from the variables and files that hold them."""
    found = dict(values)
    for section, key in (("source", "dsn"), ("lake", "catalog")):
        if isinstance(found.get(section), dict):
            found[section] = with_secret(found[section], key, base_dir, env, f"{name}: {section}")
    return found


def _with_absolute_paths(config: SyncConfig, base_dir: Path) -> SyncConfig:
    lake = config.lake
    data_path = absolute_data_path(lake.data_path, base_dir)
    paths = {"catalog": SecretText(absolute_catalog(lake.catalog, base_dir)), "data_path": data_path}
    state_dir = absolute(config.state_dir, base_dir)
    readers = tuple(absolute(path, base_dir) for path in config.maintenance.readers)
    maintenance = config.maintenance.model_copy(update={"readers": readers})
    return config.model_copy(
        update={
            "lake": lake.model_copy(update=paths),
            "state_dir": state_dir,
            "server": config.server.with_absolute_paths(base_dir),
            "maintenance": maintenance,
        }
    )


def _refuse_shared_targets(tables: Iterable[TableConfig]) -> None:
    """Refuse a shared target unless a column identifies the source and all sources have the same mode."""
    targets: dict[str, list[TableConfig]] = {}
    for table in tables:
        # DuckDB ignores the case of names.
        targets.setdefault(table.target_table.qualified.lower(), []).append(table)
    for name, sharing in targets.items():
        modes = [table.table_mode for table in sharing]
        if len(sharing) == 1:
            continue
        if any(mode.source_column is None for mode in modes):
            raise ValueError(
                f"the target table {name} appears {len(sharing)} times under groups: give each source a source_column,"
                " or its own target"
            )
        if len({(mode.name, mode.source_column) for mode in modes}) > 1:
            raise ValueError(
                f"the sources of the target table {name} must have the same mode and source_column"
            )
        if len({table.layout for table in sharing}) > 1:
            raise ValueError(
                f"the sources of the target table {name} must have the same partition_by, sort_by and target_file_size"
            )
        refuse_repeated(
            f"source_value of the target {name}", (str(mode.source_value) for mode in modes), " under groups"
        )


def group_dir(config: SyncConfig, group: GroupConfig) -> Path:
    """Where the group keeps its stage, checkpoint and state files."""
    return Path(config.state_dir) / group.name
