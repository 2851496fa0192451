"""A serving engine for tests, whose backend has no model. The backend invents tokens and checks the step tables that
the engine gives it."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from step_check import check_step

from megakernel.isa import Dtype, StepTable
from megakernel.machine import host
from megakernel.model import ModelConfig, RandomCheckpoint
from megakernel.model.tokenizer import TextStream
from megakernel.program import Program
from megakernel.runtime.backend import Output
from megakernel.scheduler import Spec, compile_program
from megakernel.serving.engine.engine import Engine
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.request import Request
from megakernel.serving.engine.scheduler import SCORED_ROWS
from megakernel.serving.engine.speculation import Speculation
from megakernel.serving.text.codec import Transcript, single_tokens

CONFIG = ModelConfig(vocab=64, hidden=16, ffn=24, layers=1, heads=2, kv_heads=1, head_dim=8, max_context=256)
EOS = 63
_SIZES = {"vocab": 97, "hidden": 32, "ffn": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
TINY = RandomCheckpoint("tiny", ModelConfig(**_SIZES, max_context=256), 0)


def digest(tokens: Sequence[int], before: int = 0) -> int:
    return crc32(array("q", tokens).tobytes(), before)


def output_ids(choice: Any) -> list[int]:
    """Return the generated token ids of one completion (`choice`) of a request."""
    return choice.tokens_from(len(choice.request.prompt_ids))


def continuation(said: int, seed: int, choice: int) -> int:
    """Compute a token id from `said` (a digest of the tokens so far), a 32-bit seed and the completion's index.
    Different sequences therefore get different tokens, but the same sequence always gets the same ones."""
    return digest([seed, choice], said) % CONFIG.vocab


class FakeBackend:
    """A backend that invents tokens instead of running a model, and asserts that the engine uses it correctly.

    The token sampled after position p is `reply(p)` or, if there is no `reply`, the `continuation` of the digest in the
    sequence's KV cache. If a bias of minus infinity forbids that token, the next allowed id is sampled.

    The KV cache has one number per position: a digest of that position's token and of the previous position's number,
    which is read through the sequence's page table. A sequence with a wrong page, even a shared one that another
    sequence wrote, therefore gets a wrong digest.

    Every step table must pass `check_step`. Launches run in order, in `wait` or, if `early` returns True, as soon as
    they are started. The engine may start one launch at a time, or two if `queues`. Until both have been awaited, it
    may not write to the token history."""

    name = "fake"

    def __init__(self, reply: Callable[[int], int] | None, *, queues: bool = False) -> None:
        self.reply, self.queues = reply, queues
        self.early: Callable[[], bool] = lambda: False
        self.history: dict[int, dict[int, int]] = defaultdict(dict)
        self.kv: dict[tuple[int, int], int] = {}  # (page, offset in the page) -> digest
        self.tables: list[StepTable] = []
        self.interrupt = False
        self.under_way: list[FakeLaunch] = []

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        assert not self.under_way
        self.history[slot].update(enumerate(tokens.tolist(), start))

    def start(self, program: Program, table: StepTable, *, trace: bool = False) -> "FakeLaunch":
        assert len(self.under_way) <= self.queues
        check_step(table)
        self.tables.append(StepTable(table.dims, table.words.copy()))  # a copy, because the engine reuses the table
        launch = FakeLaunch(self, self.tables[-1] if self.queues else table)
        self.under_way.append(launch)
        if self.early() and not self.interrupt:
            for one in self.under_way:
                one.run()
        return launch

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        return self.start(program, table, trace=trace).wait()

    def execute(self, table: StepTable) -> Output:
        if self.interrupt:
            raise KeyboardInterrupt
        d = table.dims
        for row in range(d.bucket.tokens):
            slot, position = int(table.row_seq[row]), int(table.positions[row])
            if slot < 0:
                continue
            token = int(table.token_ids[row])
            token = self.history[slot][position] if token < 0 else token
            pages = table.block_tables[slot]
            block, offset = divmod(position - 1, d.bucket.kv_page)
            before = self.kv[int(pages[block]), offset] if position else 0
            self.kv[int(pages[position // d.bucket.kv_page]), position % d.bucket.kv_page] = digest([token], before)
        logits = np.zeros((d.bucket.logit_rows, d.model.vocab), np.float32)
        tokens = np.zeros(d.bucket.logit_rows, np.int32)
        logprobs = np.zeros(d.bucket.logit_rows, np.float32)
        hidden = np.zeros((d.bucket.logit_rows, 1), np.float32)
        for i in range(d.bucket.logit_rows):
            row = int(table.logit_rows[i])
            if row < 0:
                continue
            position = int(table.sample_position[i])
            begin, end = int(table.bias_begin[i]), int(table.bias_end[i])
            bias = dict(zip(table.bias_ids[begin:end].tolist(), table.bias_values[begin:end].tolist(), strict=True))
            token = int(table.target[i])
            if table.history_slot[i] >= 0:
                assert digest(self.said(table, i)) == self.kv_before(table, row, position)
            if token < 0:
                if self.reply:
                    token = self.reply(position - 1)
                else:
                    seed = int(table.seed_low[i]) & 0xFFFFFFFF
                    token = continuation(self.kv_before(table, row, position), seed, int(table.choice[i]))
                while bias.get(token) == -np.inf:
                    token = (token + 1) % d.model.vocab
            logits[i] = np.arange(d.model.vocab) == token
            tokens[i], logprobs[i], hidden[i] = token, -position, position
            if table.sample_slot[i] >= 0:
                self.history[int(table.sample_slot[i])][position] = token
        return Output(tokens, logprobs, logits, hidden, 0.0, None)

    def said(self, table: StepTable, i: int) -> list[int]:
        """Return the tokens that the repetition penalties of logit row `i` take into account."""
        history = self.history[int(table.history_slot[i])]
        return [history[place] for place in range(int(table.sample_position[i]))]

    def kv_before(self, table: StepTable, row: int, position: int) -> int:
        """Return the KV cache's digest of all tokens before `position` in the sequence of token row `row`."""
        block, offset = divmod(position - 1, table.dims.bucket.kv_page)
        return self.kv[int(table.block_tables[table.row_seq[row], block]), offset]

    def close(self) -> None:
        pass

    def steps(self) -> list[list[tuple[int, int]]]:
        """Return, for each step, the (slot, number of token rows) of its sequences, in row order."""
        found = []
        for table in self.tables:
            slots = [int(s) for s in table.row_seq if s >= 0]
            found.append([(slot, slots.count(slot)) for slot in dict.fromkeys(slots)])
        return found


