"""Reads an answer that arrives in pieces, as the server does."""

from __future__ import annotations

from collections.abc import Sequence

from megakernel.serving.text.channels import ChannelReader
from megakernel.serving.text.tool_calls import ToolReader

Calls = list[tuple[str, str]]


def read_answer(reader: ToolReader | ChannelReader, pieces: Sequence[str], reason: str) -> tuple[str, Calls, str]:
    """Return the content, the calls (names and arguments) and the reasoning of an answer."""
    content, calls, reasoning = "", Calls(), ""
    for at, piece in enumerate(pieces, 1):
        parts = reader.add(piece, reason if at == len(pieces) else None)
        content, reasoning = content + parts.content, reasoning + parts.reasoning
        for delta in parts.calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            calls[delta.index] = calls[delta.index][0], calls[delta.index][1] + delta.arguments
    assert reader.calls == len(calls)
    return content, calls, reasoning
