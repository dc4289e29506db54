"""
Find rows by their keys in the data files of tables, one statement of the engine for each table that needs it.

DuckLake stores few deletes from a file in the catalog: the file and the row's place in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aqueduck.lake.direct.catalog_rows import Catalog, DataFile
from aqueduck.lake.direct.extremes import in_range
from aqueduck.lake.session.catalog import LakeSession
from aqueduck.lake.session.sql import ident, literal, string_list
from aqueduck.lake.session.storage import no_glob
from aqueduck.model.columns.typemap import cast_sql
from aqueduck.model.schema import Column

__all__ = ["ROWS_MAX", "Sought", "rows_in_files", "worth_reading"]

ROWS_MAX = 1_000_000
"""The most rows of files in which keys are looked up in one thread."""


@dataclass(frozen=True, slots=True)
class Sought:
    """Keys of a table, as PostgreSQL's text."""

    directory: str
    columns: tuple[tuple[str, Column], ...]
    """The columns of the key with their names in the lake."""
    keys: Sequence[tuple[str, ...]]


def worth_reading(sought: Sought, files: Sequence[DataFile]) -> list[DataFile]:
    """The files that may have one of the keys, by the statistics of the key's first column."""
    first = [key[0] for key in sought.keys]
    return [f for f in files if in_range(sought.columns[0][1], first, f.lowest, f.highest)]


def rows_in_files(
    session: LakeSession, catalog: Catalog, sought: Mapping[int, tuple[Sought, Sequence[DataFile]]]
) -> dict[int, list[tuple[int, int]]]:
    """File id and place of the current rows with these keys, by table."""
    found: dict[int, list[tuple[int, int]]] = {}
    for table, (keys, files) in sought.items():
        paths = {_place(keys, f.path, f.absolute): f for f in files}
        rows = session.execute(
            f"select filename, file_row_number from read_parquet({string_list(map(no_glob, paths))},"
            f" filename = true, file_row_number = true) where {_condition(keys)}",
            doing="looking for rows",
        )
        places: dict[str, list[int]] = {}
        for path, place in rows:
            places.setdefault(path, []).append(place)
        for path, those in places.items():
            for place in _not_in_delete_file(session, keys, paths[path], those):
                found.setdefault(table, []).append((paths[path].number, place))
    gone = catalog.deleted_from_files(found)
    found = {t: [row for row in rows if row not in gone.get(t, ())] for t, rows in found.items()}
    return {t: rows for t, rows in found.items() if rows}


def _place(sought: Sought, path: str, absolute: bool) -> str:
    return path if absolute else f"{sought.directory.rstrip('/')}/{path}"


def _not_in_delete_file(session: LakeSession, sought: Sought, file: DataFile, places: list[int]) -> list[int]:
    if file.deletes is None:
        return places
    rows = session.execute(
        f"select pos from read_parquet({literal(no_glob(_place(sought, *file.deletes)))})"
        f" where pos in ({', '.join(map(str, places))})",
        doing="looking for rows",
    )
    gone = {place for (place,) in rows}
    return [place for place in places if place not in gone]


def _condition(keys: Sought) -> str:
    names = [ident(name) for name, _ in keys.columns]
    casts = [column for _, column in keys.columns]
    typed = [
        [cast_sql(column, literal(cell)) for column, cell in zip(casts, key, strict=True)]
        for key in keys.keys
    ]
    if len(names) == 1:
        return f"{names[0]} in ({', '.join(key[0] for key in typed)})"
    same = (" and ".join(f"{n} = {v}" for n, v in zip(names, key, strict=True)) for key in typed)
    return " or ".join(f"({one})" for one in same)
