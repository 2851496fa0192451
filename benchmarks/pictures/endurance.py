"""Draws the picture of docs/reliability.md: a server's resources during an hour of mixed traffic.

python benchmarks/correctness/soak.py --minutes 60 --rounds 12 -o benchmarks/results/soak.json
python benchmarks/pictures/endurance.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
CURVES = {
    "memory_mb": "memory of all processes, MB",
    "descriptors": "open files",
    "threads": "threads",
    "kv_cache_usage_perc": "KV pages in use, share",
}
WIDTH, HEIGHT, LEFT, GAP = 720, 90, 60, 34


def panel(name: str, title: str, samples: list[dict[str, float]], top: int) -> str:
    """Return the SVG of one curve over time, whose vertical axis goes from zero to the curve's maximum."""
    end, most = samples[-1]["at"], max(max(s[name] for s in samples), 1e-9)
    points = " ".join(f"{LEFT + WIDTH * s['at'] / end:.1f},{top + HEIGHT * (1 - s[name] / most):.1f}" for s in samples)
    bottom = top + HEIGHT
    return f"""<text x="{LEFT}" y="{top - 8}">{title}</text>
<text x="{LEFT - 8}" y="{top + 5}" text-anchor="end">{most:.3g}</text>
<text x="{LEFT - 8}" y="{bottom}" text-anchor="end">0</text>
<path d="M{LEFT} {top}V{bottom}H{LEFT + WIDTH}" fill="none" stroke="#888"/>
<polyline points="{points}" fill="none" stroke="#1565c0" stroke-width="1.2"/>"""


def main() -> None:
    samples = json.loads((ROOT / "benchmarks" / "results" / "soak.json").read_text())["samples"]
    panels = [panel(*curve, samples, 30 + i * (HEIGHT + GAP)) for i, curve in enumerate(CURVES.items())]
    height = 30 + len(panels) * (HEIGHT + GAP)
    minutes = (
        f'<text x="{LEFT + WIDTH}" y="{height - GAP + 16}" text-anchor="end">{samples[-1]["at"] / 60:.0f} min</text>'
    )
    style = 'font-family="sans-serif" font-size="12" fill="#444"'
    size = f'viewBox="0 0 {LEFT + WIDTH + 20} {height}" width="{LEFT + WIDTH + 20}"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', background, *panels, minutes, "</svg>"]
    (ROOT / "docs" / "endurance.svg").write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
