"""How a program may be compiled, where there is a choice."""

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
    """Sizes of tiles and panels, which change no bits. 0: the machine's, or what the cost model says.

    tile_rows, tile_cols    most rows, and most output columns, of a matmul tile; no more than the machine's
    panel                   row blocks that share one pass over the weights
    reduce_lag, norm_lag    where a layer ends with the next one's norm: panels by which its reduction follows the last
                            stage, so that partials of all ranks have come, and by which the norm follows the reduction
    claims                  attention slots for each worker where it claims them: the work of a slot is then an even
                            share of a step's at best
    """

    tile_rows: int = 0
    tile_cols: int = 0
    panel: int = 0
    reduce_lag: int = 3
    norm_lag: int = 2
    claims: int = 4


@dataclass(frozen=True)
class Options:
    """`auto` takes what is predicted to be faster. Only `o` and `matmul` are part of the numerics class.

    o              O projection: W_O sharded by head, or all of it on every rank
    residual       token rows dealt to owner ranks, or all on every rank
    norm           a layer begins with its own attention norm, or ends with the next one's, or each matmul that reads
                   normalised rows normalises them itself
    queue          what workers claim at run time: nothing, attention, or the whole layer body. For auto,
                   `tune.Fastest` simulates all that these options leave open; `compile_program` claims nothing
    pairs          whether a worker is two SMs, which load each weight tile once for both (matrix units of GPUs only);
                   `compile_program` takes auto for off
    interleave     whether memory-bound and compute-bound work of neighbouring phases may share a worker's time;
                   off: phases one after the other
    matmul         dot products, for few rows, or matrix units; `with_matmul` says what auto is. Nothing to a CPU
    overlap_ranks  off: what comes from another rank is waited for by whole phases, not by row blocks
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
        """What workers claim at run time, or nothing."""
        return "" if self.queue in ("auto", "none") else self.queue

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in CHOICES and value not in CHOICES[field.name]:
                known = " or ".join(CHOICES[field.name])
                raise MegakernelError(f"cannot compile with {field.name} = {value!r}: it must be {known}")
