"""
The configuration of the flow `events`: source, sink and state, with the keys of other JSON CDC tools.

`parse_events` is pure; `load_events` adds the file and the environment. The keys and values of `source` and
`state` match those tools, so that their files work unchanged. Every mistake is a `ConfigError` that names the
key. The sections are in `events_sections`; sections shared by all flows are in `sections`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, ValidationError

from aqueduck.config.credentials import with_secret
from aqueduck.config.events_sections import (
    DuckLakeSinkConfig,
    FileStateConfig,
    HttpSinkConfig,
    JsonlSinkConfig,
    KafkaSinkConfig,
    LakeStateConfig,
    PostgresCdcConfig,
    PostgresSinkConfig,
    PostgresStateConfig,
    SinkConfig,
    StateConfig,
    StdoutSinkConfig,
    TlsConfig,
)
from aqueduck.config.object_store import VARIABLE
from aqueduck.config.sections import (
    MIB,
    Bytes,
    Section,
    Sections,
    Text,
    absolute,
    absolute_catalog,
    absolute_data_path,
    describe_problems,
    read_file,
    read_yaml,
)
from aqueduck.config.server import ServerConfig, TokenConfig
from aqueduck.config.sync import LakeConfig, SparkConfig
from aqueduck.envelopes.envelope import Envelope
from aqueduck.model.errors import ConfigError

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
    """A section with a `type` and a `config` whose keys depend on the type."""

    type: str
    config: dict[str, Any] = Field(default_factory=dict, repr=False)


class _Document(Section):
    """The top-level keys of a file."""

    version: Literal[1] = 1
    name: Text | None = None
    source: _Typed
    sink: _Typed
    state: _Typed | None = None
    envelope: Envelope | None = None
    spark: SparkConfig = SparkConfig()
    server: ServerConfig | None = None
    state_dir: Text | None = None
    flush_interval_ms: int = Field(default=200, ge=0, le=3_600_000)
    segment_bytes: Bytes = ByteSize(32 * MIB)
    stage_bytes_max: Bytes = ByteSize(1024 * MIB)
    batch_bytes_max: Bytes = ByteSize(512 * MIB)


_SECTIONS: Sections = {
    (): _Document,
    ("spark",): SparkConfig,
    ("server",): ServerConfig,
    ("server", "tokens"): TokenConfig,
    **dict.fromkeys([(n,) for n in _TYPES], _Typed),
}


class EventsConfig(Section):
    """A whole file of the flow `events`, with absolute paths."""

    source: PostgresCdcConfig
    sink: SinkConfig
    state: StateConfig
    envelope: Envelope
    spark: SparkConfig
    server: ServerConfig | None
    """If missing, the page uses the default port, provided that the port is free."""
    state_dir: str
    """Stage, checkpoint and state files are in a subdirectory with the slot's name."""
    flush_interval_ms: int
    segment_bytes: int
    stage_bytes_max: int
    batch_bytes_max: int


def is_events(values: Mapping[str, Any]) -> bool:
    """Whether a file belongs to the flow `events`: it has a sink, or a source with a type."""
    source = values.get("source")
    return "sink" in values or (isinstance(source, dict) and "type" in source)


def load_events(path: str | os.PathLike[str]) -> EventsConfig | None:
    """The file at `path` if it belongs to the flow `events`; None for another flow or an unreadable file."""
    try:
        text = read_file(path)
    except ConfigError:
        return None  # the next reader of the file reports the problem
    if not is_events(read_yaml(text, str(path))):
        return None
    return parse_events(text, base_dir=Path(path).absolute().parent, env=os.environ, name=str(path))


