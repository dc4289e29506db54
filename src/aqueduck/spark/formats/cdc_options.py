"""Read and check the options of `postgres_cdc`; docs/spark.md explains them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from aqueduck.config.secret_text import SecretText
from aqueduck.envelopes.envelope import ENVELOPES, Envelope
from aqueduck.model.errors import ConfigError
from aqueduck.model.schema import TableName, parse_lsn
from aqueduck.spark.formats.source_options import Options

__all__ = ["CDC_OPTIONS", "CdcOptions"]

CDC_OPTIONS = (
    "dsn", "dsn_env", "dsn_file", "slot", "publication", "table", "tables", "envelope", "create", "starting_lsn",
    "max_rows_per_trigger", "max_bytes_per_trigger", "idle_seconds", "stage_dir", "stage_bytes",
    "capture", "plugin", "poll_interval_ms", "poll_step_bytes", "catchup_bytes",
    "silence_timeout_seconds",
)  # fmt: skip

_SLOT = re.compile(r"[a-z0-9_]{1,63}")
BATCH_BYTES = 256 << 20
STEP_BYTES = 64 << 20
CATCHUP_BYTES = 16 << 20
CAPTURES = ("stream", "poll", "auto")
PLUGINS = ("pgoutput", "test_decoding")


@dataclass(frozen=True)
class CdcOptions:
    """The options of a query of `postgres_cdc`."""

    dsn: SecretText = field(repr=False)
    slot: str
    publication: str
    table: TableName | None
    """If set, rows have the columns of this table."""
    tables: tuple[TableName, ...]
    """The tables to read; if empty, all tables of the publication."""
    envelope: Envelope | None
    create: bool
    start: int | None
    rows_max: int | None
    bytes_max: int
    idle_seconds: int
    stage_dir: str | None
    stage_bytes_max: int
    capture: str
    plugin: str
    poll_interval_seconds: float
    poll_step_bytes: int
    catchup_bytes: int
    silence_timeout_seconds: float

    @property
    def table_names(self) -> list[str]:
        return [str(table) for table in self.tables]

    @classmethod
    def read(cls, given: Mapping[str, str]) -> CdcOptions:
        options = Options("postgres_cdc", given, CDC_OPTIONS)
        slot = options.needed("slot")
        if not _SLOT.fullmatch(slot):
            raise options.wrong("slot", "a name of at most 63 lowercase letters, digits and underscores")
        one = options.table("table", default_schema="public") if options.text("table") else None
        tables = options.tables("tables")
        envelope: Envelope | None = options.choice("envelope", ENVELOPES)
        if one is not None and (tables or envelope):
            raise ConfigError("postgres_cdc: the option table cannot be combined with tables or envelope")
        plugin = options.choice("plugin", PLUGINS) or "pgoutput"
        capture = options.choice("capture", CAPTURES) or ("stream" if plugin == "pgoutput" else "poll")
        if plugin != "pgoutput" and capture != "poll":
            raise ConfigError(f"postgres_cdc: the plugin {plugin} requires the option capture = poll")
        bytes_max = options.size("max_bytes_per_trigger") or BATCH_BYTES
        return cls(
            dsn=options.secret("dsn"),
            slot=slot,
            publication=options.needed("publication"),
            table=one,
            tables=tables if one is None else (one,),
            envelope=envelope,
            create=options.flag("create"),
            start=_position(options),
            rows_max=options.number("max_rows_per_trigger"),
            bytes_max=bytes_max,
            idle_seconds=60 if (idle := options.number("idle_seconds")) is None else idle,
            stage_dir=options.text("stage_dir"),
            stage_bytes_max=max(options.size("stage_bytes") or 1 << 30, 2 * bytes_max),
            capture=capture,
            plugin=plugin,
            poll_interval_seconds=(options.number("poll_interval_ms", least=10) or 100) / 1000,
            poll_step_bytes=options.size("poll_step_bytes") or STEP_BYTES,
            catchup_bytes=options.size("catchup_bytes") or CATCHUP_BYTES,
            silence_timeout_seconds=options.number("silence_timeout_seconds", least=1) or 30,
        )


def _position(options: Options) -> int | None:
    text = options.text("starting_lsn")
    try:
        return None if text is None else parse_lsn(text)
    except ValueError:
        raise options.wrong("starting_lsn", "a position such as 0/16A4F88") from None
