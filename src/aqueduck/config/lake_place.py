"""
How a configuration file names a lake, and the lake's location once all variables are read.

`LakeKeys` has the keys that the source and all destinations of a fan-out share. `resolve` turns them into a
`LakePlace`, which is all that workers need to attach the lake. Credentials come from variables and files only.
`lake_address` identifies a lake regardless of how the file writes it.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from aqueduck.config.credentials import named_secret
from aqueduck.config.object_store import (
    VARIABLE,
    Properties,
    plain_text,
    read_properties,
    read_variable,
)
from aqueduck.config.sections import DataPath, Secret, Section, Text
from aqueduck.model.errors import ConfigError

__all__ = ["LakeKeys", "LakePlace", "PlainText", "lake_address", "resolve"]

_PASSWORD = re.compile(r"password\s*=|://[^/@\s]*:[^/@\s]+@", re.IGNORECASE)


PlainText = Annotated[Text, BeforeValidator(plain_text)]


class LakePlace(Section):
    """The location of a lake and its credentials: everything that a worker needs to attach it."""

    catalog: Secret = Field(repr=False)
    data_path: str
    """If empty, a reader uses the path stored in the catalog."""
    metadata_schema: str | None = None
    """The schema of the PostgreSQL database that holds the catalog; one database can hold many catalogs."""
    properties: tuple[tuple[str, Secret], ...] = Field(default=(), repr=False)
    """Settings of the object store, such as `s3_endpoint`, including secrets."""


class LakeKeys(Section):
    """The keys by which a lake is named in the file; one of the first four is needed."""

    postgres_uri_env: Text | None = None
    catalog: Text | None = Field(default=None, repr=False)
    catalog_env: Text | None = None
    catalog_file: Text | None = None
    """A file whose text is the catalog; not for rows of a table, which could name any file."""
    metadata_schema: Text | None = None
    data_path: DataPath
    name: Text | None = None
    """The name that users give the catalog; only for display."""
    properties: Properties = Field(default_factory=dict, repr=False)

    @model_validator(mode="after")
    def _names_one_catalog(self) -> LakeKeys:
        given = [self.postgres_uri_env, self.catalog, self.catalog_env, self.catalog_file]
        if len([key for key in given if key is not None]) != 1:
            raise ValueError("needs exactly one of postgres_uri_env, catalog, catalog_env and catalog_file")
        for variable in (self.postgres_uri_env, self.catalog_env):
            if variable is not None and not VARIABLE.fullmatch(variable):
                raise ValueError("postgres_uri_env and catalog_env take the name of an environment variable")
        if self.catalog is not None and _PASSWORD.search(self.catalog):
            raise ValueError(
                "catalog has a password: put the text into a variable or a file, and name it in catalog_env or"
                " catalog_file"
            )
        return self


def resolve(
    lake: LakeKeys,
    defaults: Mapping[str, str],
    env: Mapping[str, str],
    where: str = "source",
) -> LakePlace:
    """The lake's location with the values of all variables."""
    found = read_properties({**defaults, **lake.properties}, env, f"{where}: properties.")
    if lake.postgres_uri_env is not None:
        catalog = _as_postgres(read_variable(env, lake.postgres_uri_env, f"{where}: postgres_uri_env"))
    elif lake.catalog_env is not None:
        catalog = read_variable(env, lake.catalog_env, f"{where}: catalog_env")
    elif lake.catalog_file is not None:
        catalog = named_secret("file", lake.catalog_file, f"{where}: catalog_file")
    else:
        assert lake.catalog is not None
        catalog = lake.catalog
    return LakePlace(
        catalog=catalog,
        data_path=lake.data_path,
        metadata_schema=lake.metadata_schema,
        properties=tuple(sorted(found.items())),
    )


def lake_address(lake: LakeKeys, env: Mapping[str, str]) -> str:
    """
    A text without credentials that is equal for the same lake.

    If the catalog is in a variable or a file of another instance, which cannot be read here, the name of that is used.
    """
    if lake.catalog is not None:
        catalog = lake.catalog
    elif lake.catalog_env is not None:
        catalog = env.get(lake.catalog_env) or lake.catalog_env
    elif lake.catalog_file is not None:
        catalog = _of_file(lake.catalog_file)
    else:
        assert lake.postgres_uri_env is not None
        catalog = _as_postgres(env.get(lake.postgres_uri_env) or lake.postgres_uri_env)
    if not catalog.startswith(_POSTGRES):
        kind, path = ("sqlite:", catalog[7:]) if catalog.startswith("sqlite:") else ("", catalog)
        return f"{kind}{os.path.normpath(path)} {lake.metadata_schema or 'main'}"
    given = _connection_settings(catalog)
    host = given.get("host") or given.get("hostaddr") or given.get("service") or "localhost"
    database = given.get("dbname") or given.get("user") or ""
    port = given.get("port") or "5432"
    return f"postgres:{host.lower()}:{port}/{database} {lake.metadata_schema or 'public'}"


_POSTGRES = ("postgres:", "postgresql:")
_SETTING = re.compile(r"(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|\S+)")
_URI = re.compile(
    r"\w+://(?:([^:@/?]*)(?::[^@/?]*)?@)?(\[[^]]*\]|[^:/?]*)(?::(\d*))?(?:/([^?]*))?(?:\?(.*))?"
)


def _of_file(path: str) -> str:
    try:
        return named_secret("file", path, "catalog_file")
    except ConfigError:
        return path


def _as_postgres(uri: str) -> str:
    return uri if uri.startswith(_POSTGRES) else f"postgres:{uri}"


def _connection_settings(catalog: str) -> dict[str, str]:
    """The settings in a connection string; an unparsable string is its own only setting."""
    text = catalog if "://" in catalog[:13] else catalog.partition(":")[2]
    if uri := _URI.fullmatch(text):
        user, host, port, database, more = (part or "" for part in uri.groups())
        given = {"user": user, "host": host, "port": port, "dbname": database}
        return given | dict(_SETTING.findall((more or "").replace("&", " ")))
    found = {key: re.sub(r"\\(.)", r"\1", value.strip("'")) for key, value in _SETTING.findall(text)}
    return found or {"dbname": text}
