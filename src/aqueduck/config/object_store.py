"""
How a configuration file names an object store: properties, with credentials through variables only.

The keys are `s3_endpoint`, `s3_region`, `s3_url_style`, `s3_use_ssl`, and for each credential the name of a
variable: `s3_access_key_id_env`, `s3_secret_access_key_env`, `s3_session_token_env`. `read_properties` reads
the variables. `lake.session.object_stores` passes the result to DuckDB and pyarrow.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from aqueduck.model.errors import ConfigError

__all__ = ["VARIABLE", "Properties", "VariableName", "plain_text", "read_properties", "read_variable"]

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(access_key|secret|token|password)", re.IGNORECASE)


def plain_text(value: Any) -> Any:
    """The text of a value in the file that YAML parses as a number, a boolean or a date."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime.date):
        return value.isoformat()
    return str(value) if isinstance(value, int | float) else value


def _refuse_secrets(values: dict[str, str]) -> dict[str, str]:
    for key in values:
        if _SECRET.search(key) and not key.endswith("_env"):
            raise ValueError(f"{key} is a credential: use {key}_env with the name of a variable")
    return values


def _variable_name(value: str) -> str:
    if not VARIABLE.fullmatch(value):  # it may be the secret itself: never show it
        raise ValueError("must be the name of an environment variable")
    return value


Properties = Annotated[
    dict[str, Annotated[str, BeforeValidator(plain_text)]], AfterValidator(_refuse_secrets)
]
"""Properties of an object store; all credentials are named by variables."""
VariableName = Annotated[str, AfterValidator(_variable_name)]


def read_properties(properties: Mapping[str, str], env: Mapping[str, str], where: str) -> dict[str, str]:
    """The properties with the values of their variables; `where` precedes the key in error messages."""
    return {
        key.removesuffix("_env"): read_variable(env, value, f"{where}{key}")
        if key.endswith("_env")
        else value
        for key, value in properties.items()
    }


def read_variable(env: Mapping[str, str], variable: str, where: str) -> str:
    """The value of a variable that the file names."""
    if not VARIABLE.fullmatch(variable):  # it may be the secret itself: never show it
        raise ConfigError(f"{where}: must be the name of an environment variable")
    if not env.get(variable):
        raise ConfigError(f"{where}: the variable {variable} is not set", hint=f"export {variable}=…")
    return env[variable]
