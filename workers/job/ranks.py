"""Processes of one job, from torchrun's environment variables."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from shlex import quote

import torch
import torch.distributed as dist

from geartrain.ams.values.errors import ConfigError
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.scheduler_store import VARIABLE, init_process_group
from geartrain.workers.loopback import BACKEND, BY_SCHEDULER, open_address


class JobRanks(Communicator):
    """This process among those of its job.

    Attributes: ``local_rank`` and ``local_world_size``, among those of this machine.
    """

    def __init__(self, local_rank: int = 0, local_world_size: int = 1) -> None:
        super().__init__()
        self.local_rank, self.local_world_size = local_rank, local_world_size

    @property
    def launcher(self) -> str:
        """Prefix of ``geartrain`` in a command that starts as many ranks; on each machine, if there are several."""
        if self.world_size == 1:
            return ""
        scheduler, _, job = os.environ.get(VARIABLE, "").partition("/")
        if job:
            nodes = -(-self.world_size // self.local_world_size)
            meeting = (
                f"--rdzv-backend {BY_SCHEDULER} --rdzv-endpoint {scheduler} --rdzv-id {quote(job)} --nnodes {nodes} "
            )
        else:
            meeting = f"--rdzv-backend {BACKEND} " if self.local_world_size == self.world_size else ""
        return f"torchrun {meeting}--nproc-per-node {self.local_world_size} -m "

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and prints."""
        return self.rank == 0

    def new_job_id(self) -> str:
        """Return eight hexadecimal digits, the same on all ranks, unique to the job."""
        return f"{self.share(secrets.randbits(32)):08x}"


@contextmanager
def joined_ranks(device: str, *, alone: bool = False) -> Iterator[JobRanks]:
    """Join torchrun's process group, and leave it at the end; alone without torchrun, or if ``alone``.

    Free the model before the end: DistributedDataParallel, even one that only awaits collection, keeps the threads of
    gloo, and those that outlive the interpreter abort the process.

    Raises ConfigError if torchrun's variables are incomplete, or if strangers could join.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or alone:
        _require_closed_store()
        yield JobRanks()
        return
    if "RANK" not in os.environ:
        raise ConfigError(f"WORLD_SIZE is {world_size}, but 'RANK' is not set; start the worker with torchrun")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_cuda:
        torch.cuda.set_device(local_rank)
    if local_world_size != world_size and VARIABLE not in os.environ and not _accepts_risk():
        raise ConfigError(
            f"the ranks are on several machines, and {_RISK}; start them with 'torchrun --rdzv-backend {BY_SCHEDULER} "
            "--rdzv-endpoint SCHEDULER ...', or accept that on a private network with INSECURE=1"
        )
    init_process_group("nccl" if on_cuda else "gloo")
    try:
        _require_closed_store()
        yield JobRanks(local_rank, local_world_size)
    finally:
        gc.collect()
        dist.destroy_process_group()


_RISK = "torchrun's c10d rendezvous runs code that whoever reaches it sends"


def _require_closed_store() -> None:
    """Raise ConfigError if other machines reach the store where the ranks met, unless the user has accepted that."""
    port = 0 if VARIABLE in os.environ else int(os.environ.get("MASTER_PORT", "0"))
    address = None if port == 0 or _accepts_risk() else open_address(port)
    if address is not None:
        raise ConfigError(
            f"other machines reach the store of the ranks, {address} port {port}, and {_RISK}; start them with "
            f"'torchrun --rdzv-backend {BACKEND} ...', or accept that on a private network with INSECURE=1"
        )


def _accepts_risk() -> bool:
    return os.environ.get("INSECURE") == "1"