class FakeLaunch:
    def __init__(self, backend: FakeBackend, table: StepTable) -> None:
        self.backend, self.table = backend, table
        self.output: Output | None = None

    def run(self) -> Output:
        self.output = self.output or self.backend.execute(self.table)
        return self.output

    def wait(self) -> Output:
        assert self.backend.under_way[0] is self
        output = self.run()
        self.backend.under_way.remove(self)
        return output

    def abort(self) -> None:
        self.backend.under_way.clear()


class EvenTimes:
    """Step times that do not depend on the number of rows, so that speculation verifies every proposed token."""

    late_s = 0.0

    def growing(self, tokens: int, logit_rows: int, most: int) -> list[float]:
        return [1.0] * (most + 1)

    def record(self, program: Program, seconds: float) -> None:
        pass

    def record_late(self, seconds: float) -> None:
        pass


class Known:
    """A draft proposer that knows `texts`. It proposes the next tokens, or wrong ones where `wrong(position)` holds."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: Callable[[int], bool] = lambda place: False) -> None:
        self.texts, self.wrong, self.tokens = texts, wrong, list[int]()

    def read(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def propose(self, count: int) -> tuple[list[int], int]:
        n = len(self.tokens)
        text = next((text for text in self.texts if list(text[:n]) == self.tokens), [])
        return [token ^ 1 if self.wrong(n + i) else token for i, token in enumerate(text[n : n + count])], 2


class Guesses:
    """Creates draft proposers that know each sequence's future tokens, which a test announces with `tell`."""

    def __init__(self, wrong: Callable[[int], bool] = lambda place: False) -> None:
        self.wrong = wrong
        self.texts: dict[Any, Sequence[int]] = {}

    def tell(self, choice: Any, text: Sequence[int]) -> None:
        self.texts[choice] = text

    def __call__(self, choice: Any) -> Known:
        return Known([self.texts[choice]], self.wrong)


class Letters(TextStream):
    """A streaming detokenizer: token t is the character with code 64 + t, so that token 0 is `@`. Token 62 has no text
    of its own. Together with the next token, whichever that is, it becomes a single `é`."""

    def __init__(self) -> None:
        self.half = False

    def add(self, token: int) -> str:
        if self.half:
            self.half = False
            return "é"
        self.half = token == 62
        return "" if self.half else chr(ord("@") + token)

    def finish(self) -> str:
        return "\ufffd" if self.half else ""


def transcribe(engine: Engine, request: Request) -> Transcript:
    """Run the engine and return the text of a request's only choice, which a stop string in its text stops."""
    transcript = Transcript(request.params, Letters())
    shown = ""
    for step in engine.run():
        for token in single_tokens(step.tokens):
            shown += transcript.add(token)
            if transcript.finish_reason and not token.finish_reason:
                engine.stop(request, 0)
    assert shown == transcript.text
    return transcript


@cache
def _compile(**bucket: Any) -> Program:
    return compile_program(Spec(CONFIG, host(2), dtype=Dtype.F32, **bucket))


def speculation(depth: int, guesses: Callable[[Any], Any]) -> Any:
    """Return speculation that verifies up to `depth` proposed tokens per sequence in every step."""
    return Speculation(depth, EvenTimes(), guesses)


def fake_engine(
    reply: Callable[[int], int] | None = lambda position: position % 60,
    *,
    max_seqs: int = 4,
    max_context: int = 256,
    pages: int = 64,
    step_tokens: int = 16,
    prefix_cache: bool = True,
    speculate: tuple[int, Guesses] | None = None,
    queues: bool = False,
    **changes: Any,
) -> tuple[Engine, FakeBackend]:
    compile = partial(_compile, max_seqs=max_seqs, max_context=max_context, **changes)
    programs = Programs(compile, step_tokens, max(max_seqs, SCORED_ROWS))
    backend = FakeBackend(reply, queues=queues)
    engine = Engine(
        backend,
        programs,
        programs.get(1, 1).dims,
        pages=pages,
        eos_ids=frozenset([EOS]),
        prefix_cache=prefix_cache,
        speculation=speculation(*speculate) if speculate else None,
    )
    return engine, backend


def alone(request: Request, choice: int) -> tuple[list[int], str]:
    """Return the tokens that a choice must generate, and its finish reason."""
    params, seed = request.params, request.seed & 0xFFFFFFFF
    tokens, stop = list(request.prompt_ids), {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
    made: list[int] = []
    while True:
        token = continuation(digest(tokens), seed, choice)
        while len(made) < params.min_tokens and token in stop:
            token = (token + 1) % CONFIG.vocab
        tokens.append(token)
        made.append(token)
        if token in stop:
            return made, "stop"
        if len(made) == params.max_tokens or len(tokens) == 256:
            return made, "length"
