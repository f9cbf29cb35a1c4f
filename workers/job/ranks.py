"""The processes of one job, as torchrun's environment variables describe them."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.loopback import BACKEND, open_address


@dataclass(frozen=True)
class JobRanks:
    """This process among those of its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Those of this machine."""

    @property
    def launcher(self) -> str:
        """What stands before ``geartrain`` in a command that starts as many; on each machine, if there are several."""
        if self.world_size == 1:
            return ""
        meeting = f"--rdzv-backend {BACKEND} " if self.local_world_size == self.world_size else ""
        return f"torchrun {meeting}--nproc-per-node {self.local_world_size} -m "

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and speaks to the person."""
        return self.rank == 0

    def share(self, value: int) -> int:
        """Rank 0's ``value`` (below 2^63), on every rank."""
        if self.world_size == 1:
            return value
        shared = torch.tensor([value], device=self._device())
        dist.broadcast(shared, src=0)
        return int(shared.item())

    def any(self, value: bool) -> bool:
        """Whether ``value`` is true on some rank."""
        return self.any_of(value)[0]

    def any_of(self, *values: bool) -> tuple[bool, ...]:
        """For each value, whether it is true on some rank."""
        if self.world_size == 1:
            return values
        shared = torch.tensor([int(value) for value in values], device=self._device())
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return tuple(bool(value) for value in shared.tolist())

    def gather(self, data: bytes) -> list[bytes]:
        """The ``data`` of all ranks in rank order, on every rank; lengths may differ."""
        if self.world_size == 1:
            return [data]
        device = self._device()
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=device))
        lengths = [int(size.item()) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        if data:  # torch makes no tensor of nothing
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def new_job_id(self) -> str:
        """Eight hexadecimal digits, the same on all ranks, that no other job has."""
        return f"{self.share(secrets.randbits(32)):08x}"

    @staticmethod
    def _device() -> torch.device:
        nccl = "nccl" in str(dist.get_backend())
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


@contextmanager
def joined_ranks(device: str) -> Iterator[JobRanks]:
    """Join the process group that torchrun set up, and leave it at the end; alone without torchrun.

    Who trains in it lets the model go before the end: DistributedDataParallel, even one that only awaits collection,
    keeps the threads of gloo, and those that outlive the interpreter abort the process.

    Raises ConfigError if torchrun's variables are incomplete, or if strangers could join.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        _require_closed_store()
        yield JobRanks()
        return
    try:
        ranks = JobRanks(
            int(os.environ["RANK"]),
            world_size,
            int(os.environ.get("LOCAL_RANK", "0")),
            int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        )
    except KeyError as exc:
        raise ConfigError(f"WORLD_SIZE is {world_size}, but {exc} is not set; start the worker with torchrun") from exc
    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_cuda:
        torch.cuda.set_device(ranks.local_rank)
    _require_one_machine(ranks)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    try:
        _require_closed_store()
        yield ranks
    finally:
        gc.collect()
        dist.destroy_process_group()


_RISK = "torchrun's c10d rendezvous runs code that whoever reaches it sends"


def _require_one_machine(ranks: JobRanks) -> None:
    """Raise ConfigError if the ranks meet over a network, unless the user has accepted that."""
    if ranks.local_world_size != ranks.world_size and not _accepts_risk():
        raise ConfigError(
            f"the ranks are on several machines, and {_RISK}; accept that on a private network with INSECURE=1, or "
            "train on one machine"
        )


def _require_closed_store() -> None:
    """Raise ConfigError if other machines reach the store where the ranks met, unless the user has accepted that."""
    port = int(os.environ.get("MASTER_PORT", "0"))
    address = None if port == 0 or _accepts_risk() else open_address(port)
    if address is not None:
        raise ConfigError(
            f"other machines reach the store of the ranks, {address} port {port}, and {_RISK}; start them with "
            f"'torchrun --rdzv-backend {BACKEND} ...', or accept that on a private network with INSECURE=1"
        )


def _accepts_risk() -> bool:
    return os.environ.get("INSECURE") == "1"
