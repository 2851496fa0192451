"""Compares the default model with transformers in float32 on real chat prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megakernel import LLM, SamplingParams
from megakernel.model import KNOWN_SHAPES, RandomCheckpoint, open_checkpoint
from megakernel.serving.bench.peers import torch_llama
from megakernel.timeline import resolve, summarise

PROMPTS = (
    "Name the capital of France.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many?",
    "Write a Python function that returns the 17 largest of 1,024 numbers.",
)
TOKENS = 12


@pytest.mark.slow
def test_greedy_tokens_and_logprobs(smollm2):
    """Greedy tokens and their log-probabilities agree with transformers, which computes logits for the same tokens.
    Both use the weights that megakernel has loaded, because transformers takes 20 seconds to read the GGUF file. A
    token may differ only where the two largest logits of transformers differ by less than 0.05."""
    torch.set_num_threads(1)
    model = torch_llama.build(open_checkpoint("smollm2-135m"), "f32")
    with LLM("smollm2-135m", dtype="f32", activations="float", max_context=512, max_num_seqs=4) as llm:
        prompts = [llm.chat_ids([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
        results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    for prompt, ids, result in zip(PROMPTS, prompts, results, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids + result.token_ids])).logits[0, len(ids) - 1 : -1]
        best = logits.topk(2).values
        tokens = torch.tensor(result.token_ids)
        differs = logits.argmax(-1) != tokens
        assert len(tokens) == TOKENS and not (differs & (best[:, 0] - best[:, 1] >= 0.05)).any(), prompt
        want = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
        assert np.abs(want.numpy() - result.logprobs).max() < 1e-3, prompt


def test_phases_overlap():
    """In a prompt of several row blocks, two workers compute different phases at the same time."""
    checkpoint = RandomCheckpoint("small", replace(KNOWN_SHAPES["smollm2-135m"], layers=4, vocab=1000), 0)
    with LLM(checkpoint, backend="cpu", dtype="f32", max_context=512, max_num_seqs=1) as llm:
        prefill, _ = llm.trace_steps(list(range(3, 303)))
        summary = summarise(resolve(prefill[0].program, prefill[0].output.trace))
        if llm.threads > 1:
            assert summary.overlap.phases > 0
