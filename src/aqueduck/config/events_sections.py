"""
The sections of an events file: source, sinks and states, with their keys.

`config.events` reads the file and re-exports these sections for other modules.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, field_validator, model_validator

from aqueduck.config.sections import MIB, Bytes, LakeTable, PostgresTable, Section, SlotName, Text
from aqueduck.config.sync import LakeConfig
from aqueduck.envelopes.envelope import Envelope
from aqueduck.model.schema import parse_lsn

__all__ = [
    "DuckLakeSinkConfig",
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
    "TlsConfig",
]

_URL = re.compile(r"https?://([^\s/?#@]+@)?(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(:\d{1,5})?([/?][^\s#]*)?")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

Seconds = Annotated[float, Field(gt=0)]


class TlsConfig(Section):
    """How the connection is encrypted; if missing, the connection string decides."""

    mode: Literal["disable", "require", "verify_ca", "verify_full"]
    ca_path: str | None = None


class PostgresCdcConfig(Section):
    """The slot to read."""

    connection_url: Text = Field(repr=False)
    connection_url_env: str | None = None
    connection_url_file: str | None = None
    slot_name: SlotName
    publication_name: Text
    create_slot_if_missing: bool = True
    slot_type: Literal["permanent", "temporary"] = "permanent"
    tls: TlsConfig | None = None
    start_lsn: str | None = None
    proto_version: Literal[1] = 1
    capture: Literal["stream", "poll", "auto"] = "auto"
    plugin: Literal["pgoutput", "test_decoding"] = "pgoutput"
    poll_interval_ms: int = Field(default=100, ge=10, le=60_000)
    poll_step_bytes: Bytes = ByteSize(64 * MIB)
    catchup_bytes: Bytes = ByteSize(16 * MIB)
    envelope: Envelope | None = None
    idle_timeout: Seconds | None = None
    max_messages: int | None = Field(default=None, gt=0)
    max_staged_records: int | None = Field(default=None, gt=0)
    status_update_interval: float = Field(default=10.0, ge=1)
    """The server receives a status update every second in any case."""
    tcp_keepalive: int = Field(default=10, ge=0)
    silence_timeout_seconds: float = Field(default=30.0, ge=1, le=3600)
    slot_acquire_retries: int = Field(default=10, ge=0)
    on_unpublished: Literal["stop", "continue"] = "stop"
    """What to do after the publication was re-created, or tables were missing from it for a while."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("tls"), str):
            values = {**values, "tls": {"mode": values["tls"]}}
        if isinstance(values, dict) and values.get("plugin") == "test_decoding":
            values = {"capture": "poll", **values}
        elif isinstance(values, dict) and values.get("slot_type") == "temporary":
            values = {"capture": "stream", **values}
        return values

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
    """Writes JSON lines to a file, with optional rotation."""

    path: Text
    rotate_bytes: Bytes | None = None
    rotate_seconds: Seconds | None = None

    @property
    def rotates(self) -> bool:
        return self.rotate_bytes is not None or self.rotate_seconds is not None


class StdoutSinkConfig(Section):
    """Writes JSON lines to standard output."""


class HttpSinkConfig(Section):
    """Sends batches of events to a webhook."""

    url: Text = Field(repr=False)
    url_env: str | None = None
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    headers_env: dict[str, str] = Field(default_factory=dict)
    """Headers whose values are read from environment variables."""
    signature_secret: Text | None = Field(default=None, repr=False)
    signature_secret_env: str | None = None
    ca_path: str | None = None
    """Certificate authorities that verify the receiver, instead of the system's."""
    client_cert: str | None = None
    client_key: str | None = None
    """By default read from the file `client_cert`."""
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

    @model_validator(mode="after")
    def _has_certificates_for_tls(self) -> HttpSinkConfig:
        if self.client_key is not None and self.client_cert is None:
            raise ValueError("client_key needs client_cert")
        if (self.ca_path or self.client_cert) and not self.url.startswith("https:"):
            raise ValueError("ca_path and client_cert are for a url that begins with https")
        return self


def _option(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


class KafkaSinkConfig(Section):
    """Writes to a Kafka topic."""

    brokers: Text
    topic: Text
    options: dict[str, Annotated[str | int | float, BeforeValidator(_option)]] = Field(
        default_factory=dict, repr=False
    )
    """Settings of librdkafka, such as security.protocol."""
    options_env: dict[str, str] = Field(default_factory=dict)
    timeout: Seconds = 30.0


class PostgresSinkConfig(Section):
    """Writes to a table of a PostgreSQL database, which also stores the bookmark."""

    connection_url: str | None = Field(default=None, repr=False)
    """By default the source database."""
    connection_url_env: str | None = None
    connection_url_file: str | None = None
    table: PostgresTable


class DuckLakeSinkConfig(LakeConfig):
    """Writes to a table of a DuckLake, which also stores the bookmark."""

    table: LakeTable


class FileStateConfig(Section):
    """Stores the bookmark in a file of a directory."""

    path: Text


class PostgresStateConfig(Section):
    """Stores the bookmark in a PostgreSQL table."""

    connection_url: str | None = Field(default=None, repr=False)
    """By default the source database."""
    connection_url_env: str | None = None
    connection_url_file: str | None = None
    table: PostgresTable = "aqueduck_bookmarks"


class LakeStateConfig(LakeConfig):
    """Stores the bookmark in a table of a DuckLake."""


SinkConfig = (
    JsonlSinkConfig
    | StdoutSinkConfig
    | HttpSinkConfig
    | KafkaSinkConfig
    | PostgresSinkConfig
    | DuckLakeSinkConfig
)
StateConfig = FileStateConfig | PostgresStateConfig | LakeStateConfig
