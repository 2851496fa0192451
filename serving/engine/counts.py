"""Counts the tokens that an engine's steps generate, and how many proposed tokens were accepted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """Token counts of some steps.

    generated  tokens that the steps generated
    turns      pairs of a step and a sequence that got at least one token in that step
    proposed   tokens that were proposed and verified
    accepted   proposed tokens that were right
    """

    generated: int = 0
    turns: int = 0
    proposed: int = 0
    accepted: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.generated + other.generated,
            self.turns + other.turns,
            self.proposed + other.proposed,
            self.accepted + other.accepted,
        )

    def __sub__(self, other: Counts) -> Counts:
        return self + Counts(-other.generated, -other.turns, -other.proposed, -other.accepted)

    @property
    def tokens_per_step(self) -> float:
        """Average number of tokens that a sequence gets in a step: 1 without speculation."""
        return self.generated / self.turns if self.turns else 1.0

    def figures(self) -> dict[str, float]:
        """Return the figures that benchmarks report."""
        return {"proposed": self.proposed, "accepted": self.accepted, "tokens_per_step": self.tokens_per_step}
