"""Damaged or hostile model files, and the functions that open and read them."""

import json
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from mutants import Kind, Mutant, Rng, Stage, change_json, odd_value, scramble
from tokenizers import decoders, models, pre_tokenizers

from megakernel.isa import BUFFERS, Buffer, Dtype, Split
from megakernel.model import open_checkpoint
from megakernel.model.checkpoint import Checkpoint, rows_of
from megakernel.model.families import weights
from megakernel.model.file_checkpoint import Naming, tensors_of
from megakernel.model.hf_config import read_hf_config
from megakernel.model.open import load_tokenizer
from megakernel.model.random_checkpoint import RandomCheckpoint
from megakernel.model.tokenizer import Tokenizer, byte_alphabet

VOCABULARY = [*sorted(byte_alphabet()), "ab", "<s>", "</s>"]
MESSAGES = [{"role": "user", "content": "ab \u00e9"}, {"role": "assistant", "content": "b"}]
TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}<assistant>",
    "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}"
    "{% endif %}{% set ns.text = ns.text + m.content %}{% endfor %}{{ ns.text ~ ns.n }}{{ messages | tojson }}",
)
# Chat template expressions that take long, need much memory or fail, or that the sandbox must refuse.
_WILD = (
    "7 ** (10 ** 9)", "range(99999) | list * 9999", "'x' * 10 ** 10", "'%1000000000d' % 1", "messages * 10 ** 9",
    "'{:1000000000}'.format(1)", "''.__class__.__mro__", "1 / 0", "nothing.at.all", "'x'.zfill(10 ** 10)", "2 ** 64",
    "range(10 ** 9)", "'x' | center(10 ** 10)", "messages | tojson(indent=10 ** 9)", "'\ud800'", "'\x1b[2J'",
    "raise_exception('\x1b[2J')", "cycler.__init__.__globals__", "strftime_now('%' * 99)", "messages[0].pop('role')",
)  # fmt: skip
_LOOP = "{%% for i%d in range(99999) %%}"

CONFIG_JSON: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
CONFIG_JSON |= {"vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
CONFIG_JSON |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
CONFIG_JSON |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
CONFIG_JSON |= {"tie_word_embeddings": True, "bos_token_id": 257, "eos_token_id": [258]}
TOKENIZER_CONFIG: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATES[0]}
_GGUF: dict[str, Any] = {"general.architecture": "llama", "general.alignment": 32, "llama.block_count": 1}
_GGUF |= {"llama.context_length": 64, "llama.embedding_length": 32, "llama.feed_forward_length": 64}
_GGUF |= {"llama.attention.head_count": 2, "llama.attention.head_count_kv": 1, "llama.attention.key_length": 16}
_GGUF |= {"llama.attention.value_length": 16, "llama.attention.layer_norm_rms_epsilon": 1e-5}
_GGUF |= {"llama.rope.freq_base": 1e4, "llama.vocab_size": len(VOCABULARY), "tokenizer.ggml.model": "gpt2"}
_GGUF |= {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": VOCABULARY, "tokenizer.ggml.merges": ["a b"]}
_GGUF |= {"tokenizer.ggml.token_type": [1] * 257 + [3, 3], "tokenizer.ggml.scores": [0.5] * len(VOCABULARY)}
_GGUF |= {"tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.eos_token_id": 258}
_GGUF |= {"tokenizer.chat_template": TEMPLATES[0]}


@cache
def tensors(format: str) -> list[tuple[str, Any]]:
    """Return the name and the float32 values of every tensor of the model that `CONFIG_JSON` describes."""
    from megakernel.model.hf_config import parse_hf_config

    config = parse_hf_config(CONFIG_JSON, "config")
    return [*tensors_of(RandomCheckpoint("random", config), Naming(config, format), Dtype.F32)]


def safetensors_file(header: Any | None = None) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors("safetensors"):
        end = len(data) + array.nbytes
        entries[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(entries if header is None else header).encode()
    return struct.pack("<Q", len(text)) + text + data


def gguf_file(metadata: dict[str, Any], kinds: dict[str, int]) -> bytes:
    """Return a GGUF file with this metadata and the model's tensors. The file declares every tensor as float32, except
    that `kinds` maps a tensor's name to another GGUF type number. The data of such a tensor remain float32."""
    found = tensors("gguf")
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(found), len(metadata))
    for key, value in metadata.items():
        out += _text(key) + _typed(value)
    data = b""
    for name, array in found:
        axes = struct.pack(f"<I{array.ndim}Q", array.ndim, *reversed(array.shape))
        out += _text(name) + axes + struct.pack("<IQ", kinds.get(name, 0), len(data))
        data += array.tobytes()
    return out + b"\0" * (-len(out) % 32) + data


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    """Return the number of a metadata value's GGUF type, followed by the encoded value, as bytes. The GGUF type depends
    on the value's Python type."""
    number, data = _value(value)
    return struct.pack("<I", number) + data


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return 11, struct.pack("<q", max(-(1 << 63), min(value, (1 << 63) - 1)))
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, list) and value:
        inner = [_value(one) for one in value]
        same = [data for number, data in inner if number == inner[0][0]]
        return 9, struct.pack("<IQ", inner[0][0], len(same)) + b"".join(same)
    return 8, _text(str(value))


