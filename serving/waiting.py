"""The queue of sequences that wait for a slot. Clients take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from .request import Sequence

_Queue = OrderedDict[Sequence, None]


class Waiting:
    """Waiting sequences. First those that `push` put at the front, then one of each client in turn.

    The sequences of one client keep their order. So a client with one request waits for at most one sequence of every
    other client, however many requests they have sent.
    """

    def __init__(self) -> None:
        self._head = _Queue()
        self._queues: OrderedDict[str, _Queue] = OrderedDict()  # by client; none is empty

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
        """The next sequence. The queue must not be empty."""
        return next(iter(self._head or next(iter(self._queues.values()))))

    def take(self) -> None:
        """Remove the next sequence. Then it is another client's turn."""
        sequence = self.first()
        at_head = sequence in self._head
        self.remove(sequence)
        if not at_head and (client := sequence.request.client) in self._queues:
            self._queues.move_to_end(client)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Does nothing if it does not wait."""
        self._head.pop(sequence, None)
        client = sequence.request.client
        if (queue := self._queues.get(client)) is not None:
            queue.pop(sequence, None)
            if not queue:
                del self._queues[client]
