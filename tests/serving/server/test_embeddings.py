"""Tests of embeddings: pooled hidden states equal those of transformers in any batch and any form of request."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from api_support import Live, ids_of
from model_helpers import tiny_gguf
from msgspec.structs import replace
from numpy.typing import NDArray
from tiny_llama import make_llama
from transformers import LlamaForCausalLM

from megakernel import LLM, SamplingParams
from megakernel.model import load_pooling

EMBEDDINGS = "/v1/embeddings"
SHAPE: dict[str, Any] = {"family": "qwen3", "heads": 6, "kv_heads": 2, "head_dim": 40, "hidden": 56, "ffn": 84}
SHAPE |= {"tied": True}
PROMPTS = [np.random.default_rng(3).integers(0, 97, length).tolist() for length in (1, 7, 90)]


def expected(hf: Any, prompt: list[int], pooling: str) -> NDArray[np.float64]:
    with torch.no_grad():
        states: NDArray[np.float64] = hf.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    return states[-1] if pooling == "last" else states.mean(axis=0)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    ("backend", "tp", "dtype", "tolerance"),
    [("reference", 1, "f32", 1e-4), ("cpu", 1, "f32", 1e-4), ("cpu", 2, "f32", 1e-4), ("cpu", 1, "bf16", 0.05)],
)
def test_hidden_states_as_in_transformers(backend: str, tp: int, dtype: str, tolerance: float, pooling: str) -> None:
    hf, checkpoint = make_llama(seed=1, vocab=97, **SHAPE)
    params = SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling)
    how: dict[str, Any] = {"max_context": 128, "max_num_batched_tokens": 16, "max_num_seqs": 4, "threads": 1}
    with LLM(checkpoint, tp, backend=backend, dtype=dtype, **how) as llm:
        got: dict[int, NDArray[np.float32]] = {}
        requests = [llm.engine.add(prompt, params) for prompt in PROMPTS]
        llm.engine.add([1, 2, 3], SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=1, seed=1))
        for step in llm.engine.run():
            got |= {step.tokens.choice[i]: one.pooled for i, one in step.tokens.begun.items() if one.pooled is not None}
        assert got.keys() == {request.first for request in requests}
        llm.engine.add(PROMPTS[2], params)
        [alone] = [one.pooled for step in llm.engine.run() for one in step.tokens.begun.values()]
    assert np.array_equal(alone, got[requests[2].first])
    for request, prompt in zip(requests, PROMPTS, strict=True):
        wanted = expected(hf, prompt, pooling)
        assert np.abs(got[request.first] - wanted).max() <= tolerance * np.abs(wanted).max()


# -- the route


LIMITS = {"max_context": 256}


def unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    return vector / np.linalg.norm(vector)  # type: ignore[no-any-return]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_every_form_of_a_request(live: Live, quiet_model: str, pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.service, "description", replace(live.service.description, pooling=pooling))
    hf = LlamaForCausalLM.from_pretrained(quiet_model)
    texts = ["hello", "x", "a longer text, which takes several steps: " + "y" * 60]
    ids = [ids_of(text) for text in texts]
    wanted = [unit(expected(hf, one, pooling)) for one in ids]
    tokens = sum(map(len, ids))
    for given, count in ((texts, 3), (ids, 3), (texts[0], 1), (ids[0], 1)):
        answer = live.post(EMBEDDINGS, {"input": given, "user": "u", "encoding_format": "float"})
        assert (answer["object"], answer["model"]) == ("list", "bytes")
        assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", i) for i in range(count)]
        used = tokens if count == 3 else 5
        assert answer["usage"] == {"prompt_tokens": used, "total_tokens": used}
        for one, vector in zip(answer["data"], wanted, strict=False):
            np.testing.assert_allclose(one["embedding"], vector, atol=1e-5)
    packed = live.post(EMBEDDINGS, {"input": texts[0], "encoding_format": "base64"})["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == pytest.approx(wanted[0].tolist(), abs=1e-5)
    short = live.post(EMBEDDINGS, {"input": texts[0], "dimensions": 10})["data"][0]["embedding"]
    np.testing.assert_allclose(short, unit(wanted[0][:10]), atol=1e-5)
    cut = live.post(EMBEDDINGS, {"input": texts[0], "truncate_prompt_tokens": 2})
    assert cut["usage"]["prompt_tokens"] == 2
    np.testing.assert_allclose(cut["data"][0]["embedding"], unit(expected(hf, ids[0][-2:], pooling)), atol=1e-5)
    sdk = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    embeddings = sdk.embeddings.create(model="bytes", input=texts).data
    np.testing.assert_allclose(embeddings[2].embedding, wanted[2], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ""}, "input must be text, token ids, or a list"),
        ({"input": [[1], "x"]}, "input must be text, token ids, or a list"),
        ({"input": [999]}, "token 999 is outside the vocabulary"),
        ({"input": "x" * 257}, "maximum context length is 256 tokens"),
        ({"dimensions": 0}, "dimensions must be greater than or equal to 1"),
        ({"dimensions": 49}, "dimensions must be at most 48, not 49"),
        ({"encoding_format": "int8"}, "encoding_format must be 'float' or 'base64'"),
    ],
)
def test_what_is_wrong_is_a_400(live: Live, body: dict[str, Any], message: str) -> None:
    assert message in live.post(EMBEDDINGS, {"input": "x", **body}, 400)["error"]["message"]


def test_a_pooling_that_is_not_supported_is_named(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.service, "description", replace(live.service.description, pooling="cls_token"))
    assert "bytes makes embeddings with cls_token" in live.post(EMBEDDINGS, {"input": "x"}, 400)["error"]["message"]


def mode(name: str) -> dict[str, Any]:
    """Return the pooling flags that sentence-transformers writes to a file. Only the flag of `name` is true."""
    names = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 48} | {f"pooling_mode_{other}": other == name for other in names}


@pytest.mark.parametrize(
    ("declared", "pooling"),
    [
        (None, "last"),
        (mode("lasttoken"), "last"),
        (mode("mean_tokens"), "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        (mode("cls_token"), "pooling_mode_cls_token"),
        (
            mode("mean_tokens") | {"pooling_mode_max_tokens": True},
            "pooling_mode_mean_tokens and pooling_mode_max_tokens",
        ),
        ({}, "none"),
    ],
)
def test_the_folder_says_how_to_pool(tmp_path: Path, declared: dict[str, Any] | None, pooling: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "1_Pooling").mkdir()
    if declared is not None:
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(declared))
    assert load_pooling(str(tmp_path)) == pooling
    (tmp_path / "2_Dense").mkdir()
    assert load_pooling(str(tmp_path)) == "a dense layer"


@pytest.mark.parametrize("number, pooling", [(None, "last"), (1, "mean"), (3, "last"), (2, "GGUF's pooling type 2")])
def test_a_gguf_file_says_how_to_pool(tmp_path: Path, number: int | None, pooling: str) -> None:
    path = tmp_path / "model.gguf"
    tiny_gguf(path, **({} if number is None else {"llama__pooling_type": number}))
    assert load_pooling(str(path)) == pooling
