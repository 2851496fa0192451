"""An engine on a backend without a model, that checks what it is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megakernel.isa import Dtype, StepTable
from megakernel.machine import host
from megakernel.model.config import LlamaConfig
from megakernel.program import Program
from megakernel.runtime.backend import Output
from megakernel.runtime.step import check_step
from megakernel.scheduler import compile_program
from megakernel.serving.engine import SCORED_ROWS, Engine
from megakernel.serving.programs import Programs

CONFIG = LlamaConfig(vocab=64, hidden=16, ffn=24, layers=1, heads=2, kv_heads=1, head_dim=8, max_context=256)
EOS = 63


class FakeBackend:
    """Row after position p of a sequence gets token `reply(p)`, unless a bias forbids it: then the next id.

    Every table must be valid, and every position of a sequence computed once, in order, in pages of its own.
    """

    name = "fake"

    def __init__(self, reply: Callable[[int], int]) -> None:
        self.reply = reply
        self.history: dict[int, dict[int, int]] = {}
        self.length: dict[int, int] = {}  # tokens with K and V, by slot
        self.tables: list[StepTable] = []
        self.interrupt = False

    def write_history(self, slot: int, start: int, tokens: NDArray[np.int32]) -> None:
        assert start == 0
        self.history[slot] = dict(enumerate(tokens.tolist()))
        self.length[slot] = 0

    def launch(self, program: Program, table: StepTable, *, trace: bool = False) -> Output:
        if self.interrupt:
            raise KeyboardInterrupt
        check_step(table)
        d = program.dims
        self.tables.append(table)
        owner: dict[int, int] = {}
        for row in range(d.tokens):
            slot, position = int(table.row_seq[row]), int(table.positions[row])
            if slot < 0:
                continue
            token = int(table.token_ids[row])
            known = self.history[slot][position]
            assert token in (known, -1 - slot)
            assert position == self.length[slot]
            self.length[slot] += 1
            page = int(table.block_tables[slot, position // d.page])
            assert owner.setdefault(page, slot) == slot
        logits = np.zeros((d.logit_rows, d.vocab), np.float32)
        tokens = np.zeros(d.logit_rows, np.int32)
        logprobs = np.zeros(d.logit_rows, np.float32)
        for i in range(d.logit_rows):
            row = int(table.logit_rows[i])
            if row < 0:
                continue
            position = int(table.sample_position[i])
            begin, end = int(table.bias_begin[i]), int(table.bias_end[i])
            bias = dict(zip(table.bias_ids[begin:end].tolist(), table.bias_values[begin:end].tolist(), strict=True))
            token = int(table.target[i])
            if token < 0:
                token = self.reply(position - 1)
                while bias.get(token) == -np.inf:
                    token = (token + 1) % d.vocab
            logits[i] = np.arange(d.vocab) == token
            tokens[i], logprobs[i] = token, -position
            if table.sample_slot[i] >= 0:
                self.history[int(table.sample_slot[i])][position] = token
        return Output(tokens, logprobs, logits, 0.0, None)

    def close(self) -> None:
        pass

    def steps(self) -> list[list[tuple[int, int]]]:
        """(slot, tokens) of each sequence in each step, in row order."""
        found = []
        for table in self.tables:
            slots = [int(s) for s in table.row_seq if s >= 0]
            found.append([(slot, slots.count(slot)) for slot in dict.fromkeys(slots)])
        return found


class Letters:
    """A tokenizer's stream: token t is one character, from `@` on; `~` is half of a two-token `é`."""

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


def fake_engine(
    reply: Callable[[int], int] = lambda position: position % 60,
    *,
    max_seqs: int = 4,
    max_context: int = 256,
    pages: int = 64,
    step_tokens: int = 16,
    text: bool = True,
    **changes: Any,
) -> tuple[Engine, FakeBackend]:
    compile = partial(
        compile_program, CONFIG, host(2), dtype=Dtype.F32, max_seqs=max_seqs, max_context=max_context, **changes
    )
    programs = Programs(compile, step_tokens, max(max_seqs, SCORED_ROWS))
    backend = FakeBackend(reply)
    engine = Engine(
        backend,
        programs,
        programs.get(1, 1).dims,
        pages=pages,
        step_tokens=step_tokens,
        eos_ids=frozenset([EOS]),
        decoder=Letters if text else None,
    )
    return engine, backend
