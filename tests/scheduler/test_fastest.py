"""In simulation, the compiler's default options are at most 2 % slower than any options that differ in one or two
choices."""

from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest

from megakernel import machine as machines
from megakernel.isa import Dtype
from megakernel.machine import Machine
from megakernel.model import load_config
from megakernel.scheduler import Options, Spec
from megakernel.scheduler.options import CHOICES
from megakernel.scheduler.tune import Fastest
from megakernel.scheduler.tune.fastest import Predictions

_CLOSE = 1.02


def fastest(model: str, machine: Machine, tp: int, rows: int, **more: bool) -> Fastest:
    config = load_config(f"random:{model}")
    return Fastest(Spec(config, machine, Dtype.BF16, rows, 1, max_seqs=rows, max_context=128, tp=tp), **more)


def variants(chosen: Options, tp: int, rows: int) -> list[Options]:
    """Return the options that differ from `chosen` in one or two choices, including those that cannot be compiled."""
    names = ["queue", "norm", *(["o", "residual"] if tp > 1 else []), *(["matmul"] if rows <= 16 else [])]
    values: dict[str, list[Any]] = {name: [value for value in CHOICES[name] if value != "auto"] for name in names}
    values |= {"interleave": [True, False]} if rows > 128 else {}
    every = [replace(chosen, **dict(zip(values, each, strict=True))) for each in product(*values.values())]
    return [one for one in every if sum(getattr(one, name) != getattr(chosen, name) for name in values) <= 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "machine", "tp", "rows"),
    [("llama-3.2-1b", "h100", 1, 1), ("llama-3.2-1b", "h200", 2, 16), ("llama-3.1-8b", "h200", 1, 256)],
)
def test_the_default_is_close_to_the_fastest_variant(model: str, machine: str, tp: int, rows: int) -> None:
    choose, known = fastest(model, machines.load(machine), tp, rows), Predictions()
    default = choose.options(rows)
    chosen = choose.seconds(default, rows, known)
    best = min(choose.seconds(options, rows, known) for options in variants(default, tp, rows))
    assert chosen < inf
    assert chosen <= _CLOSE * best


def test_all_buckets_of_an_engine_share_the_lowering_of_o(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for all batch sizes (buckets) must give a row the same bits. So all of them divide the O projection, or
    all replicate it, even if the other choice is faster for some sizes."""
    monkeypatch.setattr(Fastest, "seconds", lambda _, options, rows, *_s: (options.o == "replicated") != (rows > 16))
    machine = machines.load("h100")
    choose = fastest("smollm2-135m", machine, 4, 64, one_class=True)
    assert len({choose(tokens=rows, logit_rows=1).dims.split.replicated_o for rows in (1, 16, 64)}) == 1
    alone = [fastest("smollm2-135m", machine, 4, rows)(tokens=rows, logit_rows=1) for rows in (16, 64)]
    assert len({program.dims.split.replicated_o for program in alone}) == 2


@pytest.mark.parametrize(("seconds", "panel"), [(1.004, 8), (1.006, 16)])
def test_a_larger_panel_may_cost_a_little_time(monkeypatch: pytest.MonkeyPatch, seconds: float, panel: int) -> None:
    times = {0: 1.0, 8: seconds, 16: 1.001, 32: 1.0}
    monkeypatch.setattr(Fastest, "seconds", lambda _self, options, *_: times[options.panel])
    assert fastest("smollm2-135m", machines.load("h100"), 1, 8192).options(8192).panel == panel


def test_a_search_compiles_what_a_single_compilation_does() -> None:
    """Programs of a search share results of compiler stages. Each is nevertheless the program that its options give."""
    rows, machine = 96, machines.load("h100", 8)
    choose = fastest("smollm2-135m", machine, 2, rows)
    for norm, residual, queue in product(("own", "next"), ("dealt", "replicated"), ("none", "attention", "body")):
        options = Options(norm=norm, residual=residual, queue=queue)
        alone = fastest("smollm2-135m", machine, 2, rows)
        found = [each.compile(options, rows, rows).hash for each in (choose, alone)]
        assert found[0] == found[1], options


def test_a_search_simulates_again_only_what_a_higher_limit_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes at least 2 s takes at least 1 s too, but may take less than 2.5 s."""
    limits = []

    def predicted(_program: object, _machine: object, most_s: float) -> float:
        limits.append(most_s)
        return 3.0 if most_s > 3 else inf

    monkeypatch.setattr("megakernel.scheduler.tune.fastest.predicted_seconds", predicted)
    choose, known = fastest("smollm2-135m", machines.load("h100", 8), 1, 4), Predictions()
    found = [choose.seconds(Options(), 4, known, most_s) for most_s in (2.0, 1.0, 2.0, 2.5, 4.0, inf, 1.0)]
    assert found == [inf, inf, inf, inf, 3.0, 3.0, 3.0]
    assert limits == [2.0, 2.5, 4.0]


def test_what_is_said_is_done_and_a_cpu_claims_nothing() -> None:
    machine = machines.load("h100", 16)
    said = Options(queue="attention", norm="own")
    config = load_config("random:llama-3.2-1b")
    assert Fastest(Spec(config, machine, Dtype.BF16, 1, 1, 1, 128, options=said)).options(1) == said
    assert fastest("llama-3.2-1b", machines.host(2), 1, 4)(tokens=4, logit_rows=1).rank_queues == 0
