"""Compares our server with llama.cpp's on the same bf16 weights and the same cores. Requests have ShareGPT lengths, and
many of them are in flight.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36    # its sdist carries llama.cpp's source
    tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B llama/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \\
        -DLLAMA_OPENSSL=OFF
    cmake --build llama/build --target llama-server -j
    python benchmarks/speed/llama_cpp.py llama/ -o benchmarks/results/llama-cpp-smollm2-135m.json

The build needs cmake and a C++ compiler, and takes minutes to an hour. The script writes the model's weights as a bf16
GGUF, which both sides load. Then it tries changes of llama-server's settings (slots, flash attention, batch sizes,
threads) one after another on a part of the workload, and keeps each change that makes llama-server faster. Then it
measures llama-server with these settings and our server in turn, and suspends the server that is not being measured.
Finally it times our engine offline. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import text, write
from servers import machine_facts, measured, megakernel, server

from megakernel.isa import Dtype
from megakernel.model import open_checkpoint
from megakernel.model.gguf_writer import write_gguf

CONTEXT = 2048  # tokens of the longest request of the workload


def built(folder: Path) -> list[str]:
    """Return the CMake options, from the cache in `folder`/build, that decide which CPU instructions llama.cpp uses."""
    names = r"CMAKE_BUILD_TYPE|GGML_(?:NATIVE|OPENMP|AVX\w*|FMA|F16C|BMI2)"
    cache = (folder / "build" / "CMakeCache.txt").read_text()
    return [f"-D{name}={value}" for name, value in re.findall(rf"^({names}):\w+=(.*)$", cache, re.MULTILINE)]


def first_settings(threads: int) -> dict[str, str]:
    """Return the settings with which the search begins.

    All other settings have llama.cpp's defaults, among them an f16 KV cache.
    """
    return {"-np": "16", "-fa": "on", "-ub": "512", "-b": "2048", "-t": str(threads), "-tb": str(threads)}


def changes(threads: int) -> list[dict[str, str]]:
    """Return the changes of settings to try, one after another, each added to the best settings so far."""
    fewer = str(max(threads // 2, 1))
    return [{}, {"-np": "64"}, {"-fa": "off"}, {"-ub": "2048"}, {"-b": "512", "-ub": "512"}, {"-t": fewer}]


def command(folder: Path, model: Path, chosen: dict[str, str]) -> list[str]:
    flags = [part for pair in chosen.items() for part in pair]
    context = str(int(chosen["-np"]) * CONTEXT)
    return [
        str(folder / "build" / "bin" / "llama-server"),
        *("-m", str(model), "-c", context, "-cb", "--host", "127.0.0.1", "--port", "{port}", "--cache-ram", "0"),
        *flags,
    ]


def load(prompts: int, in_flight: int) -> list[str]:
    return ["--num-prompts", str(prompts), "--max-concurrency", str(in_flight)]


def run(args: argparse.Namespace) -> dict[str, Any]:
    work = args.folder / "work"
    work.mkdir(exist_ok=True)
    source = Path(measured("pull", args.model)["path"])
    model = work / f"{args.model}.bf16.gguf"
    if not model.exists():
        write_gguf(open_checkpoint(str(source)), model, Dtype.BF16, tokenizer=source)
    threads = len(os.sched_getaffinity(0))
    common = ["--model", str(model), "--machine", "host", "--seed", "1"]
    search: list[dict[str, Any]] = []
    best, fastest = first_settings(threads), 0.0
    for change in changes(threads):
        tried = best | change
        with server(command(args.folder, model, tried), work / "llama.log") as peer:
            flags = load(args.search_prompts, args.max_concurrency)
            figures = measured("bench", "serve", "--base-url", peer.url, *common, *flags)
        search.append({"settings": tried, "tokens_per_s": figures["tokens_per_s"], "failed": figures["failed"]})
        print(json.dumps(search[-1]), file=sys.stderr)
        if figures["tokens_per_s"] > fastest and not figures["failed"]:
            best, fastest = tried, figures["tokens_per_s"]
    ours = ["serve", "--model", str(model), "--port", "{port}", "--max-model-len", str(CONTEXT)]
    ours += ["--max-num-seqs", str(args.max_concurrency), *args.serve_flags]
    theirs = command(args.folder, model, best)
    with server(megakernel(*ours), work / "ours.log") as a, server(theirs, work / "llama.log") as b:
        flags = [*load(args.num_prompts, args.max_concurrency), "--runs", str(args.runs)]
        http = measured("bench", "serve", "--base-url", a.url, "--vs", b.url, *common, *flags)
    offline = measured(
        *("bench", "throughput", "--model", str(model), "--max-model-len", str(CONTEXT), "--seed", "1"),
        *("--num-prompts", str(args.num_prompts), "--max-num-seqs", str(args.max_concurrency)),
        *("--runs", str(args.runs)),
    )
    [versus] = http["vs"].values()
    return {
        "what": "output tokens/s with ShareGPT lengths and random ids, ours against llama-server",
        "machine": machine_facts(),
        "model": args.model,
        "num_prompts": args.num_prompts,
        "max_concurrency": args.max_concurrency,
        "http": {
            "tokens_per_s": http["tokens_per_s"],
            "llama_cpp_tokens_per_s": versus["tokens_per_s"],
            "ratio": versus["ratio"],
        },
        "offline": {
            "tokens_per_s": offline["tokens_per_s"],
            "ratio": offline["tokens_per_s"] / versus["tokens_per_s"],
        },
        "llama_cpp": {
            "version": versus["settings"]["version"],
            "build": built(args.folder),
            "settings": best,
            "command": [Path(part).name if os.sep in part else part for part in theirs],
            "search_prompts": args.search_prompts,
            "search": search,
        },
        "raw": {"http": http, "offline": offline},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the build of llama.cpp")
    parser.add_argument("--model", default="smollm2-135m", help="name of a GGUF model for `megakernel pull`")
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--max-concurrency", type=int, default=64)
    parser.add_argument(
        "--search-prompts",
        type=int,
        default=64,
        help="number of prompts with which each combination of settings is tried",
    )
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--serve-flags", nargs=argparse.REMAINDER, default=[], help="more flags for `megakernel serve`")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    # Remove the path of the work folder from the results, because this folder exists only on this machine.
    result = json.loads(json.dumps(run(args)).replace(f"{args.folder / 'work'}{os.sep}", ""))
    write(args.output, result)
    print(text({name: result[name] for name in ("http", "offline")} | {"settings": result["llama_cpp"]["settings"]}))


if __name__ == "__main__":
    main()
