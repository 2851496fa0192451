"""Compares a peer (another inference program) with us: finds its fastest settings, then alternates runs of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Protocol

from megakernel.errors import MegakernelError

# The timed part of a run: only the prompts (prefill), only the decode steps after them (decode), or both (batch).
Timed = Literal["prefill", "decode", "batch"]
Settings = dict[str, Any]

# The search runs each combination of settings twice, and the faster run counts. There is no second run if the first one
# takes _MUCH_LONGER times as long as the best combination. There is also none if the first run takes _LONG seconds,
# because short disturbances hardly change such a run.
_MUCH_LONGER = 1.3
_LONG = 20.0


@dataclass(frozen=True)
class Trial:
    """The work of a run: `sequences` prompts of `prompt_tokens` tokens, computed together, then `decode_steps`
    steps."""

    sequences: int
    prompt_tokens: int
    decode_steps: int

    def tokens(self, phase: Timed) -> int:
        """The number of tokens that count for a phase's rate: prompt tokens for prefill, otherwise generated tokens."""
        if phase == "prefill":
            return self.sequences * self.prompt_tokens
        # In a batch, the step that completes the prompts also generates one token for each prompt.
        return self.sequences * (self.decode_steps + (phase == "batch"))


@dataclass(frozen=True)
class Task:
    """The model and the work that a peer has to run."""

    model: str
    gguf: str | None  # the model file for peers that read GGUF
    weights: str  # the type of most weights, or the name of the file that has them
    dtype: str  # our own compute type, bf16 or f32
    threads: int  # as many as we use
    gpu: bool  # whether we use the GPU
    work: Trial
    quantised_kv: bool = False  # whether our KV cache is stored as q8_0


class Peer(Protocol):
    """Another program that runs the same model. Its methods raise MegakernelError if it fails."""

    name: str

    @property
    def about(self) -> dict[str, Any]:
        """The peer's version and other properties. They are known after its first run."""

    def settings(self, phase: Timed) -> tuple[Settings, list[Settings]]:
        """Return the settings with which the search for the fastest ones starts, and the changes that it tries in turn.
        The search applies each change to the best settings so far."""

    def seconds(self, phase: Timed, settings: Settings) -> float:
        """Time one run of a phase (such as prefill), in seconds. An untimed run comes first if the peer must warm
        up."""

    def close(self) -> None: ...


class Contest:
    """A comparison with one peer (another inference program): the search for its fastest settings, and the times of its
    runs. The result of `figures` has the numbers of the first phase (such as prefill) at the top level, and one entry
    for each other phase."""

    def __init__(self, peer: Peer, work: Trial, phases: Sequence[Timed]) -> None:
        self.peer = peer
        self.runs: list[dict[str, float]] = []
        self._work, self._phases = work, phases
        self._best: dict[Timed, Settings] = {}
        self._search: list[dict[str, Any]] = []

    def search(self, advance: Callable[[int, int], None]) -> None:
        """Find the peer's fastest settings for each phase. `advance` gets (combinations tried, all combinations)."""
        total = sum(1 + len(self.peer.settings(phase)[1]) for phase in self._phases)
        for phase in self._phases:
            first, changes = self.peer.settings(phase)
            best, least = first, self._try(phase, first)
            advance(len(self._search), total)
            for change in changes:
                tried = best | change
                try:
                    seconds = self._try(phase, tried, least)
                except MegakernelError as e:  # a build may lack a setting
                    self._search.append({"phase": phase, "settings": tried, "error": str(e)})
                    seconds = least
                if seconds < least:
                    best, least = tried, seconds
                advance(len(self._search), total)
            self._best[phase] = best

    def _try(self, phase: Timed, settings: Settings, least: float = math.inf) -> float:
        """Return the shortest time with `settings`. A run that is long or far above `least` is not repeated."""
        seconds = self.peer.seconds(phase, settings)
        if seconds < min(_MUCH_LONGER * least, _LONG):
            seconds = min(seconds, self.peer.seconds(phase, settings))
        rate = self._work.tokens(phase) / seconds
        self._search.append({"phase": phase, "settings": settings, "tokens_per_s": rate})
        return seconds

    def run(self) -> None:
        """Run every phase (prefill, decode or batch) of the peer once with its best settings. Record the seconds."""
        self.runs.append({f"{phase}_s": self.peer.seconds(phase, self._best[phase]) for phase in self._phases})

    def figures(self, ours: Mapping[str, Sequence[float]], steady: Sequence[bool] = ()) -> dict[str, Any]:
        """Return the median, lowest and highest rates of the peer, and ours. In a turn, we and the peer run once each,
        and `ratio` is the median over turns of our rate divided by the peer's. `ours` maps a phase, such as prefill, to
        the seconds of our runs. If the machine's speed was `steady` in some turns, only these count."""
        turns = [turn for turn, one in enumerate(steady) if one] or range(len(self.runs))
        by_phase = {phase: self._compare(phase, [ours[phase][turn] for turn in turns], turns) for phase in self._phases}
        first, *others = self._phases
        best: dict[str, Any] = {phase: self._best[phase] for phase in self._phases}
        settings = self.peer.about | best | {"search": self._search}
        return by_phase[first] | {p: by_phase[p] for p in others} | {"runs": self.runs, "settings": settings}

    def _compare(self, phase: Timed, ours: Sequence[float], turns: Sequence[int]) -> dict[str, Any]:
        theirs = [self.runs[turn][f"{phase}_s"] for turn in turns]
        ratio = median(their / our for their, our in zip(theirs, ours, strict=True))
        return self._rates(phase, theirs) | {"ratio": ratio, "ours": self._rates(phase, ours)}

    def _rates(self, phase: Timed, seconds: Sequence[float]) -> dict[str, float]:
        rates = [self._work.tokens(phase) / s for s in seconds]
        return {"tokens_per_s": median(rates), "tokens_per_s_min": min(rates), "tokens_per_s_max": max(rates)}
