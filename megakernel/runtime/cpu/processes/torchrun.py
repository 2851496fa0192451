"""Lets the processes of a torchrun job be the ranks. All run the same script, but only rank 0
executes it to its end; the others execute rank 0's messages.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import time
from dataclasses import dataclass

from ....errors import MegakernelError
from .channel import Channel
from .peers import Peer

_PATIENCE_S = 60.0  # the maximum time between the starts of a job's processes


@dataclass(frozen=True)
class Job:
    """A torchrun job, and which of its ranks this process is."""

    rank: int
    size: int

    @property
    def address(self) -> str:
        """The address where rank 0 listens, in Linux's abstract namespace, which has no files."""
        job = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
        return "\0megakernel " + " ".join([str(os.getuid()), *job, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")])


def job() -> Job | None:
    """The job that the environment describes; None outside a job or if this is its only process.

    Raises MegakernelError if the variables contradict each other or the job has several machines.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if any(name not in os.environ for name in names):
        return None
    try:
        rank, size, local = (int(os.environ[name]) for name in names)
    except ValueError:
        raise MegakernelError(f"{', '.join(names)} in the environment are not all whole numbers") from None
    if not 0 <= rank < size:
        raise MegakernelError(f"RANK={rank} and WORLD_SIZE={size} in the environment contradict each other")
    if local != rank:
        raise MegakernelError(
            f"LOCAL_RANK={local} and RANK={rank}: the ranks of a model must be processes of one machine"
        )
    return Job(rank, size) if size > 1 else None


def join(tp: int) -> bool:
    """On rank 0 of a job of `tp` ranks, wait until all have connected, and return True. Outside a
    job, return False.

    On the other ranks, the call does not return: they serve rank 0 until it ends, and then end too.
    Raises MegakernelError if the job has another number of processes.
    """
    this = job()
    if this is None or tp == 1:
        return False
    if this.size != tp:
        raise MegakernelError(
            f"tp={tp} needs {tp} processes, but the job has {this.size}: start {tp} processes, or use tp={this.size}"
        )
    if this.rank == 0:
        gather()
        return True
    from .rank_process import serve

    if not serve(_connect(this)):
        raise MegakernelError(f"rank {this.rank}: rank 0 has ended in the middle of its work")
    raise SystemExit(0)


def _connect(this: Job) -> Channel:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            connection.connect(this.address)
            break
        except OSError as e:
            if time.monotonic() > deadline:
                raise MegakernelError(
                    f"rank {this.rank}: rank 0 opened no model within {_PATIENCE_S:.0f} s ({e.strerror})"
                ) from e
            time.sleep(0.05)
    connection.send(str(this.rank).encode())
    return Channel(connection)


@functools.cache
def gather() -> list[Peer]:
    """On rank 0, wait for the other ranks and return the connections to them. All models share
    these connections.
    """
    this = job()
    assert this is not None and this.rank == 0
    found: dict[int, Peer] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(this.address)
        listener.listen(this.size)
        deadline = time.monotonic() + _PATIENCE_S
        while len(found) < this.size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = listener.accept()
                connection.setblocking(True)
                rank = int(connection.recv(64) or -1)
            except TimeoutError:
                missing = sorted(set(range(1, this.size)) - set(found))
                raise MegakernelError(
                    f"ranks {', '.join(map(str, missing))} did not connect within {_PATIENCE_S:.0f} s: "
                    "is the script the same on every rank?"
                ) from None
            found[rank] = Peer(rank, Channel(connection), None)
    peers = [found[rank] for rank in sorted(found)]
    # If the script ends without closing its model, tell the other ranks, because otherwise they
    # would report that rank 0 crashed.
    for peer in peers:
        atexit.register(peer.dismiss)
    return peers
