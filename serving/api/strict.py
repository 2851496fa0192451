"""The base class of all request bodies and their parts."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from . import fields


def _describe(schema: dict[str, Any], model: type[Any]) -> None:
    """The OpenAPI schema lists supported fields; other fields may only be null."""
    if model.body:
        schema["additionalProperties"] = {"type": "null"}


class Strict(BaseModel):
    """A strictly validated JSON object. Its class declares the supported fields.

    `body` names an entry of the table in `fields.py`, which says which other fields are ignored or
    refused. If `body` is empty, all are ignored.
    """

    # "5" is not accepted as a number, nor 1 as true. JSON has no infinity.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, json_schema_extra=_describe)
    body: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _read_only_known_fields(cls, given: Any) -> Any:
        return fields.without_unread(cls.body, given, cls.model_fields) if cls.body else given
