"""
The options of a table: read from the configuration, bound to the table, and compared with the lake's.

The rules are in `model.columns.projection`; this module brings together the environment, the source's catalog and the ledger.
"""

from __future__ import annotations

import os
from dataclasses import replace

from aqueduck.config.sync import GroupConfig, TableConfig
from aqueduck.lake.fold.row_filter import check_constants, compile_filter
from aqueduck.lake.ledger.table_states import TableState
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.versions import current_version, tables_at
from aqueduck.model.columns.projection import Projection, bind, salt_mark
from aqueduck.model.errors import ConfigError
from aqueduck.model.schema import TableSchema

__all__ = ["is_other", "known_projections", "with_projection"]


def with_projection(
    schema: TableSchema, table: TableConfig, salt_env: str | None, before: Projection | None = None
) -> TableSchema:
    """The source table with its options; raises `ConfigError` if they do not fit."""
    wanted = table.projection
    if wanted is None:
        return schema
    if wanted.where and not schema.key:
        raise ConfigError(
            f"{schema.qualified} has no key, by which rows that leave its row filter could be found",
            hint="add a primary key, or filter where the lake is read",
            table=schema.qualified,
        )
    published = schema.projection or Projection()
    wanted = replace(wanted, publication=published.publication, published_where=published.published_where)
    wanted = _with_salt(schema, wanted, salt_env)
    # Names keep the meaning that they had when the options were first read, even if a column was renamed since.
    before = before if before == wanted else None
    numbers = before.numbers if before is not None else ()
    wanted = compile_filter(schema, replace(wanted, numbers=numbers))
    check_constants(schema, wanted)
    return bind(schema, wanted, before)


def _with_salt(schema: TableSchema, wanted: Projection, salt_env: str | None) -> Projection:
    if not any(mask.kind == "hash" for _, mask in wanted.masks):
        return wanted
    if salt_env is None:
        raise ConfigError(
            f"{schema.qualified} masks a column with hash, which needs a salt",
            hint="set mask_salt_env to the name of a variable that holds a long random text",
            table=schema.qualified,
        )
    salt = os.environ.get(salt_env)
    if not salt:
        raise ConfigError(
            f"the variable {salt_env}, which holds the salt of masks, is not set",
            hint=f"export {salt_env}=… with a long random text, and keep it: another one means a new copy",
            table=schema.qualified,
        )
    return replace(wanted, salt_env=salt_env, salt=salt_mark(salt))


def known_projections(lake: LakeSession, group: GroupConfig) -> dict[int, Projection]:
    """The projections of a group's tables in the lake, by OID."""
    states = tables_at(lake, current_version(lake)).get(group.name, {})
    return {oid: state.projection for oid, state in states.items() if state.projection is not None}


def is_other(state: TableState, schema: TableSchema) -> bool:
    """Whether the lake's table has other options than the source table has now."""
    return state.projection != schema.projection
