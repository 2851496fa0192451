"""Tests the compiler passes that decide where norms are computed, and how ranks share the work."""

from dataclasses import replace

import pytest
from compiled import LLAMA_70B as LLAMA
from compiled import SMALL, compiled, small_machine
from sizes import least_dims

from megakernel.isa import Buffer, Dtype, Operation, Result, Rows
from megakernel.model.families import forward
from megakernel.scheduler import Options, passes
from megakernel.scheduler.verify import verify

DIMS = least_dims(LLAMA, Dtype.BF16)


def test_where_the_norms_are_computed_changes_who_computes_them_and_nothing_else() -> None:
    own, inside = (passes.apply(forward(LLAMA), DIMS.split, norm) for norm in ("own", "inside"))
    scales = [p.weights for p in own.body if p.operation is Operation.NORM]
    assert scales == [Buffer.ATTN_NORM, Buffer.MLP_NORM] == [p.norm for p in inside.body if p.norm is not None]
    kept = [p for p in own.body if p.operation is not Operation.NORM]
    apart = [replace(p, norm=None, inputs=q.inputs, number=q.number) for p, q in zip(inside.body, kept, strict=True)]
    assert apart == kept


def test_the_first_norm_of_the_next_layer_ends_a_layer() -> None:
    own, ahead = (passes.apply(forward(LLAMA), DIMS.split, norm) for norm in ("own", "next"))
    first, last = ahead.prologue[-1], ahead.body[-1]
    assert [p.weights for p in (first, last)] == [Buffer.ATTN_NORM] * 2 and (first.ahead, last.ahead) == (0, 1)
    assert [p.name for p in (own.body[0], first, last)] == ["attn_norm", "first_norm", "next_norm"]
    assert [p.name for p in ahead.body[:-1]] == [p.name for p in own.body[1:]]


def test_ranks_add_partial_sums_unless_each_has_all_the_weights() -> None:
    biased = replace(LLAMA, o_bias=True)
    dims = DIMS.changed(tp=2)
    shared, whole = (passes.apply(forward(biased), dims.changed(replicated_o=o).split) for o in (0, 1))
    names = ["o_partial", "o_reduce", "mlp_norm", "gate_up_silu", "down_partial", "down_reduce"]
    assert [p.name for p in shared.body[3:]] == names
    assert [p.name for p in whole.body[3:]] == ["o_proj", *names[2:]]
    partial, total = shared.body[3:5]
    assert (partial.result, partial.bias, total.operation) == (Result.PARTIAL, None, Operation.REDUCE)
    assert total.bias is Buffer.B_O and total.output is Buffer.X is whole.body[3].output


def test_a_norm_of_what_a_layer_adds_follows_the_sum_of_the_ranks() -> None:
    model = replace(LLAMA, family="glm4", post_norms=True)
    one, two = (passes.apply(forward(model), DIMS.changed(tp=tp, post_norms=1).split) for tp in (1, 2))
    assert [p.name for p in one.body[3:6]] == ["o_proj", "post_attn_norm", "mlp_norm"]
    partial, total, norm = two.body[3:6]
    assert (partial.result, total.result, norm.result) == (Result.PARTIAL, Result.STORED, Result.RESIDUAL)
    assert total.output is norm.inputs is Buffer.SUBLAYER and norm.output is Buffer.X
    inside = passes.apply(forward(model), DIMS.split, "inside")
    assert [p.weights for p in inside.body if p.operation is Operation.NORM] == [
        Buffer.POST_ATTN_NORM,
        Buffer.POST_MLP_NORM,
    ]


@pytest.mark.parametrize(("norm", "tp"), [("own", 1), ("inside", 2), ("next", 2), ("next", 8), ("inside", 8)])
def test_norms_over_all_heads(norm: str, tp: int) -> None:
    """Every rank computes q, k and v of all heads, and a residual that no norm follows is rounded by an instruction of
    its own. Programs are proved, also for ranks without heads."""
    config = replace(SMALL, family="olmo2", post_norms=True, whole_norms=True)
    residual = "replicated" if norm == "inside" else "dealt"
    program = compiled(config, small_machine(3), tokens=9, tp=tp, options=Options(norm=norm, residual=residual))
    assert verify(program).ok
    named = program.forward.by_name
    raw, heads = named["qkv"], named["qk_norm_rope"]
    assert (raw.rows, raw.result, heads.result) == (Rows.EVERY, Result.STORED, Result.HEADS)
    assert {p.weights for p in program.forward.body if p.operation is Operation.NORM and p.result is Result.NONE} == {
        None
    }
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    assert [raw.width(d.split) for d in program.dims.ranks] == [
        width if d.split.rank_heads else 0 for d in program.dims.ranks
    ]
