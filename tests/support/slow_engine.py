"""A slow, simple engine that handles its sequences one by one. The real engine must do the same in every step."""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from megakernel.isa import Dims, StepTable, ceil_div
from megakernel.runtime import Chunk, SampleRow
from megakernel.runtime.attention_items import deal_items, write_items
from megakernel.runtime.backend import Backend, Launch
from megakernel.runtime.steps import FLOATS
from megakernel.serving.engine.engine import top_logprobs
from megakernel.serving.engine.pages import ROOT, PagePool, page_hash
from megakernel.serving.engine.plan import VERIFIED_ROWS
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.request import Request
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.engine.scheduler import SCORED_ROWS, Counts, Stats
from megakernel.serving.engine.speculation import Speculation, _Offer
from megakernel.serving.engine.tokens import Token


@dataclass(eq=False)
class SlowSequence:
    """One choice of a request. `length` also counts the tokens that planned steps have not sampled yet."""

    request: Request
    choice: int
    tokens: list[int]
    length_limit: int
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    length: int = field(init=False)
    known_pages: int = 0
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.length = len(self.tokens)

    def tokens_from(self, start: int) -> list[int]:
        return self.tokens[start:]

    @property
    def age(self) -> tuple[int, int]:
        return self.request.id, self.choice

    @property
    def pending(self) -> int:
        return self.length - self.computed if self.length < self.length_limit else 0

    @property
    def scoring(self) -> bool:
        request = self.request
        return request.scores_prompt(self.choice) and request.scored < len(request.prompt_ids) - 1

    def page_hashes(self, page: int, count: int) -> list[bytes]:
        hashes = [ROOT]
        for i in range(count):
            hashes.append(page_hash(hashes[-1], self.tokens[i * page : (i + 1) * page]))
        return hashes[1:]

    def sample_row(self, index: int, start: int, *, store: bool = True) -> SampleRow:
        p = self.request.params
        early = start + index + 1 - len(self.request.prompt_ids) < p.min_tokens
        return SampleRow(
            index=index,
            store=store,
            prompt_length=len(self.request.prompt_ids),
            top_k=max(p.top_k, 0),
            **{name: getattr(p, name) for name in FLOATS},
            seed=self.request.seed,
            choice=self.choice,
            bias=dict(p.logit_bias) | (dict.fromkeys(self.request.stop_ids, float("-inf")) if early else {}),
        )


class Sample(NamedTuple):
    """What to do with a logit row.

    `position` is the number of tokens up to and including this row's token. `target` is the prompt token to score, or
    -1 if a token is sampled. `top` is the number of most likely tokens to report, or -1 if no log-probabilities are
    wanted. `after` is the proposed token that the row follows, or -1 if the row follows a known token. A row after a
    proposed token counts only if that token is accepted.
    """

    sequence: SlowSequence
    position: int
    target: int
    top: int
    after: int = -1


@dataclass
class Turn:
    sequence: SlowSequence
    chunk: Chunk
    samples: list[Sample]
    proposed: int = 0


@dataclass
class SlowWork:
    turns: list[Turn]
    histories: list[tuple[int, int, list[int]]]
    launch: Launch | None = None

    @property
    def samples(self) -> list[Sample]:
        return [sample for turn in self.turns for sample in turn.samples]

    @property
    def chunks(self) -> list[Chunk]:
        return [turn.chunk for turn in self.turns]


class SlowStep(NamedTuple):
    rows: list[int]
    contexts: list[int]
    logit_rows: int
    tokens: list[Token]


