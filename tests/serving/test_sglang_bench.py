"""SGLang's load generator, bench_serving.py, works with our server. The file comes unchanged from SGLang's wheel."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from api_support import serving
from built_once import built_once

from megakernel import LLM

WHEEL, MEMBER = "sglang==0.5.9", "sglang/bench_serving.py"
IMPORTS = ["aiohttp", "multidict", "yarl", "frozenlist", "aiosignal", "propcache", "aiohappyeyeballs", "attrs"]
IMPORTS += ["pybase64", "pillow"]


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--disable-pip-version-check"]
    if subprocess.run(command, capture_output=True, timeout=300).returncode:
        pytest.skip(f"no package index has {' '.join(arguments[1:])}")


def make(folder: Path) -> None:
    """Install the packages that bench_serving.py imports. The package `datasets` is a stub, because only workloads from
    the Hugging Face hub need it."""
    shutil.rmtree(folder, ignore_errors=True)  # of a try that failed
    pip("install", "--target", str(folder), *IMPORTS)
    with tempfile.TemporaryDirectory() as downloads:
        pip("download", WHEEL, "--dest", downloads)
        [wheel] = Path(downloads).glob("sglang-*.whl")
        zipfile.ZipFile(wheel).extract(MEMBER, folder)
    (folder / "datasets.py").write_text("def load_dataset(*_, **__):\n    raise OSError('no hub here')\n")


@pytest.mark.slow
def test_sglang_bench_serving(tmp_path: Path, model: str) -> None:
    bench_serving = built_once("sglang", " ".join([sys.version, WHEEL, *IMPORTS]).encode(), make) / MEMBER
    conversations, result = tmp_path / "sharegpt.json", tmp_path / "result.jsonl"
    rng = random.Random(0)
    turns = [["x" * rng.randint(5, 200), "y" * rng.randint(4, 40)] for _ in range(24)]
    talks = [{"conversations": [{"from": "human", "value": t} for t in two]} for two in turns]
    conversations.write_text(json.dumps(talks))
    with LLM(model, backend="null", threads=1, max_num_seqs=8) as llm, serving(llm) as server:
        environment = os.environ | {"PYTHONPATH": str(bench_serving.parents[1]), "HF_HUB_OFFLINE": "1"}
        workload = ["--dataset-name", "sharegpt", "--dataset-path", str(conversations), "--num-prompts", "24"]
        command = [sys.executable, str(bench_serving), "--backend", "vllm", "--base-url", server.url, *workload]
        command += ["--tokenizer", model, "--output-file", str(result)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    figures = json.loads(result.read_text())
    assert figures["completed"] == 24
    assert figures["total_input_tokens"] == sum(len(prompt) for prompt, _ in turns)
    assert figures["total_output_tokens"] == sum(len(answer) for _, answer in turns)
