"""
Which partitions the rows of a lake table came from: what `app.watch` compares the source with.

Written with the copy that read them, so that a partition which is truncated, attached or lost at any later time,
also while the service is stopped, makes a difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from aqueduck.lake.catalog import OWN_SCHEMA, LakeSession
from aqueduck.lake.sql import LAKE, qualified

__all__ = ["ensure_marks", "forget_marks", "read_marks", "write_marks"]

TABLE = qualified(LAKE, OWN_SCHEMA, "partitions")


def ensure_marks(session: LakeSession) -> None:
    session.execute(
        f"create table if not exists {TABLE} (group_name varchar, source_oid ubigint, file_nodes varchar)",
        doing="preparing the lake",
    )


def read_marks(session: LakeSession, group: str) -> dict[int, dict[int, int]]:
    """By table: the file node of each partition that holds rows."""
    rows, _ = session.query(f"select source_oid, file_nodes from {TABLE} where group_name = ?", [group])
    return {oid: {int(leaf): node for leaf, node in json.loads(text).items()} for oid, text in rows}


def write_marks(session: LakeSession, group: str, oid: int, nodes: Mapping[int, int]) -> None:
    """Inside an open transaction."""
    forget_marks(session, group, oid)
    session.execute(f"insert into {TABLE} values (?, ?, ?)", [group, oid, json.dumps(dict(nodes))])


def forget_marks(session: LakeSession, group: str, oid: int) -> None:
    """Inside an open transaction."""
    session.execute(f"delete from {TABLE} where group_name = ? and source_oid = ?", [group, oid])