class SlowBatch:
    def __init__(self, dims: Dims, *, pages: int, step_tokens: int, prefix_cache: bool) -> None:
        self.waiting: OrderedDict[SlowSequence, None] = OrderedDict()
        self.running: dict[SlowSequence, None] = {}
        self.counts = Counts()
        self.max_seqs, self.page = dims.bucket.max_seqs, dims.bucket.kv_page
        self.step_tokens, self.prefix_cache = step_tokens, prefix_cache
        self.pool = PagePool(pages)
        self.slots = list(range(dims.bucket.max_seqs - 1, -1, -1))
        self.histories: list[tuple[int, int, list[int]]] = []
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    @property
    def stats(self) -> Stats:
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages=self.pool.pages,
            pages_used=self.pool.pages - self.pool.free,
            preemptions=self.preemptions,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            counts=self.counts,
        )

    def add(self, request: Request) -> None:
        now = len(request.choices) if len(request.prompt_ids) <= self.page else 1
        self.waiting.update(dict.fromkeys(request.choices[:now]))  # type: ignore[arg-type]
        request.held = request.choices[now:]

    def plan(self) -> list[tuple[SlowSequence, int]]:
        for sequence in self.running:
            self.publish(sequence)
        self.grow()
        self.admit()
        return self.deal()

    def finish(self, sequence: SlowSequence, reason: str) -> None:
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence.slot >= 0:
            self.publish(sequence)
            self.release(sequence)
        elif sequence in sequence.request.held:
            sequence.request.held.remove(sequence)
        else:
            self.waiting.pop(sequence, None)
        if sequence.choice == 0:
            self.unhold(sequence.request)

    def lengthen(self, sequence: SlowSequence, tokens: int) -> int:
        missing = ceil_div(tokens, self.page) - len(sequence.pages)
        sequence.pages += self.pool.take(max(0, min(missing, self.pool.free)))
        return min(tokens, len(sequence.pages) * self.page)

    def shorten(self, sequence: SlowSequence) -> None:
        tokens = len(sequence.tokens)
        sequence.computed, sequence.length = tokens - 1, tokens
        kept = ceil_div(tokens, self.page)
        self.pool.give(sequence.pages[kept:])
        del sequence.pages[kept:]
        if sequence.sample_row(0, sequence.length).penalised:
            self.histories.append((sequence.slot, tokens - 1, sequence.tokens[-1:]))

    def unhold(self, request: Request) -> None:
        for sequence in reversed(request.held):
            self.push(sequence)  # type: ignore[arg-type]
        request.held = []

    def reset(self) -> None:
        for sequence in sorted(self.running, key=lambda s: s.age, reverse=True):
            self.release(sequence)
            self.push(sequence)
        for sequence in self.waiting:
            sequence.length = len(sequence.tokens)
            sequence.request.scored = len(sequence.request.prompt_logprobs)
        self.histories.clear()
        self.pool.forget()

    def publish(self, sequence: SlowSequence) -> None:
        full = min(sequence.computed, len(sequence.tokens) - 1) // self.page
        hashes = sequence.page_hashes(self.page, full)
        for i in range(sequence.known_pages, full):
            self.pool.learn(hashes[i], sequence.pages[i])
            sequence.known_pages = full

    def grow(self) -> None:
        short = [s for s in self.running if s.pending and len(s.pages) * self.page < s.length]
        if len(short) > self.pool.free:
            short.sort(key=lambda s: s.age)
        for sequence in short:
            while not self.pool.free and sequence.slot >= 0:
                youngest = max(self.running, key=lambda s: s.age)
                self.release(youngest)
                self.push(youngest)
                self.preemptions += 1
            if sequence.slot >= 0:
                sequence.pages += self.pool.take(1)

    def admit(self) -> None:
        def needs_one(s: SlowSequence) -> bool:
            return len(s.pages) * self.page < s.length_limit - 1

        spare = self.pool.free - sum(needs_one(s) for s in self.running)
        while self.waiting and self.slots:
            sequence = next(iter(self.waiting))
            request = sequence.request
            if sequence.length > len(sequence.tokens):
                return
            scores = request.scores_prompt(sequence.choice)
            full = 0 if scores or not self.prefix_cache else (sequence.length - 1) // self.page
            shared = self.pool.find(sequence.page_hashes(self.page, full))
            own = ceil_div(sequence.length, self.page) - len(shared)
            taken = own + self.pool.unused(shared)
            if taken > (spare if self.running else self.pool.free):
                return
            del self.waiting[sequence]
            self.pool.share(shared)
            sequence.slot, sequence.pages = self.slots.pop(), shared + self.pool.take(own)
            sequence.computed, sequence.known_pages = len(shared) * self.page, len(shared)
            self.running[sequence] = None
            if request.cached_tokens is None:
                request.cached_tokens = sequence.computed
            if not scores:
                self.prefix_queries += len(sequence.tokens)
                self.prefix_hits += sequence.computed
            self.histories.append((sequence.slot, 0, list(sequence.tokens)))
            spare -= taken + needs_one(sequence)

    def deal(self) -> list[tuple[SlowSequence, int]]:
        tokens, rows = self.step_tokens, max(self.max_seqs, SCORED_ROWS)
        plan: list[tuple[SlowSequence, int]] = []
        prompts: list[SlowSequence] = []
        for sequence in self.running:
            if sequence.pending == 1 and tokens and rows:
                plan.append((sequence, 1))
                tokens, rows = tokens - 1, rows - 1
            elif sequence.pending:
                prompts.append(sequence)
        for sequence in prompts:
            count = min(sequence.pending, tokens)
            if sequence.scoring:
                count = wanted = min(count, rows)
            elif count == sequence.pending and rows == 0:
                count, wanted = count - 1, 0
            else:
                wanted = int(count == sequence.pending)
            if count:
                plan.append((sequence, count))
                tokens, rows = tokens - count, rows - wanted
        return plan

    def release(self, sequence: SlowSequence) -> None:
        del self.running[sequence]
        self.pool.give(sequence.pages)
        self.slots.append(sequence.slot)
        sequence.slot, sequence.pages = -1, []

    def push(self, sequence: SlowSequence) -> None:
        self.waiting[sequence] = None
        self.waiting.move_to_end(sequence, last=False)


