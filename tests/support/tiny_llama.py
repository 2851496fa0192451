"""Makes small random models of any family, each as a transformers model and as a Checkpoint with the same weights. The
random weights are large, so that a mistake changes the logits clearly: attention concentrates on a few tokens, norms
and biases are far from 1 and 0, and each layer changes the residual by about as much as the residual's own
magnitude."""

from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel

from megakernel.model.checkpoint import Checkpoint
from megakernel.model.config import Rope, RopeKind
from megakernel.model.memory import open_memory

SHAPE: dict[str, Any] = {"vocab": 101, "hidden": 48, "ffn": 72, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 16}
SHAPE |= {"max_context": 512, "rms_eps": 1e-5, "tied": False, "rope": Rope()}
# Settings that a family needs in addition to SHAPE.
OWN: dict[str, dict[str, Any]] = {
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "granitemoehybrid": {"num_local_experts": 0, "shared_intermediate_size": 77, "position_embedding_type": "rope"}
    | {"layer_types": ["full_attention"] * 2, "mamba_n_heads": 4},
    "glm": {"eos_token_id": 0},
    "glm4": {"eos_token_id": 0},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 7, "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1}
    | {"intermediate_size": 144},
    "ernie4_5_moe": {"moe_num_experts": 7, "moe_k": 3, "moe_num_shared_experts": 2, "intermediate_size": 99}
    | {"moe_layer_start_index": 1},
    "glm4_moe": {"n_routed_experts": 7, "num_experts_per_tok": 3, "n_shared_experts": 1, "intermediate_size": 200},
    "qwen2_moe": {"num_experts": 7, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 100},
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 3, "head_dim": 8},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True, "intermediate_size": 1},
    "ministral3": {"rope": Rope(10000.0, RopeKind.YARN, 8.0, 1.0, 32.0, original_context=64, ends=True)},
}
ROPES = {
    "default": Rope(theta=10000.0),
    "linear": Rope(theta=10000.0, kind=RopeKind.LINEAR, factor=4.0),
    "llama3": Rope(500000.0, RopeKind.LLAMA3, 8.0, 1.0, 4.0, original_context=64),
    "yarn": Rope(10000.0, RopeKind.YARN, 8.0, 1.0, 32.0, original_context=64),
    "longrope": Rope(
        10000.0, RopeKind.LONGROPE, 8.0, original_context=64, factors=(4.0,) * 3 + (9.0,) * 5, short_factors=(1.0,) * 8
    ),
}


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's weights under the names in published files, where each expert has separate matrices, except in
    gpt-oss."""
    out = {}
    if model.config.model_type == "gpt_oss":
        return dict(model.state_dict())
    if model.config.model_type == "granitemoe":
        names = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
        names |= {"router.weight": "router.layer.weight"}
        for name, tensor in model.state_dict().items():
            layer, _, end = name.partition("block_sparse_moe.")
            out[f"{layer}block_sparse_moe.{names[end]}" if end else name] = tensor
        return out
    mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in model.state_dict().items():
        name = name.replace("shared_expert.", "shared_experts.").replace("gate.moe_statics", "moe_statics")
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        stem, _, what = name.rpartition(".experts.")
        for e, own in enumerate(tensor if stem else ()):
            parts = zip((gate, up), own.chunk(2), strict=True) if what == "gate_up_proj" else [(down, own)]
            out |= {f"{stem}.experts.{e}.{part}.weight": matrix for part, matrix in parts}
        if not stem:
            out[name] = tensor
    return out


def checkpoint_of(model: PreTrainedModel) -> Checkpoint:
    """Return a Checkpoint with the weights that a model has now, under the names in published files."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: tensor.detach().clone() for name, tensor in published(model).items() if name not in tied}
    return open_memory((model.config, weights.items()))


