"""The sizes of a model that parallelism on paper needs, experts included. Only dense ones are compiled and run."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.config import LlamaConfig


@dataclass(frozen=True)
class Shape:
    """Counts. `ffn` is one expert's where there are experts; `kv_width` values are kept per token and layer."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    head_dim: int
    kv_heads: int
    kv_width: int
    parameters: float  # all of them
    embedding_parameters: float  # looked up, not multiplied with
    experts: int = 1
    active: int = 1  # routed experts of a token
    expert_parameters: float = 0.0  # of all routed experts together, a part of `parameters`

    @property
    def dense_parameters(self) -> float:
        """What every token uses, the lookup table included."""
        return self.parameters - self.expert_parameters

    @property
    def active_parameters(self) -> float:
        """What multiplies one token."""
        routed = self.expert_parameters * self.active / self.experts
        return self.dense_parameters - self.embedding_parameters + routed


def shape_of(name: str, config: LlamaConfig) -> Shape:
    """A dense Llama's."""
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


def _experts(layers: int, experts: int, hidden: int, ffn: int) -> float:
    """Gate, up and down of every expert in every layer that has them."""
    return 3.0 * layers * experts * hidden * ffn


# From the models' own config.json and reports. DeepSeek-V3 keeps 512 + 64 values per token and layer (its latent
# attention) in one copy, and its first three layers are dense.
SHAPES: dict[str, Shape] = {
    s.name: s
    for s in (
        Shape(
            name="llama-3.1-405b",
            layers=126,
            hidden=16384,
            ffn=53248,
            heads=128,
            head_dim=128,
            kv_heads=8,
            kv_width=2048,
            parameters=405.9e9,
            embedding_parameters=128256.0 * 16384,
        ),
        Shape(
            name="deepseek-v3",
            layers=61,
            hidden=7168,
            ffn=2048,
            heads=128,
            head_dim=128,
            kv_heads=1,
            kv_width=576,
            parameters=671e9,
            embedding_parameters=129280.0 * 7168,
            experts=256,
            active=8,
            expert_parameters=_experts(layers=58, experts=256, hidden=7168, ffn=2048),
        ),
        Shape(
            name="gpt-oss-120b",
            layers=36,
            hidden=2880,
            ffn=2880,
            heads=64,
            head_dim=64,
            kv_heads=8,
            kv_width=1024,
            parameters=116.8e9,
            embedding_parameters=201088.0 * 2880,
            experts=128,
            active=4,
            expert_parameters=_experts(layers=36, experts=128, hidden=2880, ffn=2880),
        ),
        Shape(
            name="grok-1",
            layers=64,
            hidden=6144,
            ffn=32768,
            heads=48,
            head_dim=128,
            kv_heads=8,
            kv_width=2048,
            parameters=314e9,
            embedding_parameters=131072.0 * 6144,
            experts=8,
            active=2,
            expert_parameters=_experts(layers=64, experts=8, hidden=6144, ffn=32768),
        ),
    )
}
