"""How many tokens an engine's steps gave, and how many of the proposed ones were right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """`generated` tokens; `turns` counts each sequence of each step that got at least one of them.

    Steps verified `proposed` tokens, of which `accepted` were right.
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
        """Tokens that a step gives a sequence, on average: 1 without speculation."""
        return self.generated / self.turns if self.turns else 1.0

    def figures(self) -> dict[str, float]:
        """What benchmarks report."""
        return {"proposed": self.proposed, "accepted": self.accepted, "tokens_per_step": self.tokens_per_step}
