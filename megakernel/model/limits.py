"""Limits on the contents of a model's files, each with its reason, and checks of a model's configuration."""

from __future__ import annotations

from dataclasses import replace

from ..errors import MegakernelError
from ..isa.record import MOST_LAYERS
from .config import ModelConfig, RopeKind

# Sizes are stored as int32; products of two sizes are computed in 64 bits.
_LARGEST = 2**31 - 1
# The maximum number of tokens of a vocabulary, because there are arrays of this length, such as a row of logits. The
# largest published vocabularies have 2^18 tokens.
MOST_VOCABULARY = 1 << 24
# Limits of a tokenizer.json: the length of a token, the number of components, and how many times longer all components
# together may make a text. Published files have up to 1,024 characters per token, and make texts 3 times as long.
MOST_TOKEN_CHARACTERS, MOST_TOKENIZER_PARTS, MOST_TOKENIZER_GROWTH = 1 << 13, 64, 16
# The maximum length of a chat template. Jinja parses in linear time. The longest published one has 20,000 characters.
MOST_TEMPLATE_CHARACTERS = 1 << 20
# The processor time, in seconds, of compiling or rendering a template once. It usually takes milliseconds. Processor
# time, unlike elapsed time, does not depend on how busy the machine is.
MOST_TEMPLATE_SECONDS = 2.0
# The maximum memory of the process that renders a template. Python and Jinja take 50 MB, and the process may have
# several copies of the longest prompt.
MOST_TEMPLATE_BYTES = 1 << 30
# The maximum length of a rendered prompt: four times the maximum length of an HTTP request in bytes.
MOST_PROMPT_CHARACTERS = 1 << 26
# The maximum size of a JSON file, because it is read as a whole. The largest published tokenizers have 40 MB.
MOST_JSON_BYTES = 1 << 28
# The maximum number of elements of a GGUF file's metadata, because each becomes a Python object. A large vocabulary
# with its merges and scores has 2^20 elements.
MOST_METADATA_ELEMENTS = 1 << 22
# The maximum length of a string in a GGUF file, in bytes. The longest string is usually the chat template.
MOST_STRING_BYTES = 1 << 22
# The largest alignment of tensors in a GGUF file, in bytes.
MOST_ALIGNMENT = 1 << 20
# The merges of a SentencePiece vocabulary are found by splitting each token at every place. This is the maximum total
# number of characters of all parts. At the limit, the work takes seconds. Published vocabularies need 2^26.
MOST_SPLIT_CHARACTERS = 1 << 30

# The least and the greatest value of fields of ModelConfig, and of fields of its RoPE.
_RANGES = (
    ("vocab", "", 1, MOST_VOCABULARY),
    ("layers", "", 1, MOST_LAYERS),
    ("hidden ffn heads kv_heads head_dim max_context", "", 1, _LARGEST),
    ("rms_eps", "", 0, 1),
    ("embedding_multiplier residual_multiplier attention_multiplier logits_scaling", "", 1e-4, 1e4),
    ("score_cap logit_cap", "", 0, 1e4),
    ("window", "", 0, _LARGEST),
    ("theta", "rope", 1e-9, 1e30),
    ("factor attention", "rope", 1e-9, 1e9),
)


def check_config(config: ModelConfig, source: str) -> ModelConfig:
    """Return `config` without ids of tokens outside the vocabulary. Raises MegakernelError, which names the first field
    whose value is impossible."""

    def refuse(what: str) -> MegakernelError:
        return MegakernelError(f"{source}: {what}")

    rope, pairs = config.rope, (config.rope.dims or config.head_dim) // 2
    for names, of, least, most in _RANGES:
        for name in names.split():
            if (value := getattr(getattr(config, of, config), name)) is not None and not least <= value <= most:
                raise refuse(f"{f'{of} {name}'.strip()} is {value}; it must be between {least} and {most}")
    if config.heads % config.kv_heads:
        raise refuse(f"{config.heads} attention heads cannot be divided evenly among {config.kv_heads} key/value heads")
    if config.head_dim % 8:
        raise refuse(
            f"head size {config.head_dim} is not supported: it must be a multiple of 8, because vector instructions "
            "and tensor cores load 8 elements of a head at once"
        )
    if rope.dims % 2 or not 0 <= rope.dims <= config.head_dim:
        raise refuse(f"RoPE rotates {rope.dims} elements of a head, but needs an even number up to {config.head_dim}")
    if config.heads * config.head_dim > _LARGEST:
        raise refuse(f"{config.heads} heads times head size {config.head_dim} must be at most {_LARGEST}")
    if config.window:
        first, every, at = config.full_places().values()
        full = {layer for layer in range(config.layers) if layer < first or layer % every == at}
        if full != set(config.full_layers):
            raise refuse("layers without a sliding window are not at equal distances, which is not supported")
    if rope.kind in (RopeKind.LLAMA3, RopeKind.YARN):
        if not 1e-9 < rope.low_freq_factor < rope.high_freq_factor < 1e9:
            raise refuse(
                f"{rope.kind.value} RoPE scaling needs 0 < low_freq_factor < high_freq_factor (YaRN: beta_slow < "
                f"beta_fast), not {rope.low_freq_factor} and {rope.high_freq_factor}"
            )
        if not 0 < rope.original_context <= _LARGEST:
            raise refuse(f"original_max_position_embeddings is {rope.original_context}; it must be 1 to {_LARGEST}")
    if rope.kind is RopeKind.YARN and rope.theta <= 1:
        raise refuse(f"RoPE theta is {rope.theta}; YaRN needs more than 1")
    lists = {RopeKind.FACTORS: [rope.factors], RopeKind.LONGROPE: [rope.factors, rope.short_factors]}
    for factors in lists.get(rope.kind, []):
        if len(factors) != pairs or not all(1e-9 < factor < 1e9 for factor in factors):
            raise refuse(f"RoPE factors must be {pairs} positive finite numbers")

    # Some files name tokens that only the tokenizer has. The model never chooses such a token.
    bos, *eos = (None if i is None or not 0 <= i < config.vocab else i for i in (config.bos_id, *config.eos_ids))
    return replace(config, bos_id=bos, eos_ids=tuple(i for i in eos if i is not None))
