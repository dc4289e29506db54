"""
Modes: how the changes of a source table become rows of its lake table.

`upsert` keeps a copy of the source.  The others keep more: `append` every change, `history` every version
of a row, `soft_delete` the rows that are gone.  With a *source column*, several sources share one target, and each
has the rows that carry its value.  A `TableMode` is all of that for one table, as plain values; what a mode does
with changes is in `lake.fold.fold_modes`, what it does to rows of the target in `lake.target.mode_rows`.
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
"""Every mode, with the columns that it adds to those of the source: names and types."""


@dataclass(frozen=True, slots=True)
class TableMode:
    """The mode of one table, and what tells its rows from those of other sources, if there are any."""

    name: str = "upsert"
    source_column: str | None = None
    source_value: str | None = None

    @property
    def plain(self) -> bool:
        """Whether the target is nothing but a copy of the source: it may be emptied, and has no other columns."""
        return self.name == "upsert" and self.source_column is None

    @property
    def keeps(self) -> bool:
        """Whether what a change replaces stays, so that changes before a truncate count as well."""
        return self.name != "upsert"

    @property
    def needs_key(self) -> bool:
        """Whether rows have to be found again: by a key, or for `upsert` by the whole row (REPLICA IDENTITY FULL)."""
        return self.name != "append"

    @property
    def follows_keys(self) -> bool:
        """Whether versions of a row belong together, for which only a key will do."""
        return self.name in ("history", "soft_delete")

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Names and types of the columns that the target has besides those of the source."""
        shared = () if self.source_column is None else ((self.source_column, "VARCHAR"),)
        return (*shared, *MODES[self.name])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> TableMode:
        """The reverse of `to_json`; nothing stands for `upsert`."""
        return cls(**json.loads(text)) if text else UPSERT


UPSERT = TableMode()
