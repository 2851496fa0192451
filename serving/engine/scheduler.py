"""The batch scheduler: which sequences wait and run, their slots and KV pages, and their tokens in the next step.

A slot is an index of the arrays in `Slots`, which hold the state of all running sequences. Work that every step does
for every sequence is vectorised over these arrays. Code for single sequences runs only when a sequence arrives, leaves,
fills a page or computes its prompt.

A running sequence has KV pages for its prompt and the tokens generated so far. If it needs another page and none is
free, the youngest running sequence is preempted: it frees its pages and waits again, but keeps its generated tokens.
When it is admitted again, it recomputes their keys and values, with bit-identical results. If all layers have sliding
windows, a sequence frees the pages that its windows have left. Launches run one after another, so no running launch
reads a page that the next one overwrites."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Dims
from megakernel.runtime.steps import Ints
from megakernel.scheduler import MOST_MASKS
from megakernel.serving.engine.mask_time import MaskTime
from megakernel.serving.engine.request import Request, Sequence, Slots

_Queue = OrderedDict[Sequence, None]
SCORED_ROWS = 64  # maximum logit rows per step for scoring prompts; each has a logit per vocabulary entry


@dataclass
class Counts:
    """Numbers of tokens, summed over steps."""

    generated: int = 0  # tokens that the steps generated
    turns: int = 0  # pairs of a step and a sequence that got at least one token in that step
    proposed: int = 0  # tokens that were proposed and verified
    accepted: int = 0  # proposed tokens that were right

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(int.__add__, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*map(int.__sub__, vars(self).values(), vars(other).values()))

    @property
    def tokens_per_step(self) -> float:
        """Average number of tokens that a sequence gets in a step: 1 without speculation."""
        return self.generated / self.turns if self.turns else 1.0

    def figures(self) -> dict[str, float]:
        return {"proposed": self.proposed, "accepted": self.accepted, "tokens_per_step": self.tokens_per_step}


@dataclass
class Stats:
    """The engine's current state, and its counters since it was created."""

    pages: int
    pages_used: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens of all admitted sequences that may use the prefix cache
    prefix_hits: int = 0  # how many tokens of `prefix_queries` were in the prefix cache
    counts: Counts = field(default_factory=Counts)


class Waiting:
    """The queue of waiting sequences. Preempted sequences and others that `push` puts at the front come first. Then
    clients take turns, with one sequence per turn, and the sequences of one client keep their order. So a client with
    one request waits for at most one sequence of every other client, however many requests they have sent."""

    def __init__(self) -> None:
        self._head = _Queue()
        self._queues: OrderedDict[str, _Queue] = OrderedDict()  # the queue of each client; no queue is empty

    def __len__(self) -> int:
        return len(self._head) + sum(map(len, self._queues.values()))

    @property
    def clients(self) -> set[str]:
        return {*self._queues, *(one.request.client for one in self._head)}

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._head
        for queue in self._queues.values():
            yield from queue

    def append(self, client: str, sequences: Iterable[Sequence]) -> None:
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


