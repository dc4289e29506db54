"""
The partitions that the rows of a lake table came from; `sync.watching.source_watch` compares them with the source.

They are written with the copy that read them.  A partition that is truncated, attached or dropped later, even while
the service is stopped, then shows as a difference.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from aqueduck.lake.session.catalog import OWN_SCHEMA, LakeSession
from aqueduck.lake.session.sql import LAKE, qualified

__all__ = ["Marks", "ensure_marks", "forget_marks", "read_marks", "write_marks"]

TABLE = qualified(LAKE, OWN_SCHEMA, "partitions")


@dataclass(frozen=True, slots=True)
class Marks:
    """The partitions of one table at one point in time."""

    nodes: dict[int, int]
    """The file node of each partition that holds rows."""
    horizon: int = 0
    """All transactions below this number had ended by then; 0 if unknown."""
    ties: dict[int, str] = field(default_factory=dict)
    """How each of them became a partition, where known."""


def ensure_marks(session: LakeSession) -> None:
    session.execute(
        f"create table if not exists {TABLE} (group_name varchar, source_oid ubigint, file_nodes varchar)",
        doing="preparing the lake",
    )


def read_marks(session: LakeSession, group: str) -> dict[int, Marks]:
    """The marks of each table, by OID."""
    rows, _ = session.query(f"select source_oid, file_nodes from {TABLE} where group_name = ?", [group])
    return {oid: _read(json.loads(text)) for oid, text in rows}


def _read(values: dict[str, Any]) -> Marks:
    nodes = values.get("nodes", values)  # a lake of an earlier version has only the nodes
    ties = {int(leaf): text for leaf, text in values.get("ties", {}).items()}
    return Marks({int(leaf): node for leaf, node in nodes.items()}, values.get("horizon", 0), ties)


def write_marks(session: LakeSession, group: str, oid: int, marks: Marks) -> None:
    """Inside an open transaction."""
    forget_marks(session, group, oid)
    text = json.dumps({"nodes": marks.nodes, "horizon": marks.horizon, "ties": marks.ties})
    session.execute(f"insert into {TABLE} values (?, ?, ?)", [group, oid, text])


def forget_marks(session: LakeSession, group: str, *oids: int) -> None:
    """Inside an open transaction."""
    session.execute(
        f"delete from {TABLE} where group_name = ? and source_oid in (select unnest(?))", [group, list(oids)]
    )
