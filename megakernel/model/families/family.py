"""The fields that each model family declares: its phases, its weight names and its configuration keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...isa import Buffer, Forward
from ..config import Keys, ModelConfig, Rope


class Weight(NamedTuple):
    """Names the tensors that contain a buffer's rows, in safetensors and in GGUF files, in the order of the rows. `{}`
    stands for the layer's number, and `{expert}` for the expert's. A repeated name means one tensor that contains the
    rows of several matrices.
    """

    safetensors: tuple[str, ...]
    gguf: tuple[str, ...]


def of_layer(safetensors: str, gguf: str, end: str = ".weight") -> Weight:
    """The tensors of a layer. The arguments list names, without "model.layers.0." and the ending `end`."""
    return Weight(
        tuple(f"model.layers.{{}}.{name}{end}" for name in safetensors.split()),
        tuple(f"blk.{{}}.{name}{end}" for name in gguf.split()),
    )


B = Buffer
_QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attn_q attn_k attn_v"
_O = "self_attn.o_proj", "attn_output"
_GATE_UP = "mlp.gate_proj mlp.up_proj", "ffn_gate ffn_up"
_DOWN = "mlp.down_proj", "ffn_down"
# The names of the tensors in most families.
WEIGHTS: dict[Buffer, Weight] = {
    B.EMBED: Weight(("model.embed_tokens.weight",), ("token_embd.weight",)),
    B.ATTN_NORM: of_layer("input_layernorm", "attn_norm"),
    B.W_QKV: of_layer(*_QKV),
    B.B_QKV: of_layer(*_QKV, ".bias"),
    B.QK_NORM: of_layer("self_attn.q_norm self_attn.k_norm", "attn_q_norm attn_k_norm"),
    B.W_O: of_layer(*_O),
    B.B_O: of_layer(*_O, ".bias"),
    B.MLP_NORM: of_layer("post_attention_layernorm", "ffn_norm"),
    B.W_GATE_UP: of_layer(*_GATE_UP),
    B.B_GATE_UP: of_layer(*_GATE_UP, ".bias"),
    B.W_DOWN: of_layer(*_DOWN),
    B.B_DOWN: of_layer(*_DOWN, ".bias"),
    B.FINAL_NORM: Weight(("model.norm.weight",), ("output_norm.weight",)),
    B.LM_HEAD: Weight(("lm_head.weight",), ("output.weight",)),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Declares a model family: its forward pass, and how to read its files."""

    name: str  # `model_type` in config.json; the class name there begins with it, in CamelCase, or is in `also`
    models: str  # published models of the family, in Markdown
    also: tuple[str, ...] = ()  # other class names in config.json
    inside: tuple[str, ...] = ()  # classes of models that also see images and contain a language model of the family
    # The values that keys of config.json have in these models and in GGUF files, which lack them.
    inside_keys: Mapping[str, Any] = field(default_factory=dict)
    gguf: tuple[str, ...] = ()  # the architecture's names in GGUF files; the first is used when a file is written
    # Lists the phases of a step, for a configuration and this family, if they are not Llama's.
    forward: Callable[[ModelConfig, Family], Forward] | None = None
    head_norms: bool = False  # each head of q and k is normalised before RoPE
    gelu: bool = False  # the MLP's gate is GELU, approximated by tanh, instead of SiLU
    sinks: bool = False  # each head of attention adds a score that belongs to no token
    weights: Mapping[Buffer, Weight] = field(default_factory=dict)  # tensor names of buffers that differ from Llama's
    # The tensor names of the MLP that runs as shared experts. Layers without a router have Llama's.
    shared: Mapping[Buffer, Weight] = field(default_factory=dict)
    # The file formats that store the two rows of a RoPE pair of q or k next to each other. In other formats, rows i and
    # i + R / 2 form a pair, if RoPE rotates R rows of a head.
    adjacent: tuple[str, ...] = ()
    alternate: bool = False  # in a tensor with gate and up of all experts, outputs of gate alternate with those of up
    norms_minus_one: bool = False  # safetensors files contain the scales of norms minus 1
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of ModelConfig with one value in all models
    # Fields of ModelConfig that have a key in config.json: the key, and the value if it is absent.
    fields: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys of config.json, with all supported values
    # Returns the other fields of ModelConfig that `config` does not set for all families, from a file of either format.
    # The result may also have the entry `longest`, a limit of the context in tokens.
    read: Callable[[Keys], dict[str, Any]] = lambda keys: {}
    keys: str = ""  # keys that have no effect in this family, or that `read` may leave out, separated by spaces
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of keys in config.json, and the usual names
    renames: Mapping[str, str] = field(default_factory=dict)  # parts of names in safetensors files, and the usual parts
    # The values of keys that are absent in config.json, where they are not those of Llama. The key
    # `partial_rotary_factor`, and `alpha` of RoPE's settings, are supported only if listed here.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activations: tuple[str, ...] = ("silu", "swish")  # the allowed names of the MLP's activation in config.json
    two_ropes: bool = False  # `rope_parameters` has one table for layers with sliding windows, one for others

    def tensors(self, buffer: Buffer) -> Weight:
        """Return the names of the tensors that contain a buffer."""
        return self.weights.get(buffer) or WEIGHTS[buffer]

    def fields_of(self, keys: Keys) -> dict[str, Any]:
        """Return the fields of ModelConfig that depend on the family, from a model's file. Raises MegakernelError."""
        for key, values in self.only.items():
            keys.only(key, *values)
        return {**keys.fields(self.fields), **self.fixed, **self.read(keys)}

    def config(self, keys: Keys, rope: Rope, head_dim: int, **known: Any) -> ModelConfig:
        """Return the configuration that a model's file declares. `rope` and `head_dim` have been read, and `known` has
        further fields."""
        count, default = keys.count, self.defaults.get
        own = self.fields_of(keys) | known
        bos, longest = (
            keys.ids("bos_token_id"),
            rope.longest(count("max_position_embeddings", default("max_position_embeddings", 2048))),
        )
        heads = count("num_attention_heads", default("num_attention_heads"))
        return ModelConfig(
            vocab=count("vocab_size", default("vocab_size")),
            hidden=count("hidden_size"),
            ffn=own.pop("ffn") if "ffn" in own else count("intermediate_size"),
            layers=count("num_hidden_layers"),
            heads=heads,
            kv_heads=count("num_key_value_heads", default("num_key_value_heads", heads)),
            head_dim=head_dim,
            max_context=min(longest, own.pop("longest", longest)),
            rms_eps=keys.number("rms_norm_eps", default("rms_norm_eps", 1e-6)),
            rope=rope,
            tied=keys.flag("tie_word_embeddings", default("tie_word_embeddings", False)),
            bos_id=bos[0] if bos else None,
            eos_ids=keys.ids("eos_token_id"),
            family=self.name,
            **own,
        )
