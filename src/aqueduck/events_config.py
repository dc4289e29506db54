"""
The configuration of the flow `events`: a source, a sink, a state, as users of JSON CDC tools write them.

`parse_events` is pure, `load_events` adds the file and the environment.  The keys and words of `source` and
`state` are those of such tools, so that their files run unchanged; every mistake is a `ConfigError` that
names the key.  The flow `sync` is in `config`, whose helpers are used here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, ValidationError, field_validator, model_validator

from aqueduck.config import (
    _SLOT_NAME,
    _VARIABLE,
    MIB,
    Bytes,
    LakeConfig,
    Section,
    Sections,
    SparkConfig,
    Text,
    _absolute,
    _absolute_catalog,
    _describe,
    _read_yaml,
)
from aqueduck.envelope import Envelope
from aqueduck.errors import ConfigError
from aqueduck.schema import parse_lsn, parse_table_name

__all__ = [
    "DuckLakeSinkConfig",
    "EventsConfig",
    "FileStateConfig",
    "HttpSinkConfig",
    "JsonlSinkConfig",
    "KafkaSinkConfig",
    "LakeStateConfig",
    "PostgresCdcConfig",
    "PostgresSinkConfig",
    "PostgresStateConfig",
    "SinkConfig",
    "StateConfig",
    "StdoutSinkConfig",
    "is_events",
    "load_events",
    "parse_events",
    "setting_names",
]

_HINT = "see docs/events.md for every key"
_URL = re.compile(r"https?://([^\s/?#@]+@)?(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(:\d{1,5})?([/?][^\s#]*)?")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

Seconds = Annotated[float, Field(gt=0)]


class TlsConfig(Section):
    """How the connection is encrypted; without it, as the connection string says."""

    mode: Literal["disable", "require", "verify_ca", "verify_full"]
    ca_path: str | None = None


class PostgresCdcConfig(Section):
    """The slot to read."""

    connection_url: Text = Field(repr=False)
    connection_url_env: str | None = None
    slot_name: str
    publication_name: Text
    create_slot_if_missing: bool = True
    slot_type: Literal["permanent", "temporary"] = "permanent"
    tls: TlsConfig | None = None
    start_lsn: str | None = None
    proto_version: Literal[1] = 1
    capture: Literal["stream", "poll", "auto"] = "stream"
    plugin: Literal["pgoutput", "test_decoding"] = "pgoutput"
    poll_interval_ms: int = Field(default=100, ge=10, le=60_000)
    poll_step_bytes: Bytes = ByteSize(64 * MIB)
    catchup_bytes: Bytes = ByteSize(64 * MIB)
    envelope: Envelope | None = None
    idle_timeout: Seconds | None = None
    max_messages: int | None = Field(default=None, gt=0)
    max_staged_records: int | None = Field(default=None, gt=0)
    status_update_interval: Seconds = 10.0
    tcp_keepalive: int = Field(default=60, ge=0)
    slot_acquire_retries: int = Field(default=10, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("tls"), str):
            values = {**values, "tls": {"mode": values["tls"]}}
        if isinstance(values, dict) and values.get("plugin") == "test_decoding":
            values = {"capture": "poll", **values}
        return values

    @field_validator("slot_name")
    @classmethod
    def _is_a_slot_name(cls, value: str) -> str:
        if not _SLOT_NAME.fullmatch(value):
            raise ValueError("must be 1 to 63 of the characters a-z, 0-9 and _")
        return value

    @field_validator("start_lsn")
    @classmethod
    def _is_a_position(cls, value: str | None) -> str | None:
        if value is not None:
            parse_lsn(value)
        return value

    @model_validator(mode="after")
    def _speaks_before_it_gives_up(self) -> PostgresCdcConfig:
        given = "status_update_interval" in self.model_fields_set
        if given and self.idle_timeout is not None and self.status_update_interval >= self.idle_timeout:
            raise ValueError("status_update_interval must be less than idle_timeout")
        return self

    @model_validator(mode="after")
    def _can_be_read(self) -> PostgresCdcConfig:
        if self.plugin != "pgoutput" and self.capture != "poll":
            raise ValueError(f"plugin {self.plugin} needs capture: poll")
        if self.capture != "stream" and self.slot_type == "temporary":
            raise ValueError("a temporary slot can only be read with capture: stream")
        return self


class JsonlSinkConfig(Section):
    """JSON lines in a file, or in files that are rotated."""

    path: Text
    rotate_bytes: Bytes | None = None
    rotate_seconds: Seconds | None = None

    @property
    def rotates(self) -> bool:
        return self.rotate_bytes is not None or self.rotate_seconds is not None


class StdoutSinkConfig(Section):
    """JSON lines on standard output."""


class HttpSinkConfig(Section):
    """A webhook that takes batches of events."""

    url: Text = Field(repr=False)
    url_env: str | None = None
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    headers_env: dict[str, str] = Field(default_factory=dict)
    """Headers whose value is in an environment variable."""
    batch_size: int = Field(default=100, ge=1, le=500)
    timeout: Seconds = 10.0
    retries: int = Field(default=5, ge=0)
    backoff: Seconds = 0.5
    dead_letter_path: str | None = None

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        if not _URL.fullmatch(value):
            raise ValueError("must be a URL such as https://host/path")
        return value

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _HEADER.fullmatch(name) or "\n" in text or "\r" in text:
                raise ValueError("must be names and values of HTTP headers")
        return value


def _option(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


class KafkaSinkConfig(Section):
    """A Kafka topic."""

    brokers: Text
    topic: Text
    options: dict[str, Annotated[str | int | float, BeforeValidator(_option)]] = Field(
        default_factory=dict, repr=False
    )
    """Settings of librdkafka, such as security.protocol."""
    options_env: dict[str, str] = Field(default_factory=dict)
    timeout: Seconds = 30.0


class PostgresSinkConfig(Section):
    """A table of a PostgreSQL database, which keeps the bookmark too."""

    connection_url: str | None = Field(default=None, repr=False)
    """By default the source's."""
    connection_url_env: str | None = None
    table: str

    @field_validator("table")
    @classmethod
    def _is_a_table(cls, value: str) -> str:
        return str(parse_table_name(value, default_schema="public"))


