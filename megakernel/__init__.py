"""Compiles a model's forward pass into a program (a list of instructions for each SM or CPU core), and runs it."""

from __future__ import annotations

import os.path

# The folders `scheduler` and `serving` are inside this folder in an installed package, and next to it in a checkout.
# Therefore their parent folder is added to the import path. This file imports neither `pathlib` nor `typing`, because
# they load slowly and Ctrl-C is handled only after this file has run.
if not os.path.exists(os.path.join(__path__[0], "scheduler")):  # noqa: PTH110, PTH118
    __path__.append(os.path.dirname(__path__[0]))  # noqa: PTH120

TYPE_CHECKING = False  # type checkers treat this name as true
if TYPE_CHECKING:
    from typing import Any

    from megakernel.serving import (
        LLM,
        AsyncLLM,
        CompletionOutput,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

    from .errors import MegakernelError

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "MegakernelError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = dict.fromkeys(__all__, ".serving") | {"MegakernelError": ".errors"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing a small module does not load the inference engine."""
    if name == "__version__":
        from importlib.metadata import version

        return version("megakernel")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)
