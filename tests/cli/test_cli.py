"""Tests the command line: what it prints to which stream, and its errors and exit statuses."""

import json
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import Cli, command
from mutate import edit, rows_of
from rich.console import Console

from megakernel import LLM, SamplingParams
from megakernel.cli import output, parser
from megakernel.cli.generate import sampling_params
from megakernel.cli.options import prompt_ids
from megakernel.errors import MegakernelError
from megakernel.isa.record import SIGNAL_WORD, WAIT_WORD, WAITS
from megakernel.machine import MACHINES
from megakernel.program import load_program
from megakernel.roofline import Ceilings
from megakernel.runtime import BACKENDS
from megakernel.scheduler.options import CHOICES
from megakernel.scheduler.tune import fastest
from megakernel.scheduler.verify import proof
from megakernel.serving.bench import ceilings
from megakernel.serving.bench.ceilings import host_ceilings
from megakernel.settings import SETTINGS

# -- generate


def test_generate_json(cli: Cli, model: str) -> None:
    flags = ["--model", model, "--max-tokens", "4", "--ignore-eos", "--seed", "1"]
    result = cli.json("generate", "--prompt", "hello", "--logprobs", "2", *flags)
    assert [len(result[name]) for name in ("prompt_ids", "token_ids", "logprobs", "top_logprobs")] == [5, 4, 4, 4]
    assert all(isinstance(value, float) for value in result["logprobs"])
    assert isinstance(result["text"], str) and result["finish_reason"] == "length"
    assert result["ttft_s"] > 0 and result["tpot_s"] > 0 and "choices" not in result
    again = cli.json("generate", "--prompt-ids", ",".join(map(str, result["prompt_ids"])), *flags)
    assert again["token_ids"] == result["token_ids"]
    speculated = cli.json("generate", "--prompt", "hello", "--logprobs", "2", "--speculate", "3", *flags)
    assert all(speculated[name] == result[name] for name in ("token_ids", "logprobs", "top_logprobs", "text"))
    several = cli.json("generate", "--prompt", "hello", "--n", "2", *flags)
    first, second = (choice["token_ids"] for choice in several["choices"])
    assert first == result["token_ids"] != second
    chat = cli.json("generate", "--chat", "hello", *flags)
    assert len(chat["prompt_ids"]) == len("<user>hello<assistant>")