class SlowSpeculation(Speculation):
    """Chooses the same proposals to verify as Speculation, but for a list of Turn objects instead of NumPy columns."""

    def read_turns(self, work: SlowWork) -> None:
        for turn in work.turns:
            if turn.samples:
                self._draft(turn.sequence)  # type: ignore[arg-type]

    def extend_turns(self, work: SlowWork, batch: SlowBatch, *, tokens: int, logit_rows: int) -> bool:
        rows, logits = sum(len(chunk.tokens) for chunk in work.chunks), len(work.samples)
        room = min(tokens - rows, min(logit_rows, VERIFIED_ROWS) - logits)
        offers = []
        for number, turn in enumerate(work.turns if room > 0 else []):
            sequence, chunk = turn.sequence, turn.chunk
            known = chunk.start == len(sequence.tokens) - 1 and sequence.finish_reason is None
            if known and len(chunk.tokens) == len(turn.samples) == 1:
                draft = self._draft(sequence)  # type: ignore[arg-type]
                most = min(self._depth, sequence.length_limit - len(sequence.tokens) - 1)
                if proposed := draft.proposer.propose(most) if most > 0 else []:
                    offers.append(_Offer(number, draft, proposed))
        if not offers:
            return False
        self._choose(offers, rows, logits, room)
        extended = False
        for offer in offers:
            turn = work.turns[offer.chunk]
            sequence, known = turn.sequence, len(turn.sequence.tokens)
            taken = batch.lengthen(sequence, known + offer.taken) - known if offer.taken else 0
            if not taken:
                offer.draft.decline()
                continue
            offer.draft.verify()
            work.histories += propose(turn, offer.tokens[:taken])
            extended = True
        if extended:
            work.turns = [turn for turn in work.turns if turn.sequence.finish_reason is None]
        return extended


def propose(turn: Turn, tokens: list[int]) -> list[tuple[int, int, list[int]]]:
    """Add proposed `tokens` to a turn that decodes one token. Return the entries that HISTORY needs for them."""
    sequence, start = turn.sequence, turn.chunk.start
    ids = [sequence.tokens[-1], *tokens]
    penalised = sequence.sample_row(0, start).penalised
    rows = [sequence.sample_row(i, start, store=not penalised) for i in range(len(ids))]
    turn.chunk = replace(turn.chunk, tokens=ids, samples=rows)
    first = turn.samples[0]
    turn.samples += [first._replace(position=start + i + 1, after=ids[i]) for i in range(1, len(ids))]
    turn.proposed = len(tokens)
    sequence.computed += turn.proposed
    sequence.length += turn.proposed
    return [(sequence.slot, start, ids)] if penalised else []


