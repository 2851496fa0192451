"""Implements `--vs`, which compares our engine with other programs (peers). All run the same model, in turn."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rich.text import Text

from . import output

if TYPE_CHECKING:
    from megakernel.serving import LLM
    from megakernel.serving.bench.peers import Contest, InstalledPeer, Timed


# The flags that name peers, the other programs of a comparison.
VERSUS = """
--vs | NAME+ | - | also measure llama.cpp or torch, with its best settings on the same weights; runs alternate with
    megakernel's (the flag may be repeated)
--llama-bench | PATH | (the program on PATH) | llama.cpp's program llama-bench, or the folder of a build
"""


def find_peers(args: argparse.Namespace, *, batched: bool) -> list[InstalledPeer]:
    """Return the peers that the flags name. Raises MegakernelError if one is missing."""
    if not args.vs and args.llama_bench is None:
        return []  # this function returns before the import below, because the import takes time
    from megakernel.serving.bench.peers import find

    names = [name for given in args.vs or () for name in given.split(",")]
    return find(list(dict.fromkeys(names)), args.llama_bench, batched=batched)


@contextmanager
def opened(
    found: Sequence[InstalledPeer],
    llm: LLM,
    args: argparse.Namespace,
    sizes: tuple[int, int, int],
    phases: Sequence[Timed],
) -> Iterator[list[Contest]]:
    """Start the other programs (peers), find the best settings of each, and yield them, ready to be measured. `sizes`
    are three numbers: sequences, tokens per prompt, and decode steps."""
    if not found:
        yield []
        return
    from megakernel.serving.bench.peers import Trial, contests

    with ExitStack() as stack:
        with output.busy("writing the weights for the other programs"):
            peers = stack.enter_context(contests(found, llm, args.model, args.weights, Trial(*sizes), phases))
        for one in peers:
            with output.progress(f"searching for the best settings of {one.peer.name}") as advance:
                one.search(advance)
        yield peers


def rows(vs: dict[str, Any]) -> list[tuple[str, str | Text]]:
    """Return rows (name, value) of the output that compare our engine with each peer, as measured in `vs`."""
    lines: list[tuple[str, str | Text]] = []
    for name, other in vs.items():
        prefill = other.get("prefill")
        lines.append(("versus", _against(other, name)))
        if prefill is not None:
            lines.append(("  prefill", _against(prefill, name)))
        about = {key: value for key, value in other["settings"].items() if key != "search"}
        chosen = [f"{key}: {_text(value)}" for key, value in about.items() if isinstance(value, dict)]
        said = [str(value) for key, value in about.items() if not isinstance(value, dict) and key != "kv_cache"]
        lines.append(("  settings", f"{', '.join(said)}; {'; '.join(chosen)}"))
    return lines


def _against(side: dict[str, Any], name: str) -> Text:
    ours = side["ours"]
    theirs = f" the {side['tokens_per_s']:.1f} tokens/s of {name}"
    spread = f" ({_spread(side)}; ours {ours['tokens_per_s']:.1f}, {_spread(ours)})"
    return Text.assemble((f"{side['ratio']:.2f} x", "bold"), theirs, (spread, "dim"))


def _spread(side: dict[str, Any]) -> str:
    return f"{side['tokens_per_s_min']:.1f} to {side['tokens_per_s_max']:.1f}"


def _text(settings: dict[str, Any]) -> str:
    def word(value: Any) -> str:
        return ("on" if value else "off") if isinstance(value, bool) else str(value)

    return ", ".join(f"{key.replace('_', ' ')} {word(value)}" for key, value in settings.items())