class PagePool:
    """The KV pages with ids 0 to `pages` - 1. Each page counts its users, the sequences that read it. Once steps have
    filled a page, it is identified by the hash of all tokens up to its end. So sequences with the same prefix
    share it. A page without users stays in the cache until it is needed; the least recently used page goes first."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._users = [0] * pages
        self._unknown = list(range(pages - 1, -1, -1))  # free pages without cached tokens
        self._unused: OrderedDict[int, None] = OrderedDict()  # free pages with cached tokens, least recently used first
        self._page: dict[bytes, int] = {}
        self._hash: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._unknown) + len(self._unused)

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages for one sequence and return their ids. The caller has checked that they are free."""
        taken = []
        for _ in range(count):
            if self._unknown:
                page = self._unknown.pop()
            else:
                page, _ = self._unused.popitem(last=False)
                del self._page[self._hash.pop(page)]
            self._users[page] = 1
            taken.append(page)
        return taken

    def find(self, hashes: Seq[bytes]) -> list[int]:
        """Return the cached pages of the longest cached prefix, given a hash per page. To use them, call `share`."""
        return [self._page[key] for key in takewhile(self._page.__contains__, hashes)]

    def unused(self, pages: Seq[int]) -> int:
        """Return how many of `pages` no sequence uses. The pool counts these as free until `share` is called. So a
        caller that will share them must subtract this number from the number of free pages."""
        return sum(not self._users[page] for page in pages)

    def share(self, pages: Seq[int]) -> None:
        """Add a user to each of the pages that `find` returned."""
        for page in pages:
            if not self._users[page]:
                del self._unused[page]
            self._users[page] += 1

    def learn(self, key: bytes, page: int) -> None:
        """Cache a full `page` under the hash `key` of its prefix. If a page with the same hash is cached already, the
        cache keeps that page and ignores the new one."""
        if key not in self._page and page not in self._hash:
            self._page[key], self._hash[page] = page, key

    def give(self, pages: Seq[int]) -> None:
        """Release a sequence's pages, last page first, so that the end of a prefix is evicted before its beginning."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._hash:
                self._unused[page] = None
            else:
                self._unknown.append(page)

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._unknown.extend(self._unused)
        self._unused.clear()
        self._page.clear()
        self._hash.clear()


class Batch:
    """Schedules sequences: assigns `dims.max_seqs` slots, `pages` KV pages and `step_tokens` tokens per step."""

    def __init__(self, dims: Dims, *, pages: int, step_tokens: int, prefix_cache: bool) -> None:
        self.waiting = Waiting()
        self.slots = Slots(dims)
        self.mask_time = MaskTime()
        self.totals = Stats(pages)  # the engine updates `counts` after each step; see `stats`
        self._max_seqs, self._page = dims.bucket.max_seqs, dims.bucket.kv_page
        self._windows = max(dims.model.spans) < dims.bucket.max_context  # whether all layers have sliding windows
        self._step_tokens, self._prefix_cache = step_tokens, prefix_cache
        self.pool = PagePool(pages)
        self._slots = list(range(dims.bucket.max_seqs - 1, -1, -1))  # free slots
        # Tokens that the host must write to the device buffer HISTORY before the next step: slot, first position, ids.
        self.histories: list[tuple[int, int, NDArray[np.int32]]] = []
        # For the next `_steady` steps, no sequence of `_steady_order` needs a new page, so `plan` returns this array.
        self._steady, self._steady_order = 0, self.slots.order

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, in the order of admission."""
        return self.slots.sequence[self.slots.order].tolist()  # type: ignore[no-any-return]

    @property
    def stats(self) -> Stats:
        used = self.pool.pages - self.pool.free
        return replace(self.totals, running=len(self.slots.order), waiting=len(self.waiting), pages_used=used)

    @property
    def alone(self) -> bool:
        """Whether all sequences, running or waiting, are of one client."""
        return len(self.waiting.clients.union(one.request.client for one in self.running)) == 1

    def add(self, request: Request) -> None:
        """Queue the choices (completions) of a request. If the prompt is longer than a page, only the first choice is
        queued. The others wait until the first one has computed the prompt, because they can then share at least one of
        the prompt's pages. They also wait if the prompt is scored, because its scores are sent first."""
        waits = len(request.prompt_ids) > self._page or request.scores_prompt(0)
        now = 1 if waits else len(request.choices)
        self.waiting.append(request.client, request.choices[:now])
        request.held = request.choices[now:]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def plan(self) -> tuple[Ints, list[tuple[Sequence, int]]]:
        """Plan the next step, in which some sequences compute one token and others several. Returns the slots of the
        sequences that compute one token, and a list of (sequence, number of tokens) for the other sequences. All these
        sequences have a slot and the pages that they need."""
        slots, order = self.slots, self.slots.order
        if self._steady and self._steady_order is order and not self.waiting:
            self._steady -= 1
            return order, []
        full = slots.full_pages(order)
        for at in (full > slots.known_pages[order]).nonzero()[0]:
            self._publish(slots.sequence[order[at]], int(full[at]))
        if self._windows:
            passed = slots.passed(order)
            for at in (passed > slots.freed[order]).nonzero()[0]:
                self.pool.give(slots.drop(int(order[at]), int(passed[at])))
        self._grow()
        self._admit()
        ones, prompts = self._deal()
        steady = len(ones) and ones is slots.order and not (slots.constraints or self._windows)
        self._steady, self._steady_order = slots.steady(ones) if steady else 0, ones
        return ones, prompts

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, whether it runs or waits. Does nothing if it has ended already."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence.slot >= 0:
            self._publish(sequence, int(self.slots.full_pages(np.array(sequence.slot))))
            self._release(sequence)
        elif sequence in sequence.request.held:
            sequence.request.held.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.choice == 0:
            self.unhold(sequence.request)

    def grant(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        """Give a running sequence KV pages for the proposed `tokens`, which follow its last known token. Returns as
        many of `tokens`, from the first on, as the free pages allow. If the sequence has penalties, the launch reads
        its tokens from the device buffer HISTORY, so the host will write the granted tokens there."""
        slots, slot = self.slots, sequence.slot
        self._steady = 0
        known, held = int(slots.known[slot]), int(slots.pages.count[slot])
        wanted = self.pages_for(known + len(tokens)) - held
        if tokens and (more := self.pool.take(max(0, min(wanted, self.pool.free)))):
            slots.set_pages(slot, held, more)
        granted = tokens[: int(slots.pages.count[slot]) * self._page - known]
        if granted and slots.sampling.penalised[slot]:
            text = np.array([slots.tokens[slot, known - 1], *granted], np.int32)
            self.histories.append((slot, known - 1, text))
        return granted

    def shorten(self, sequence: Sequence) -> None:
        """Forget the keys and values of a step's rejected tokens, and free the pages that only these tokens used."""
        slots, slot = self.slots, sequence.slot
        tokens = int(slots.known[slot])
        slots.computed[slot], slots.length[slot] = tokens - 1, tokens
        kept, count = self.pages_for(tokens), int(slots.pages.count[slot])
        self.pool.give(slots.pages.ids[slot, kept:count].tolist())
        slots.set_pages(slot, min(kept, count), [])
        self._write_history(slot, tokens - 1)

    def unhold(self, request: Request) -> None:
        """Move the choices of a request that wait for its first choice to the front of the queue. The first choice has
        now computed the prompt, or has ended."""
        for sequence in reversed(request.held):
            self.waiting.push(sequence)
        request.held = []
        slot = request.choices[0].slot
        if slot >= 0:
            self.slots.holds[slot] = False

    def unhold_computed(self, planned: Ints) -> None:
        """Queue the waiting choices of each request whose first choice is in `planned` and has computed the prompt."""
        slots = self.slots
        ready = slots.holds[planned] & (slots.computed[planned] >= slots.prompt[planned])
        for sequence in slots.sequence[planned[ready]]:
            self.unhold(sequence.request)

    def reset(self) -> None:
        """Preempt all running sequences after a failed launch; they keep their tokens. Empty the prefix cache."""
        for sequence in sorted(self.running, key=_age, reverse=True):
            self._preempt(sequence)
        for sequence in self.waiting:
            sequence.sampling = False
            sequence.request.scored = len(sequence.request.prompt_logprobs) or sequence.request.pooled_rows
        self.histories.clear()
        self.pool.forget()

    def _publish(self, sequence: Sequence, full: int) -> None:
        """Add the sequence's first `full` KV pages, which launches have filled, to the prefix cache."""
        slots, slot = self.slots, sequence.slot
        known = int(slots.known_pages[slot])
        hashes = sequence.page_hashes(self._page, full)
        for page, key in zip(slots.pages.ids[slot, known:full].tolist(), hashes[known:], strict=True):
            self.pool.learn(key, page)
        slots.known_pages[slot] = max(known, full)

    def _grow(self) -> None:
        """Give each running sequence a KV page if it needs one for its next token, the oldest sequences first. If no
        page is free, the youngest sequences are preempted."""
        slots = self.slots
        order = slots.order
        short = order[slots.crowded(order)]
        if not len(short):
            return
        short = short[slots.pending(short) > 0]
        if len(short) <= self.pool.free:
            slots.add_page(short, self.pool.take(len(short)))
            return
        for sequence in sorted(slots.sequence[short], key=_age):
            while not self.pool.free and sequence.slot >= 0:
                self._preempt(max(self.running, key=_age))
                self.totals.preemptions += 1
            if sequence.slot >= 0:
                slots.add_page(np.array([sequence.slot]), self.pool.take(1))

    def _preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the front of the queue. It keeps its tokens."""
        sequence.sampling = bool(self.slots.length[sequence.slot] > self.slots.known[sequence.slot])
        self._release(sequence)
        self.waiting.push(sequence)

    def _admit(self) -> None:
        """Admit waiting sequences in turn while there are a free slot and enough KV pages for the next one's tokens.

        One free page is reserved for each running sequence whose pages cannot hold its longest possible output. At most
        MOST_MASKS constrained sequences run, because a step has room for so many token masks. The running launch
        stores the token of a sequence that was just preempted in its old slot. So this sequence is not admitted before
        that launch has ended."""
        if self.waiting and not self._slots:
            self._make_room()
        if not self.waiting or not self._slots:
            return
        slots, running = self.slots, self.slots.order
        roomy = slots.pages.count[running] * self._page >= slots.limit[running] - 1
        spare = self.pool.free - int((~roomy).sum())
        while self.waiting and self._slots:
            sequence = self.waiting.first()
            if sequence.sampling or (sequence.constraint and slots.constraints >= MOST_MASKS):
                return
            shared = self._prefix(sequence)
            own = self.pages_for(len(sequence.saved)) - len(shared)
            taken = own + self.pool.unused(shared)
            if taken > (spare if len(slots.order) else self.pool.free):
                return
            self.waiting.take()
            self.pool.share(shared)
            pages = shared + self.pool.take(own)
            slots.seat(self._slots.pop(), sequence, pages, len(shared))
            request, cached = sequence.request, int(slots.computed[sequence.slot])
            if request.cached_tokens is None:
                request.cached_tokens = cached
            if not request.scores_prompt(sequence.choice):
                self.totals.prefix_queries += len(sequence.saved)
                self.totals.prefix_hits += cached
            self._write_history(sequence.slot, 0)
            spare -= taken + (len(pages) * self._page < sequence.length_limit - 1)

    def _make_room(self) -> None:
        """Free a slot for other clients if a client's constraints take too much time. The youngest sequence of such
        clients is preempted, and waits for its client's next turn."""
        rests = self.mask_time.rests
        slow = [sequence for sequence in self.running if rests(sequence.request.client)]
        if slow and not all(map(rests, self.waiting.clients)):
            self._preempt(sequence := max(slow, key=_age))
            self.waiting.remove(sequence)
            self.waiting.append(sequence.request.client, [sequence])

    def _write_history(self, slot: int, start: int) -> None:
        """If a sequence has penalties, let the host write its tokens except the first `start` to the buffer HISTORY."""
        if self.slots.sampling.penalised[slot]:
            self.histories.append((slot, start, self.slots.known_tokens(slot)[start:].copy()))

    def _prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached pages that hold the beginning of the sequence's tokens. A page with the last token is never
        returned, because a step must compute that token's logits. If the request asks for log-probabilities of the
        prompt, no page is returned, because the logits of all tokens are needed."""
        request = sequence.request
        if request.scores_prompt(sequence.choice) or not self._prefix_cache:
            return []
        page = self._page
        return self.pool.find(sequence.page_hashes(page, (len(sequence.saved) - 1) // page))

    def _deal(self) -> tuple[Ints, list[tuple[Sequence, int]]]:
        """Divide the maximum number of tokens of a step among the running sequences. Each decoding sequence gets one
        token. The rest goes to prompts, in the order of admission. The result has the form that `plan` returns."""
        slots, order = self.slots, self.slots.order
        tokens, rows = self._step_tokens, max(self._max_seqs, SCORED_ROWS)
        pending = slots.pending(order)
        if slots.constraints and not self.alone:
            skipping = self.mask_time.skipping(slots)
            pending[skipping if np.delete(pending, skipping).any() else []] = 0
        decoding = (pending == 1).nonzero()[0][: min(tokens, rows)]
        if len(decoding) == len(order):
            return order, []  # the same array object unless a sequence came or left, so that its plan is reused
        tokens, rows = tokens - len(decoding), rows - len(decoding)
        pending[decoding] = 0
        prompts: list[tuple[Sequence, int]] = []
        for at in pending.nonzero()[0]:
            sequence, left = slots.sequence[order[at]], int(pending[at])
            count = min(left, tokens)
            if sequence.scoring:  # every prompt token needs logits
                count = wanted = min(count, rows)
            else:  # only the last token needs logits; if no row is left for it, this token waits for a later step
                wanted = int(count == left)
                if wanted > rows:
                    count, wanted = count - 1, 0
            if count:
                prompts.append((sequence, count))
                tokens, rows = tokens - count, rows - wanted
            if not tokens:
                break
        return order[decoding], prompts

    def _release(self, sequence: Sequence) -> None:
        self._slots.append(sequence.slot)
        self.pool.give(self.slots.leave(sequence))


def _age(sequence: Sequence) -> tuple[int, int]:
    """A key by which sequences are sorted from oldest to youngest."""
    return sequence.request.id, sequence.choice
