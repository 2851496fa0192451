"""Tests weights that are in memory: an LLM of a transformers model, and replacements between requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import make_llama, published
from transformers import PreTrainedModel

from megakernel import LLM, SamplingParams
from megakernel.errors import MegakernelError
from megakernel.isa import Dtype
from megakernel.model.memory import open_memory

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
PROMPTS = [[5, 9, 7, 30, 2] * 30, [8, 1]]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"heads": 9, "kv_heads": 3, "head_dim": 8, "hidden": 72, "ffn": 137, "tied": True},
    "gemma": {"heads": 6, "kv_heads": 2, "head_dim": 24, "hidden": 56, "ffn": 69, "tied": True},
    "qwen3_moe": {"heads": 6, "kv_heads": 3, "head_dim": 40, "hidden": 56, "ffn": 83, "attention_bias": True},
    "granite": {"heads": 6, "kv_heads": 3, "hidden": 40, "ffn": 99, "logits_scaling": 8.0},
}
CASES = [*product(SHAPES, ["cpu"], [1, 4]), ("qwen3_moe", "reference", 2)]


def answers(llm: LLM) -> list[Any]:
    return [(out.token_ids, out.logprobs) for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def saved(folder: Path, model: PreTrainedModel, **options: Any) -> list[Any]:
    """The answers of a folder into which the model is saved."""
    model.save_pretrained(folder)
    with LLM(str(folder), **options) as llm:
        return answers(llm)


@pytest.mark.parametrize(("family", "backend", "tp"), CASES)
def test_answers_as_saved_also_after_replacements(tmp_path: Path, family: str, backend: str, tp: int) -> None:
    dtype = torch.bfloat16 if family == "gemma" else torch.float32
    models = [make_llama(seed, family, **SHAPES[family] | {"max_context": 256})[0].to(dtype) for seed in range(4)]
    options: dict[str, Any] = {"backend": backend, "tp": tp, "max_num_seqs": 4}
    with LLM(models[0], **options) as llm:
        assert llm.dtype is (Dtype.F32 if dtype is torch.float32 else Dtype.BF16)
        held = getattr(llm.engine.backend, "weight_bytes", 0)
        for number, model in enumerate(models):
            if number:
                llm.load_weights(model if number < 3 else iter(published(model).items()))
            assert answers(llm) == saved(tmp_path, model, **options)
        assert getattr(llm.engine.backend, "weight_bytes", 0) == held


def test_some_weights_in_other_types_replace_quantised_ones(tmp_path: Path) -> None:
    shape = {"hidden": 64, "ffn": 96, "head_dim": 16, "heads": 4, "kv_heads": 2}
    first, second = (make_llama(seed, "qwen3", **shape)[0] for seed in (1, 2))
    options: dict[str, Any] = {"weights": "q8_0", "backend": "cpu", "max_num_seqs": 4}
    parts = ("layers.1.self_attn.q", "layers.1.self_attn.k_p", "layers.1.self_attn.v", "down_proj", "lm_head", "norm")
    new = {name: tensor for name, tensor in second.state_dict().items() if any(part in name for part in parts)}
    new |= {name: tensor for name, tensor in second.state_dict().items() if "layers.0" in name}
    with LLM((first.config.to_dict(), first.state_dict().items()), **options) as llm:
        before = answers(llm)
        llm.load_weights((name, tensor.half() if "mlp" in name else tensor.numpy()) for name, tensor in new.items())
        assert answers(llm) != before
        with torch.no_grad():
            for name, tensor in new.items():
                first.get_parameter(name).copy_(tensor.half() if "mlp" in name else tensor)
        assert answers(llm) == saved(tmp_path, first, **options)


def test_what_does_not_fit_replaces_nothing() -> None:
    model = make_llama(1, "llama", **SHAPES["llama"])[0]
    state = dict(model.state_dict())
    gate, down = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.down_proj.weight"

    def failing() -> Iterator[tuple[str, Any]]:
        yield down, torch.zeros_like(state[down])
        raise OSError("the trainer is gone")

    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"model.layers.9.mlp.down_proj.weight": state[down]}, MegakernelError, "belongs to no part of the model"),
        ({down: state[down][1:]}, MegakernelError, r"has shape \[71, 137\]; the config asks for \[72, 137\]"),
        ({down: state[down].long()}, MegakernelError, r"has type int64, not one of float32"),
        ({down: state[down] / 0}, MegakernelError, "contains a NaN or an infinity"),
        ({down: state[down][:0]}, MegakernelError, "must have axes and elements"),
        ({down: 7}, MegakernelError, "has type <class 'int'>"),
        ({gate: state[gate]}, MegakernelError, r"up_proj\.weight is missing: it must come together with .*gate_proj"),
        ({"lm_head.weight": state["lm_head.weight"]}, MegakernelError, "but config.json says that they are equal"),
        (failing(), OSError, "the trainer is gone"),
    ]
    with LLM(model, backend="cpu", max_num_seqs=4) as llm:
        before = answers(llm)
        for given, error, message in wrong:
            good = {"model.norm.weight": 2 * state["model.norm.weight"]}
            with pytest.raises(error, match=message):
                llm.load_weights({**good, **given}.items() if isinstance(given, dict) else given)
        assert answers(llm) == before
        request = llm.engine.add([1, 2], GREEDY)
        with pytest.raises(MegakernelError, match="cannot replace weights while requests"):
            llm.load_weights([])
        llm.engine.abort(request)
    with pytest.raises(MegakernelError, match=r"the model's config: .*is not supported"):
        open_memory(({**json.loads(model.config.to_json_string()), "model_type": "new"}, []))