def template(rng: Rng) -> str:
    """Return a hostile chat template: scrambled bytes, an expression of `_WILD`, nested loops, a repeatedly doubled
    value, or a random sequence of template tokens."""
    text = TEMPLATES[int(rng.integers(len(TEMPLATES)))]
    match int(rng.integers(5)):
        case 0:
            return scramble(text.encode(), rng).decode("utf-8", "surrogateescape")
        case 1:
            wild = _WILD[int(rng.integers(len(_WILD)))]
            return (
                f"{text}{{{{ {wild} }}}}" if rng.random() < 0.5 else f"{{% set x = {wild} %}}{text}{{{{ x | length }}}}"
            )
        case 2:
            depth = int(rng.integers(1, 6))
            loops = "".join(_LOOP % i for i in range(depth))
            return loops + ("x" if rng.random() < 0.5 else "{% set y = 1 %}") + "{% endfor %}" * depth
        case 3:
            grow = "{% set ns.x = ns.x + ns.x %}"
            return "{% set ns = namespace(x=messages) %}" + grow * int(rng.integers(1, 60)) + "{{ ns.x | length }}"
        case _:
            parts = ["{%", "%}", "{{", "}}", "{#", "#}", "for m in messages", "if", "endfor", "endif", *"([x|"]
            return " ".join(str(p) for p in rng.choice(parts, int(rng.integers(1, 400))))


# -- mutants


def _changed(value: Any, rng: Rng) -> bytes:
    """Return `value` as JSON, with one value inside changed or with some bytes scrambled."""
    if rng.random() < 0.3:
        return scramble(json.dumps(value).encode(), rng)
    return json.dumps(change_json(value, rng)).encode()


def _config(rng: Rng, seed: int) -> Mutant:
    return Mutant("config.json", json.dumps(CONFIG_JSON).encode(), _changed(CONFIG_JSON, rng))


def _safetensors(rng: Rng, seed: int) -> Mutant:
    good = safetensors_file()
    if rng.random() < 0.5:
        return Mutant("model.safetensors", good, scramble(good, rng))
    header = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])
    return Mutant("model.safetensors", good, safetensors_file(change_json(header, rng)))


@cache
def _tokenizer_json() -> str:
    vocabulary = {token: i for i, token in enumerate(VOCABULARY[:-2])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(VOCABULARY[-2:])
    return str(backend.to_str())


# Components of tokenizers that the valid file lacks, some of them dangerous.
_DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
_PARTS: list[tuple[str, dict[str, Any]]] = [
    ("normalizer", {"type": "Sequence", "normalizers": [_DOUBLING] * 40}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAgAAAAIAB"}),
    ("normalizer", {"type": "Prepend", "prepend": "a" * 100}),
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
    ("pre_tokenizer", {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}),
    ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["a" * 200_000, -1.0], ["b", -2.0]]}),
    ("model", {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 1}),
]


def _tokenizer(rng: Rng, seed: int) -> Mutant:
    good = json.loads(_tokenizer_json())
    if rng.random() < 0.3:
        key, part = rng.choice(_PARTS)
        return Mutant("tokenizer.json", json.dumps(good).encode(), _changed(good | {key: part}, rng))
    return Mutant("tokenizer.json", json.dumps(good).encode(), _changed(good, rng))


