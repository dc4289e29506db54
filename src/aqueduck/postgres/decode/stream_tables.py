"""
What the decoder asks about the tables of the stream: which are wanted, and what the stream does not tell of them.

`StreamTables` is the question, `GivenTables` the answer of `sync`: the tables of a group and no others.  Whatever a
publication holds is in `capture.announced_tables`.
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
        """The table as it is known so far; None if nobody wants its rows."""

    def find_committed(self, relation: WireRelation) -> TableSchema | None:
        """The same, once the streamed transaction that described the relation has committed."""

    def is_visible(self, oid: int) -> bool:
        """Whether the catalog shows the table: not, as long as the transaction goes on that made it."""

    def resolve(self, column: Column, /) -> Column:
        """Complete a column that was not known like this: what lies below a type that is not built in is not on the wire."""

    def keyed(self, table: TableSchema, /) -> bool:
        """Whether a table with a full identity still has its key: the wire marks all its columns."""

    def settle(self, table: TableSchema, /) -> TableSchema:
        """Give the columns of a table with a projection their numbers."""


class GivenTables:
    """
    The tables of a group, as the catalog describes them.

    Without `settle`, the driver has to find out which column is which.
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
