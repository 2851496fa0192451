"""Tests GGUF files: weights have the values that the gguf package reads, and damaged files give one clear error
quickly.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from model_helpers import finish, tiny_gguf
from numpy.typing import NDArray
from weights import loaded

from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dtype, Split, from_f32
from megakernel.isa.dtypes import BLOCKS
from megakernel.model import Rope, gguf_checkpoint, load_config, load_sampling, open_checkpoint
from megakernel.model.checkpoint import Storage, StoredRows, rows_of
from megakernel.model.families import FAMILIES
from megakernel.model.file_checkpoint import Naming, tensors_of
from megakernel.model.gguf_checkpoint import GgufFile, keys_of
from megakernel.model.hf_config import parse_hf_config
from megakernel.model.quantise import quantise
from megakernel.model.rope import inverse_frequencies
from megakernel.model.weight_types import for_contexts, stored_as


@pytest.mark.parametrize("quantise", [None, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_1])
def test_values_are_the_packages(path: Path, quantise: Type | None) -> None:
    values = tiny_gguf(path, quantise=quantise)
    if quantise is not None:
        for name, value in values.items():
            if value.ndim == 2:
                values[name] = gguf.quants.dequantize(gguf.quants.quantize(value, quantise), quantise)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.dtype is (Dtype.F32 if quantise is None else Dtype.BF16)
    for compute in (Dtype.F32, Dtype.BF16):
        found = dict(tensors_of(checkpoint, Naming(checkpoint.config, "gguf"), compute))
        assert set(found) == set(values)
        for name, array in found.items():
            kind = compute if array.ndim == 2 else Dtype.F32
            np.testing.assert_array_equal(array, from_f32(values[name], kind), err_msg=name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def test_sampling_that_the_author_recommends(path: Path) -> None:
    """llama.cpp's converter copies it from generation_config.json, as float32 numbers."""
    tiny_gguf(path)
    assert load_sampling(str(path)) == {}
    tiny_gguf(path, general__sampling__temp=0.7, general__sampling__top_k=20, general__sampling__penalty_repeat=1.05)
    assert load_sampling(str(path)) == {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    tiny_gguf(path, general__sampling__top_p="most")
    with pytest.raises(MegakernelError, match=r'm\.gguf: general\.sampling\.top_p is "most", not a finite number'):
        load_sampling(str(path))


def arbitrary(*shape: int, seed: int) -> NDArray[np.uint8]:
    """Random bytes with bit 6 cleared, so that no float16 among them, at any offset, is an infinity or NaN."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8) & 0xBF


@pytest.mark.parametrize("kind", gguf.quants._type_traits, ids=lambda kind: kind.name)
def test_every_type_that_the_package_dequantises(path: Path, kind: Type) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = arbitrary(256, 512 // block * size, seed=int(kind))
    tiny_gguf(path, raw={"blk.0.ffn_down.weight": (rows, kind)})
    got = loaded(open_checkpoint(str(path)), Buffer.W_DOWN)
    np.testing.assert_array_equal(got, gguf.quants.dequantize(rows, kind))


@pytest.mark.parametrize("dtype", BLOCKS)
@pytest.mark.parametrize("weights", ["auto", "the same"])
def test_blocks_that_the_file_has_are_kept(path: Path, dtype: Dtype, weights: str) -> None:
    """Quantised blocks keep their bytes. Quantising again would change them, because their scales are arbitrary."""
    assert BLOCKS[dtype][:2] == gguf.GGML_QUANT_SIZES[Type[dtype.name]]
    rows = arbitrary(256, dtype.row_bytes(512), seed=4)
    tiny_gguf(path, raw={"blk.0.ffn_down.weight": (rows, Type[dtype.name])})
    name = dtype.name.lower() if weights == "the same" else weights
    checkpoint = stored_as(open_checkpoint(str(path)), name)
    assert checkpoint.storage[Buffer.W_DOWN] == Storage(((StoredRows(dtype, 256),),))
    (part,) = rows_of(checkpoint, Buffer.W_DOWN, 0, Split(checkpoint.config.sizes(Dtype.F32)))
    assert part.dtype is dtype
    np.testing.assert_array_equal(part.data, rows)


def test_shape_from_metadata(path: Path) -> None:
    bias = {"blk.0.attn_q.bias": np.ones(256, np.float32)}
    lists: dict[str, Any] = {"llama__attention__head_count_kv": [2, 2], "llama__feed_forward_length": [512]}
    lists["llama__attention__layer_norm_epsilon"] = 1e-6  # no family reads it
    tiny_gguf(path, tensors=bias, tokenizer__ggml__eos_token_id=2, tokenizer__ggml__eot_token_id=3, **lists)
    config = load_config(str(path))
    assert (config.hidden, config.ffn, config.layers, config.heads, config.kv_heads) == (256, 512, 1, 4, 2)
    assert (config.vocab, config.max_context, config.head_dim) == (70, 128, 64)
    assert (config.family, config.tied, config.eos_ids) == ("llama", False, (2, 3))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    biases = loaded(open_checkpoint(str(path)), Buffer.B_QKV)
    np.testing.assert_array_equal(biases, np.r_[np.ones(256), np.zeros(256)])


@pytest.mark.parametrize(
    ("metadata", "config", "context"),
    [
        ({"factor": 4.0}, {"factor": 4.0}, 512),
        ({"factor": 2.0, "original_context_length": 32}, {"factor": 2.0, "original_max_position_embeddings": 32}, 128),
        (
            {"factor": 4.0, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0},
            {"factor": 4.0, "beta_fast": 8, "beta_slow": 2},
            512,
        ),
        ({"factor": 4.0, "yarn_log_multiplier": 0.5}, {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}, 512),
        ({"factor": 8.0, "yarn_attn_factor": 1.2079441541679836}, {"factor": 8.0}, 1024),
        ({"factor": 8.0, "yarn_attn_factor": 1.0}, {"factor": 8.0}, 1024),
    ],
)
def test_yarn_as_in_config_json(path: Path, metadata: dict[str, Any], config: dict[str, Any], context: int) -> None:
    tiny_gguf(path, llama__rope__scaling__type="yarn", **{f"llama__rope__scaling__{k}": v for k, v in metadata.items()})
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}
    raw |= {"max_position_embeddings": 128, "vocab_size": 70, "intermediate_size": 512}
    want = parse_hf_config({**raw, "rope_scaling": {"type": "yarn", **config}}, "")
    found = load_config(str(path))
    assert (found.rope, found.max_context) == (want.rope, want.max_context) and want.max_context == context
    metadata = {"type": "yarn", "factor": 4.0, "attn_factor": 0.5}
    tiny_gguf(path, **{f"llama__rope__scaling__{key}": value for key, value in metadata.items()})
    assert load_config(str(path)).rope.attention == 0.5 * (0.1 * math.log(4) + 1)


def test_longrope(path: Path) -> None:
    """LongRoPE has two lists of factors. The maximum context of the engine decides which one all requests use."""
    long, short = np.linspace(2, 9, 32, dtype=np.float32), np.linspace(1, 2, 32, dtype=np.float32)
    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    how = {"llama__rope__scaling__type": "longrope", "llama__rope__scaling__original_context_length": 64}
    tiny_gguf(path, tensors=tensors, **how, llama__rope__scaling__attn_factor=1.25)
    checkpoint = open_checkpoint(str(path))
    for context, factors in ((128, long), (65, long), (64, short)):
        table = loaded(for_contexts(checkpoint, context), Buffer.INV_FREQ)
        np.testing.assert_allclose(table, [inverse_frequencies(Rope(), 64) / factors, np.full(32, 1.25)], rtol=1e-6)
    del tensors["rope_factors_short.weight"]
    tiny_gguf(path, tensors=tensors, **how)
    with pytest.raises(MegakernelError, match="longrope needs both"):
        open_checkpoint(str(path))


def split(path: Path, parts: int = 3, **changes: Any) -> list[Path]:
    """Write a small model as parts, as llama.cpp's `gguf-split` does. `changes` are metadata of the second part."""
    whole = tiny_gguf(path)
    names = np.array_split(list(whole), parts)
    files = []
    for number, own in enumerate(names):
        files.append(path.with_name(f"m-{number + 1:05}-of-{parts:05}.gguf"))
        writer = gguf.GGUFWriter(files[-1], "llama")
        if number == 0:
            for key, field in gguf.GGUFReader(path).fields.items():
                if key.startswith("llama."):
                    writer.add_key_value(key, field.contents(), field.types[0])
        values = {"no": number, "count": parts, "tensors.count": len(whole)} | (changes if number == 1 else {})
        for key, value in values.items():
            (writer.add_int32 if key == "tensors.count" else writer.add_uint16)(f"split.{key}", value)
        for name in own:
            writer.add_tensor(name, whole[name])
        finish(writer)
    return files


def test_a_split_model_opens_from_any_part(path: Path) -> None:
    files = split(path)
    want = open_checkpoint(str(path))
    for opened in (*files, files[0].parent):
        if opened == files[0].parent:
            path.unlink()  # the parts are now the only model in the folder
        checkpoint = open_checkpoint(str(opened))
        assert checkpoint.config == want.config
        for buffer in (Buffer.EMBED, Buffer.W_QKV, Buffer.W_DOWN, Buffer.LM_HEAD):
            np.testing.assert_array_equal(loaded(checkpoint, buffer), loaded(want, buffer))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda files: files[2].unlink(), r"m-00003-of-00003.gguf does not exist: .* needs all 3 parts"),
        (lambda files: files[0].unlink(), r"m-00001-of-00003.gguf does not exist"),
        (lambda files: files[2].write_bytes(files[1].read_bytes()), r"twice|is not part 3 of 3"),
        (lambda files: files[2].write_bytes(files[2].read_bytes()[:-9]), r"00003.gguf is damaged"),
        (lambda files: files[1].rename(files[1].with_name("x.gguf")), r"x.gguf contains part 2 of a model in 3 parts"),
        (lambda files: split(files[0].with_name("n.gguf"), count=4), r"00002-of-00003.gguf .*(not part|part 2 of a)"),
        (lambda files: split(files[0].with_name("n.gguf"), no=7), r"00002-of-00003.gguf is (not part 2|damaged)"),
    ],
)
@pytest.mark.parametrize("opened", [0, 1])
def test_damaged_parts_are_named(path: Path, damage: Any, message: str, opened: int) -> None:
    files = split(path)
    damage(files)
    given = next((f for f in (files[opened], files[1 - opened], path.with_name("x.gguf")) if f.exists()), path)
    if (moved := path.with_name("x.gguf")).exists():
        given = moved
    with pytest.raises(MegakernelError, match=message):
        open_checkpoint(str(given))


