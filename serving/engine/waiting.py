"""The queue of sequences that wait for a slot. Clients take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from megakernel.serving.engine.request import Sequence

_Queue = OrderedDict[Sequence, None]


class Waiting:
    """A queue of waiting sequences. Sequences that `push` has put at the front come first.

    Then clients take turns, with one sequence per turn, and the sequences of one client keep their order. So a client
    with one request waits for at most one sequence of every other client, however many requests they have sent.
    """

    def __init__(self) -> None:
        self._head = _Queue()
        self._queues: OrderedDict[str, _Queue] = OrderedDict()  # the queue of each client; no queue is empty

    def __len__(self) -> int:
        return len(self._head) + sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._head or self._queues)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._head
        for queue in self._queues.values():
            yield from queue

    def append(self, client: str, sequences: Iterable[Sequence]) -> None:
        """Append sequences to the client's queue."""
        self._queues.setdefault(client, _Queue()).update(dict.fromkeys(sequences))

    def push(self, sequence: Sequence) -> None:
        """Put a sequence at the front, before all clients."""
        self._head[sequence] = None
        self._head.move_to_end(sequence, last=False)

    def first(self) -> Sequence:
        """Return the next sequence. The queue must not be empty."""
        return next(iter(self._head or next(iter(self._queues.values()))))

    def take(self) -> None:
        """Remove the next sequence. Unless `push` had put it at the front, the turn passes to the next client."""
        sequence = self.first()
        at_head = sequence in self._head
        self.remove(sequence)
        if not at_head and (client := sequence.request.client) in self._queues:
            self._queues.move_to_end(client)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue. If the queue does not have it, do nothing."""
        self._head.pop(sequence, None)
        client = sequence.request.client
        if (queue := self._queues.get(client)) is not None:
            queue.pop(sequence, None)
            if not queue:
                del self._queues[client]
