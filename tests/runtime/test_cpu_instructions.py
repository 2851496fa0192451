"""Each instruction of the CPU backend against NumPy, in every SIMD width and type, and which bits must not vary."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_support import DIMS, FORWARD, PAGES, Array, Item, RandomCheckpoint, fill, make_table, set_items
from program_parts import record

from megakernel.errors import MegakernelError
from megakernel.isa import BUFFERS, Buffer, Dims, Dtype, StepTable, from_f32, to_f32
from megakernel.model import families
from megakernel.model.families import Norm
from megakernel.runtime.cpu import CpuBackend, native

B = Buffer
P = FORWARD.by_name
WIDTHS = ("portable", "avx2", "avx512")


def make(monkeypatch: pytest.MonkeyPatch, simd: str, dims: Dims, **options: Any) -> CpuBackend:
    monkeypatch.setenv("MEGAKERNEL_SIMD", simd)
    try:
        native.simd()
    except MegakernelError as e:
        pytest.skip(str(e))
    return CpuBackend(RandomCheckpoint(dims, **options), dims, PAGES, dtype=Dtype(dims.dtype), threads=1)


@pytest.fixture(params=[(w, t) for w in WIDTHS for t in (Dtype.F32, Dtype.BF16)], ids=lambda p: f"{p[0]}-{p[1].name}")
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuBackend]:
    simd, dtype = request.param
    made = make(monkeypatch, simd, replace(DIMS, dtype=int(dtype)))
    fill(made)
    yield made
    made.close()


def value(backend: CpuBackend, buffer: Buffer, layer: int = 0) -> Array:
    return to_f32(backend.buffer(buffer, layer)).astype(np.float64)


def weight(backend: CpuBackend, buffer: Buffer, layer: int = 0) -> Array:
    return RandomCheckpoint(backend.dims).f32(buffer, layer).astype(np.float64)


def close(backend: CpuBackend, got: Array, expected: Array, rounded: bool = True) -> None:
    """`rounded`: stored in the compute type, so bfloat16 may be off by one unit in the last place."""
    bf16 = rounded and backend.dims.dtype == Dtype.BF16
    np.testing.assert_allclose(got, expected, rtol=2**-8 if bf16 else 2e-5, atol=1e-3 if bf16 else 2e-5)


def norm(x: Array, w: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + DIMS.rms_eps) * w


def test_embed(backend: CpuBackend) -> None:
    table = make_table(backend.dims, {0: (37, 20), 1: (390, 4)})
    table.token_ids[21] = -1 - 1
    backend.write_history(1, 391, np.array([77], np.int32))
    before = value(backend, B.X)
    for name in ("embed", "rope"):
        backend.execute(record(P[name], 3, 19), 0, table, FORWARD)
    ids = table.token_ids[3:22].copy()
    ids[-1] = 77
    expected = before
    expected[3:22] = weight(backend, B.EMBED)[ids]
    np.testing.assert_array_equal(value(backend, B.X), expected)
    angle = table.positions[3:22, None] * RandomCheckpoint(DIMS).f32(B.INV_FREQ)
    rope = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(19, -1)
    np.testing.assert_allclose(value(backend, B.ROPE)[3:22], rope, atol=5e-5)


def test_norms(backend: CpuBackend) -> None:
    table = make_table(backend.dims, {0: (0, 40)})
    x = value(backend, B.X)
    for name, buffer in (("attn_norm", B.ATTN_NORM), ("mlp_norm", B.MLP_NORM)):
        before = value(backend, B.H)
        backend.execute(record(P[name], 5, 30), 1, table, FORWARD)
        before[5:35] = norm(x, weight(backend, buffer, 1))[5:35]
        close(backend, value(backend, B.H), before)
    table.logit_rows[:] = [7, -1, 39, 0, -1]
    backend.execute(record(P["final_norm"], 0, 5), 0, table, FORWARD)
    expected = norm(x, weight(backend, B.FINAL_NORM))[[7, 7, 39, 0, 0]]
    expected[[1, 4]] = 0
    close(backend, value(backend, B.Y), expected)


# A register block, several, and more than a tile holds; a depth of several chunks that ends in part of a vector.
@pytest.mark.parametrize("rows", [1, 2, 7, 13, 40, 120])
@pytest.mark.parametrize("dtype", [Dtype.F32, Dtype.BF16], ids=lambda t: t.name)
@pytest.mark.parametrize("simd", WIDTHS)
def test_a_norm_on_the_way_in_has_the_bits_of_its_own_phase(
    monkeypatch: pytest.MonkeyPatch, simd: str, dtype: Dtype, rows: int
) -> None:
    """Of rows inside the batch: a row's scale is its own."""
    dims = replace(DIMS, hidden=301, tokens=125, max_seqs=1, dtype=int(dtype))
    backend = make(monkeypatch, simd, dims)
    fill(backend)
    table = make_table(dims, {0: (0, 125)})
    backend.buffer(B.X)[:] *= np.linspace(0.1, 30, 125, dtype=np.float32)[:, None]
    inside = families.forward(RandomCheckpoint(dims).config, dims, Norm.INSIDE)
    for scale, name, stored, cols in (
        ("attn_norm", "qkv_rope", (B.Q, B.K_CACHE, B.V_CACHE), 240),
        ("mlp_norm", "gate_up_silu", (B.ACT,), 104),
    ):
        found = []
        for forward in (FORWARD, inside):
            for buffer in stored:
                backend.buffer(buffer, 1 if BUFFERS[buffer].layered else 0)[:] = 0
            if forward is FORWARD:
                backend.execute(record(P[scale], 5, rows), 1, table, FORWARD)
            else:
                backend.buffer(B.H)[:] = 0x7FC1 if dtype is Dtype.BF16 else np.nan  # is not read
            for col in range(0, cols, 88):
                tile = record(forward.by_name[name], 5, rows, col, min(88, cols - col))
                backend.execute(tile, 1, table, forward)
            found.append([backend.buffer(b, 1 if BUFFERS[b].layered else 0).copy() for b in stored])
        for own, together in zip(*found, strict=True):
            assert own.any()
            np.testing.assert_array_equal(own, together, err_msg=name)
    backend.close()