def test_types_without_arithmetic_are_counted(path: Path) -> None:
    """Weights of some types are widened when they are loaded. Their bytes are counted, so that a message can say so."""
    block, size = gguf.GGML_QUANT_SIZES[Type.IQ4_XS]
    rows = arbitrary(256, 512 // block * size, seed=1)
    tiny_gguf(path, raw={"blk.0.ffn_down.weight": (rows, Type.IQ4_XS)})
    assert open_checkpoint(str(path)).widened == {"IQ4_XS": rows.nbytes}
    tiny_gguf(path, quantise=Type.Q8_0)
    assert open_checkpoint(str(path)).widened == {}


def test_the_documents_name_every_type() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    kept, widened = text.split("Other GGUF types are widened")
    for kind in gguf.quants._type_traits:
        own = kept if kind.name in Dtype.__members__ else widened
        assert re.search(rf"\b{kind.name}\b", own), kind.name


@pytest.mark.parametrize(("architecture", "context", "window"), [("llama", 96, 0), ("mistral3", 128, 96)])
def test_a_window_is_applied_or_limits_the_context(path: Path, architecture: str, context: int, window: int) -> None:
    tiny_gguf(path, architecture, **{f"{architecture}__attention__sliding_window": 96})
    config = load_config(str(path))
    assert (config.max_context, config.window) == (context, window)


@pytest.mark.parametrize(
    ("pattern", "full"),
    [
        (None, {"gemma3": (5,), "gpt-oss": (1, 3, 5), "olmo2": (3,)}),
        (3, (2, 5)),
        (0, ()),
        ([True, False] * 3, (1, 3, 5)),
        ([0, 1, 1, 0, 1, 1], (0, 3)),
    ],
)
@pytest.mark.parametrize("architecture", ["gemma3", "gpt-oss", "olmo2"])
def test_layers_without_windows_are_those_of_llama_cpp(architecture: str, pattern: Any, full: Any) -> None:
    values = {"attention.sliding_window": 96, "block_count": 6, "embedding_length": 64, "attention.head_count": 4}
    values |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
    values |= {} if pattern is None else {"attention.sliding_window_pattern": pattern}
    family, prefix = next(f for f in FAMILIES.values() if architecture in f.gguf), f"{architecture}."
    metadata = {prefix + key: value for key, value in values.items()}
    found = family.fields_of(keys_of(metadata, "m.gguf", prefix, family))
    assert (found["window"], found["full_layers"]) == (96, full[architecture] if pattern is None else full)
    for key, value in [("sliding_window_pattern", 1)] + [("sliding_window", 0)] * (architecture != "gpt-oss"):
        keys = keys_of({**metadata, f"{prefix}attention.{key}": value}, "m.gguf", prefix, family)
        assert not family.fields_of(keys).keys() & {"window", "full_layers", "local_theta"}


@pytest.mark.parametrize(
    ("named", "metadata"),
    [
        ("rope.freq_base_swa = 20000.0 is not supported: it must be 10000", {"gpt-oss__rope__freq_base_swa": 2e4}),
        ("true or false for each of 1 layers", {"olmo2__attention__sliding_window_pattern": ["L"]}),
        ("rope.scaling.type 'ntk'", {"llama__rope__scaling__type": "ntk"}),
        ("yarn_ext_factor", {"llama__rope__scaling__yarn_ext_factor": 0.5}),
        ("yarn_attn_factor = 1.5 .* must be 1.0$", {"llama__rope__scaling__yarn_attn_factor": 1.5}),
        (
            "yarn_attn_factor = 1.5 .* must be 1.0 or 1.138",
            {"llama__rope__scaling__type": "yarn"}
            | {f"llama__rope__scaling__{key}": n for key, n in {"factor": 4.0, "yarn_attn_factor": 1.5}.items()},
        ),
        ("rope.scaling.alpha", {"llama__rope__scaling__alpha": 1.5}),
        ("beta_slow", {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_beta_slow": 50.0}),
        ("rope.dimension_count", {"llama__rope__dimension_count": 32}),
        ("attention.value_length", {"llama__attention__value_length": 32}),
        ("qwen2.expert_count", {"qwen2__expert_count": 8}),
        ("llama.expert_used_count is missing", {"llama__expert_count": 8}),
        ("expert_used_count = 9 is not supported", {"llama__expert_count": 8, "llama__expert_used_count": 9}),
        ("longrope needs both", {"mistral3__rope__scaling__type": "longrope"}),
        ("mistral3.attention.temperature_scale", {"mistral3__attention__temperature_scale": 0.1}),
        ("qwen2.attention.sliding_window", {"qwen2__attention__sliding_window": "wide"}),
        ("logit_scale", {"llama__logit_scale": 2.0}),
        ("head_dim is 0", {"gemma3__attention__key_length": 0}),
        ("vocab_size", {"llama__vocab_size": "many"}),
        (r"feed_forward_length is \[512, 256\]", {"llama__feed_forward_length": [512, 256]}),
        ("the file is a LoRA adapter: merge it", {"llama__rope__freq_base": 1e4, "general__type": "adapter"}),
        ("only the image encoder", {"clip__vision__block_count": 1, "general__type": "mmproj"}),
        ("freq_base", {"llama__rope__freq_base": float("nan")}),
        ("'jina-bert-v2' is not supported: it must be one of .*'llama', ", {"jina-bert-v2__vocab_size": 70}),
    ],
)
def test_refused_by_name(path: Path, named: str, metadata: dict[str, Any]) -> None:
    tiny_gguf(path, next(iter(metadata)).split("__")[0], **metadata)
    with pytest.raises(MegakernelError, match=named):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.attn_q.weight": np.ones((128, 256), np.float32)}, r"attn_q.*\[128, 256\].*\[256, 256\]"),
        ({"output_norm.weight": np.ones(256, np.int32)}, "output_norm.weight .*I32"),
    ],
)
def test_wrong_tensors_are_named(path: Path, tensors: dict[str, Any], message: str) -> None:
    tiny_gguf(path, tensors=tensors)
    with pytest.raises(MegakernelError, match=message):
        open_checkpoint(str(path))


@pytest.mark.parametrize("axes", [4, 5])
def test_a_tensor_has_four_axes_at_most(path: Path, axes: int) -> None:
    tiny_gguf(path, tensors={"extra": np.ones([1] * (axes - 1) + [32], np.float32)})
    if axes == 4:
        assert GgufFile(path).tensors["extra"].shape == (1, 1, 1, 32)
    else:
        with pytest.raises(MegakernelError, match="tensor extra has 5 axes"):
            GgufFile(path)


@pytest.mark.parametrize("dtype", [Dtype.Q4_K, Dtype.Q5_K, Dtype.Q6_K])
def test_superblocks_are_near_the_weights_that_they_stand_for(dtype: Dtype) -> None:
    """Quantised weights, as the gguf package reads them, differ from the originals by at most 1.5 steps."""
    weights = np.random.default_rng(8).standard_normal((3, 512)).astype(np.float32)
    read = gguf.quants.dequantize(quantise(weights, dtype), Type[dtype.name])
    group, steps = (16, 62) if dtype is Dtype.Q6_K else (32, 15 if dtype is Dtype.Q4_K else 31)
    groups = weights.reshape(-1, group)
    widest = 2 * np.abs(groups).max(axis=1) if dtype is Dtype.Q6_K else np.ptp(np.pad(groups, [(0, 0), (0, 1)]), axis=1)
    error = np.abs(read - weights).reshape(-1, group).max(axis=1)
    assert (error <= 1.5 * widest / steps).all()


def test_scales_of_superblocks_are_those_of_their_weights() -> None:
    """In a Q6_K block, a group with smaller weights is as exact as the first, because it has a scale of its own."""
    whole = np.array([-31, 31, *range(-7, 7)], np.float32)
    weights = np.concatenate([whole, *[whole * (100 / 127)] * 15])[None]
    read = gguf.quants.dequantize(quantise(weights, Dtype.Q6_K), Type.Q6_K)
    np.testing.assert_allclose(read, weights, atol=0.05)


def test_cut_anywhere(path: Path) -> None:
    tiny_gguf(path, quantise=Type.Q8_0)
    data = path.read_bytes()
    for keep in [*range(0, 1200, 7), len(data) // 2, len(data) - 40, len(data) - 1]:
        path.write_bytes(data[:keep])
        with pytest.raises(MegakernelError, match=r"is damaged|is empty"):
            open_checkpoint(str(path))


def test_lying_lengths(path: Path) -> None:
    """With a huge number in place of any eight bytes of the header, the file is refused or loads, but never crashes."""
    tiny_gguf(path, quantise=Type.Q8_0, tokenizer__ggml__tokens=["a", "b"], general__alignment=32)
    data = path.read_bytes()
    refused = 0
    for position in range(4, 1200, 20):
        for lie in (2**64 - 1, 2**31):
            path.write_bytes(data[:position] + lie.to_bytes(8, "little") + data[position + 8 :])
            try:
                loaded(open_checkpoint(str(path)), Buffer.FINAL_NORM)
            except MegakernelError:
                refused += 1
    assert refused > 60


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_scales_that_are_no_numbers_are_refused_by_name(path: Path, kind: Dtype) -> None:
    """An infinite scale is refused, and the error names the tensor. All other bytes of a block may be anything."""
    block, name = BLOCKS[kind], "blk.0.ffn_down.weight"
    rows = np.full((256, 512 // block.weights, block.bytes), 0xFF, np.uint8)
    good, bad = (np.frombuffer(np.float16(x).tobytes(), np.uint8) for x in (-65504, -np.inf))
    scales = [(slice(at, at + 2), bad) for at in block.scales]
    if kind is Dtype.MXFP4:  # 6 is the largest value, and 6 * 2^(253 - 127) is infinite
        good, scales = np.uint8([252]), [(slice(0, 1), np.uint8([exponent])) for exponent in (253, 255)]
    for at, _ in scales:
        rows[..., at] = good
    for at, value in ((None, bad), *scales):
        if at is not None:
            rows[-1, -1, at] = value
        tiny_gguf(path, raw={name: (rows.reshape(256, -1), Type[kind.name])})
        checkpoint = open_checkpoint(str(path))
        if at is None:
            loaded(checkpoint, Buffer.W_DOWN)
            continue
        with pytest.raises(MegakernelError, match=rf"tensor {name} in .*m\.gguf contains a NaN or an infinity"):
            loaded(checkpoint, Buffer.W_DOWN)
        rows[-1, -1, at] = 0


def test_elements_of_metadata_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts metadata entries, tensors and the elements of lists together."""
    path = tmp_path / "tiny.gguf"
    tiny_gguf(path, "llama")
    file = GgufFile(path)
    lists = sum(len(value) for value in file.metadata.values() if isinstance(value, list))
    announced = len(file.metadata) + len(file.tensors) + lists
    monkeypatch.setattr(gguf_checkpoint, "MOST_METADATA_ELEMENTS", announced)
    GgufFile(path)
    monkeypatch.setattr(gguf_checkpoint, "MOST_METADATA_ELEMENTS", announced - 1)
    with pytest.raises(MegakernelError, match=f"the limit is {announced - 1}"):
        GgufFile(path)
