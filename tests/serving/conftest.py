"""The server fixture that several test files of this folder share."""

from collections.abc import Iterator

import pytest
from api_support import Live, serving, until

from megakernel import LLM


@pytest.fixture(scope="module")
def live(llm: LLM) -> Iterator[Live]:
    """Yield a server for the `llm` fixture of the test file."""
    with serving(llm) as server:
        yield server
        until(server.at_rest)
