"""
How a lake is named in a configuration file, and where it is once every variable has been read.

`LakeKeys` are the keys that the source and all destinations of a fan-out share; `resolve` makes a `LakePlace` of
them, the only thing that workers need to attach the lake.  Credentials come through variables only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator, model_validator

from aqueduck.object_store import (
    VARIABLE,
    Properties,
    plain_text,
    read_properties,
    read_variable,
    refuse_secrets,
)
from aqueduck.sections import Section, Text

__all__ = ["LakeKeys", "LakePlace", "PlainText", "resolve"]

_PASSWORD = re.compile(r"password\s*=|://[^/@\s]*:[^/@\s]+@", re.IGNORECASE)


PlainText = Annotated[Text, BeforeValidator(plain_text)]


class LakePlace(Section):
    """Where a lake is and how to get in; everything that a worker needs to attach it."""

    catalog: Text = Field(repr=False)
    data_path: str
    """Empty: the one that the catalog knows, for readers."""
    metadata_schema: str | None = None
    """The schema of a PostgreSQL database that holds the catalog; many lakes can share a database."""
    properties: tuple[tuple[str, str], ...] = Field(default=(), repr=False)
    """Settings of the object store, such as `s3_endpoint`, secrets included."""


class LakeKeys(Section):
    """The keys by which a lake is named in the file; one of the first three is needed."""

    postgres_uri_env: Text | None = None
    catalog: Text | None = Field(default=None, repr=False)
    catalog_env: Text | None = None
    metadata_schema: Text | None = None
    data_path: Text
    name: Text | None = None
    """What users call the catalog; for people only."""
    properties: Properties = Field(default_factory=dict, repr=False)

    @model_validator(mode="after")
    def _names_one_catalog(self) -> LakeKeys:
        given = [self.postgres_uri_env, self.catalog, self.catalog_env]
        if len([key for key in given if key is not None]) != 1:
            raise ValueError("needs exactly one of postgres_uri_env, catalog and catalog_env")
        for variable in (self.postgres_uri_env, self.catalog_env):
            if variable is not None and not VARIABLE.fullmatch(variable):
                raise ValueError("postgres_uri_env and catalog_env take the name of an environment variable")
        if self.catalog is not None and _PASSWORD.search(self.catalog):
            raise ValueError(
                "catalog has a password: put the text into a variable and name it in catalog_env"
            )
        return self

    @field_validator("properties")
    @classmethod
    def _hold_no_secrets(cls, values: dict[str, str]) -> dict[str, str]:
        return refuse_secrets(values)


def resolve(
    lake: LakeKeys,
    defaults: Mapping[str, str],
    env: Mapping[str, str],
    where: str = "source",
) -> LakePlace:
    """The lake with everything that variables hold."""
    found = read_properties({**defaults, **lake.properties}, env, f"{where}: properties.")
    if lake.postgres_uri_env is not None:
        uri = read_variable(env, lake.postgres_uri_env, f"{where}: postgres_uri_env")
        catalog = uri if uri.startswith(("postgres:", "postgresql:")) else f"postgres:{uri}"
    elif lake.catalog_env is not None:
        catalog = read_variable(env, lake.catalog_env, f"{where}: catalog_env")
    else:
        assert lake.catalog is not None
        catalog = lake.catalog
    return LakePlace(
        catalog=catalog,
        data_path=lake.data_path,
        metadata_schema=lake.metadata_schema,
        properties=tuple(sorted(found.items())),
    )
