"""
The layout of a lake table: by what its files are partitioned, and in which order their rows are sorted.

A partition key is a column or a transform of one: `tenant`, `month(created_at)`, `bucket(16, id)`.  DuckLake learns the
partition of a file that we add from the directories in its path, `tenant=a/month=3/`, which not every layout and not
every value survives: `TableLayout.in_paths` and `goes_into_path` say which do.  The rows of all others are inserted by
DuckLake itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

__all__ = [
    "AS_IT_IS",
    "IDENTITY",
    "PLAIN",
    "PartitionKey",
    "SortKey",
    "TableLayout",
    "WantedLayout",
    "goes_into_path",
    "parse_partition_key",
    "parse_sort_key",
    "path_part",
    "path_value",
]

IDENTITY = "identity"
DATE_PARTS = ("year", "month", "day", "hour")
COMPONENT_BYTES_MAX = 255
"""The longest name of a directory in the usual file systems."""

# What DuckDB reads as NULL in a path, whatever the column's type.
_READ_AS_NULL = {"null", "__hive_default_partition__"}
_NULL = "__HIVE_DEFAULT_PARTITION__"
# Types whose values are the same after a cast to text and back, and whose equal values have the same text.
_EXACT = re.compile(
    r"varchar|boolean|u?int\d+|decimal\(\d+, ?\d+\)|date|timestamp(_us|_ms|_s|_ns)?|timestamptz|uuid"
    r"|smallint|integer|bigint|timestamp with time zone"
)
_SPECIAL, _ENCODED = re.compile(rb"[^A-Za-z0-9_.~-]"), re.compile(rb"%([0-9A-Fa-f]{2})")
_NAME = r'(?:[^\W\d]\w*|"(?:[^"]|"")+")'
_PARTITION = re.compile(
    rf"(?:bucket\s*\(\s*(?P<buckets>\d{{1,6}})\s*,\s*(?P<bucketed>{_NAME})\s*\)"
    rf"|(?P<part>year|month|day|hour)\s*\(\s*(?P<dated>{_NAME})\s*\)|(?P<plain>{_NAME}))",
    re.IGNORECASE,
)
_SORT = re.compile(
    rf"(?P<column>{_NAME})(?:\s+(?P<direction>asc|desc))?(?:\s+nulls\s+(?P<nulls>first|last))?", re.IGNORECASE
)
_PLAIN_NAME = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class PartitionKey:
    """A column, or a transform of one."""

    column: str
    transform: str = IDENTITY
    buckets: int = 0
    kind: str = ""
    """DuckLake's name of the column's type, if the key was read from a lake."""

    def __str__(self) -> str:
        if self.transform == IDENTITY:
            return self.column
        return (
            f"bucket({self.buckets}, {self.column})" if self.buckets else f"{self.transform}({self.column})"
        )

    @property
    def is_known(self) -> bool:
        """Whether this is a transform that we can compute."""
        return self.transform in (IDENTITY, *DATE_PARTS) or bool(self.buckets)

    @property
    def has_exact_text(self) -> bool:
        """Whether every value of the key is the same after a cast to text and back."""
        return self.transform != IDENTITY or _EXACT.fullmatch(self.kind.lower()) is not None


@dataclass(frozen=True, slots=True)
class SortKey:
    """An expression over columns, as DuckLake stores it, with its direction."""

    expression: str
    descending: bool = False
    nulls_first: bool = False
    column: str | None = None
    """The column, if the expression is one."""


@dataclass(frozen=True, slots=True)
class TableLayout:
    """How a table's rows are divided into files, and sorted in them."""

    partition: tuple[PartitionKey, ...] = ()
    sort: tuple[SortKey, ...] = ()
    in_paths: bool = True
    """Whether paths can name the partitions of files for DuckLake."""
    names_directories: bool = True
    """Whether DuckLake puts files into directories that are named after partition values; see `hive_file_pattern`."""

    def __str__(self) -> str:
        parts = []
        if self.partition:
            parts.append("partitioned by " + ", ".join(map(str, self.partition)))
        if self.sort:
            parts.append(
                "sorted by " + ", ".join(f"{k.expression}{' desc' * k.descending}" for k in self.sort)
            )
        return "; ".join(parts)

    @property
    def is_plain(self) -> bool:
        """Whether files may have any rows in any order."""
        return not self.partition and not self.sort

    @property
    def unknown(self) -> tuple[PartitionKey, ...]:
        """Keys that cannot be written: unknown transforms, and keys that repeat another one."""
        seen: set[tuple[str, str, int]] = set()
        found = []
        for key in self.partition:
            mark = (key.column.lower(), key.transform, key.buckets)
            if not key.is_known or mark in seen:
                found.append(key)
            seen.add(mark)
        return tuple(found)

    @property
    def by_tasks(self) -> bool:
        """Whether tasks can write files that fit; otherwise DuckLake inserts the rows."""
        return self.in_paths and self.names_directories and all(key.column is not None for key in self.sort)

    @property
    def mark(self) -> str:
        """Part of the names of files that fit these partition keys; empty if all files fit."""
        text = ", ".join(map(str, self.partition))
        return f"-p{hashlib.sha256(text.encode()).hexdigest()[:10]}" if text else ""

    def fits(self, path: str) -> bool:
        """Whether the file with this path can become part of the table as it is."""
        *directories, name = path.split("/")
        if not self.by_tasks or (self.partition and f"{self.mark}-" not in name):
            return False
        # DuckLake takes values from any directory of this form, also from those above the table's.
        return not self.partition or sum("=" in part for part in directories) == len(self.partition)

    @property
    def path_names(self) -> tuple[str, ...]:
        """The names by which DuckLake finds the partition values in a path, in the order of the keys."""
        used: set[str] = set()
        names = []
        for key in self.partition:
            name = key.column if key.transform == IDENTITY else "bucket" if key.buckets else key.transform
            if name.lower() in used:
                name = f"{name}_{key.column}"
            used.add(name.lower())
            names.append(name)
        return tuple(names)

    def renamed(self, before: str, after: str) -> TableLayout:
        """The layout after a column was renamed."""
        partition = tuple(
            replace(key, column=after) if key.column.lower() == before.lower() else key
            for key in self.partition
        )
        sort = tuple(
            replace(key, column=after)
            if key.column is not None and key.column.lower() == before.lower()
            else key
            for key in self.sort
        )
        return replace(self, partition=partition, sort=sort)

    @property
    def repeats_column(self) -> bool:
        """Whether two keys are of one column, for example its year and its month."""
        columns = [key.column.lower() for key in self.partition]
        return len(set(columns)) < len(columns)

    def can_be_in_paths(self, columns: Collection[str]) -> bool:
        """Whether paths can name the partitions of a table with these columns."""
        own = {key.column.lower() for key in self.partition if key.transform == IDENTITY}
        others = {column.lower() for column in columns} - own
        names = self.path_names
        if any(name.lower() in others for name in names) or not all(map(_PLAIN_NAME.fullmatch, names)):
            return False
        # The values of several keys of a column are mended after the commit, which is too late for those that prune.
        owners = [key.column.lower() for key in self.partition]
        return all(
            key.has_exact_text and (owners.count(key.column.lower()) == 1 or key.transform in DATE_PARTS)
            for key in self.partition
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TableLayout:
        values = json.loads(text)
        return cls(
            tuple(PartitionKey(**key) for key in values["partition"]),
            tuple(SortKey(**key) for key in values["sort"]),
            values["in_paths"],
            values["names_directories"],
        )


@dataclass(frozen=True, slots=True)
class WantedLayout:
    """What the configuration says of a target's layout; None leaves alone what the lake has."""

    partition: tuple[PartitionKey, ...] | None = None
    sort: tuple[SortKey, ...] | None = None
    file_bytes: int | None = None

    @property
    def columns(self) -> list[str]:
        """Every column that it names, once."""
        keys = [key.column for key in self.partition or ()] + [key.expression for key in self.sort or ()]
        return list(dict.fromkeys(keys))

    def over(self, current: TableLayout) -> TableLayout:
        """The layout of a table that has `current`."""
        partition = current.partition if self.partition is None else self.partition
        return TableLayout(partition, current.sort if self.sort is None else self.sort)

    def differs(self, current: TableLayout) -> tuple[bool, bool]:
        """Whether the partition keys and the sort keys differ from those of a table."""
        one, other = self.over(current), current
        keys = [
            [(k.column.lower(), k.transform, k.buckets) for k in layout.partition] for layout in (one, other)
        ]
        sorts = [[_place(key) for key in layout.sort] for layout in (one, other)]
        return keys[0] != keys[1], sorts[0] != sorts[1]


def _place(key: SortKey) -> tuple[str, bool, bool]:
    return (key.column or key.expression).lower(), key.descending, key.nulls_first


def parse_partition_key(text: str) -> PartitionKey:
    """A partition key such as `tenant`, `month(created_at)` or `bucket(16, id)`; a name may be quoted."""
    found = _PARTITION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a column, year(…), month(…), day(…), hour(…) or bucket(16, …)")
    if found["buckets"]:
        if int(found["buckets"]) == 0:
            raise ValueError(f"{text!r} has no buckets")
        return PartitionKey(_unquoted(found["bucketed"]), "bucket", int(found["buckets"]))
    if found["part"]:
        return PartitionKey(_unquoted(found["dated"]), found["part"].lower())
    return PartitionKey(_unquoted(found["plain"]))


def parse_sort_key(text: str) -> SortKey:
    """A sort key such as `created_at` or `created_at desc nulls first`; a name may be quoted."""
    found = _SORT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a column, which asc, desc, nulls first and nulls last may follow")
    column = _unquoted(found["column"])
    descending = (found["direction"] or "").lower() == "desc"
    return SortKey(column, descending, (found["nulls"] or "").lower() == "first", column)


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


AS_IT_IS = WantedLayout()
PLAIN = TableLayout()
"""The layout of a table that has none."""


def path_part(name: str, value: str | None) -> str:
    """The directory of a partition value."""
    encoded = _NULL if value is None else _SPECIAL.sub(_percent, value.encode()).decode()
    return f"{name}={encoded}"


def _percent(found: re.Match[bytes]) -> bytes:
    return b"%%%02X" % found[0][0]


def _byte(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 16)])


def path_value(text: str) -> str | None:
    """The value of a directory that `path_part` named, after the equals sign."""
    return None if text == _NULL else _ENCODED.sub(_byte, text.encode()).decode()


def goes_into_path(names: Sequence[str], values: Sequence[str | None]) -> bool:
    """Whether DuckLake reads back these values, as text, from a path."""
    return all(
        value is None
        or (
            value.lower() not in _READ_AS_NULL and len(path_part(name, value).encode()) <= COMPONENT_BYTES_MAX
        )
        for name, value in zip(names, values, strict=True)
    )
