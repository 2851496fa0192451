"""Tests the work that a step needs, the hardware limits and the roofline fractions, for models of published sizes."""

from dataclasses import replace
from pathlib import Path

import pytest
from sizes import least_dims

from megakernel import machine
from megakernel.isa import Dtype
from megakernel.model import ModelConfig, load_config
from megakernel.model.families import forward
from megakernel.roofline import Ceilings, StepWork, bound, machine_ceilings, measure, step_work
from megakernel.roofline.ceilings import last_level_cache
from megakernel.roofline.work import fraction_error
from megakernel.scheduler import passes

LLAMA_1B, LLAMA_8B = load_config("random:llama-3.2-1b"), load_config("random:llama-3.1-8b")
PARAMETERS_1B, PARAMETERS_8B = 1_235_814_400, 8_030_261_248


def work_of(
    config: ModelConfig, rows: list[int], contexts: list[int], logit_rows: int, *, tied: bool = False
) -> StepWork:
    dims = least_dims(config, Dtype.BF16)
    return step_work(passes.apply(forward(config), dims.split), dims.split, rows, contexts, logit_rows, tied=tied)


def test_a_decode_step_reads_every_weight_once() -> None:
    work = work_of(LLAMA_1B, [1], [1], 1, tied=True)
    norms = (2 * 16 + 1) * 2048  # norms are float32, which takes two bytes more than bfloat16
    assert work.weight_bytes == 2 * PARAMETERS_1B + 2 * norms + 4 * 16 * 64  # and RoPE's 32 frequencies and factors
    assert work.kv_bytes == 2 * 16 * 8 * 64 * 2
    untied = work_of(LLAMA_1B, [1], [1], 1)
    assert untied.weight_bytes - work.weight_bytes == 2 * 2048  # it also reads one row of the embedding table


def test_floors_of_known_models() -> None:
    """The least times of a decode step agree with published ones, which for the 8B model assume reading 15.01 GB: all
    weights except the embedding table."""
    small, large = work_of(LLAMA_1B, [1], [1], 1, tied=True), work_of(LLAMA_8B, [1], [1], 1)
    for name, floors in (("h100", (738e-6, 4481e-6)), ("h200", (515e-6, 3127e-6))):
        ceilings = machine_ceilings(machine.load(name))
        assert (bound(small, ceilings), bound(large, ceilings)) == pytest.approx(floors, rel=2e-3)


def test_flops_follow_2nP_plus_4nSLHh() -> None:
    n, context = 7, 1000
    work = work_of(LLAMA_8B, [1] * n, [context] * n, n)
    norms, embedding = (2 * 32 + 1) * 4096, 128256 * 4096
    assert work.flops == 2 * n * (PARAMETERS_8B - norms - embedding) + 4 * n * context * 32 * 32 * 128
    assert work.kv_bytes == n * context * 2 * 32 * 8 * 128 * 2


def test_prefill_counts_the_causal_half_and_only_the_logit_rows() -> None:
    one = work_of(LLAMA_1B, [100], [100], 1)
    alone = [work_of(LLAMA_1B, [1], [c], 0).flops for c in range(1, 101)]
    assert one.flops == pytest.approx(sum(alone) + 2 * 128256 * 2048)
    none = work_of(LLAMA_1B, [100], [100], 0)
    assert one.weight_bytes - none.weight_bytes == 128256 * 2048 * 2 + 2048 * 4
    assert work_of(LLAMA_1B, [10], [110], 0).kv_bytes == 110 * 2 * 16 * 8 * 64 * 2


def test_layers_with_windows_count_what_their_rows_see() -> None:
    model = replace(LLAMA_1B, window=512, full_layers=(0, 4, 8, 12))
    per_token = 2 * 8 * 64 * 2  # of one layer
    assert work_of(model, [1], [8192], 0).kv_bytes == per_token * (4 * 8192 + 12 * 512)
    assert work_of(model, [10], [600], 0).kv_bytes == per_token * (4 * 600 + 12 * 521)
    alone = sum(work_of(model, [1], [c], 0).flops for c in range(301, 901))
    assert work_of(model, [600], [900], 0).flops == pytest.approx(alone)


def test_biases_count_where_the_model_has_them() -> None:
    plain = work_of(LLAMA_1B, [1], [1], 1)
    biased = work_of(replace(LLAMA_1B, qkv_bias=True, o_bias=True, mlp_bias=True), [1], [1], 1)
    assert biased.weight_bytes - plain.weight_bytes == 16 * 4 * ((2048 + 2 * 512) + 2048 + 2 * 8192 + 2048)


def test_impossible_steps_are_refused() -> None:
    for rows, message in (([4], "at least its number of new rows"), ([1, 1], "2 row counts but 1")):
        with pytest.raises(ValueError, match=message):
            work_of(LLAMA_1B, rows, [3], 0)


def test_the_largest_time_binds() -> None:
    ceilings = Ceilings(read_bytes_per_s=100.0, flops=1000.0, threads=2, how="made up")
    memory, math = StepWork(1000.0, 150.0, 50.0), StepWork(5000.0, 100.0, 0.0)
    link = replace(memory, link_bytes=30.0)
    assert [bound(work, ceilings) for work in (memory, math, link)] == [2.0, 5.0, 2.0]
    assert bound(link, replace(ceilings, link_bytes_per_s=10.0)) == 3.0


def test_measuring_takes_the_best_probe_over_more_than_the_cache() -> None:
    sizes = []
    reads, rates = iter([5.0, 9.0, 7.0, 20.0, 40.0, 30.0]), iter([3.0, 1.0, 2.0])
    integers = iter([5.0, 8.0, 6.0])

    def read(threads: int, size: int, seconds: float) -> float:
        assert threads == 3 and seconds > 0
        sizes.append(size)
        return next(reads)

    measured = measure(3, read, lambda threads, seconds: next(rates), lambda threads, seconds: next(integers))
    figures = (measured.read_bytes_per_s, measured.cache_bytes_per_s, measured.flops, measured.integer_ops)
    assert figures == (9.0, 40.0, 3.0, 8.0) and measured.threads == 3
    assert min(sizes[:3]) >= min(8 * last_level_cache(), 2 << 30) > last_level_cache() >= max(sizes[3:])


def test_cache_size_is_the_largest_that_linux_reports(tmp_path: Path) -> None:
    for name, size in (("index0", "48K"), ("index3", "36M"), ("index4", "what")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(size + "\n")
    assert last_level_cache(tmp_path) == 36 << 20
    (tmp_path / "index3" / "size").write_text("1G\n")
    assert last_level_cache(tmp_path) == 1 << 30
    assert last_level_cache(tmp_path / "absent") > 0


def test_only_a_fraction_above_one_is_impossible() -> None:
    ceilings = Ceilings(read_bytes_per_s=100.0, flops=1000.0, threads=2, how="made up")
    assert fraction_error(1.0, ceilings) is None
    said = "1.01 of the roofline is impossible: the ceilings (made up) or the time are wrong"
    assert fraction_error(1.01, ceilings) == said