@pytest.mark.parametrize("table", ["", "Operation", "Result"])
def test_what_has_no_code_does_not_build(tmp_path: Path, table: str) -> None:
    """With the build's own flags; without a change they suffice."""
    root = Path(__file__).parents[2]
    shutil.copytree(root / "csrc", tmp_path / "csrc")
    isa = tmp_path / "csrc" / "common" / "isa.h"
    isa.write_text(re.sub(rf"enum class {table or 'None'} : int32_t {{", r"\g<0> kMissing = 99,", isa.read_text()))
    found = re.search(r"^FLAGS = (\[.*\])$", (root / "setup.py").read_text(), re.MULTILINE)
    compiler = shutil.which("c++") or shutil.which("g++")
    assert found and compiler
    options = [*ast.literal_eval(found[1]), "-fsyntax-only", "-DMK_SIMD=portable", "-DMK_LANES=4"]
    source = tmp_path / "csrc" / "cpu" / "kernels.cpp"
    done = subprocess.run([compiler, *options, str(source)], capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) is (not table)
    assert ("kMissing" in done.stderr) is bool(table), done.stderr


def test_nan_stays_nan(backend: CpuBackend) -> None:
    """Whatever its payload: rounding all ones up to bfloat16 must not wrap to zero."""
    backend.buffer(B.X).view(np.uint32)[3] = 0x7FFFFFFF
    backend.execute(record(P["attn_norm"], 3, 1), 0, make_table(backend.dims, {0: (0, 40)}), FORWARD)
    assert np.isnan(value(backend, B.H)[3]).all()


