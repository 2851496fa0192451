"""Draws the picture of docs/reliability.md: a server's resources during an hour of mixed traffic.

python benchmarks/correctness/soak.py --minutes 60 --rounds 12 -o benchmarks/results/soak.json
python benchmarks/pictures/endurance.py
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
CURVES = {
    "memory_mb": "memory of all processes, MB",
    "descriptors": "open files",
    "threads": "threads",
    "kv_cache_usage_perc": "KV pages in use, share",
}


def main() -> None:
    samples = json.loads((ROOT / "benchmarks" / "results" / "soak.json").read_text())["samples"]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "endurance"}):
        figure = Figure(figsize=(8, 5.5), layout="constrained")
        panels = figure.subplots(len(CURVES), sharex=True)
        for panel, (name, title) in zip(panels, CURVES.items(), strict=True):
            panel.plot([s["at"] / 60 for s in samples], [s[name] for s in samples], linewidth=1)
            panel.set_title(title, loc="left", fontsize=9)
            panel.set_ylim(bottom=0)
            panel.spines[["top", "right"]].set_visible(False)
        panels[-1].set_xlabel("minutes")
        figure.savefig(ROOT / "docs" / "endurance.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