def test_generate_prints_the_text(cli: Cli, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    screen = StringIO()
    monkeypatch.setattr(output, "stderr", Console(file=screen, force_terminal=True, width=100))
    flags = ["generate", "--model", model, "--prompt", "x", "--max-tokens", "8", "--ignore-eos", "--seed", "2"]
    flags += ["--threads", "auto"]
    text = cli.json(*flags)["text"]
    status, out, _ = cli.run(*flags)
    assert (status, out) == (0, text + "\n")
    assert "first token" in screen.getvalue() and "computing the answer" in screen.getvalue()
    _, out, _ = cli.run(*flags, "--n", "2")
    assert out.startswith(text + "\n")


@pytest.mark.parametrize(
    ("verb", "flags", "message"),
    [
        ("generate", ["--prompt", ""], "prompt is empty"),
        ("generate", ["--prompt-ids", ""], "prompt is empty"),
        ("generate", ["--prompt-ids", "1,260"], "token 260 is outside the vocabulary of 260"),
        ("generate --prompt x", ["--max-model-len", "5000"], "context 5000 exceeds the model's limit of 4096"),
        ("generate --prompt x", ["--logit-bias", "1=nan"], "logit_bias=nan"),
        ("generate --prompt x", ["--backend", "tpu"], "unknown backend 'tpu'"),
        ("generate --prompt x", ["--speculate", "64"], "speculate=64 must be from 0 (off) to 63"),
        ("generate --prompt x", ["--prompt-logprobs", "0"], "report numbers that only --json shows: add --json"),
        ("bench throughput", ["--random-input-len", "8"], "--random-input-len does not change the requests of"),
        ("bench throughput", ["--random-range-ratio", "0.5", "--dataset", "a.csv"], "the requests of a.csv: add"),
        ("compile", ["--machine", "h900"], "unknown machine 'h900'"),
        ("compile", ["--max-model-len", "300"], "context 300 exceeds the model's limit of 256"),
    ],
)
def test_flags_are_refused(cli: Cli, model: str, tiny_shape: str, verb: str, flags: list[str], message: str) -> None:
    of = tiny_shape if verb == "compile" else model
    assert message in cli.fails(*verb.split(), "--model", of, *flags)


def test_every_sampling_flag_arrives() -> None:
    flags = "--temperature .5 --top-p .6 --min-p .1 --top-k 3 --presence-penalty .1 --frequency-penalty .2 --n 2"
    flags += " --repetition-penalty 1.1 --seed 4 --max-tokens 5 --min-tokens 1 --logprobs 6 --prompt-logprobs 7"
    flags += " --stop a --stop b --stop-token-ids 8,9 --ignore-eos --logit-bias 1=2.5 --logit-bias 2=-1"
    defaults = {"temperature": 9.0, "top_k": 9, "max_tokens": 9}
    parsed = sampling_params(parser().parse_args(["generate", "--prompt", "x", *flags.split()]), defaults)
    sampled = {"temperature": 0.5, "top_p": 0.6, "min_p": 0.1, "top_k": 3, "seed": 4, "n": 2}
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    ends = {"max_tokens": 5, "min_tokens": 1, "stop": ["a", "b"], "stop_token_ids": [8, 9], "ignore_eos": True}
    told = {"logprobs": 6, "prompt_logprobs": 7, "logit_bias": {1: 2.5, 2: -1.0}}
    assert parsed == SamplingParams(**sampled, **penalties, **ends, **told)


def test_usage_errors_exit_with_2(cli: Cli) -> None:
    wrong = ["nonsense", "compile --tokens -1", "disasm", "disasm file --model m", "bench", "bench nonsense"]
    wrong += ["generate", "generate --prompt-ids 1,x", "serve --max-body-bytes 16MB"]
    wrong += [f"generate --prompt a {more}" for more in ("--chat b", "--threads 0", "--logit-bias 1")]
    for arguments in wrong:
        assert cli.run(*arguments.split())[0] == 2, arguments
    for arguments, near in (("serv", "serve"), ("bench latenci", "latency")):
        status, out, err = cli.run(*arguments.split())
        assert (status, out) == (2, "") and f"did you mean {near}?" in err


def test_every_verb_has_help_with_an_example(cli: Cli) -> None:
    status, out, _ = cli.run("--help")
    assert status == 0 and cli.run()[:2] == (0, out)
    verbs = ["demo", "pull", "generate", "compile", "disasm", "verify", "bench", "timeline", "doctor"]
    said = " ".join(out.split())
    for verb in (*verbs, "bench latency", "bench throughput", "bench serve"):
        status, text, _ = cli.run(*verb.split(), "--help")
        assert status == 0 and f"Example: megakernel {verb}" in " ".join(text.split())
        what = " ".join(text.split("\n\n")[1].split())
        assert what[0].isupper() and what.endswith(".")
        assert verb not in verbs or f"{verb} {what[0].lower()}{what[1:-1]}" in said
    status, out, _ = cli.run("--version")
    assert (status, out.split()[0]) == (0, "megakernel")


# -- programs


def test_compile_disasm_verify(cli: Cli, tmp_path: Path, tiny_shape: str) -> None:
    file = str(tmp_path / "a.mkp")
    flags = ["--model", tiny_shape, "--machine", "h100", "--tokens", "200", "--workers", "5"]
    facts = cli.json("compile", *flags, "-o", file)
    assert facts["workers"] == 5 and facts["instructions"] > 0 and facts["counters"] > 0 and facts["compile_s"] > 0
    assert facts["bytes"] == Path(file).stat().st_size
    report = cli.json("verify", file)
    assert report["ok"] and report["checked"] == facts["instructions"] and report["violations"] == []
    assert report["verify_s"] > 0
    assert cli.json("verify", *flags)["checked"] == facts["instructions"]
    status, from_file, _ = cli.run("disasm", file)
    assert status == 0 and "qkv_rope" in from_file
    assert cli.run("disasm", *flags)[1] == from_file
    assert cli.json("disasm", file)["lines"] == from_file.splitlines()
    assert cli.json("compile", "--model", tiny_shape, "--norm", "inside")["lowering"] == {"norm": "inside"}
    for verb in ("compile", "verify"):
        status, out, err = cli.run(verb, *flags)
        assert status == 0 and out and not err


def test_a_model_that_does_not_fit_is_a_warning(cli: Cli, tiny_shape: str) -> None:
    large = ("--model", "random:llama-3.1-70b", "--machine", "h100", "--workers", "4", "--queue", "none")
    status, _, err = cli.run("compile", *large)
    assert status == 0 and "warning: the weights of a rank take 141.1 GB, but h100 has 80.0 GB" in err
    assert not cli.run("compile", *large, "-tp", "8")[2]
    assert not cli.run("compile", "--model", tiny_shape, "--machine", "h100")[2]


def test_damaged_programs_are_one_line(cli: Cli, tmp_path: Path, tiny_shape: str) -> None:
    file = tmp_path / "a.mkp"
    cli.json("compile", "--model", tiny_shape, "-o", str(file))
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    file.write_bytes(flipped)
    for verb in ("disasm", "verify"):
        assert "damaged" in cli.fails(verb, str(file))
    nowhere = str(tmp_path / "missing" / "a.mkp")
    assert "cannot read program" in cli.fails("verify", nowhere)
    assert "cannot write" in cli.fails("compile", "--model", tiny_shape, "-o", nowhere)


def test_a_violation_exits_with_1(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_shape: str) -> None:
    file = tmp_path / "a.mkp"
    cli.json("compile", "--model", tiny_shape, "-o", str(file))
    program = load_program(file)
    edit(program, "body", 0, SIGNAL_WORD).save(file)  # the first instruction no longer signals its counter
    status, out, _ = cli.run("verify", str(file), "--json")
    report = json.loads(out)
    assert status == 1 and not report["ok"] and report["violations"] and not report["more"]
    for name in ("gate_up_silu", "down_proj"):
        for at in rows_of(program, "body", name):
            program = edit(program, "body", at, list(range(WAIT_WORD, WAIT_WORD + WAITS)))
    program.save(file)
    monkeypatch.setattr(proof, "_MOST", 1)  # the number of violations that a report lists
    status, out, _ = cli.run("verify", str(file))
    assert status == 1 and out.count("\n") == 2 and out.splitlines()[-1].startswith("more than 1 violation: ")


# -- measurements

FIGURES = ("tokens_per_s", "step_s", "roofline_fraction", "read_GBps", "gflops")


def test_bench_json(cli: Cli, model: str) -> None:
    flags = ["bench", "latency", "--model", model, "--tokens", "3", "--runs", "2", "--prompt-tokens", "600"]
    for backend in ("cpu", "null"):
        figures = cli.json(*flags, "--backend", backend)
        assert all(figures[key] > 0 for key in FIGURES)
        assert (figures["vs"], figures["errors"], figures["prefill"]["tokens"]) == ({}, [], 600)
        assert [len(one["decode_step_s"]) for one in figures["runs"]] == [3, 3]
        assert figures["step_s_min"] <= figures["step_s_max"] and figures["ceilings"]["read_bytes_per_s"] > 0
        assert figures["settings"]["backend"] == backend
        assert (figures["proposed"], figures["accepted"], figures["tokens_per_step"]) == (0, 0, 1.0)


def test_benchmarks_say_how_often_proposals_were_right(cli: Cli, model: str) -> None:
    load = ["--dataset", "random", "--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "8"]
    for flags in (["latency", "--tokens", "6", "--runs", "2", "--prompt-ids", "1,2,1,2,1,2"], ["throughput", *load]):
        figures = cli.json("bench", *flags, "--model", model, "--speculate", "3")
        assert figures["settings"]["speculate"] == 3 and figures["tokens_per_s"] > 0
        assert 0 <= figures["accepted"] <= figures["proposed"] and figures["tokens_per_step"] >= 1


def test_bench_throughput(cli: Cli, model: str) -> None:
    sizes = ["--random-input-len", "20", "--random-output-len", "5", "--max-num-seqs", "4"]
    flags = ["bench", "throughput", "--model", model, "--dataset", "random", "--num-prompts", "6", *sizes]
    figures = cli.json(*flags, "--backend", "null", "--runs", "2")
    assert all(figures[key] > 0 for key in (*FIGURES, "total_tokens_per_s"))
    assert (figures["completed"], figures["input_tokens"], figures["output_tokens"]) == (6, 120, 30)
    assert figures["steps"] >= 10 and 1 <= figures["sequences"] <= 4
    assert len(figures["runs"]) == 2 and figures["vs"] == {}


def test_a_fraction_above_the_roofline_is_named(cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "host_ceilings", lambda threads, **_: Ceilings(1.0, 1.0, threads, "made up"))
    status, out, err = cli.run("bench", "latency", "--model", model, "--tokens", "2", "--runs", "1")
    assert status == 0 and "tokens/s" in out
    assert "decode: " in err and "made up" in err


def test_default_prompts(model: str) -> None:
    with LLM(model, max_context=128) as llm:
        ids = prompt_ids(llm, 100)
        assert len(ids) == 100 and llm.tokenizer is not None
        assert llm.tokenizer.decode(ids).startswith("A river begins")
        with pytest.raises(MegakernelError, match="leaves no room for an answer in the context"):
            prompt_ids(llm, 128)


def test_timeline(cli: Cli, tmp_path: Path, model: str) -> None:
    page, perfetto, stem = tmp_path / "a.html", tmp_path / "a.pftrace", tmp_path / "kept"
    outputs = ["-o", str(page), "--perfetto", str(perfetto)]
    made = cli.json("timeline", "--model", model, "--prompt-tokens", "20", "--save", str(stem), *outputs)
    assert {"busy", "overlap", "exposed_communication", "critical_path", "dropped", "waterfall"} <= made.keys()
    launches = made.pop("recorded")
    assert len(launches) == 5 and launches[2] == made["step_s"] and launches == sorted(launches)
    assert page.stat().st_size > 0 and perfetto.stat().st_size > 0
    saved = [str(stem) + ".program", str(stem) + ".trace"]
    assert cli.json("timeline", *saved) == made
    status, out, err = cli.run("timeline", *saved, *outputs)
    assert status == 0 and "per step" in out and err.splitlines() == [f"wrote {page}", f"wrote {perfetto}"]
    prefill = cli.json("timeline", "--model", model, "--prompt-tokens", "20", "--phase", "prefill")
    assert prefill["intervals"] > 0
    fits = ["timeline", "--model", model, "--max-model-len", "26", "--prompt-tokens", "20", "--launches"]
    assert len(cli.json(*fits, "5")["recorded"]) == 5
    assert "need a context of 27, not 26" in cli.fails(*fits, "6")
    assert cli.json(*fits, "6", "--phase", "prefill")["intervals"] > 0
    assert "also needs a trace file" in cli.fails("timeline", saved[0])
    assert "not a trace file" in cli.fails("timeline", saved[0], saved[0])
    assert "cannot read trace" in cli.fails("timeline", saved[0], str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("path", "why"),
    [(p, f"{p!r}: it is not the name of a file") for p in ("", ".", "..", "/", "/folder/", "/folder/..", "/tmp")]
    + [("/folder/file.html", "/folder/file.html: /folder is not a folder")],
)
@pytest.mark.parametrize("verb", ["simulate --save", "simulate -o", "timeline --perfetto", "compile -o", "demo -o"])
def test_a_file_that_cannot_be_written_is_an_error_at_once(cli: Cli, verb: str, path: str, why: str) -> None:
    assert cli.fails(*verb.split(), path).endswith(f"cannot write {why}\n")


def test_demo(cli: Cli, tmp_path: Path, model: str) -> None:
    page = tmp_path / "demo.html"
    flags = ["demo", "--model", model, "--prompt", "[bold]hello", "-o", str(page)]
    status, out, _ = cli.run(*flags)
    assert status == 0
    assert "> [bold]hello" in out and "tokens/s" in out and page.as_uri() in out
    keys = {"text", "token_ids", "tokens_per_s", "read_fraction", "busy", "overlap", "timeline"}
    figures = cli.json(*flags)
    assert keys <= figures.keys()
    # The peak rates on the page are measured ones, not the nominal rates of the processor.
    memory = next(r for r in figures["resources"] if r["name"] == "memory")
    assert memory["peak"] == pytest.approx(figures["ceilings"]["read_bytes_per_s"])
    assert f'"peaks":[{figures["ceilings"]["flops"]}' in page.read_text()


def test_doctor(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "host_ceilings", host_ceilings)  # measures
    monkeypatch.setattr("megakernel.roofline.ceilings._REPEATS", 1)
    report = cli.json("doctor")
    assert report["ok"] and report["findings"] == [] and report["ceilings"]["flops"] > 0
    assert report["versions"]["megakernel"] and report["cores"] >= 1 and report["simd"]
    assert set(report["settings"]) == {s.env for s in SETTINGS.values() if s.env}


def test_doctor_keeps_secrets(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:password@host/simple")
    for flags in (["doctor"], ["doctor", "--json"]):
        _, out, _ = cli.run(*flags)
        assert "hf_secret" not in out and "password" not in out


@pytest.mark.parametrize("unit", ["", "bytes"])
def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    screen = StringIO()
    monkeypatch.setattr(output, "stderr", Console(file=screen, force_terminal=True, width=100))
    with output.progress("fetching", unit) as advance:
        advance(1, 4)
        advance(4, 4)
    assert "fetching" in screen.getvalue() and "4/4" in screen.getvalue()
    with output.busy("waiting") as over:
        over()
    assert "waiting" in screen.getvalue()


# -- the process


def begun(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command, and return its process as soon as it has printed something."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1)
    return process


def test_interrupt_exits_with_130(model: str) -> None:
    process = begun("generate", "--model", model, "--prompt", "x", "--max-tokens", "4000", "--ignore-eos")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


_INTERRUPTED_IMPORT = """
import os, signal, sys
from megakernel.__main__ import main
module = sys.argv.pop(1)
class Finder:
    def find_spec(name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
status = main()
if module == "end":
    os.kill(os.getpid(), signal.SIGINT)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("megakernel.cli", "doctor"),
        ("numpy", "generate --prompt x"),
        ("tokenizers", "generate --prompt x --model random:llama-3.2-1b"),
        ("uvicorn", "serve --model random:llama-3.2-1b --port 0"),
        ("end", "roofline ask"),
    ],
)
def test_an_interrupt_of_an_import_is_silent(module: str, arguments: str) -> None:
    line = [sys.executable, "-P", "-c", _INTERRUPTED_IMPORT, module, *arguments.split()]
    done = subprocess.run(line, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize(
    ("redirection", "arguments", "why"),
    [(">&-", "serve", "standard output is closed"), ("1</dev/null", "roofline ask --json", "Bad file descriptor")],
)
def test_output_that_cannot_be_written_is_one_line(redirection: str, arguments: str, why: str) -> None:
    line = ["sh", "-c", f'"$@" {redirection}', "sh", *command(*arguments.split())]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, f"megakernel: error: {why}\n")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("serve --hf_token x", "(set the environment variable HF_TOKEN)"),
        ("serve --gpu-memory-utilization 0.9", "(the KV cache is as large as --max-num-seqs"),
        ("serve --quantization=fp8 model", "(use --weights)"),
        ("serve --max-num-sequences 3", "(did you mean --max-num-seqs?)"),
        ("generate --prompt x --max-tokns 3", "(did you mean --max-tokens?)"),
        ("bench serve --zzzzzz", "unrecognized arguments: --zzzzzz\n"),
    ],
)
def test_an_unknown_flag_is_told_with_the_nearest(cli: Cli, arguments: str, hint: str) -> None:
    status, _, err = cli.run(*arguments.split())
    assert status == 2 and hint in err


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    process = begun("disasm", "--model", "random:smollm2-135m", "--machine", "h100", "--tokens", "512")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(timeout=60), err) == (1, b"")


def test_memory_and_disk_errors_are_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, tiny_shape: str) -> None:
    for error, message in (
        (MemoryError(), "out of memory"),
        (OSError(28, "No space left on device", "/some/file"), "/some/file: No space left on device: free some"),
    ):
        monkeypatch.setattr(fastest, "compile_program", Mock(side_effect=error))
        assert message in cli.fails("compile", "--model", tiny_shape)


def test_settings_name_every_choice() -> None:
    known = {"machine": ("host", *MACHINES), "backend": BACKENDS} | CHOICES
    for name, choices in known.items():
        assert all(choice in SETTINGS[{"o": "o_lowering"}.get(name, name)].what for choice in choices)
