"""Reads an answer that arrives in pieces, as the server does."""

from __future__ import annotations

from collections.abc import Sequence

from megakernel.serving.text.tool_calls import Reader

Calls = list[tuple[str, str]]


def read_answer(reader: Reader, pieces: Sequence[str], reason: str) -> tuple[str, Calls, str]:
    """Return the content, the calls (names and arguments) and the reasoning of an answer."""
    text, calls = {"content": "", "reasoning": ""}, Calls()
    for at, given in enumerate(pieces, 1):
        for piece in reader.add(given, reason if at == len(pieces) else None):
            if piece.kind == "call":
                calls.append((piece.text, ""))
            elif piece.kind == "arguments":
                calls[-1] = calls[-1][0], calls[-1][1] + piece.text
            else:
                text[piece.kind] += piece.text
    assert reader.calls == len(calls)
    return text["content"], calls, text["reasoning"]
