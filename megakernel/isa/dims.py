"""The sizes that a program is compiled for. Declared once: the C++ struct is generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Dims:
    """Sizes of one rank's share of a step. All are counts unless a unit is given.

    The first block comes from the model, the second from the numerics class and the machine, the third from
    the bucket and the engine's limits. `rms_eps` is the only float.
    """

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_bias: int  # 1: B_QKV and B_O are added
    mlp_bias: int  # 1: B_GATE_UP and B_DOWN are added
    rms_eps: float

    dtype: int  # Dtype of weights, activations and KV cache; accumulation and residual are float32
    kv_block: int  # KV tokens that share one softmax partial (m, l, o); fixed by the numerics class
    page: int  # KV tokens in a page; divides kv_block
    row_block: int  # token rows behind one row-block counter

    tokens: int  # token rows of the bucket
    logit_rows: int  # rows that get logits
    max_seqs: int  # sequences with a block table, and request slots with a history
    max_context: int  # tokens a sequence may reach
    items: int  # attention work items
    attention_slots: int  # attention instructions per layer
    partials: int  # split-attention partials, one per (split item, query row, kv block)
    bias_entries: int  # logit-bias pairs, all rows together

    @property
    def row_blocks(self) -> int:
        return -(-self.tokens // self.row_block)

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_context // self.page)

    @property
    def q_cols(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_cols(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_cols(self) -> int:
        return self.q_cols + 2 * self.kv_cols

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


DIM_FIELDS: tuple[tuple[str, type], ...] = tuple((f.name, float if f.name == "rms_eps" else int) for f in fields(Dims))

# KV tokens per softmax partial, in every program: attention's bits depend on it, so it is no option.
KV_BLOCK = 128
