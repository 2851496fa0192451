"""SmolLM3: Llama's forward pass. In layers without RoPE, the pairs of q and k turn by an angle of 0."""

from __future__ import annotations

from typing import Any

from ...errors import MegakernelError
from ...isa import Buffer, Forward
from ..config import Keys, ModelConfig
from .family import Family
from .llama import AFTER, BEFORE, BIASES, WEIGHTS
from .verbs import add_matmul, attention, norm, qkv, rope, silu_matmul
from .windows import every_nth, layers_of

B = Buffer


def forward(c: ModelConfig) -> Forward:
    """The prologue computes layer 0's table of cosines and sines, and each layer that of the next."""
    return Forward.of(
        BEFORE,
        [
            norm("attn_norm", inputs=B.X, scale=B.ATTN_NORM, output=B.H),
            qkv("qkv_rope", inputs=B.H, weights=B.W_QKV, bias=c.bias(B.B_QKV), output=B.Q),
            attention("attention", inputs=B.Q, output=B.ATTN),
            add_matmul("o_proj", inputs=B.ATTN, weights=B.W_O, bias=c.bias(B.B_O), output=B.X),
            norm("mlp_norm", inputs=B.X, scale=B.MLP_NORM, output=B.H),
            silu_matmul("gate_up_silu", inputs=B.H, weights=B.W_GATE_UP, bias=c.bias(B.B_GATE_UP), output=B.ACT),
            add_matmul("down_proj", inputs=B.ACT, weights=B.W_DOWN, bias=c.bias(B.B_DOWN), output=B.X),
            rope("next_rope", frequencies=B.INV_FREQ, output=B.ROPE, ahead=1),
        ],
        AFTER,
    )


def read(config: Keys) -> dict[str, Any]:
    """Read which layers have RoPE: a list with 1 for these layers and 0 for others, or else an interval."""
    layers, interval = layers_of(config), config.count("no_rope_layer_interval", 4)
    rotated = None if config.get("no_rope_layers") is None else config.numbers("no_rope_layers")
    if interval < 1 or (rotated is not None and len(rotated) < len(layers)):
        raise MegakernelError(
            f"{config.source}: no_rope_layers and no_rope_layer_interval do not say which layers have RoPE"
        )
    nope = every_nth(layers, interval) if rotated is None else (i for i in layers if not rotated[i])
    return {"nope_layers": tuple(nope)}


SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    gguf=("smollm3",),
    models="SmolLM3-3B",
    forward=forward,
    weights=WEIGHTS,
    fields=BIASES,
    only={"use_sliding_window": (False,)},
    read=read,
    keys="max_window_layers no_rope_layer_interval no_rope_layers sliding_window",
    defaults={"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True},
    # llama.cpp assumes that every fourth layer has no RoPE.
    read_gguf=lambda config: {"nope_layers": tuple(every_nth(layers_of(config, "block_count"), 4))},
)
