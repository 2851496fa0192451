"""Adapts the OpenAPI schema to the served model and to the server's configuration."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from megakernel.serving.server.service import Service

_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}


def describe(app: FastAPI, service: Service) -> None:
    """Correct the schema that FastAPI makes for `app`.

    Limit token ids to the vocabulary, remove status 422, which this server does not use, and add the API key if the
    server requires one.
    """
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = made()
            _bound(schema, service.description.vocab)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            if service.access.keys:
                schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for name, path in schema["paths"].items():
                for operation in path.values() if service.access.guards(name) else ():
                    operation["security"] = [{"key": []}]
                    operation["responses"]["401"] = {"description": "missing or wrong API key", "content": _ERROR}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _bound(node: Any, vocab: int) -> None:
    if isinstance(node, dict):
        if node.pop("x-vocabulary", False):
            node["maximum"] = vocab - 1
        for value in node.values():
            _bound(value, vocab)
    elif isinstance(node, list):
        for value in node:
            _bound(value, vocab)