class SlowEngine:
    """A simple engine. Unlike the real engine, it does not call `check`, so its requests must be valid."""

    def __init__(
        self,
        backend: Backend,
        programs: Programs,
        dims: Dims,
        *,
        pages: int,
        step_tokens: int,
        eos_ids: frozenset[int],
        prefix_cache: bool = True,
        speculation: SlowSpeculation | None = None,
    ) -> None:
        self.backend, self.programs, self.dims = backend, programs, dims
        self.eos_ids, self.step_tokens, self.speculation = eos_ids, step_tokens, speculation
        self.batch = SlowBatch(dims, pages=pages, step_tokens=step_tokens, prefix_cache=prefix_cache)
        self.under_way: SlowWork | None = None
        self.requests = self.choices = 0

    @property
    def idle(self) -> bool:
        return not self.batch.waiting and not self.batch.running

    @property
    def stats(self) -> Stats:
        return self.batch.stats

    def add(self, prompt: list[int], params: SamplingParams) -> Request:
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
        request = Request(self.requests, prompt, params, stop_ids, self.choices)
        self.requests, self.choices = self.requests + 1, self.choices + params.n
        context = self.dims.bucket.max_context
        limit = context if params.max_tokens is None else min(context, len(prompt) + params.max_tokens)
        request.choices = [SlowSequence(request, choice, list(prompt), limit) for choice in range(params.n)]  # type: ignore[misc]
        self.batch.add(request)
        return request

    def abort(self, request: Request) -> None:
        for sequence in request.choices:
            self.batch.finish(sequence, "abort")  # type: ignore[arg-type]
        self.settle()

    def stop(self, request: Request, choice: int) -> None:
        self.batch.finish(request.choices[choice], "stop")  # type: ignore[arg-type]
        self.settle()

    def reset_prefix_cache(self) -> None:
        self.batch.pool.forget()

    def step(self) -> SlowStep:
        try:
            if self.under_way is None:
                self.start(self.prepare())
            work = self.under_way
            assert work is not None and work.launch is not None
            late = any(turn.proposed for turn in work.turns)
            ahead = None if late else self.prepare()
            output = work.launch.wait()
            samples = work.samples
            tokens, logprobs = output.tokens[: len(samples)].tolist(), output.logprobs[: len(samples)].tolist()
            logits = output.logits.copy()
            self.under_way = None
            fates = self.advance(work, tokens)
            self.start(self.prepare() if late else ahead)
        except BaseException:
            work, self.under_way = self.under_way, None
            if work and work.launch:
                work.launch.abort()
            self.batch.reset()
            raise
        found: list[Token] = []
        for row, (sample, token, logprob) in enumerate(zip(samples, tokens, logprobs, strict=True)):
            counts, reason = fates[row]
            if not counts:
                continue
            request = sample.sequence.request
            best = top_logprobs(logits[row], sample.top, token, logprob) if sample.top > 0 else {}
            if sample.top >= 0:
                best[token] = logprob
            if sample.target < 0:
                number = request.first + sample.sequence.choice
                found.append(Token(number, token, logprob, best, reason, 0.0))
            else:
                request.prompt_logprobs.append(logprob)
                request.prompt_top_logprobs.append(best)
        counted = [len(chunk.tokens) for chunk in work.chunks]
        contexts = [chunk.start + len(chunk.tokens) for chunk in work.chunks]
        return SlowStep(counted, contexts, len(samples), found)

    def prepare(self) -> SlowWork | None:
        turns = [self.turn(sequence, count) for sequence, count in self.batch.plan()]
        if not turns:
            return None
        histories, self.batch.histories = self.batch.histories, []
        work = SlowWork(turns, histories)
        if self.speculation:
            self.speculation.read_turns(work)
        return work

    def start(self, work: SlowWork | None) -> None:
        if work is None:
            return
        if self.speculation:
            most = self.programs.most_logit_rows
            self.speculation.extend_turns(work, self.batch, tokens=self.step_tokens, logit_rows=most)
        for slot, start, tokens in work.histories:
            self.backend.write_history(slot, start, np.array(tokens, np.int32))
        if all(turn.sequence.finish_reason for turn in work.turns):
            return
        program = self.programs.get(sum(len(chunk.tokens) for chunk in work.chunks), max(len(work.samples), 1))
        work.launch = self.backend.start(program, slow_table(program.dims, work.chunks))
        self.under_way = work

    def settle(self) -> None:
        if self.idle and self.under_way and self.under_way.launch:
            self.under_way.launch.wait()
            self.under_way = None

    def turn(self, sequence: SlowSequence, count: int) -> Turn:
        request, start, end = sequence.request, sequence.computed, sequence.computed + count
        rows: list[SampleRow] = []
        samples: list[Sample] = []
        if sequence.scoring:
            prompt, top = request.prompt_ids, request.params.prompt_logprobs or 0
            first, last = max(start, request.scored), min(end, len(prompt) - 1)
            for position in range(first, last):
                rows.append(SampleRow(index=position - start, target=prompt[position + 1], store=False))
                samples.append(Sample(sequence, position + 1, prompt[position + 1], top))
            request.scored = max(last, request.scored)
        ids = sequence.tokens[start:end]
        if len(ids) < count:
            ids.append(-1)
        if end == sequence.length:
            rows.append(sequence.sample_row(count - 1, start))
            wanted = request.params.logprobs
            samples.append(Sample(sequence, end, -1, -1 if wanted is None else wanted))
            sequence.length += 1
        sequence.computed = end
        if request.held and sequence.choice == 0 and end >= len(request.prompt_ids):
            self.batch.unhold(request)
        return Turn(sequence, Chunk(sequence.slot, start, ids, sequence.pages, rows), samples)

    def advance(self, work: SlowWork, tokens: Seq[int]) -> list[tuple[bool, str | None]]:
        """Add a step's tokens to their sequences. Returns for each logit row whether it counts, and the finish reason
        if its token ends the sequence."""
        left: Iterator[int] = iter(tokens)
        fates: list[tuple[bool, str | None]] = []
        for turn in work.turns:
            mine = [self.take(sample, next(left)) for sample in turn.samples]
            made = sum(counts for (counts, _), sample in zip(mine, turn.samples, strict=True) if sample.target < 0)
            self.batch.counts += Counts(made, int(made > 0))
            if made and turn.proposed:
                self.batch.counts += Counts(proposed=turn.proposed, accepted=made - 1)
                assert self.speculation
                self.speculation.learn(turn.sequence, turn.proposed, made - 1)  # type: ignore[arg-type]
                if turn.sequence.finish_reason is None:
                    self.batch.shorten(turn.sequence)
            fates += mine
        return fates

    def take(self, sample: Sample, token: int) -> tuple[bool, str | None]:
        sequence = sample.sequence
        if sequence.finish_reason is not None:
            return False, None
        if sample.target >= 0:
            return True, None
        known = sequence.tokens
        if sample.after >= 0 and (len(known) != sample.position or known[-1] != sample.after):
            return False, None
        known.append(token)
        if token in sequence.request.stop_ids:
            self.batch.finish(sequence, "stop")
        elif len(known) >= sequence.length_limit:
            self.batch.finish(sequence, "length")
        return True, sequence.finish_reason


