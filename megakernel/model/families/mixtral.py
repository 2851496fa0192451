"""Mixtral: Llama's attention, and an MLP of experts, of which a router chooses some for each token."""

from __future__ import annotations

from typing import Any

from ...errors import MegakernelError
from ...isa import Buffer, Forward, Result
from ...isa.dims import MOST_EXPERTS
from ..config import Keys, ModelConfig
from . import llama
from .family import Family, Weight
from .verbs import add_experts, experts, route, silu_experts

B = Buffer


def with_experts(f: Forward) -> Forward:
    """The phases `f`, with the MLP of each layer replaced by experts. If the MLP has biases, so have they and
    their router.
    """
    body = []
    for phase in f.body:
        if phase.result is Result.GATED:
            bias = None if phase.bias is None else B.B_ROUTER
            body.append(route("route", inputs=B.H, router=B.W_ROUTER, bias=bias, output=B.ROUTES))
            up = silu_experts("experts_gate_up", inputs=B.H, weights=B.W_GATE_UP, bias=phase.bias, output=B.ACT)
            body.append(up)
        elif phase.weights is B.W_DOWN:
            down = experts("experts_down", inputs=B.ACT, weights=B.W_DOWN, bias=phase.bias, output=B.EXPERTS_OUT)
            body.append(down)
            body.append(add_experts("combine", inputs=B.EXPERTS_OUT, weights=B.W_DOWN, output=B.X))
        else:
            body.append(phase)
    return Forward.of(f.prologue, body, f.epilogue)


def forward(c: ModelConfig) -> Forward:
    """Llama's phases with experts."""
    return with_experts(llama.forward(c))


def expert_weights(router: str, gate: str, up: str, down: str) -> dict[Buffer, Weight]:
    """The weights of experts. The arguments are the ends of their names in safetensors files. GGUF files have one
    tensor for all experts of a layer.
    """
    layer = "model.layers.{}."
    return {
        B.W_ROUTER: Weight((layer + router,), ("blk.{}.ffn_gate_inp.weight",)),
        B.W_GATE_UP: Weight((layer + gate, layer + up), ("blk.{}.ffn_gate_exps.weight", "blk.{}.ffn_up_exps.weight")),
        B.W_DOWN: Weight((layer + down,), ("blk.{}.ffn_down_exps.weight",)),
    }


def counts(config: Keys, every: tuple[str, ...], used: str) -> dict[str, Any]:
    """Read the numbers of experts: of a layer, by any of the names `every`, and of a token."""
    name = next((key for key in every if config.get(key) is not None), every[0])
    count, per_token = config.count(name), config.count(used)
    for key in every:
        config.only(key, count)
    if not 0 < per_token <= count <= MOST_EXPERTS:
        raise MegakernelError(
            f"{config.source}: {config.prefix}{name} = {count} with {config.prefix}{used} = {per_token} is not "
            f"supported: a layer has at most {MOST_EXPERTS} experts, and a token uses 1 or more of them"
        )
    return {"experts": count, "experts_per_token": per_token}


EXPERTS = ("num_local_experts", "num_experts")  # the names that transformers 4 and 5 write
# Numbers for training, and whether the model also returns the router's logits.
HARMLESS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
GGUF_KEYS = frozenset({"expert_count", "expert_used_count"})


def read(config: Keys) -> dict[str, Any]:
    """Read the sliding window, which a config.json without the key does not have, and the experts."""
    window = {"window": config.count("sliding_window")} if config.get("sliding_window") else {}
    return window | counts(config, EXPERTS, "num_experts_per_tok") | {"normalised_routes": True}


def read_gguf(config: Keys) -> dict[str, Any]:
    return counts(config, ("expert_count",), "expert_used_count") | {"normalised_routes": True}


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    ("llama",),
    forward,
    llama.WEIGHTS
    | expert_weights(
        "block_sparse_moe.gate.weight",
        *(f"block_sparse_moe.experts.{{expert}}.w{i}.weight" for i in (1, 3, 2)),
    ),
    read,
    frozenset({*EXPERTS, "num_experts_per_tok", "sliding_window"}) | HARMLESS,
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    read_gguf=read_gguf,
    gguf_keys=GGUF_KEYS,
)
