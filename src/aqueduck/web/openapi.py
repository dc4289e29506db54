"""The OpenAPI document of the API, made from the list in `operations` and the models in `answers`."""

from __future__ import annotations

import re
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from aqueduck.web.answers import ErrorAnswer, Health, Readiness
from aqueduck.web.operations import OPERATIONS, PREFIX, Operation

__all__ = ["openapi_document"]

_REF = "#/components/schemas/{model}"
_NAMES = {
    "get": "read", "post": "do", "put": "set", "delete": "delete",
}  # fmt: skip


def openapi_document(version: str) -> dict[str, Any]:
    """What `/api/v1/openapi.json` answers."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {
        "/healthz": {
            "get": _probe(
                "Whether the process is alive and its flows turn",
                {200: _schema(Health, schemas), 503: _schema(Health, schemas)},
            )
        },
        "/readyz": {
            "get": _probe(
                "Whether everything that has work moves",
                {200: _schema(Readiness, schemas), 503: _schema(Readiness, schemas)},
            )
        },
    }
    for operation in OPERATIONS:
        paths.setdefault(PREFIX + operation.path, {})[operation.method.lower()] = _described(
            operation, schemas
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Aqueduck",
            "version": version,
            "description": "Status and control of a running service. Beside what is described here there are /metrics "
            "(Prometheus) and /api/v1/events (server-sent events for the page).",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    error = {"description": "An error", "content": _json(_schema(ErrorAnswer, schemas))}
    answer = _json(_schema(operation.answer, schemas))
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "responses": {str(operation.status): {"description": "Done", "content": answer}, "default": error},
        # An empty requirement: no token is needed where the server is bound to a loopback address.
        "security": [{"token": []}] if operation.changes else [{}, {"token": []}],
    }
    if operation.params is not None:
        described["parameters"] = _parameters(operation, schemas)
    if operation.body is not None:
        body = _schema(operation.body, schemas, "validation")
        described["requestBody"] = {"required": True, "content": _json(body)}
    return described


def _parameters(operation: Operation, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    assert operation.params is not None
    model = TypeAdapter(operation.params).json_schema(ref_template=_REF)
    schemas.update(model.get("$defs", {}))
    in_path = set(re.findall(r"{(\w+)}", operation.path))
    return [
        {
            "name": name,
            "in": "path" if name in in_path else "query",
            "required": name in in_path,
            "schema": _without_null(schema),
        }
        for name, schema in model["properties"].items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query has no null: a parameter is there or not."""
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    if len(options) != 1:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    return {**rest, **options[0]}


def _schema(model: Any, schemas: dict[str, Any], mode: JsonSchemaMode = "serialization") -> dict[str, Any]:
    schema = TypeAdapter(model).json_schema(ref_template=_REF, mode=mode)
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema
    return {"$ref": _REF.format(model=model.__name__)}


def _probe(summary: str, answers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {
            str(status): {"description": "Green" if status == 200 else "Red", "content": _json(schema)}
            for status, schema in answers.items()
        },
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation_id(operation: Operation) -> str:
    words = [_NAMES[operation.method.lower()], *re.findall(r"\w+", operation.path)]
    return "_".join(words)
