"""Functions that write small models to files, for tests of the model package."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from sizes import least_dims
from tiny_llama import published
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig as HfConfig
from transformers import LlamaForCausalLM, PreTrainedModel

from megakernel.isa import BUFFERS, Buffer, Dtype
from megakernel.model import ModelConfig
from megakernel.model.families import weights

SHAPE: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": 70}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 128}


def tiny_llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(HfConfig(**{**SHAPE, "tie_word_embeddings": False, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.to(dtype)


def byte_model(folder: Path, gain: float = 1.0, **changes: Any) -> None:
    """Write a model folder: random weights, a tokenizer with one token per byte, and a chat template. The tokens of the
    bytes have ids 0 to 255 of a vocabulary of 260. `gain` scales the logits. A gain of 0.01 makes them small compared
    with logit biases and penalties. `changes` are fields of config.json."""
    model = tiny_llama(vocab_size=260, max_position_embeddings=4096, **changes)
    with torch.no_grad():
        model.lm_head.weight.mul_(gain)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    spaces = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([spaces, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def weight_count(config: ModelConfig) -> int:
    """Return the number of weights in a model's files. A matrix shared by embedding and LM head counts once."""
    dims = least_dims(config, Dtype.F32)
    absent = {Buffer.INV_FREQ} | ({Buffer.LM_HEAD} if config.tied else set())
    held = [BUFFERS[buffer] for buffer in weights(config) if buffer not in absent]
    return sum(math.prod(spec.shape(dims, 0)) * (config.layers if spec.layered else 1) for spec in held)