# Row counts on both sides of every register block and of the tile; columns across heads and to the ragged end.
@pytest.mark.parametrize("rows", [1, 2, 5, 13, 40])
def test_qkv_rope(backend: CpuBackend, rows: int) -> None:
    d = backend.dims
    live = min(rows, 37)
    table = make_table(backend.dims, {0: (30, 1), 2: (100, 39)} if rows > 1 else {2: (100, 40)})
    table.row_seq[live:] = -1
    h, rope = value(backend, B.H)[:rows], value(backend, B.ROPE)[:rows]
    t = h @ weight(backend, B.W_QKV, 1).T + weight(backend, B.B_QKV, 1)
    heads = t[:, : d.q_cols + d.kv_cols].reshape(rows, -1, d.head_dim)
    cos, sin = rope[:, None, 0::2], rope[:, None, 1::2]
    a, b = heads[..., 0::2].copy(), heads[..., 1::2].copy()
    heads[..., 0::2], heads[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    q, k, v = np.split(t, [d.q_cols, d.q_cols + d.kv_cols], axis=1)
    for col, end in ((16, 160), (160, 240)):
        backend.execute(record(P["qkv_rope"], 0, rows, col, end - col), 1, table, FORWARD)
    close(backend, value(backend, B.Q)[:rows, 16:], q[:, 16:])
    k_cache, v_cache = value(backend, B.K_CACHE, 1), value(backend, B.V_CACHE, 1)
    for r in range(live):
        page = table.block_tables[table.row_seq[r], table.positions[r] // d.kv_page]
        offset = table.positions[r] % d.kv_page
        close(backend, k_cache[page, :, :, offset].ravel(), k[r])
        close(backend, v_cache[page, :, offset].ravel(), v[r])


def test_padding_rows_store_no_keys(backend: CpuBackend) -> None:
    table = make_table(backend.dims, {})
    before = [backend.buffer(b, 0).copy() for b in (B.K_CACHE, B.V_CACHE)]
    backend.execute(record(P["qkv_rope"], 0, 40, 0, 240), 0, table, FORWARD)
    for b, old in zip((B.K_CACHE, B.V_CACHE), before, strict=True):
        np.testing.assert_array_equal(backend.buffer(b, 0), old)


@pytest.mark.parametrize("rows", [1, 3, 7, 26, 40])
def test_matmuls(backend: CpuBackend, rows: int) -> None:
    table = make_table(backend.dims, {0: (0, 40)})
    for name, source, w, bias in (("o_proj", B.ATTN, B.W_O, B.B_O), ("down_proj", B.ACT, B.W_DOWN, B.B_DOWN)):
        x = value(backend, B.X)
        backend.execute(record(P[name], 0, rows, 16, 56), 1, table, FORWARD)
        t = value(backend, source) @ weight(backend, w, 1).T + weight(backend, bias, 1)
        x[:rows, 16:72] += t[:rows, 16:72]
        close(backend, value(backend, B.X), x, rounded=False)

    backend.execute(record(P["gate_up_silu"], 0, rows, 32, 72), 0, table, FORWARD)
    w, bias = weight(backend, B.W_GATE_UP), weight(backend, B.B_GATE_UP)
    gate, up = (value(backend, B.H)[:rows] @ w[i].T + bias[i] for i in (0, 1))
    close(backend, value(backend, B.ACT)[:rows, 32:104], (gate / (1 + np.exp(-gate)) * up)[:, 32:])

    n = min(rows, 5)
    backend.execute(record(P["lm_head"], 0, n, 48, 155), 0, table, FORWARD)
    logits = value(backend, B.Y)[:n] @ weight(backend, B.LM_HEAD).T
    close(backend, value(backend, B.LOGITS)[:n, 48:], logits[:, 48:], rounded=False)


@pytest.mark.parametrize("k", [71, 256, 300, 513])
def test_matmul_depths(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Odd depths, and depths around the chunk in which accumulators are revisited; more rows than a tile holds."""
    dims = replace(DIMS, ffn=k, tokens=120, dtype=int(Dtype.BF16))
    backend = make(monkeypatch, "", dims)
    fill(backend)
    table = make_table(dims, {0: (0, 120)})
    x = value(backend, B.X)
    backend.execute(record(P["down_proj"], 0, 120, 0, 72), 0, table, FORWARD)
    t = value(backend, B.ACT) @ weight(backend, B.W_DOWN).T + weight(backend, B.B_DOWN)
    close(backend, value(backend, B.X), x + t, rounded=False)
    backend.close()


def attention_expected(backend: CpuBackend, table: StepTable, row: int) -> Array:
    """ATTN of one row, [heads, head_dim], in float64."""
    d = backend.dims
    n = int(table.positions[row]) + 1
    token = np.arange(n)
    page = table.block_tables[table.row_seq[row], token // d.kv_page]
    q = value(backend, B.Q)[row].reshape(d.heads, d.head_dim)
    k = value(backend, B.K_CACHE, 1)[page, :, :, token % d.kv_page]  # [tokens, KV heads, elements]
    v = value(backend, B.V_CACHE, 1)[page, :, token % d.kv_page]
    out = np.empty((d.heads, d.head_dim))
    for h in range(d.heads):
        s = k[:, h // d.group_size] @ q[h] / np.sqrt(d.head_dim)
        p = np.exp(s - s.max())
        out[h] = p @ v[:, h // d.group_size] / p.sum()
    return out.ravel()


def poison_beyond(backend: CpuBackend, table: StepTable) -> None:
    """NaN in every cache slot that holds no token of the step's sequences."""
    d = backend.dims
    keep = np.zeros((PAGES, d.kv_page), bool)
    for row in np.flatnonzero(table.row_seq >= 0):
        token = np.arange(table.positions[row] + 1)
        keep[table.block_tables[table.row_seq[row], token // d.kv_page], token % d.kv_page] = True
    nan = from_f32(np.full(1, np.nan, np.float32), Dtype(d.dtype))[0]
    backend.buffer(B.K_CACHE, 1).transpose(0, 3, 1, 2)[~keep] = nan
    backend.buffer(B.V_CACHE, 1).transpose(0, 2, 1, 3)[~keep] = nan


def test_attention(backend: CpuBackend) -> None:
    # Prefill across a KV block border, one decode row deep in a sequence, the first token of another, padding.
    table = make_table(backend.dims, {0: (110, 32), 1: (389, 1), 2: (0, 1)})
    items = [
        Item(0, 0, 32, 0, 2),
        Item(1, 32, 1, 0, 1),
        Item(1, 32, 1, 1, 1),
        Item(1, 33, 1, 0, 2),
        Item(3, 34, 6, 0, 2),
    ]
    set_items(table, items)
    poison_beyond(backend, table)
    for slot in range(4):
        backend.execute(record(P["attention"], slot, 1, 2), 1, table, FORWARD)
    got = value(backend, B.ATTN)
    for row in range(34):
        close(backend, got[row], attention_expected(backend, table, row))
    assert not got[34:].any()


def test_attention_bits_do_not_depend_on_the_split(backend: CpuBackend) -> None:
    table = make_table(backend.dims, {0: (290, 5), 1: (120, 9)})
    whole = [Item(0, 0, 5, 0, 2), Item(0, 5, 9, 0, 2)]
    cut = [Item(0, 0, 5, 0, 1, (2, 3), 1, 2, 7), Item(1, 0, 5, 0, 1, (0, 2), 1, 2, 7), Item(2, 0, 2, 1, 1)]
    cut += [Item(2, 2, 3, 1, 1), Item(3, 5, 1, 0, 2), Item(3, 6, 8, 0, 1), Item(3, 6, 8, 1, 1)]
    found = []
    for items in (whole, cut):
        set_items(table, items)
        poison_beyond(backend, table)
        backend.buffer(B.ATTN)[:] = 0
        for slot in range(4):
            backend.execute(record(P["attention"], slot, 1, 2), 1, table, FORWARD)
        found.append(backend.buffer(B.ATTN)[:14].copy())
    np.testing.assert_array_equal(*found)
    close(backend, to_f32(found[0][0]), attention_expected(backend, table, 0))
    assert not backend.buffer(B.SPLITS).any()


def test_bits_do_not_depend_on_rows_or_tiles(backend: CpuBackend) -> None:
    table = make_table(backend.dims, {0: (0, 40)})
    cases = (
        ("qkv_rope", B.Q, 240, 144),
        ("gate_up_silu", B.ACT, 104, 104),
        ("o_proj", B.X, 72, 72),
        ("down_proj", B.X, 72, 72),
    )
    for name, out, cols, kept in cases:
        start = backend.buffer(out).copy()
        backend.execute(record(P[name], 0, 40, 0, cols), 0, table, FORWARD)
        together = backend.buffer(out)[:, :kept].copy()
        backend.buffer(out)[:] = start
        for row, rows in ((0, 1), (1, 2), (3, 6), (9, 1), (10, 30)):
            for col in range(0, cols, 44):  # not where panels of packed weights begin
                backend.execute(record(P[name], row, rows, col, min(44, cols - col)), 0, table, FORWARD)
        np.testing.assert_array_equal(backend.buffer(out)[:, :kept], together, err_msg=name)


def philox_uniform(key: tuple[int, int], counter: tuple[int, int]) -> float:
    """First word of Philox4x32-10 as 24-bit uniform; written from the paper's figure, word by word."""
    c, k = [*counter, 0, 0], list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (c[0] >> 8) / 2**24


def sampled(backend: CpuBackend, logits: Array, **fields: Any) -> tuple[int, float]:
    """One row of `logits` sampled with step-table fields."""
    table = make_table(backend.dims, {0: (0, 1)})
    backend.buffer(B.LOGITS)[2] = logits
    table.logit_rows[2] = 0
    for name, v in fields.items():
        if name == "bias":
            table.bias_begin[2], table.bias_end[2] = 1, 1 + len(v)
            table.bias_ids[1 : 1 + len(v)], table.bias_values[1 : 1 + len(v)] = list(v), list(v.values())
        else:
            getattr(table, name)[2] = v
    backend.execute(record(P["sample"], 1, 3), 0, table, FORWARD)
    assert (backend.buffer(B.TOKENS_OUT)[[1, 3]] == 0).all() and (backend.buffer(B.LOGPROBS_OUT)[[1, 3]] == 0).all()
    return int(backend.buffer(B.TOKENS_OUT)[2]), float(backend.buffer(B.LOGPROBS_OUT)[2])


def test_greedy_sampling(backend: CpuBackend) -> None:
    z = np.random.default_rng(5).standard_normal(DIMS.vocab).astype(np.float32)
    z[[31, 190]] = 4.0
    lse = np.log(np.exp(z.astype(np.float64)).sum())
    token, logprob = sampled(backend, z)
    assert token == 31 and abs(logprob - (4.0 - lse)) < 1e-5
    assert sampled(backend, z, bias={31: -1.0})[0] == 190
    assert sampled(backend, z, bias={31: -np.inf, 190: -np.inf, 202: 30.0})[0] == 202
    token, logprob = sampled(backend, z, target=8)
    assert token == 8 and abs(logprob - (z[8] - lse)) < 1e-5

    backend.write_history(1, 0, np.array([31, 31, 190, 5], np.int32))
    history = {"sample_slot": 1, "sample_position": 4}
    assert sampled(backend, z, **history, prompt_length=2, presence_penalty=0.5)[0] == 31  # 31 only in the prompt
    assert sampled(backend, z, **history, prompt_length=1, frequency_penalty=0.5)[0] == 31  # once each, tie by id
    assert sampled(backend, z, **history, prompt_length=0, frequency_penalty=0.5)[0] == 190  # 31 twice
    assert backend.buffer(B.HISTORY)[1, 4] == 190
    negative = np.where(z == 4.0, 4.0, -20.0).astype(np.float32)
    negative[5] = 3.0
    assert sampled(backend, negative, **history, repetition_penalty=2.0)[0] == 31  # 2.0, 2.0, 1.5
    assert sampled(backend, np.full(DIMS.vocab, -1.0, np.float32), **history, repetition_penalty=2.0)[0] == 0
    assert 0 <= sampled(backend, np.full(DIMS.vocab, np.nan, np.float32))[0] < DIMS.vocab
    assert 0 <= sampled(backend, np.full(DIMS.vocab, np.nan, np.float32), temperature=1.0)[0] < DIMS.vocab
    assert 0 <= sampled(backend, np.full(DIMS.vocab, -np.inf, np.float32), temperature=1.0)[0] < DIMS.vocab


@pytest.mark.parametrize(
    "cut",
    [{}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.8, "min_p": 0.01}, {"top_p": 1e-6}],
    ids=str,
)
def test_random_sampling(backend: CpuBackend, cut: dict[str, float]) -> None:
    z = np.random.default_rng(6).standard_normal(DIMS.vocab).astype(np.float32) * 2
    z[40:50] = z[60]  # ties at every cut
    temperature = 0.7
    p = np.exp((z - z.max()).astype(np.float64) / temperature)
    order = np.argsort(-p, kind="stable")
    order = order[p[order] >= cut.get("min_p", 0)]
    order = order[: cut.get("top_k", DIMS.vocab)]
    share = np.cumsum(p[order]) / p[order].sum()
    order = order[: int(np.searchsorted(share, cut.get("top_p", 1.0))) + 1]
    ids = np.sort(order)
    cdf = np.cumsum(p[ids]) / p[ids].sum()
    tokens = set()
    for draw in range(40):
        seed = draw * 0x9E3779B97F4A7C15 % 2**64
        low, high = seed & 0xFFFFFFFF, seed >> 32
        u = philox_uniform((low, high), (draw, 3))
        expected = int(ids[np.searchsorted(cdf, u, side="right")])
        words = np.array([low, high], np.uint32).view(np.int32)
        token, _ = sampled(
            backend,
            z,
            temperature=temperature,
            seed_low=words[0],
            seed_high=words[1],
            choice=3,
            sample_position=draw,
            **cut,
        )
        if np.abs(cdf - u).min() > 1e-5:  # not decided by the last bits of a probability
            assert token == expected
        tokens.add(token)
    assert tokens <= set(ids.tolist())


def test_philox_known_answer() -> None:
    """Random123's vector for counter 0, key 0 starts with 6627e8d5."""
    assert philox_uniform((0, 0), (0, 0)) == (0x6627E8D5 >> 8) / 2**24


def test_tied_embedding_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make(monkeypatch, "", DIMS, tied=True)
    fill(backend)
    backend.execute(record(P["lm_head"], 0, 5, 0, 203), 0, make_table(backend.dims, {0: (0, 40)}), FORWARD)
    close(backend, value(backend, B.LOGITS), value(backend, B.Y) @ weight(backend, B.EMBED).T, rounded=False)
    backend.close()


def test_unknown_simd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAKERNEL_SIMD", "sse9")
    with pytest.raises(MegakernelError, match="portable, avx2 or avx512"):
        native.simd()
