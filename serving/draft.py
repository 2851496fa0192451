"""What an engine knows of proposals for one sequence: who makes them, and how often they were right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

_MEMORY = 0.9  # weight of what a share was before the last verification
_BEGIN = 2.0  # tokens for which a share stands at first
_PATIENCE, _MOST_PATIENCE = 16, 64  # proposals in a row that are declined, at first and after probes that failed


class Proposer(Protocol):
    """Guesses how one sequence goes on."""

    def read(self) -> None:
        """Take note of the sequence's new tokens, while nothing waits for it."""

    def propose(self, count: int) -> list[int]:
        """At most `count` tokens that may come next."""


@dataclass(slots=True)
class Share:
    """How likely a proposed token is right if those before it are: `accepted` of `tried` ones were, as decayed sums."""

    memory: float = _MEMORY
    tried: float = _BEGIN
    accepted: float = _BEGIN / 2

    @property
    def value(self) -> float:
        return self.accepted / self.tried

    def young(self) -> Share:
        """A new one that begins with the value of this one."""
        return Share(tried=_BEGIN, accepted=_BEGIN * self.value)

    def learn(self, proposed: int, accepted: int) -> None:
        """Of `proposed` tokens so many were right; the first wrong one was tried, those after it were not."""
        self.tried = self.memory * self.tried + accepted + (accepted < proposed)
        self.accepted = self.memory * self.accepted + accepted


@dataclass(slots=True)
class Draft:
    """`share` is the sequence's own, and begins with what its maker believes.

    After `patience` declined proposals in a row one token is tried against the odds, a probe. One that succeeds is
    followed by the next, until the share of accepted tokens decides again; each that fails makes probes rarer.
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
        """A proposal is not verified."""
        self.declined += 1

    def verify(self) -> None:
        """A proposal is verified."""
        self.probing, self.declined = self.due, 0

    def learn(self, proposed: int, accepted: int) -> None:
        """See `Share.learn`."""
        self.share.learn(proposed, accepted)
        if self.probing and accepted:
            self.declined = self.patience
        elif self.probing:
            self.patience = min(2 * self.patience, _MOST_PATIENCE)
        elif accepted:
            self.patience = _PATIENCE
