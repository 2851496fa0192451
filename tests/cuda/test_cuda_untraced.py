"""Tracing costs untraced code nothing: with all of it taken out of the source, the compiler says the same."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megakernel.runtime.cuda import compile as cuda


def without_tracing(text: str) -> str:
    """A source without what is compiled for MK_TRACE, without `if constexpr (P::kTrace)` and without calls to trace."""
    kept: list[str] = []
    regions: list[bool | None] = []  # whether a region is MK_TRACE's and in its traced part; None: another's
    for line in text.splitlines(keepends=True):
        directive = line.strip()
        if directive == "#if MK_TRACE":
            regions.append(True)
        elif directive.startswith("#else") and regions[-1] is not None:
            regions[-1] = not regions[-1]
        elif directive.startswith("#endif") and regions[-1] is not None:
            regions.pop()
        else:
            if directive.startswith("#if"):
                regions.append(None)
            elif directive.startswith("#endif"):
                regions.pop()
            if True not in regions:
                kept.append(line)
    text = "".join(kept)
    text = taken_out(text, r"if constexpr \(P::kTrace\) \{", "{}")
    text = taken_out(text, r"\bp_?\.trace\(", "()")
    return re.sub(r"\bp_?\.now\(\)", "0", text)


def taken_out(text: str, start: str, pair: str) -> str:
    """`text` without what matches `start`, up to the end of the pair that it opens."""
    while found := re.search(start, text):
        depth, end = 1, found.end()
        while depth:
            depth += {pair[0]: 1, pair[1]: -1}.get(text[end], 0)
            end += 1
        text = text[: found.start()] + text[end:]
    return text


def ptx(sources: dict[str, str], folder: Path) -> str:
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    nvcc = cuda.nvcc_path()
    if nvcc is None:
        pytest.skip("needs nvcc")
    command = [nvcc, "-ptx", "-std=c++20", "-arch=compute_90a", "-DMK_UNITS=1", "megakernel.cu", "-o", "-"]
    return subprocess.run(command, cwd=folder / "cuda", capture_output=True, text=True, check=True).stdout


def test_untraced_code_is_that_of_a_source_without_tracing(tmp_path: Path) -> None:
    """As PTX, from which both would be assembled alike."""
    whole = {name: text.decode() for name, text in cuda.sources().items()}
    bare = {name: without_tracing(text) for name, text in whole.items()}
    left = "".join(bare.values())
    assert "".join(whole.values()).count(".trace(") > 3
    assert not re.search(r"#if MK_TRACE|P::kTrace|\.trace\(|\.stall\(|clock64", left)
    assert ptx(bare, tmp_path / "bare") == ptx(whole, tmp_path / "whole")