def write_gguf(path: Path, model: PreTrainedModel, architecture: str, *, permuted: bool) -> None:
    """Write a transformers model to a GGUF file in float32, as llama.cpp's converter does. With `permuted`, the two
    rows of each RoPE pair in the Q and K weights are stored next to each other. The converter does so only for Llama
    and Mistral."""
    c = model.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, c.num_hidden_layers)
    sizes = (c.num_hidden_layers, c.max_position_embeddings, c.hidden_size, c.intermediate_size)
    writer = _gguf_writer(path, architecture, *sizes, c.num_attention_heads, c.num_key_value_heads, c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if c.eos_token_id is not None:
        writer.add_eos_token_id(c.eos_token_id)
    if getattr(c, "sliding_window", None):
        writer.add_sliding_window(c.sliding_window)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_attn_temperature_scale(rope.get("llama_4_scaling_beta", 0.0))
        if architecture == "olmo2":
            writer.add_rope_scaling_attn_factors(0.1 * math.log(rope["factor"]) + 1)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        writer.add_rope_dimension_count(int(c.head_dim * rope["partial_rotary_factor"]))
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(c.attn_logit_softcapping)
        writer.add_final_logit_softcapping(c.final_logit_softcapping)
    if architecture.startswith("granite"):
        writer.add_embedding_scale(c.embedding_multiplier)
        writer.add_residual_scale(c.residual_multiplier)
        writer.add_attention_scale(c.attention_multiplier)
        writer.add_logit_scale(c.logits_scaling)
    state = published(model)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(c.intermediate_size)
        _split_experts(writer, state)
    for name in [name for name in state if name.endswith("put_linear.weight")]:  # the experts of Granite
        tensor, layer = state.pop(name).detach().float(), name.split(".")[2]
        parts = dict(zip(("gate", "up"), tensor.chunk(2, 1), strict=True)) if "input" in name else {"down": tensor}
        for part, value in parts.items():
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", value.contiguous().numpy())
    experts = getattr(c, "num_local_experts", 0) or getattr(c, "num_experts", 0)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
        if hasattr(c, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(c.moe_intermediate_size)
        if architecture == "qwen2moe":
            writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
        if architecture == "ernie4_5-moe":
            writer.add_expert_shared_count(c.moe_num_shared_experts)
            writer.add_leading_dense_block_count(c.moe_layer_start_index)
        if architecture in ("glm4moe", "dots1"):
            writer.add_expert_shared_count(c.n_shared_experts)
            writer.add_leading_dense_block_count(c.first_k_dense_replace)
            writer.add_expert_weights_scale(c.routed_scaling_factor)
            writer.add_expert_weights_norm(c.norm_topk_prob)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        kinds = {"w1": "gate", "w3": "up", "w2": "down"} | {f"{k}_proj": k for k in ("gate", "up", "down")}
        for name in [name for name in state if ".experts.0." in name]:
            every = torch.stack([state.pop(name.replace(".experts.0.", f".experts.{e}.")) for e in range(experts)])
            layer, part = name.split(".")[2], name.split(".")[-2]
            writer.add_tensor(f"blk.{layer}.ffn_{kinds[part]}_exps.weight", every.detach().float().numpy())
    for name, tensor in state.items():
        value = tensor.detach().float().numpy()
        if permuted and ("q_proj" in name or "k_proj" in name):
            pairs = value.reshape(-1, 2, c.head_dim // 2, *value.shape[1:])
            value = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)
        if architecture.startswith("gemma") and "norm" in name:
            value = value + 1
        if name != "lm_head.weight" or not c.tie_word_embeddings:
            name, value = name.replace("correction_bias", "correction.bias"), value.squeeze()
            written = names.get_name(name, (".weight", ".bias"))
            writer.add_tensor(written + ".weight" * name.endswith("sinks"), value)
    finish(writer)


def _split_experts(writer: gguf.GGUFWriter, state: dict[str, torch.Tensor]) -> None:
    """Write the experts of gpt-oss, and remove them from `state`. Rows of gate and up alternate there, and matrices are
    transposed."""
    for name in [name for name in state if ".experts." in name]:
        tensor, kind, layer = state.pop(name).detach().float(), name.rpartition(".")[2], name.split(".")[2]
        rows, end = (tensor, "bias") if kind.endswith("_bias") else (tensor.transpose(1, 2), "weight")
        parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if kind.startswith("gate_up") else {"down": rows}
        for part, value in parts.items():
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.{end}", value.contiguous().numpy())


def _gguf_writer(path: Path, architecture: str, *sizes: float) -> gguf.GGUFWriter:
    """Return a GGUF writer that has the model's sizes as metadata. `sizes` are the number of layers, the context
    length, the hidden and FFN sizes, the numbers of heads and KV heads, and the epsilon of the norms, in this order."""
    writer = gguf.GGUFWriter(path, architecture)
    lengths = "block_count context_length embedding_length feed_forward_length"
    for name, size in zip(f"{lengths} head_count head_count_kv layer_norm_rms_eps".split(), sizes, strict=True):
        getattr(writer, f"add_{name}")(size)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    tensors: dict[str, NDArray[Any]] | None = None,
    quantise: gguf.GGMLQuantizationType | None = None,
    raw: dict[str, tuple[NDArray[np.uint8], gguf.GGMLQuantizationType]] | None = None,
    **metadata: Any,
) -> dict[str, NDArray[np.float32]]:
    """Write a GGUF file of a one-layer model and return its tensors as they were before quantisation. `tensors`
    replaces random tensors, and `quantise` is the type in which all matrices are stored. `raw` maps a tensor's name to
    the already quantised bytes of its rows and their type. A keyword `a__b` sets the metadata `a.b`."""
    rng = np.random.default_rng(2)
    hidden, heads, kv_heads, head_dim, ffn, vocab = 256, 4, 2, 64, 512, 70
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    shapes |= {"output.weight": (vocab, hidden), "blk.0.attn_norm.weight": (hidden,)}
    shapes |= {"blk.0.attn_q.weight": (heads * head_dim, hidden), "blk.0.attn_k.weight": (kv_heads * head_dim, hidden)}
    shapes |= {"blk.0.attn_v.weight": (kv_heads * head_dim, hidden)}
    shapes |= {"blk.0.attn_output.weight": (hidden, heads * head_dim), "blk.0.ffn_norm.weight": (hidden,)}
    shapes |= {"blk.0.ffn_gate.weight": (ffn, hidden), "blk.0.ffn_up.weight": (ffn, hidden)}
    shapes |= {"blk.0.ffn_down.weight": (hidden, ffn)}
    values = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    values.update(tensors or {})
    writer = _gguf_writer(path, architecture, 1, 128, hidden, ffn, heads, kv_heads, 1e-5)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, _gguf_type(value))
    for name, value in values.items():
        if raw is not None and name in raw:
            rows, raw_type = raw[name]
            writer.add_tensor(name, rows, raw_dtype=raw_type)
        elif quantise is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, value)
    finish(writer)
    return values


def _gguf_type(value: Any) -> gguf.GGUFValueType:
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    return gguf.GGUFValueType[kinds[type(value)]]
