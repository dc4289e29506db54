"""
What the decoder asks about the tables of the stream: which are wanted, and what the stream does not contain about them.

`StreamTables` is the interface, `GivenTables` the implementation of `sync`: exactly the tables of a group.
`capture.announced_tables` implements it for all tables of a publication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.decode.pgoutput_messages import WireRelation

__all__ = ["GivenTables", "StreamTables"]


class StreamTables(Protocol):
    """Answers for the relations that the server describes."""

    def find(self, relation: WireRelation) -> TableSchema | None:
        """The table as it is known now; None if its rows are not wanted."""

    def find_committed(self, relation: WireRelation) -> TableSchema | None:
        """The same, after the streamed transaction that described the relation has committed."""

    def is_visible(self, oid: int) -> bool:
        """Whether the catalog shows the table: it does not while the transaction that created it is open."""

    def resolve(self, column: Column, /) -> Column:
        """Complete an unknown column: the stream does not contain the base of a type that is not built in."""

    def keyed(self, table: TableSchema, /) -> bool:
        """Whether a table with a full identity still has its key: the stream marks all its columns."""

    def settle(self, table: TableSchema, /) -> TableSchema:
        """Give the columns of a table with a projection their numbers."""


class GivenTables:
    """
    The tables of a group, as the catalog describes them.

    Without `settle`, the driver has to identify the columns.
    """

    def __init__(
        self,
        tables: Mapping[int, TableSchema],
        *,
        resolve: Callable[[Column], Column] = lambda column: column,
        keyed: Callable[[TableSchema], bool] = lambda table: True,
        settle: Callable[[TableSchema], TableSchema] = lambda table: table.settled(None),
    ) -> None:
        self._tables = dict(tables)
        self.resolve = resolve
        self.keyed = keyed
        self.settle = settle

    def find(self, relation: WireRelation) -> TableSchema | None:
        return self._tables.get(relation.oid)

    def find_committed(self, relation: WireRelation) -> TableSchema | None:
        return self._tables.get(relation.oid)

    def is_visible(self, oid: int) -> bool:
        return True
