"""One peer against us: the best of its settings is searched, then it runs in turn with us, then both are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Protocol

from ....errors import MegakernelError

# What is timed: the prompts, the decode steps after them (the prompts come before the clock starts), or both together.
Phase = Literal["prefill", "decode", "batch"]
Settings = dict[str, Any]

_TRIALS = 2  # runs of one choice of settings while the best is searched; the faster one counts


@dataclass(frozen=True)
class Work:
    """`sequences` prompts of `prompt_tokens` each, all at once; then `decode_steps` steps of one token each."""

    sequences: int
    prompt_tokens: int
    decode_steps: int

    def tokens(self, phase: Phase) -> int:
        """The tokens that count in a phase: those of the prompts, or those that come out."""
        if phase == "prefill":
            return self.sequences * self.prompt_tokens
        # The step that ends a prompt makes a token as well.
        return self.sequences * (self.decode_steps + (phase == "batch"))


@dataclass(frozen=True)
class Task:
    """What a peer is to do, with as much of the machine as we use.

    `gguf` is the model for peers that read such files, and `weights` the type in it. We compute in `dtype`: bf16, f32.
    """

    model: str
    gguf: str | None
    weights: str
    dtype: str
    threads: int
    gpu: bool
    work: Work


class Peer(Protocol):
    """A program that runs the same model. Its methods raise MegakernelError where it fails."""

    name: str

    @property
    def about(self) -> dict[str, Any]:
        """What it is: versions and the like. Known after its first run."""

    def settings(self, phase: Phase) -> tuple[Settings, list[Settings]]:
        """Where the search begins, and changes to try one after the other, each on the best so far."""

    def seconds(self, phase: Phase, settings: Settings) -> float:
        """What one run of a phase takes, after one to warm up where it must."""

    def close(self) -> None: ...


class Contest:
    """A peer and what it took. The first of `phases` is the one that its main figures are of."""

    def __init__(self, peer: Peer, work: Work, phases: Sequence[Phase]) -> None:
        self.peer = peer
        self.runs: list[dict[str, float]] = []
        self._work, self._phases = work, phases
        self._best: dict[Phase, Settings] = {}
        self._search: list[dict[str, Any]] = []

    def search(self, advance: Callable[[int, int], None]) -> None:
        """Finds the fastest settings of each phase. `advance` is told (choices tried, all)."""
        total = sum(1 + len(self.peer.settings(phase)[1]) for phase in self._phases)
        for phase in self._phases:
            first, changes = self.peer.settings(phase)
            best, least = first, self._try(phase, first)
            advance(len(self._search), total)
            for change in changes:
                tried = best | change
                try:
                    seconds = self._try(phase, tried)
                except MegakernelError as e:  # not every build has every setting
                    self._search.append({"phase": phase, "settings": tried, "error": str(e)})
                    seconds = least
                if seconds < least:
                    best, least = tried, seconds
                advance(len(self._search), total)
            self._best[phase] = best

    def _try(self, phase: Phase, settings: Settings) -> float:
        seconds = min(self.peer.seconds(phase, settings) for _ in range(_TRIALS))
        rate = self._work.tokens(phase) / seconds
        self._search.append({"phase": phase, "settings": settings, "tokens_per_s": rate})
        return seconds

    def run(self) -> None:
        """The peer's turn: every phase once."""
        self.runs.append({f"{phase}_s": self.peer.seconds(phase, self._best[phase]) for phase in self._phases})

    def figures(self, ours: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Medians and spreads of both sides, and ratios, ours ÷ theirs. `ours` are seconds of our runs by phase."""
        by_phase = {phase: self._compare(phase, ours[phase]) for phase in self._phases}
        first, *others = self._phases
        best: dict[str, Any] = {phase: self._best[phase] for phase in self._phases}
        settings = self.peer.about | best | {"search": self._search}
        return by_phase[first] | {p: by_phase[p] for p in others} | {"runs": self.runs, "settings": settings}

    def _compare(self, phase: Phase, ours: Sequence[float]) -> dict[str, Any]:
        theirs = self._rates(phase, [one[f"{phase}_s"] for one in self.runs])
        we = self._rates(phase, ours)
        return theirs | {"ratio": we["tokens_per_s"] / theirs["tokens_per_s"], "ours": we}

    def _rates(self, phase: Phase, seconds: Sequence[float]) -> dict[str, float]:
        rates = [self._work.tokens(phase) / s for s in seconds]
        return {"tokens_per_s": median(rates), "tokens_per_s_min": min(rates), "tokens_per_s_max": max(rates)}
