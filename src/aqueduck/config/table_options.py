"""
A table's command-line options in the form of the configuration file: docs/columns.md.

Pure; the rules are those of `config.sync.TableConfig`, and `model.columns.projection` applies the options.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from aqueduck.config.sections import describe_problems
from aqueduck.config.sync import TableConfig
from aqueduck.model.errors import ConfigError

__all__ = ["check_options", "read_options"]

CONSTANT = "constant:"


def read_options(
    table: str,
    columns: str | None,
    exclude: str | None,
    rename: Sequence[str],
    mask: Sequence[str],
    where: str | None,
    mode: str = "upsert",
    *,
    partition_by: str | None = None,
    sort_by: str | None = None,
    target_file_size: str | None = None,
) -> dict[str, Any]:
    """Options in the form of the file; mistakes are refused with the same messages."""
    given: dict[str, Any] = {
        "columns": _names(columns),
        "exclude": _names(exclude),
        "rename": dict(_pair("--rename", text) for text in rename),
        "mask": {
            name: {"constant": value.removeprefix(CONSTANT)} if value.startswith(CONSTANT) else value
            for name, value in (_pair("--mask", text) for text in mask)
        },
        "where": where or "",
        "partition_by": _keys(partition_by),
        "sort_by": _keys(sort_by),
        "target_file_size": target_file_size or "",
    }
    return check_options(table, {name: value for name, value in given.items() if value}, mode)


def check_options(table: str, options: dict[str, Any], mode: str = "upsert") -> dict[str, Any]:
    """The same options, if a table of this mode may have them."""
    try:
        return TableConfig.model_validate({"source": table, "mode": mode, **options}).options
    except ValidationError as exc:
        raise ConfigError(
            f"{table}: {describe_problems(exc, {(): TableConfig})}", hint="see docs/columns.md"
        ) from None


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] if text else []


def _keys(text: str | None) -> list[str]:
    """Keys that are separated by commas, except for those within parentheses or quotes."""
    found = re.findall(r'(?:[^,("]|\([^)]*\)|"[^"]*")+', text or "")
    return [key.strip() for key in found if key.strip()]


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ConfigError(f"{option} {name} needs a value", hint=f"write it as {option} column=…")
    return name, value
