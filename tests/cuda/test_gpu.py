"""Tests of the CUDA backend on a real GPU: `python -P -m pytest -m gpu`. If the backend cannot run, pytest skips the
tests and reports why."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutate import edit
from phase_graph import by_phases
from runner import Piece, Runner
from tiny_llama import ROPES, error, hf_logits, make_llama

from megakernel import LLM, SamplingParams
from megakernel.cli import doctor_gpu
from megakernel.errors import MegakernelError
from megakernel.isa import Dtype, record
from megakernel.runtime import Chunk, SampleRow, build_step, registered
from megakernel.runtime.cuda.availability import missing

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "speed"))

_LACK = missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_LACK is not None, reason=f"no GPU to run on: {_LACK}")]

# The interpreter supports these sizes. The vocabulary, hidden and FFN sizes are not multiples of its tile sizes.
SHAPE = {"vocab": 331, "hidden": 168, "ffn": 200, "head_dim": 64, "heads": 6, "kv_heads": 2}
TOKENS = np.random.default_rng(0).integers(0, SHAPE["vocab"], 150).tolist()
GRID: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"heads": 3, "kv_heads": 3},
    "mqa": {"heads": 8, "kv_heads": 1, "head_dim": 128},
    "heads of 80": {"head_dim": 80},
    "tied": {"tied": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "norms of heads": {"family": "qwen3", "head_dim": 128, "heads": 4},
    "llama3 rope": {"rope": ROPES["llama3"]},
}


def opened(checkpoint: Any, tp: int = 1, **options: str) -> Runner:
    limits = {"max_seqs": 4, "max_context": 512, "tp": tp}
    machine = registered("cuda").machine(None, tp)
    return Runner(checkpoint, "cuda", Dtype.BF16, machine=machine, **{"matmul": "tensor"} | options, **limits)


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = opened(make_llama(0, **SHAPE)[1])
    yield made
    made.close()


@pytest.mark.parametrize("case", doctor_gpu.cases() if _LACK is None else [], ids=lambda c: c.name)
def test_every_instruction_equals_the_references(case: doctor_gpu.Case) -> None:
    assert doctor_gpu.check(case, seeds=3, repeats=20) == []


@pytest.mark.parametrize("matmul", ["dots", "tensor"])
@pytest.mark.parametrize("name", list(GRID))
def test_steps_of_odd_shapes_equal_transformers(name: str, matmul: str) -> None:
    hf, checkpoint = make_llama(1, **{**SHAPE, **GRID[name]})
    runner = opened(checkpoint, matmul=matmul)
    tokens = TOKENS[:6]
    got = runner.logits(tokens, range(1, len(tokens)), slot=1)
    if matmul == "tensor":
        np.testing.assert_array_equal(runner.logits(tokens, slot=2), got)  # whatever the batch
    expected = hf_logits(hf, tokens)
    theirs = hf_logits(hf.bfloat16(), tokens)
    assert error(got, expected) < 2 * max(error(theirs.astype(np.float32), expected), 0.01)
    runner.close()


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_on_parts_of_the_gpu(tp: int) -> None:
    hf, checkpoint = make_llama(2, **SHAPE)
    tokens = TOKENS[:70]
    expected = hf_logits(hf, tokens)
    for o in ("sharded", "replicated"):
        for residual in ("dealt", "replicated"):
            runner = opened(checkpoint, tp, o=o, residual=residual)
            assert error(runner.logits(tokens), expected) < 0.1, (o, residual)
            runner.close()


def test_switches_change_no_bit(runner: Runner) -> None:
    expected = runner.logits(TOKENS)
    for _ in range(20):
        np.testing.assert_array_equal(runner.logits(TOKENS), expected)
    runner.backend.pipelined = False
    np.testing.assert_array_equal(runner.logits(TOKENS), expected)
    runner.backend.pipelined = True
    with by_phases(runner.backend):
        np.testing.assert_array_equal(runner.logits(TOKENS), expected)
    np.testing.assert_array_equal(runner.logits(TOKENS, trace=True), expected)
    together = runner.step([Piece(3, 0, TOKENS[:100]), Piece(1, 0, [7] * 50)]).logits
    np.testing.assert_array_equal(together[:100], expected[:100])


@pytest.mark.parametrize("queue", ["attention", "body"])
def test_queues_change_no_bit(runner: Runner, queue: str) -> None:
    expected = runner.logits(TOKENS)
    other = opened(runner.checkpoint, queue=queue)
    for _ in range(5):
        np.testing.assert_array_equal(other.logits(TOKENS), expected)
    other.close()


def test_a_missing_signal_ends_in_an_error_and_the_next_launch_works(runner: Runner) -> None:
    tokens = list(range(40))
    good = runner.program(40, 40)
    table = runner.table(good, [Piece(0, 0, tokens)])
    expected = runner.backend.launch(good, table).logits[:]
    row = int(np.flatnonzero(good.body.records[:, record.SIGNAL_WORD])[0])
    bad = edit(good, "body", row, record.SIGNAL_WORD)
    with pytest.raises(MegakernelError, match=r"rank 0 worker \d+ waits in .* for counter"):
        runner.backend.launch(bad, table)
    np.testing.assert_array_equal(runner.backend.launch(good, table).logits[:], expected)
    runner.backend.start(good, table).abort()
    np.testing.assert_array_equal(runner.backend.launch(good, table).logits[:], expected)


@pytest.mark.parametrize("model", ["random:llama-3.2-1b", "random:llama-3.1-8b"])
def test_large_shapes_are_as_close_to_float32_as_torch(model: str) -> None:
    torch = pytest.importorskip("torch")
    from torch_llama import TorchLlama

    with LLM(model, backend="cuda", max_num_seqs=1, max_context=512, max_num_batched_tokens=128) as llm:
        backend: Any = llm.engine.backend
        program = llm.engine.programs.get(64, 64)
        ids = np.random.default_rng(0).integers(0, llm.config.vocab, 64).tolist()
        samples = [SampleRow(i, store=False) for i in range(64)]
        table = build_step(program.dims, [Chunk(0, 0, ids, list(range(program.dims.bucket.pages_per_seq)), samples)])
        ours = torch.tensor(backend.launch(program, table).logits[:], device="cuda")
        with torch.inference_mode():
            where = torch.tensor(ids, device="cuda"), torch.arange(64, device="cuda")
            truth = TorchLlama(backend, llm.config, 64, torch.float32)(*where).double().log_softmax(-1)
            theirs = TorchLlama(backend, llm.config, 64, torch.bfloat16)(*where).double().log_softmax(-1)
            kl = [float((truth.exp() * (truth - x)).sum(-1).mean()) for x in (ours.double().log_softmax(-1), theirs)]
        assert kl[0] <= 1.05 * kl[1]


def test_the_default_model_answers(smollm2: Path) -> None:
    pytest.importorskip("gguf")
    params = SamplingParams(temperature=0.0, max_tokens=16)
    texts = []
    for backend in ("cuda", "cpu"):
        with LLM(str(smollm2), backend=backend, dtype="bf16", max_num_seqs=1, max_context=512) as llm:
            texts.append(llm.chat([{"role": "user", "content": "Name the capital of France."}], params)[0].text)
    assert texts[0] == texts[1] and "Paris" in (texts[0] or "")
