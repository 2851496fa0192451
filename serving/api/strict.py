"""What all parts of a request's body have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    # "5" is not a number and 1 is not true. JSON knows no infinity.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
