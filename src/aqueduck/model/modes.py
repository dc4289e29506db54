"""
Modes: how the changes of a source table become rows of its lake table.

`upsert` keeps a copy of the source. The other modes keep more: `append` every change, `history` every version
of a row, `soft_delete` deleted rows as well. With a *source column*, several sources share one target, and
each owns the rows with its value. A `TableMode` describes all of that for one table, as plain values.
`lake.fold.fold_modes` applies a mode to changes, `lake.target.mode_rows` to rows of the target.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["MODES", "UPSERT", "TableMode"]

MODES = {
    "upsert": (),
    "append": (
        ("_op", "VARCHAR"),
        ("_commit_lsn", "BIGINT"),
        ("_commit_time", "TIMESTAMP WITH TIME ZONE"),
        ("_seq", "BIGINT"),
        ("_unchanged", "JSON"),
    ),
    "history": (("_valid_from", "TIMESTAMP WITH TIME ZONE"), ("_valid_to", "TIMESTAMP WITH TIME ZONE")),
    "soft_delete": (("_deleted", "BOOLEAN"), ("_deleted_at", "TIMESTAMP WITH TIME ZONE")),
}
"""Every mode, with the names and types of the columns that it adds to the source's."""


@dataclass(frozen=True, slots=True)
class TableMode:
    """The mode of one table, and the source column and value if other sources share the target."""

    name: str = "upsert"
    source_column: str | None = None
    source_value: str | None = None

    @property
    def plain(self) -> bool:
        """Whether the target is only a copy of the source: it may be truncated, and has no other columns."""
        return self.name == "upsert" and self.source_column is None

    @property
    def keeps(self) -> bool:
        """Whether replaced rows are kept, so that changes before a truncate count as well."""
        return self.name != "upsert"

    @property
    def needs_key(self) -> bool:
        """Whether rows must be found again: by a key, or for `upsert` by the whole row (REPLICA IDENTITY FULL)."""
        return self.name != "append"

    @property
    def follows_keys(self) -> bool:
        """Whether versions of a row must be linked, which requires a key."""
        return self.name in ("history", "soft_delete")

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Names and types of the target's columns beyond the source's."""
        shared = () if self.source_column is None else ((self.source_column, "VARCHAR"),)
        return (*shared, *MODES[self.name])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> TableMode:
        """The reverse of `to_json`; an empty value means `upsert`."""
        return cls(**json.loads(text)) if text else UPSERT


UPSERT = TableMode()
