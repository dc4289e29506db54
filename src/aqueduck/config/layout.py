"""The keys by which files and options give lake tables a layout: docs/layout.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ByteSize, Field

from aqueduck.config.sections import MIB, Text
from aqueduck.model.layout import TableLayout, WantedLayout, parse_partition_key, parse_sort_key

__all__ = ["LAYOUT_KEYS", "FileSize", "PartitionKeys", "SortKeys", "layout_text", "wanted_layout"]

LAYOUT_KEYS = {"partition_by", "sort_by", "target_file_size"}


def _partition_keys(texts: tuple[str, ...]) -> tuple[str, ...]:
    keys = [parse_partition_key(text) for text in texts]
    if unknown := TableLayout(tuple(keys)).unknown:
        raise ValueError(f"names {unknown[0]} more than once")
    return texts


def _sort_keys(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        parse_sort_key(text)
    return texts


PartitionKeys = Annotated[tuple[Text, ...], AfterValidator(_partition_keys)] | None
SortKeys = Annotated[tuple[Text, ...], AfterValidator(_sort_keys)] | None
FileSize = Annotated[ByteSize, Field(ge=MIB, le=1 << 40)] | None


def layout_text(options: Mapping[str, Any]) -> str | None:
    """The layout among a table's options, for people; None if they have none."""
    parts = [
        f"{said} {', '.join(map(str, options[key]))}"
        for key, said in (("partition_by", "partitioned by"), ("sort_by", "sorted by"))
        if options.get(key)
    ]
    return "; ".join(parts) or None


def wanted_layout(
    partition_by: tuple[str, ...] | None, sort_by: tuple[str, ...] | None, file_size: int | None
) -> WantedLayout:
    """What the keys say; None leaves alone what the lake has."""
    return WantedLayout(
        None if partition_by is None else tuple(map(parse_partition_key, partition_by)),
        None if sort_by is None else tuple(map(parse_sort_key, sort_by)),
        file_size,
    )
