"""The options of the compiler."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import MegakernelError

CHOICES: dict[str, tuple[str, ...]] = {
    "o": ("auto", "sharded", "replicated"),
    "residual": ("auto", "dealt", "replicated"),
    "norm": ("auto", "own", "next", "inside"),
    "queue": ("auto", "none", "attention", "body"),
    "matmul": ("auto", "dots", "tensor"),
    "pairs": ("off", "on", "auto"),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of tiles and panels, which change no bits. 0 means the machine's value or the cost model's choice.

    tile_rows, tile_cols    the most rows and the most output columns of a matmul tile, up to the machine's
    panel                   row blocks that share one pass over the weights
    reduce_lag, norm_lag    if a layer ends with the next layer's norm: the number of panels by which its reduction
                            follows the last stage, so that the partial sums of all ranks have arrived, and by which the
                            norm follows the reduction
    claims                  attention slots per worker, if workers claim them; a slot is then at best an even share of
                            the step's attention
    """

    tile_rows: int = 0
    tile_cols: int = 0
    panel: int = 0
    reduce_lag: int = 3
    norm_lag: int = 2
    claims: int = 4


@dataclass(frozen=True)
class Options:
    """Options of a compilation. `auto` chooses what is predicted to be faster. Only `o` and `matmul` affect the
    numerics class.

    o              O projection: W_O sharded by head, or replicated on every rank
    residual       token rows dealt to owner ranks, or kept on every rank
    norm           a layer begins with its own attention norm, or ends with that of the next layer, or each matmul that
                   reads normalised rows normalises them itself
    queue          what workers claim at run time: nothing, attention, or the whole body of a layer. With auto,
                   `tune.Fastest` simulates all possibilities that these options leave open; `compile_program` claims
                   nothing
    pairs          whether a worker is two SMs, which load each weight tile once for both (matrix units of GPUs only);
                   `compile_program` treats auto as off
    interleave     whether memory-bound and compute-bound work of neighbouring phases may share a worker's time; if off,
                   phases run one after another
    matmul         dot products (for few rows) or matrix units; `with_matmul` resolves auto. It has no effect on a CPU
    overlap_ranks  if off, instructions wait for whole phases of other ranks instead of row blocks
    """

    o: str = "auto"
    residual: str = "auto"
    norm: str = "auto"
    queue: str = "auto"
    matmul: str = "auto"
    pairs: str = "off"
    interleave: bool = True
    overlap_ranks: bool = True
    shape: Shape = Shape()

    @property
    def claimed(self) -> str:
        """The part of a layer that workers claim at run time, if any."""
        return "" if self.queue in ("auto", "none") else self.queue

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in CHOICES and value not in CHOICES[field.name]:
                known = " or ".join(CHOICES[field.name])
                raise MegakernelError(f"cannot compile with {field.name} = {value!r}: it must be {known}")
