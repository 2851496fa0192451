"""Models: their configurations, weights and tokenizers, from local files or downloads."""

from .checkpoint import Checkpoint
from .config import ModelConfig, Rope, RopeKind
from .open import gguf_path, load_config, load_pooling, load_sampling, load_tokenizer, local_checkpoint, open_checkpoint
from .pypi import PACKAGES, cached, pull
from .random_checkpoint import KNOWN_SHAPES, RandomCheckpoint
