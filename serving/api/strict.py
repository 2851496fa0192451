"""What all parts of a request's body have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from . import fields


def _describe(schema: dict[str, Any], model: type[Any]) -> None:
    """OpenAPI has what is supported; of other fields it admits null."""
    if model.body:
        schema["additionalProperties"] = {"type": "null"}


class Strict(BaseModel):
    """`body` names its part of the table of fields; without a name, fields that the model lacks are ignored."""

    # "5" is not a number and 1 is not true. JSON knows no infinity.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, json_schema_extra=_describe)
    body: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _read_only_known_fields(cls, given: Any) -> Any:
        return fields.without_unread(cls.body, given, cls.model_fields) if cls.body else given