def _tokenizer_config(rng: Rng, seed: int) -> Mutant:
    return Mutant("tokenizer_config.json", json.dumps(TOKENIZER_CONFIG).encode(), _changed(TOKENIZER_CONFIG, rng))


def _template(rng: Rng, seed: int) -> Mutant:
    data = json.dumps(TOKENIZER_CONFIG | {"chat_template": template(rng)}).encode()
    return Mutant("tokenizer_config.json", json.dumps(TOKENIZER_CONFIG).encode(), data)


def _gguf(rng: Rng, seed: int) -> Mutant:
    good = gguf_file(_GGUF, {})
    chance = rng.random()
    if chance < 0.4:
        return Mutant("mutant.gguf", good, scramble(good, rng))
    metadata, kinds = dict(_GGUF), dict[str, int]()
    if chance < 0.5:
        kinds = {str(rng.choice([name for name, _ in tensors("gguf")])): int(rng.integers(40))}
    elif chance < 0.6:
        metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    key = str(rng.choice(list(metadata)))
    if rng.random() < 0.1:
        del metadata[key]
    elif isinstance(metadata[key], list) and rng.random() < 0.7:
        metadata[key] = change_json(metadata[key], rng)
    else:
        metadata[key] = odd_value(rng, metadata[key])
    return Mutant("mutant.gguf", good, gguf_file(metadata, kinds))


# -- readers


def _folder(path: Path) -> Path:
    """Write undamaged copies of the model's other files to the folder of `path`, and return that folder."""
    files = {
        "config.json": json.dumps(CONFIG_JSON).encode(),
        "model.safetensors": safetensors_file(),
        "tokenizer.json": _tokenizer_json().encode(),
        "tokenizer_config.json": json.dumps(TOKENIZER_CONFIG).encode(),
    }
    for name, data in files.items():
        if name != path.name:
            (path.parent / name).write_bytes(data)
    return path.parent


def _weights(name: str) -> Iterator[Stage]:
    opened: list[Checkpoint] = []
    yield "open", lambda: opened.append(open_checkpoint(name))
    if opened:
        yield "load", lambda: _read_all(opened[0])


def _read_all(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    split = Split(config.sizes(Dtype.F32))
    for buffer in weights(config):
        for layer in range(config.layers if BUFFERS[buffer].layered else 1):
            if not (buffer is Buffer.LM_HEAD and config.tied):
                rows_of(checkpoint, buffer, layer, split)


def _text_of(name: str, chat: bool = False) -> Iterator[Stage]:
    opened: list[Tokenizer | None] = []
    yield "tokenizer", lambda: opened.append(load_tokenizer(name))
    if opened and (tokenizer := opened[0]) is not None:
        yield "encode", lambda: tokenizer.decode(tokenizer.encode("ab \u00e9<s>"))
        yield "ids", lambda: (tokenizer.decode(range(0, 300)), tokenizer.longest)
        if chat:
            yield "chat", lambda: tokenizer.apply_chat_template(MESSAGES)


def _read_config(path: Path, mutant: Mutant) -> Iterator[Stage]:
    folder = _folder(path)
    yield "config", lambda: read_hf_config(folder)
    yield from _weights(str(folder))


def _read_gguf(path: Path, mutant: Mutant) -> Iterator[Stage]:
    yield from _weights(str(path))
    yield from _text_of(str(path))


KINDS = {
    "config.json": Kind(_config, _read_config),
    "safetensors": Kind(_safetensors, lambda path, mutant: _weights(str(_folder(path)))),
    "GGUF": Kind(_gguf, _read_gguf),
    "tokenizer.json": Kind(_tokenizer, lambda path, mutant: _text_of(str(_folder(path))), share=0.5),
    # Few files of the next two kinds are tried, because each starts a process that renders its chat template.
    "tokenizer_config.json": Kind(
        _tokenizer_config, lambda path, mutant: _text_of(str(_folder(path)), chat=True), share=0.1
    ),
    # Even fewer of these are tried, because many of the templates run until their time limit.
    "chat templates": Kind(_template, lambda path, mutant: _text_of(str(_folder(path)), chat=True), share=0.03),
}
