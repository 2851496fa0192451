"""Charges clients for the time that their constraints take, because a grammar of a few characters can need 10 ms for
each mask. Steps wait for masks, so without a limit, one client's grammars would delay all other clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from time import perf_counter

from megakernel.serving.engine.request import Sequence, Slots

_SLOW = 5e-3  # A client whose masks took more seconds skips steps (rests), but only while others have requests.
_REST = 3  # A client rests this many times as long as its masks took.
_FEW = 4  # After its rest, a client gets at most this many masks per step. The limit doubles after each quick step.
_TRUSTED = 64  # Clients that may get this many masks are trusted, and their masks are computed together.


class MaskTime:
    """Decides which constrained sequences skip a step, because the masks of their client have taken too long."""

    def __init__(self) -> None:
        self._most: dict[str, int] = {}
        self._rests_until: dict[str, float] = {}

    def rests(self, client: str) -> bool:
        return perf_counter() < self._rests_until.get(client, 0.0)

    def skipping(self, slots: Slots) -> list[int]:
        """Return the running sequences that should skip the next step, as indices into `slots.order`."""
        found, rows, order = [], Counter[str](), slots.order
        for at in sorted(slots.constrained[order].nonzero()[0].tolist(), key=lambda at: slots.last_token_at[order[at]]):
            rows[client := slots.sequence[order[at]].request.client] += 1
            if rows[client] > self._most.get(client, _FEW) or self.rests(client):
                found.append(at)
        self._most = {client: most for client, most in self._most.items() if client in rows}
        return found

    def groups(self, sequences: Iterable[Sequence], *, alone: bool) -> Iterator[list[Sequence]]:
        """Divide the sequences that need masks by client, with all trusted clients in one group, and yield each group.
        The time until the caller asks for the next group is charged to the clients of the group."""
        groups: dict[str | None, list[Sequence]] = {}
        for sequence in sequences:
            trusted = alone or self._most.get(sequence.request.client, _FEW) >= _TRUSTED
            groups.setdefault(None if trusted else sequence.request.client, []).append(sequence)
        for client, group in groups.items():
            began = perf_counter()
            yield group
            seconds = perf_counter() - began
            for one in {sequence.request.client for sequence in group}:
                self._most[one] = _FEW if seconds > _SLOW else 2 * min(self._most.get(one, _FEW), _TRUSTED)
            if client is not None and seconds > _SLOW:
                self._rests_until[client] = perf_counter() + _REST * seconds
