"""Tests that the sampling that a model's author recommends applies where vLLM applies it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from api_support import Live
from commands import Cli
from model_helpers import byte_model

from megakernel import LLM, SamplingParams
from megakernel.errors import MegakernelError

LIMITS: dict[str, Any] = {"max_context": 64, "threads": 1}
# Only the likeliest token is sampled, so that all seeds give the same tokens.
DEFAULTS = {"do_sample": True, "temperature": 0.9, "top_k": 1, "max_new_tokens": 6}
FREE = {"top_k": -1, "temperature": 2.0}


@pytest.fixture(scope="module")
def quiet_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    byte_model(folder, gain=0.01)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return str(folder)


def test_llm_uses_them_unless_parameters_are_given(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.9, top_k=1, max_tokens=6)
    chat: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    for made in ([llm.generate("x")[0] for _ in range(3)], [llm.chat(chat)[0] for _ in range(3)]):
        assert [one.token_ids for one in made] == [made[0].token_ids] * 3 and len(made[0].token_ids) == 6
    given = [llm.generate("x", SamplingParams(seed=seed, max_tokens=9, temperature=2.0))[0] for seed in (1, 2)]
    assert given[0].token_ids != given[1].token_ids and len(given[0].token_ids) == 9


def test_llm_takes_them_from_elsewhere_or_not_at_all(quiet_model: str, tmp_path: Path) -> None:
    with LLM(quiet_model, generation_config="vllm", backend="null", **LIMITS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    path = tmp_path / "generation_config.json"
    path.write_text('{"min_p": 0.25}')
    with LLM(quiet_model, generation_config=str(tmp_path), backend="null", **LIMITS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(min_p=0.25)
    for content, message in ('{"top_p": 3}', "top_p=3.0 .*; use --generation-config vllm"), ("[", "not valid JSON"):
        path.write_text(content)
        with pytest.raises(MegakernelError, match=rf"generation_config\.json.*{message}"):
            LLM(quiet_model, generation_config=str(tmp_path), backend="null", **LIMITS)
    path.unlink()
    with pytest.raises(MegakernelError, match=r"generation_config\.json does not exist"):
        LLM(quiet_model, generation_config=str(tmp_path), backend="null", **LIMITS)


def test_requests_use_them_field_by_field(live: Live) -> None:
    def ask(**more: Any) -> tuple[str, int]:
        answer = live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **more})
        return json.dumps(answer["choices"]), answer["usage"]["completion_tokens"]

    alike = [ask(seed=seed, max_tokens=5) for seed in (1, 2, 3)]
    assert alike == [alike[0]] * 3 and alike[0][1] == 5
    assert len({ask(seed=seed, **FREE)[0] for seed in (1, 2, 3)}) > 1
    assert ask(max_tokens=20)[1] == 6  # max_new_tokens limits every answer


def test_verbs_use_and_name_them(cli: Cli, quiet_model: str) -> None:
    flags = ["generate", "--model", quiet_model, "--prompt", "x", "--max-model-len", "64", "--ignore-eos"]
    _, text, said = cli.run(*flags)
    assert "recommended sampling: temperature 0.9, top_k 1, max_tokens 6;" in said
    assert cli.run(*flags)[1] == text
    assert "recommended sampling: max_tokens 6;" in cli.run(*flags, "--temperature", "0")[2]
    assert "recommended sampling: temperature 0.9, top_k 1;" in cli.run(*flags, "--max-tokens", "3")[2]
    assert len(cli.json(*flags, "--max-tokens", "8")["token_ids"]) == 8
    _, _, said = cli.run(*flags, "--generation-config", "vllm", "--max-tokens", "3")
    assert "recommended" not in said
