"""Fixtures that several test files of this folder share: a model, a server and a client."""

from collections.abc import Iterator

import pytest
from api_support import Live, serving, until
from model_helpers import byte_model
from openai import OpenAI

from megakernel import LLM


@pytest.fixture(scope="session")
def quiet_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model as the fixture `model` gives it, but with logits that are small compared with biases and penalties."""
    folder = tmp_path_factory.mktemp("quiet")
    byte_model(folder, gain=0.01)
    return str(folder)


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, quiet_model: str) -> Iterator[LLM]:
    """The model `bytes`, with the arguments LIMITS of the test file."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "threads": 1} | request.module.LIMITS
    with LLM(quiet_model, **limits) as made:
        made.model = "bytes"
        yield made


@pytest.fixture(scope="module")
def live(llm: LLM) -> Iterator[Live]:
    """Yield a server for the `llm` fixture of the test file."""
    with serving(llm) as server:
        yield server
        until(server.at_rest)


@pytest.fixture
def client(live: Live) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def null(model: str) -> Iterator[Live]:
    """A server whose model computes nothing, and generates the token 0 without end."""
    limits = {"max_context": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32, "threads": 1}
    with LLM(model, backend="null", **limits) as llm, serving(llm) as server:  # type: ignore[arg-type]
        yield server
