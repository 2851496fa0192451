"""Tests that `roofline`, `compile` and `simulate`, which do not run the model, count weights in the types that a run
would keep in memory."""

from pathlib import Path

import pytest
from commands import Cli
from model_helpers import tiny_gguf

from megakernel import LLM
from megakernel.isa import BUFFERS, Buffer
from megakernel.machine import hardware
from megakernel.program import Program, load_program
from megakernel.roofline.work import model_weights

CPU = str(Path(__file__).parents[2] / "benchmarks" / "machines" / "server-16.toml")
PARAMETERS = 134515008 - 61 * 576  # weights of SmolLM2-135M without its norms
MODELS = [("smollm2-135m", "auto"), ("random:smollm2-135m", "q4_k")]


def run_bytes(model: str, weights: str) -> int:
    """Return the bytes that the weight matrices take in memory when the model is run."""
    with LLM(model, weights=weights, backend="null", max_context=32, max_num_seqs=1) as llm:
        return sum(llm.weight_bytes.values())


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("model, weights", MODELS)
def test_bytes_are_those_of_a_run(cli: Cli, tmp_path: Path, model: str, weights: str) -> None:
    expected = run_bytes(model, weights)
    flags = ["--model", model, "--weights", weights, "--machine", CPU]
    step = cli.json("roofline", *flags)
    matmuls = [c for c in step["instructions"] if c["family"] == "matmul"]
    assert sum(c["memory_bytes"] for c in matmuls) == pytest.approx(expected)
    vectors = 4 * (30 * 2 * 32 + 61 * 576)  # RoPE frequencies and factors of each layer, norms
    assert step["memory"]["weight_bytes"] == pytest.approx(expected + vectors)
    assert step["critical_rows"] == pytest.approx(hardware(CPU).critical_rows("bf16", expected / PARAMETERS))
    file = tmp_path / "a.program"
    assert cli.json("compile", *flags, "-o", str(file))["weight_bytes"] == expected + vectors
    cli.json("simulate", *flags, "--save", str(tmp_path / "b"))
    for program in map(load_program, (file, tmp_path / "b.program")):
        assert sum(matrices(program).values()) == expected


def matrices(program: Program) -> dict[Buffer, int]:
    """The bytes of each matrix that a program reads. The embedding table, which is also the LM head, counts once."""
    found = model_weights(program.forward, program.dims.split)
    return {b: size for b, size in found.items() if BUFFERS[b].matrix and b.name != "EMBED"}


@pytest.mark.usefixtures("smollm2")
def test_a_gpu_has_them_in_the_compute_type(cli: Cli) -> None:
    flags = ["--machine", "h100"]
    step = cli.json("roofline", "--model", "smollm2-135m", *flags)
    whole = cli.json("roofline", "--model", "random:smollm2-135m", *flags)
    assert step["memory_bytes"] == whole["memory_bytes"] and step["memory"] == whole["memory"]
    error = cli.fails("compile", "--model", "random:smollm2-135m", "--weights", "q8_0", *flags)
    assert "weights in q8_0 are not supported on a Hopper GPU" in error


def test_auto_is_the_type_of_the_file(cli: Cli, tmp_path: Path, model: str) -> None:
    tiny_gguf(tmp_path / "a.gguf")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    for name, dtype in ((str(tmp_path / "a.gguf"), "fp32"), (model, "fp32"), (str(bare), "bf16")):
        assert cli.json("roofline", "--model", name, "--machine", CPU, "--context", "8")["dtype"] == dtype


@pytest.mark.parametrize(("given", "rounded"), [([], 1), (["--activations", "float"], 0)])
def test_a_compiled_program_has_the_class_of_a_run(cli: Cli, tmp_path: Path, given: list[str], rounded: int) -> None:
    flags = ["--model", "random:smollm2-135m", "--weights", "q8_0", "--machine", CPU, "--kv-cache-dtype", "q8_0"]
    cli.json("compile", *flags, *given, "-o", str(tmp_path / "a"))
    model = load_program(tmp_path / "a").dims.model
    assert (model.q8_activations, model.quantised_kv) == (rounded, 1)


@pytest.mark.parametrize("flag", ["--weights", "--kv-cache-dtype", "--activations"])
def test_a_compiled_program_keeps_its_types(cli: Cli, tmp_path: Path, flag: str) -> None:
    cli.json("compile", "--model", "random:smollm2-135m", "--machine", CPU, "-o", str(tmp_path / "a"))
    value = "float" if flag == "--activations" else "q8_0"
    error = cli.fails("simulate", str(tmp_path / "a"), "--machine", CPU, flag, value)
    assert f"{flag} cannot change {tmp_path / 'a'}, which is already compiled" in error
