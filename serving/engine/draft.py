"""State of speculative decoding for one sequence: the proposer of its next tokens, and their acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

_MEMORY = 0.9  # at each verification, the earlier counts are multiplied by this factor
_BEGIN = 2.0  # weight of the initial acceptance rate, as a number of tried tokens
_PATIENCE, _MOST_PATIENCE = 16, 64  # initial and maximum value of `Draft.patience`, in proposals


class Proposer(Protocol):
    """Guesses the next tokens of one sequence."""

    def read(self) -> None:
        """Read the sequence's new tokens. The engine calls this while a launch runs, when it costs no time."""

    def propose(self, count: int) -> list[int]:
        """Return at most `count` tokens that may come next."""


@dataclass(slots=True)
class Share:
    """Acceptance rate: the probability that a proposed token is right if all tokens before it are.

    `tried` and `accepted` are exponentially decayed counts of tokens.
    """

    memory: float = _MEMORY
    tried: float = _BEGIN
    accepted: float = _BEGIN / 2

    @property
    def value(self) -> float:
        return self.accepted / self.tried

    def young(self) -> Share:
        """Return an acceptance rate for a new sequence. Its initial value is the value of this rate."""
        return Share(tried=_BEGIN, accepted=_BEGIN * self.value)

    def learn(self, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of `proposed` tokens were right.

        The first wrong token counts as tried. The tokens after it do not.
        """
        self.tried = self.memory * self.tried + accepted + (accepted < proposed)
        self.accepted = self.memory * self.accepted + accepted


@dataclass(slots=True)
class Draft:
    """Decides when to probe whether a sequence's proposals have become right. `share` is the acceptance rate of the
    sequence.

    A proposal is declined, that is, not verified, if verification is not expected to save time. After `patience`
    declined proposals in a row, at least one token of the next proposal is verified nevertheless, as a probe. After a
    successful probe, the next proposal is probed too. A failed probe doubles `patience`, up to _MOST_PATIENCE.
    """

    proposer: Proposer
    share: Share = field(default_factory=Share)
    declined: int = 0
    patience: int = _PATIENCE
    probing: bool = False

    @property
    def acceptance(self) -> float:
        return self.share.value

    @property
    def due(self) -> bool:
        """Whether a probe is due."""
        return self.declined >= self.patience

    def decline(self) -> None:
        """Record that the engine does not verify the current proposal."""
        self.declined += 1

    def verify(self) -> None:
        """Record that a proposal is verified."""
        self.probing, self.declined = self.due, 0

    def learn(self, proposed: int, accepted: int) -> None:
        """Update the acceptance rate (see `Share.learn`) and the rate of probes."""
        self.share.learn(proposed, accepted)
        if self.probing and accepted:
            self.declined = self.patience
        elif self.probing:
            self.patience = min(2 * self.patience, _MOST_PATIENCE)
        elif accepted:
            self.patience = _PATIENCE
