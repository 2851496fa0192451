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
    """Sizes of tiles and panels. No result depends on them, in any bit. 0 means the machine's value or the cost model's
    choice.

    tile_rows, tile_cols    the maximum numbers of rows and output columns of a matmul tile, at most the machine's
    panel                   row blocks that share one pass over the weights
    reduce_lag, norm_lag    lags, in panels, if a layer ends with the next layer's norm: from the last stage to the
                            reduction, so that the partial sums of all ranks have arrived, and from the reduction to the
                            norm
    claims                  attention slots per worker, if workers claim slots; the step's attention is then divided
                            into equal slots where possible
    """

    tile_rows: int = 0
    tile_cols: int = 0
    panel: int = 0
    reduce_lag: int = 3
    norm_lag: int = 2
    claims: int = 4


@dataclass(frozen=True)
class Options:
    """Options of a compilation. `auto` chooses what is predicted to be faster. Only `o` and
    `matmul` affect the numerics class, which determines the bits of the results.

    o              O projection: W_O sharded by head, or replicated on every rank
    residual       token rows dealt to owner ranks, or kept on every rank
    norm           own: a layer begins with its own attention norm; next: it ends with the next layer's attention norm;
                   inside: each matmul that reads normalised rows normalises them itself
    queue          what workers claim at run time: nothing, attention, or the whole body of a layer. If it is auto,
                   `tune.Fastest` simulates all possibilities that these options leave open, and `compile_program`
                   treats it as none
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
