"""The sizes of a model that the planner needs. The model may have experts, but only dense models can be compiled and
run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..machine import OPERAND_BYTES
from ..model.config import ModelConfig


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, as counts. If the model has experts, `ffn` is the width of one expert's MLP.

    `kv_width` is the number of values that the KV cache keeps per token and layer. `router_nodes` is the maximum number
    of nodes on which the experts of one token may lie (0: no limit). `weight_bytes` is the number of bytes per weight
    during decoding.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    head_dim: int
    kv_heads: int
    kv_width: int
    parameters: float  # all of them
    embedding_parameters: float  # parameters that are looked up, not multiplied
    experts: int = 1
    active: int = 1  # number of experts that process a token
    expert_parameters: float = 0.0  # parameters of all routed experts together; included in `parameters`
    router_nodes: int = 0
    weight_bytes: float = OPERAND_BYTES["bf16"]

    @property
    def dense_parameters(self) -> float:
        """The parameters that every token uses, the embedding table included."""
        return self.parameters - self.expert_parameters

    @property
    def active_parameters(self) -> float:
        """The parameters that one token is multiplied with."""
        routed = self.expert_parameters * self.active / self.experts
        return self.dense_parameters - self.embedding_parameters + routed


def shape_of(name: str, config: ModelConfig) -> Shape:
    """The shape of a dense Llama."""
    c = config
    attention = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    table = c.vocab * c.hidden
    layers = c.layers * (attention + 3 * c.hidden * c.ffn)
    return Shape(
        name=name,
        layers=c.layers,
        hidden=c.hidden,
        ffn=c.ffn,
        heads=c.heads,
        head_dim=c.head_dim,
        kv_heads=c.kv_heads,
        kv_width=2 * c.kv_heads * c.head_dim,
        parameters=float(layers + table * (1 if c.tied else 2)),
        embedding_parameters=0.0 if c.tied else float(table),
    )


# From the models' own config.json and reports. DeepSeek-V3 keeps one copy of 512 + 64 values per token and layer (its
# latent attention), its first three layers are dense, and a token's experts lie on at most four nodes.
_COLUMNS = (
    "name", "vocab", "layers", "hidden", "ffn", "heads", "head_dim", "kv_heads", "kv_width", "parameters",
    "experts", "active", "dense_layers", "router_nodes",
)  # fmt: skip
_PUBLISHED: tuple[tuple[Any, ...], ...] = (
    ("llama-3.1-405b", 128256, 126, 16384, 53248, 128, 128, 8, 2048, 405.9e9, 1, 1, 126, 0),
    ("deepseek-v3", 129280, 61, 7168, 2048, 128, 128, 1, 576, 671e9, 256, 8, 3, 4),
    ("gpt-oss-120b", 201088, 36, 2880, 2880, 64, 64, 8, 1024, 116.8e9, 128, 4, 0, 0),
    ("grok-1", 131072, 64, 6144, 32768, 48, 128, 8, 2048, 314e9, 8, 2, 0, 0),
)


def _published(vocab: int, dense_layers: int, **row: Any) -> Shape:
    """Return the shape of a model of _PUBLISHED. Such a model has a separate table for its LM head. In each layer that
    is not dense, every expert has gate, up and down matrices.
    """
    expert = 3.0 * row["hidden"] * row["ffn"]
    return Shape(
        **row,
        embedding_parameters=float(vocab * row["hidden"]),
        expert_parameters=expert * row["experts"] * (row["layers"] - dense_layers),
    )


SHAPES: dict[str, Shape] = {row[0]: _published(**dict(zip(_COLUMNS, row, strict=True))) for row in _PUBLISHED}