def slow_table(dims: Dims, chunks: Seq[Chunk]) -> StepTable:
    """Build a step's table one word at a time, except for the attention items, which `write_items` writes."""
    table = StepTable(dims)
    table.row_seq[:] = table.logit_rows[:] = table.sample_slot[:] = table.history_slot[:] = table.target[:] = -1
    table.top_p[:] = table.repetition_penalty[:] = 1.0
    row = logit = pair = 0
    for chunk in chunks:
        first = row
        needed = ceil_div(chunk.start + len(chunk.tokens), dims.bucket.kv_page)
        table.block_tables[chunk.slot, :needed] = chunk.pages[:needed]
        for place, token in enumerate(chunk.tokens, chunk.start):
            table.token_ids[row] = token if token >= 0 else -1 - chunk.slot
            table.positions[row], table.row_seq[row] = place, chunk.slot
            row += 1
        for s in chunk.samples:
            table.logit_rows[logit] = first + s.index
            table.sample_slot[logit] = chunk.slot if s.store else -1
            table.history_slot[logit] = chunk.slot if s.penalised else -1
            table.sample_position[logit] = chunk.start + s.index + 1
            for name in ("prompt_length", "target", "top_k", "choice", *FLOATS):
                getattr(table, name)[logit] = getattr(s, name)
            table.seed_low[logit], table.seed_high[logit] = np.array([s.seed], np.uint64).view(np.int32)
            table.bias_begin[logit] = pair
            for token, value in s.bias.items():
                table.bias_ids[pair], table.bias_values[pair] = token, value
                pair += 1
            table.bias_end[logit] = pair
            logit += 1
    slot, start = ([getattr(chunk, name) for chunk in chunks] for name in ("slot", "start"))
    count = [len(chunk.tokens) for chunk in chunks]
    write_items(table, deal_items(dims, *(np.array(column, np.int32) for column in (slot, start, count))))
    return table