class DuckLakeSinkConfig(LakeConfig):
    """A table of a DuckLake, which keeps the bookmark too."""

    table: str

    @field_validator("table")
    @classmethod
    def _is_a_table(cls, value: str) -> str:
        return str(parse_table_name(value, default_schema="main", fold_case=False))


class FileStateConfig(Section):
    """The bookmark in a file of a directory."""

    path: Text


class PostgresStateConfig(Section):
    """The bookmark in a PostgreSQL table."""

    connection_url: str | None = Field(default=None, repr=False)
    """By default the source's."""
    connection_url_env: str | None = None
    table: str = "aqueduck_bookmarks"

    @field_validator("table")
    @classmethod
    def _is_a_table(cls, value: str) -> str:
        return str(parse_table_name(value, default_schema="public"))


class LakeStateConfig(LakeConfig):
    """The bookmark in a table of a DuckLake."""


SinkConfig = (
    JsonlSinkConfig
    | StdoutSinkConfig
    | HttpSinkConfig
    | KafkaSinkConfig
    | PostgresSinkConfig
    | DuckLakeSinkConfig
)
StateConfig = FileStateConfig | PostgresStateConfig | LakeStateConfig

_TYPES: Mapping[str, Mapping[str, type[Section]]] = {
    "source": {"postgres-cdc": PostgresCdcConfig},
    "sink": {
        "jsonl": JsonlSinkConfig,
        "stdout": StdoutSinkConfig,
        "http": HttpSinkConfig,
        "kafka": KafkaSinkConfig,
        "postgres": PostgresSinkConfig,
        "ducklake": DuckLakeSinkConfig,
    },
    "state": {"file": FileStateConfig, "postgres": PostgresStateConfig, "lake": LakeStateConfig},
}


class _Typed(Section):
    """A `type`, and a `config` whose keys depend on it."""

    type: str
    config: dict[str, Any] = Field(default_factory=dict, repr=False)


class _Document(Section):
    """The outer keys of a file."""

    version: Literal[1] = 1
    name: Text | None = None
    source: _Typed
    sink: _Typed
    state: _Typed | None = None
    envelope: Envelope | None = None
    spark: SparkConfig = SparkConfig()
    state_dir: Text | None = None
    flush_interval_ms: int = Field(default=200, ge=0, le=3_600_000)
    segment_bytes: Bytes = ByteSize(32 * MIB)
    stage_bytes_max: Bytes = ByteSize(1024 * MIB)
    batch_bytes_max: Bytes = ByteSize(512 * MIB)


_SECTIONS: Sections = {
    (): _Document,
    ("spark",): SparkConfig,
    **dict.fromkeys([(n,) for n in _TYPES], _Typed),
}


class EventsConfig(Section):
    """A whole file of the flow `events`, its paths absolute."""

    source: PostgresCdcConfig
    sink: SinkConfig
    state: StateConfig
    envelope: Envelope
    spark: SparkConfig
    state_dir: str
    """Where stage, checkpoint and notes are, in a directory of the slot's name."""
    flush_interval_ms: int
    segment_bytes: int
    stage_bytes_max: int
    batch_bytes_max: int


def is_events(values: Mapping[str, Any]) -> bool:
    """Whether a file is of the flow `events`: it has a sink, or a source with a type."""
    source = values.get("source")
    return "sink" in values or (isinstance(source, dict) and "type" in source)


def load_events(path: str | os.PathLike[str]) -> EventsConfig | None:
    """The file at `path` if it is of the flow `events`; None for another flow, or if it cannot be read."""
    file = Path(path).absolute()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None  # whoever reads it next says why
    if not is_events(_read_yaml(text, str(path))):
        return None
    return parse_events(text, base_dir=file.parent, env=os.environ, name=str(path))


