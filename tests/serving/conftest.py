"""The server that several files of this folder ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_support import Live, serving, until

from megakernel import LLM


@pytest.fixture(scope="module")
def live(llm: LLM) -> Iterator[Live]:
    """A server of the `llm` that a file has."""
    with serving(llm) as server:
        yield server
        until(server.at_rest)
