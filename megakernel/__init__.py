"""Compiles a language model's forward pass into one program of instruction streams, and interprets that program."""

from __future__ import annotations

import os.path

# In an installed package, scheduler and serving are inside this folder. In a checkout, they are next to this folder.
# (Python imports the checkout if it is the current folder.) Importing `pathlib` or `typing` would take longer, and
# `__main__` handles Ctrl-C only after this module.
if not os.path.exists(os.path.join(__path__[0], "scheduler")):  # noqa: PTH110, PTH118
    __path__.append(os.path.dirname(__path__[0]))  # noqa: PTH120

TYPE_CHECKING = False  # type checkers take it for true
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
    """Import a public name on first use, so that importing the instruction table, for example, loads no engine."""
    if name == "__version__":
        from importlib.metadata import version

        return version("megakernel")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)
