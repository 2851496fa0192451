"""The options of the compiler: their names, their possible values and their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from megakernel.errors import MegakernelError

CHOICES: dict[str, tuple[str, ...]] = {
    "o": ("auto", "sharded", "replicated"),
    "residual": ("auto", "dealt", "replicated"),
    "norm": ("auto", "own", "next", "inside"),
    "queue": ("auto", "none", "attention", "body"),
    "matmul": ("auto", "dots", "tensor"),
}


@dataclass(frozen=True)
class Options:
    """How to compile a program. For `auto`, the compiler chooses the value that it predicts to be fastest. Only `o`,
    `matmul` and `expert_parallel` affect the bits of the results.

    o              O projection: W_O sharded by head, or replicated on every rank
    residual       the rows of the residual: each on one owner rank (dealt), or on every rank (replicated)
    norm           own: a layer begins with its own attention norm; next: a layer ends with the next layer's attention
                   norm; inside: each matmul that reads normalised rows normalises them itself
    queue          what workers claim from a queue at run time: nothing (none), attention, or a whole layer (body).
                   For auto, `tune.Fastest` simulates all possibilities that these options leave open;
                   `compile_program` treats auto as none
    interleave     whether a worker may alternate between memory-bound and compute-bound work of neighbouring
                   operations; if off, operations run one after another
    matmul         dot products on CUDA cores (for few rows) or matrix units; `Spec.matmul` decides auto. It has no
                   effect on a CPU
    expert_parallel  whether each rank has some whole experts, instead of a part of every expert
    panel          the number of row blocks (tiles of rows) that share one pass over the weights, or the least one if
                   `place` finds that more fit in the L2 cache; 0: the cost model chooses"""

    o: str = "auto"
    residual: str = "auto"
    norm: str = "auto"
    queue: str = "auto"
    matmul: str = "auto"
    interleave: bool = True
    expert_parallel: bool = False
    panel: int = 0

    @property
    def claimed(self) -> str:
        """What workers claim from queues at run time: "attention", "body" (whole layers) or "" for nothing."""
        return "" if self.queue in ("auto", "none") else self.queue

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise MegakernelError(f"cannot compile with {name} = {value!r}: it must be {' or '.join(known)}")
