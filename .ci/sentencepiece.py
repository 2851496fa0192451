"""Reads a vocabulary that SentencePiece trained: a folder whose only vocabulary is tokenizer.model."""

import json
import tempfile
from pathlib import Path

import sentencepiece

from megakernel.model import load_tokenizer

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
CONFIG = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 500, **SIZES}
licence = Path(__file__).parents[1] / "LICENSE"
with tempfile.TemporaryDirectory() as folder:
    sentencepiece.SentencePieceTrainer.train(
        input=str(licence), model_prefix=f"{folder}/tokenizer", vocab_size=500, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    ids = tokenizer.encode("Grant of Copyright License")
    assert tokenizer.decode(ids) == "Grant of Copyright License"
    print(len(ids), repr(tokenizer.decode(ids)))
