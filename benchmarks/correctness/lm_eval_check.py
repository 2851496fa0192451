"""Runs lm-eval's `local-completions` against `megakernel serve` on a small task file: log-likelihoods and generation.

    pip install lm_eval[api] && python benchmarks/correctness/lm_eval_check.py [--model smollm2-135m]

lm-eval is unmodified. It finds the server's tokenizer through /tokenizer_info and sends batches of token ids with echo
and logprobs. The script compares lm-eval's log-likelihoods with those that the engine computes without a server, and
fails if one differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from servers import megakernel

QUESTIONS = [
    ("The capital of France is", [" Paris", " a banana", " seven"], 0),
    ("Two plus two is", [" green", " four", " Tuesday"], 1),
    ("The sun rises in the", [" refrigerator", " violin", " east"], 2),
    ("Ice is frozen", [" water", " paper", " music"], 0),
]
TASK = """
task: megakernel_check
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as scratch:
        task = write_task(Path(scratch))
        command = megakernel("serve", "--json", "--port", "0", "--model", args.model, "--max-model-len", "512")
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            facts = json.loads(server.stdout.readline())
            measured, accuracy = evaluate(facts["url"], facts["model"], task)
        finally:
            server.terminate()
            server.wait()
    expected = offline(args.model)
    worst = max(abs(a - b) for a, b in zip(measured, expected, strict=True))
    ok = len(measured) == len(expected) and worst < 1e-4
    print(json.dumps({"ok": ok, "accuracy": accuracy, "loglikelihoods": measured, "largest_difference": worst}))
    return 0 if ok else 1


def write_task(folder: Path) -> Path:
    rows = [{"question": q, "choices": choices, "answer": answer} for q, choices, answer in QUESTIONS]
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "megakernel_check.yaml").write_text(TASK.format(data=data))
    return folder


def evaluate(url: str, model: str, task: Path) -> tuple[list[float], float]:
    """Run lm-eval, and return the log-likelihood of each choice of each question, and the accuracy."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    result = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": model, "base_url": f"{url}/v1/completions", "num_concurrent": 2, "max_length": 512},
        batch_size=4,
        tasks=["megakernel_check"],
        task_manager=TaskManager(include_path=str(task), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(result["samples"]["megakernel_check"], key=lambda sample: sample["doc_id"])
    found = [float(answer[0]) for sample in samples for answer in sample["filtered_resps"]]
    return found, float(result["results"]["megakernel_check"]["acc,none"])


def offline(model: str) -> list[float]:
    """Return the log-likelihood of each choice of each question, computed by the engine without a server."""
    from megakernel import LLM, SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    with LLM(model, max_context=512) as llm:
        for question, choices, _ in QUESTIONS:
            for choice in choices:
                context = len(llm.encode(question))
                [result] = llm.generate([llm.encode(question + choice)], params)
                assert result.prompt_token_logprobs is not None
                found.append(math.fsum(p for p in result.prompt_token_logprobs[context:] if p is not None))
    return found


if __name__ == "__main__":
    sys.exit(main())