def parse_events(text: str, *, base_dir: Path, env: Mapping[str, str], name: str = "config") -> EventsConfig:
    """Turn the text of a file into a configuration."""
    document = _validated(_Document, read_yaml(text, name), (), name)
    source = _section("source", document.source, base_dir, env, name)
    sink = _section("sink", document.sink, base_dir, env, name)
    given = document.state or _Typed(type="file", config={"path": ".aqueduck"})
    state = _with_absolute(_section("state", given, base_dir, env, name), base_dir)
    assert isinstance(source, PostgresCdcConfig)
    if isinstance(sink, PostgresSinkConfig | DuckLakeSinkConfig) and not isinstance(state, FileStateConfig):
        hint = "leave state out; of a state of type file only the directory is used"
        raise ConfigError(f"{name}: a sink of type {document.sink.type} keeps the bookmark itself", hint=hint)
    if document.envelope and source.envelope:
        raise ConfigError(
            f"{name}: envelope is set twice, here and under source.config", hint="keep one of them"
        )
    state_dir = document.state_dir or (state.path if isinstance(state, FileStateConfig) else ".aqueduck")
    values = {key: getattr(document, key) for key in ("spark", "flush_interval_ms", *_SIZES)}
    return EventsConfig(
        source=_with_absolute(source, base_dir),
        sink=_with_absolute(sink, base_dir),
        state=state,
        envelope=document.envelope or source.envelope or "default",
        server=document.server and document.server.with_absolute_paths(base_dir),
        state_dir=absolute(state_dir, base_dir),
        **values,
    )


_SIZES = ("segment_bytes", "stage_bytes_max", "batch_bytes_max")


def setting_names() -> list[str]:
    """Every key as a path such as `sink.jsonl.path`."""
    names = [key for key in _Document.model_fields if key not in _TYPES]
    names += [
        f"{part}.{kind}.{key}"
        for part, kinds in _TYPES.items()
        for kind, section in kinds.items()
        for key in section.model_fields
    ]
    return sorted(names)


_IN_FILES = ("connection_url", "catalog")
"""Keys whose value can be read from a file."""


def _section(part: str, typed: _Typed, base_dir: Path, env: Mapping[str, str], name: str) -> Any:
    kinds = _TYPES[part]
    if typed.type not in kinds:
        raise ConfigError(f"{name}: {part}.type: must be one of {', '.join(kinds)}", hint=_HINT)
    values = typed.config
    for key in _IN_FILES:
        if f"{key}_file" in values:
            values = with_secret(values, key, base_dir, env, f"{name}: {part}.config")
    values = _with_environment(f"{part}.config", values, env, name)
    return _validated(kinds[typed.type], values, (part, "config"), name)


def _validated(section: type[Section], values: Any, prefix: tuple[str, ...], name: str) -> Any:
    try:
        return section.model_validate(values)
    except ValidationError as exc:
        known: Sections = {**_SECTIONS, prefix: section, (*prefix, "tls"): TlsConfig}
        problems = describe_problems(exc, known, prefix=prefix)
        raise ConfigError(f"{name}: {problems}", hint=_HINT) from None


def _with_environment(
    where: str, values: dict[str, Any], env: Mapping[str, str], name: str
) -> dict[str, Any]:
    """Resolve keys ending in `_env`: the key without the ending gets the value of the variable."""
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
    if not isinstance(variable, str) or not VARIABLE.fullmatch(variable):  # it may be a secret: never show it
        raise ConfigError(f"{name}: {where}: must be the name of an environment variable")
    if not env.get(variable):
        raise ConfigError(f"{name}: {where}: the variable {variable} is not set", hint=f"export {variable}=…")
    return env[variable]


def _with_absolute(section: Any, base_dir: Path) -> Any:
    update: dict[str, Any] = {}
    for key in ("path", "dead_letter_path", "ca_path", "client_cert", "client_key"):
        if getattr(section, key, None):
            update[key] = absolute(getattr(section, key), base_dir)
    if isinstance(section, LakeConfig):
        update["catalog"] = absolute_catalog(section.catalog, base_dir)
        update["data_path"] = absolute_data_path(section.data_path, base_dir)
    if isinstance(section, PostgresCdcConfig) and section.tls and section.tls.ca_path:
        tls = {"ca_path": absolute(section.tls.ca_path, base_dir)}
        update["tls"] = section.tls.model_copy(update=tls)
    return section.model_copy(update=update) if update else section