def make_llama(seed: int, family: str = "llama", **shape: Any) -> tuple[PreTrainedModel, Checkpoint]:
    """Return a random float32 model and a Checkpoint with its weights. `shape` overrides entries of SHAPE. It may also
    set config.json keys of the family, such as attention_bias."""
    needed = OWN.get(family, {})
    shape = needed | shape
    own = {key: shape.pop(key) for key in set(shape) - set(SHAPE)}  # `checkpoint_of` refuses unknown keys
    settings = _hf_config(transformers.CONFIG_MAPPING[family], SHAPE | shape, own)
    hf = transformers.AutoModelForCausalLM.from_config(settings).eval().to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        buffers = [(name, buffer) for name, buffer in hf.named_buffers() if name.endswith("bias")]
        for name, p in [*hf.named_parameters(), *buffers]:
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name:
                p.copy_(torch.sign(noise) * (0.5 + torch.rand(p.shape, generator=generator)))
            elif name.endswith("bias"):
                p.copy_(0.5 * noise)
            elif "embed" in name or name.endswith("sinks"):
                p.copy_(noise)
            else:
                # This gain on Q and K gives attention scores a standard deviation of 2, so that a few tokens get most
                # of the attention.
                gain = 2**0.5 if "q_proj" in name or "k_proj" in name else 1.0
                p.copy_(gain * noise / p.shape[-1] ** 0.5)
    return hf, checkpoint_of(hf)


def _hf_config(kind: type[PretrainedConfig], shape: dict[str, Any], own: dict[str, Any]) -> PretrainedConfig:
    names = {"vocab": "vocab_size", "hidden": "hidden_size", "ffn": "intermediate_size", "layers": "num_hidden_layers"}
    names |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    names |= {"max_context": "max_position_embeddings", "rms_eps": "rms_norm_eps", "tied": "tie_word_embeddings"}
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if hasattr(kind, "moe_intermediate_size"):
        names["ffn"] = "moe_intermediate_size"
    fields = {name: shape[key] for key, name in names.items()} | no_tokens | own
    fields |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    return kind(**fields, **_rope_arguments(shape["rope"], shape["head_dim"], kind))


def _rope_arguments(rope: Rope, head_dim: int, kind: type[PretrainedConfig]) -> dict[str, Any]:
    """Return the arguments that describe `rope` to a transformers configuration class. transformers 5 reads
    rope_parameters, and transformers 4 reads rope_theta and rope_scaling."""
    if kind is transformers.Gemma3TextConfig:
        return {}  # Gemma 3 has two RoPE tables, whose defaults are right
    scaling: dict[str, Any] = {"rope_type": rope.kind.value}
    if rope.kind is not RopeKind.DEFAULT:
        scaling["factor"] = rope.factor
    if rope.kind is RopeKind.LONGROPE:
        scaling |= {"long_factor": list(rope.factors), "short_factor": list(rope.short_factors)}
    if rope.kind in (RopeKind.YARN, RopeKind.LONGROPE):
        scaling["original_max_position_embeddings"] = rope.original_context
    if not rope.truncate:
        scaling["truncate"] = False
    if rope.dims:
        scaling["partial_rotary_factor"] = rope.dims / head_dim
    if rope.ends:
        scaling["llama_4_scaling_beta"] = 0.1
    if rope.kind is RopeKind.LLAMA3:
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
        scaling["original_max_position_embeddings"] = rope.original_context
    if kind is transformers.Olmo3Config:
        tables = {"full_attention": scaling, "sliding_attention": {"rope_type": "default"}}
        return {"rope_parameters": {name: table | {"rope_theta": rope.theta} for name, table in tables.items()}}
    if hasattr(kind(), "rope_parameters"):
        return {"rope_parameters": scaling | {"rope_theta": rope.theta}}
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind is RopeKind.DEFAULT else scaling}


def hf_logits(hf: PreTrainedModel, tokens: list[int], **options: torch.Tensor) -> NDArray[np.float32]:
    """Return the logits at all positions of a prompt, with the shape [len(tokens), vocab]."""
    with torch.no_grad():
        logits: NDArray[np.float32] = hf(torch.tensor([tokens]), **options).logits[0].float().numpy()
    return logits


def rounded(model: PreTrainedModel) -> Checkpoint:
    """Round the weights of `model` to bfloat16 in place, and return a Checkpoint of the rounded weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return checkpoint_of(model)


def error(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the largest absolute difference, divided by the standard deviation of `expected`."""
    return float(np.abs(got - expected).max() / expected.std())
