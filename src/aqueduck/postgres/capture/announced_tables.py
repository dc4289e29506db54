"""
The tables that the stream announces, for any publication: for change events and for `postgres_cdc`.

The catalog is asked only for what the stream does not contain: the key of a table with a full identity, and the parents of
a partition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from aqueduck.model.schema import Column, TableSchema
from aqueduck.postgres.decode.pgoutput_messages import WireRelation
from aqueduck.postgres.publications.published import Newcomer

__all__ = ["AnnouncedTables", "Look"]

#: returns all tables of the publication except those with these OIDs
Look = Callable[[Sequence[int]], Mapping[int, Newcomer]]


class AnnouncedTables:
    """
    All tables of the stream except the excluded ones; only the wanted ones, if any are named.

    `look` receives the known OIDs and returns, for the publication's other tables, what the stream does not contain.
    """

    def __init__(
        self,
        tables: Mapping[int, TableSchema],
        *,
        excluded: Collection[str] = (),
        wanted: Collection[str] = (),
        look: Look = lambda _: {},
        resolve: Callable[[Column], Column] = lambda column: column,
    ) -> None:
        self._tables = dict(tables)
        self._excluded = frozenset(excluded)
        self._wanted = frozenset(wanted)
        self._look = look
        self._told = frozenset(tables)
        self._seen: dict[int, Newcomer] = {}
        self._unseen: set[int] = set()
        """Tables that the catalog did not have: dropped, or created by a transaction that is still open."""
        self.resolve = resolve

    def find(self, relation: WireRelation) -> TableSchema | None:
        if not self._is_wanted(relation):
            return None
        if relation.oid not in self._tables:
            self._tables[relation.oid] = self._describe(relation)
        return self._tables[relation.oid]

    def find_committed(self, relation: WireRelation) -> TableSchema | None:
        if relation.oid in self._unseen:
            self._tables[relation.oid] = self._describe(relation)
        return self._tables.get(relation.oid)

    def is_visible(self, oid: int) -> bool:
        return oid not in self._unseen

    def keyed(self, table: TableSchema, /) -> bool:
        return True

    def settle(self, table: TableSchema, /) -> TableSchema:
        return table.settled(None)

    def _is_wanted(self, relation: WireRelation) -> bool:
        """Whether the table is excluded by its name; partitions that an excluded table gets later are excluded, too."""
        name = f"{relation.schema}.{relation.name}"
        if name in self._excluded or (self._wanted and name not in self._wanted):
            return False
        if not self._excluded or relation.oid in self._told:
            return True
        return self._excluded.isdisjoint(self._newcomer(relation.oid).above)

    def _describe(self, relation: WireRelation) -> TableSchema:
        """The table as the stream describes it. With a full identity, the stream marks every column as key, so the catalog is asked."""
        columns = tuple(Column(c.name, c.type_oid, c.typmod) for c in relation.columns)
        key = tuple(c.name for c in relation.columns if c.is_key)
        if relation.identity == "f":
            key = self._newcomer(relation.oid).key
        return TableSchema(relation.oid, relation.schema, relation.name, columns, key, relation.identity)

    def _newcomer(self, oid: int) -> Newcomer:
        """The catalog's description; tables that were announced together are looked up together."""
        if oid not in self._seen:
            self._seen.update(self._look([*self._told, *self._seen]))
        if oid not in self._seen:
            self._unseen.add(oid)
            return Newcomer()
        self._unseen.discard(oid)
        return self._seen[oid]