def parse_events(text: str, *, base_dir: Path, env: Mapping[str, str], name: str = "config") -> EventsConfig:
    """Turn the text of a file into a configuration."""
    document = _validated(_Document, _read_yaml(text, name), (), name)
    source = _section("source", document.source, env, name)
    sink = _section("sink", document.sink, env, name)
    given = document.state or _Typed(type="file", config={"path": ".aqueduck"})
    state = _with_absolute(_section("state", given, env, name), base_dir)
    assert isinstance(source, PostgresCdcConfig)
    if isinstance(sink, PostgresSinkConfig | DuckLakeSinkConfig) and not isinstance(state, FileStateConfig):
        hint = "leave state out; of a state of type file only the directory is used"
        raise ConfigError(f"{name}: a sink of type {document.sink.type} keeps the bookmark itself", hint=hint)
    if document.envelope and source.envelope:
        raise ConfigError(f"{name}: envelope stands twice, also under source.config", hint="keep one of them")
    state_dir = document.state_dir or (state.path if isinstance(state, FileStateConfig) else ".aqueduck")
    values = {key: getattr(document, key) for key in ("spark", "flush_interval_ms", *_SIZES)}
    return EventsConfig(
        source=_with_absolute(source, base_dir),
        sink=_with_absolute(sink, base_dir),
        state=state,
        envelope=document.envelope or source.envelope or "default",
        state_dir=_absolute(state_dir, base_dir),
        **values,
    )


_SIZES = ("segment_bytes", "stage_bytes_max", "batch_bytes_max")


def setting_names() -> list[str]:
    """Every key, as a path such as `sink.jsonl.path`."""
    names = [key for key in _Document.model_fields if key not in _TYPES]
    names += [
        f"{part}.{kind}.{key}"
        for part, kinds in _TYPES.items()
        for kind, section in kinds.items()
        for key in section.model_fields
    ]
    return sorted(names)


def _section(part: str, typed: _Typed, env: Mapping[str, str], name: str) -> Any:
    kinds = _TYPES[part]
    if typed.type not in kinds:
        raise ConfigError(f"{name}: {part}.type: must be one of {', '.join(kinds)}", hint=_HINT)
    values = _with_environment(f"{part}.config", typed.config, env, name)
    return _validated(kinds[typed.type], values, (part, "config"), name)


def _validated(section: type[Section], values: Any, prefix: tuple[str, ...], name: str) -> Any:
    try:
        return section.model_validate(values)
    except ValidationError as exc:
        known: Sections = {**_SECTIONS, prefix: section, (*prefix, "tls"): TlsConfig}
        problems = [
            _describe({**problem, "loc": (*prefix, *problem["loc"])}, known)
            for problem in exc.errors(include_url=False, include_input=False)
        ]
        raise ConfigError(f"{name}: {'; '.join(problems)}", hint=_HINT) from None


def _with_environment(
    where: str, values: dict[str, Any], env: Mapping[str, str], name: str
) -> dict[str, Any]:
    """Put the values of the variables that keys ending in `_env` name into the keys without it."""
    found = dict(values)
    for key, given in values.items():
        if not key.endswith("_env"):
            continue
        plain = key.removesuffix("_env")
        if isinstance(given, dict):
            named = {k: _variable(f"{where}.{key}.{k}", v, env, name) for k, v in given.items()}
            found[plain] = {**(values.get(plain) or {}), **named}
        elif values.get(plain) is not None:
            raise ConfigError(f"{name}: {where}: has both {plain} and {key}", hint="keep one of them")
        elif given is not None:
            found[plain] = _variable(f"{where}.{key}", given, env, name)
    return found


def _variable(where: str, variable: Any, env: Mapping[str, str], name: str) -> str:
    if not isinstance(variable, str) or not _VARIABLE.fullmatch(
        variable
    ):  # it may be a secret: never show it
        raise ConfigError(f"{name}: {where}: must be the name of an environment variable")
    if not env.get(variable):
        raise ConfigError(f"{name}: {where}: the variable {variable} is not set", hint=f"export {variable}=…")
    return env[variable]


def _with_absolute(section: Any, base_dir: Path) -> Any:
    update: dict[str, Any] = {}
    for key in ("path", "dead_letter_path"):
        if getattr(section, key, None):
            update[key] = _absolute(getattr(section, key), base_dir)
    if isinstance(section, LakeConfig):
        update["catalog"] = _absolute_catalog(section.catalog, base_dir)
        if "://" not in section.data_path:
            update["data_path"] = _absolute(section.data_path, base_dir)
    if isinstance(section, PostgresCdcConfig) and section.tls and section.tls.ca_path:
        tls = {"ca_path": _absolute(section.tls.ca_path, base_dir)}
        update["tls"] = section.tls.model_copy(update=tls)
    return section.model_copy(update=update) if update else section
