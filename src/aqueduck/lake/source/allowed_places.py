"""
The lakes that rows of `destinations_table` may name: the configuration file decides, not the table's authors (ADR 65).

Paths are compared part by part, connection strings by their settings, variables by name.  `{value}` in a pattern
matches any text within one part or setting.  Without `destinations_allow`, the file allows places beside its own
destinations, places that its pattern produces, and the variables that both name.  Symbolic links are resolved.

An allowed place may belong to another lake: a row must not name the lake of the source or of a destination that is not
a row, nor a directory that overlaps the directory of another lake.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from aqueduck.config.fanout import PLACEHOLDER, DestinationConfig, FanoutConfig
from aqueduck.config.lake_place import LakeKeys
from aqueduck.lake.session.catalog import catalog_kind, catalog_settings
from aqueduck.model.errors import ConfigError

__all__ = ["AllowedPlaces"]

_PART = r"[^/*?\[\]\x00-\x1f\x7f]+"
"""Globs are refused because DuckLake expands them, URL parameters because they can name another endpoint."""
_PLAIN = re.compile(rf"(?!\.\.?$){_PART}")
_SETTING = r"[A-Za-z0-9_-]+"


@dataclass(frozen=True)
class _Path:
    """A directory, a file or a prefix of an object store: its kind or scheme, and its parts."""

    parts: tuple[str, ...]
    alone: bool = False
    """Whether only the path itself is meant, not the paths below it."""

    def allows(self, place: _Path) -> bool:
        here, beneath = place.parts[: len(self.parts)], place.parts[len(self.parts) :]
        if len(here) < len(self.parts) or (self.alone and beneath):
            return False
        fits = all(_fits(p, part, _PART) for p, part in zip(self.parts, here, strict=True))
        return fits and all(map(_PLAIN.fullmatch, beneath)) and not {".", ".."} & set(place.parts)

    @functools.cached_property
    def real(self) -> _Path:
        """The path with symbolic links resolved; in a pattern, only those before its first placeholder."""
        if self.parts[0].endswith("://"):
            return self
        fixed = next((i for i, part in enumerate(self.parts) if PLACEHOLDER in part), len(self.parts))
        found = os.path.realpath("/" + "/".join(self.parts[1:fixed]))
        return _Path((self.parts[0], *_split(found), *self.parts[fixed:]), self.alone)

    def beside(self) -> _Path:
        """The pattern for everything in the same directory; a bucket or an entry of the root directory allows only itself."""
        if any(PLACEHOLDER in part for part in self.parts):
            return self
        return (
            _Path((*self.parts[:-1], PLACEHOLDER)) if len(self.parts) > 2 else _Path(self.parts, alone=True)
        )


@dataclass(frozen=True, slots=True)
class _Owner:
    """The owner of a lake."""

    name: str
    value: str | None
    """The routing value of the destination; a row with the same value belongs to the same tenant."""
    lake: str
    """The address."""
    is_row: bool


@dataclass
class _Directories:
    """The directories of lakes and their owners."""

    at: dict[tuple[str, ...], set[_Owner]] = field(default_factory=dict)
    beneath: dict[tuple[str, ...], set[_Owner]] = field(default_factory=dict)

    def add(self, path: _Path, owner: _Owner) -> None:
        parts = path.real.parts
        self.at.setdefault(parts, set()).add(owner)
        for length in range(1, len(parts)):
            self.beneath.setdefault(parts[:length], set()).add(owner)

    def touching(self, path: _Path) -> Iterator[_Owner]:
        """The owners of directories that equal, contain or lie within this one."""
        parts = path.real.parts
        yield from self.beneath.get(parts, ())
        for length in range(1, len(parts) + 1):
            yield from self.at.get(parts[:length], ())


class AllowedPlaces:
    """The places and variables that a configuration file allows, and the places that are taken."""

    def __init__(self, config: FanoutConfig) -> None:
        self._lakes: dict[str, list[_Owner]] = {}
        self._directories = _Directories()
        allow = config.destinations_allow
        own: list[LakeKeys] = [*config.destinations, *([config.dynamic] if config.dynamic else [])]
        files = [lake.catalog for lake in own if lake.catalog and catalog_kind(lake.catalog) != "postgres"]
        postgres = [p for p in allow.catalogs or () if catalog_kind(p) == "postgres"]
        self._files = _patterns(
            [p for p in allow.catalogs or () if p not in postgres], allow.catalogs is None, files
        )
        self._databases = [_settings(p, "destinations_allow.catalogs") for p in postgres]
        self._data_paths = _patterns(
            allow.data_paths or (), allow.data_paths is None, (d.data_path for d in own)
        )
        named = {v for lake in own for v in (lake.catalog_env, lake.postgres_uri_env) if v is not None}
        self._variables = named if allow.env is None else set(allow.env)

    def refuse(self, row: DestinationConfig) -> None:
        """Raise if the row names something that the file does not allow; call this before contacting or reading it."""
        if row.catalog_file is not None:
            raise ConfigError("catalog_file is not for rows of destinations_table", hint="use catalog_env")
        variable = row.catalog_env or row.postgres_uri_env
        if variable is not None and variable not in self._variables:
            raise ConfigError(
                f"the file does not allow the variable {variable} in destinations_table",
                hint="name the variable of one of the file's own destinations, or add it to destinations_allow.env",
            )
        if row.catalog is not None:
            self._refuse_catalog(row.catalog)
        if not _any(self._data_paths, row.data_path):
            raise ConfigError(
                "the file does not allow this data_path in destinations_table",
                hint="choose one beside those of the file's own destinations, or add its directory to"
                " destinations_allow.data_paths",
            )

    def take(self, name: str, value: str | None, place: LakeKeys, lake: str, *, is_row: bool) -> None:
        """Record the owner of the lake with this address and of its directory."""
        owner = _Owner(name, value, lake, is_row)
        if not is_row:
            self._lakes.setdefault(lake, []).append(owner)
        self._directories.add(_path(place.data_path), owner)

    def refuse_taken(self, row: DestinationConfig, value: str, lake: str) -> None:
        """Raise if the row would write to a lake or directory of another owner; only rows may share a lake with each other."""
        for owner in self._lakes.get(lake, ()):
            if owner.value != value:
                raise ConfigError(
                    f"the lake (catalog and metadata_schema) belongs to {owner.name}",
                    hint="use another catalog or metadata_schema for the row, or list it under destinations",
                )
        for owner in self._directories.touching(_path(row.data_path)):
            if owner.lake != lake and owner.value != value:
                raise ConfigError(
                    f"the data_path overlaps the data_path of {owner.name}",
                    hint="use a separate directory for each lake",
                )

    def _refuse_catalog(self, catalog: str) -> None:
        if catalog_kind(catalog) != "postgres":
            if not _any(self._files, catalog):
                raise ConfigError(
                    "the file does not allow this catalog in destinations_table",
                    hint="choose one beside those of the file's own destinations, or add its directory to"
                    " destinations_allow.catalogs",
                )
            return
        given = _settings(catalog, "catalog")
        if not any(_same_settings(allowed, given) for allowed in self._databases):
            raise ConfigError(
                "the file does not allow this PostgreSQL catalog in destinations_table",
                hint="name a variable of destinations_allow.env in catalog_env, or add the connection string to"
                " destinations_allow.catalogs",
            )


def _patterns(given: Iterable[str], derive: bool, own: Iterable[str]) -> list[_Path]:
    return [_path(p).beside() for p in own] if derive else [_path(p) for p in given]


def _any(patterns: Iterable[_Path], place: str) -> bool:
    found = _path(place)
    if not any(pattern.allows(found) for pattern in patterns):
        return False
    # Resolve links only now, so that no path of the host is read unless it is allowed.
    return found.real == found or any(pattern.real.allows(found.real) for pattern in patterns)


def _path(place: str) -> _Path:
    """Parse an absolute path or a URL; empty parts of a URL count, because keys of an object store may have them."""
    kind, path = ("sqlite:", place[7:]) if place.startswith("sqlite:") else ("", place)
    scheme, separator, rest = path.partition("://")
    if separator:
        return _Path((f"{kind}{scheme}://", *rest.rstrip("/").split("/")))
    return _Path((kind, *_split(path)))


def _split(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _fits(pattern: str, part: str, value: str) -> bool:
    if PLACEHOLDER not in pattern:
        return pattern == part
    return re.fullmatch(value.join(map(re.escape, pattern.split(PLACEHOLDER))), part) is not None


def _settings(catalog: str, key: str) -> dict[str, str]:
    return {name: str(value) for name, value in catalog_settings(catalog, key).items()}


def _same_settings(allowed: dict[str, str], given: dict[str, str]) -> bool:
    """Whether both have exactly the same settings, because `hostaddr`, `service`, `options` and others also redirect."""
    return allowed.keys() == given.keys() and all(_fits(allowed[k], given[k], _SETTING) for k in allowed)
