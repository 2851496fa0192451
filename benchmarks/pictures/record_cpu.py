"""Writes HTML timelines of steps on this machine's CPU. benchmarks/pictures/timeline.py then takes pictures of them.

    python benchmarks/pictures/record_cpu.py FOLDER

decode.html shows a decode step, and speculation.html a step of speculative decoding: the model repeats a passage of the
prompt, and the step verifies proposed tokens. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))

from speculation import TEXTS

from megakernel import LLM, SamplingParams
from megakernel.cli import main as megakernel
from megakernel.serving.engine.engine import Step

MODEL, TOKENS = "smollm2-135m", 64


def verifying_step(speculate: int = 7) -> Step:
    """Generate a text with speculative decoding, and return a step that verifies up to `speculate` proposed tokens.

    The step is the one with the median time among all steps that ran the most frequent program.
    """
    prompt, sampling = TEXTS["repeats"]
    params = SamplingParams(**sampling, max_tokens=TOKENS, ignore_eos=True)
    with LLM(MODEL, backend="cpu", max_context=2048, max_num_seqs=1, speculate=speculate) as llm:
        ids = llm.chat_ids([{"role": "user", "content": prompt}])
        llm.generate([ids], params)  # warm up caches and threads
        llm.engine.reset_prefix_cache()
        request, steps = llm.engine.add(ids, params), []
        while not request.done:
            steps.append(llm.engine.step(trace=True))
    verified = [step for step in steps if step.logit_rows > 1 and step.output.trace]
    usual = Counter(step.program.hash for step in verified).most_common(1)[0][0]
    found = sorted((step for step in verified if step.program.hash == usual), key=lambda step: step.output.seconds)
    return found[len(found) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pages and the recorded step are written")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    megakernel(["timeline", "--model", MODEL, "--backend", "cpu", "-o", str(folder / "decode.html")])
    step = verifying_step()
    files = [folder / "speculation.program", folder / "speculation.trace"]
    step.program.save(files[0])
    if step.output.trace:
        step.output.trace.save(files[1])
    megakernel(["timeline", *map(str, files), "-o", str(folder / "speculation.html")])


if __name__ == "__main__":
    main()
