"""The base class of all request bodies and their parts."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from megakernel.serving.server.routes import fields


def _describe(schema: dict[str, Any], model: type[Any]) -> None:
    """State in the OpenAPI schema that fields which the class `model` does not declare may only be null."""
    if model.body:
        schema["additionalProperties"] = {"type": "null"}


class Strict(BaseModel):
    """A strictly validated JSON object. Its class declares the supported fields.

    `body` is a key of the table in `fields.py`. The table says which undeclared fields the server ignores and which it
    refuses. A field that is neither declared nor in the table is refused, unless it is null. If `body` is empty, every
    undeclared field is ignored.
    """

    # With strict=True, the string "5" is not accepted as a number, and 1 is not accepted as true. Infinity and NaN are
    # refused, because JSON has neither.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, json_schema_extra=_describe)
    body: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _read_only_known_fields(cls, given: Any) -> Any:
        return fields.without_unread(cls.body, given, cls.model_fields) if cls.body else given
