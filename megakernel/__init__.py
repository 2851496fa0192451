"""A Llama forward pass compiled into one program of instruction streams, and the interpreters that run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import MegakernelError
    from .serving import LLM, SamplingParams

__all__ = ["LLM", "MegakernelError", "SamplingParams", "__version__"]

_HOMES = {"LLM": ".serving", "SamplingParams": ".serving", "MegakernelError": ".errors"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that reading the instruction table does not load an engine."""
    if name == "__version__":
        from importlib.metadata import version

        return version("megakernel")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)
