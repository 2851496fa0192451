"""Training on paper: state, FLOPs, days."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..machine import Hardware

WEIGHT_BYTES = 2.0  # bf16
OPTIMIZER_BYTES = 8.0  # Adam's two moments in fp32
STATE_BYTES = WEIGHT_BYTES + OPTIMIZER_BYTES  # per parameter
FLOPS_PER_PARAMETER_AND_TOKEN = 6.0  # forward 2, backward 4
SECONDS_PER_DAY = 86400.0


@dataclass(frozen=True)
class Run:
    """A whole training run."""

    flops: float
    flops_per_s: float

    @property
    def seconds(self) -> float:
        return self.flops / self.flops_per_s

    @property
    def days(self) -> float:
        return self.seconds / SECONDS_PER_DAY


def state_bytes(parameters: float) -> float:
    """Weights and optimizer of a model, 10 bytes per parameter; gradients and activations not counted."""
    return STATE_BYTES * parameters


def gpus_to_hold(size_bytes: float, hardware: Hardware) -> int:
    """GPUs whose memory together holds so much."""
    return ceil(size_bytes / hardware.chip.hbm_bytes)


def training_run(parameters: float, tokens: float, gpus: int, hardware: Hardware, utilisation: float) -> Run:
    """6 P T FLOPs at `utilisation` of the bf16 peak."""
    return Run(FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens, gpus * hardware.flops_per_s("bf16") * utilisation)


def tokens_per_gpu(sequences: int, sequence_tokens: int, gpus: int) -> float:
    """Of one batch."""
    return sequences * sequence_tokens / gpus
