"""Rendezvous store of ranks at the scheduler, protected by its certificates.

torch's own TCPStore trusts any peer that reaches its port.

``torchrun --rdzv-backend geartrain`` (``workers/rendezvous.py``) announces this store to ranks by an environment
variable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from geartrain.ams.client.jobs.rendezvous import RendezvousValues

VARIABLE = "GEARTRAIN_RANKS_STORE"
"""``HOST:PORT/JOB``: the scheduler's address, and the job given by ``--rdzv-id``."""


def ranks_key(master_port: int | str) -> str:
    """Return the key in the job's values under which the store's name for one start of the ranks is."""
    return f"ranks/{master_port}"


_store: Store | None = None
"""Reference that keeps the Python part of the store alive; torch.distributed holds only the C++ part."""


class SchedulerStore(Store):
    """Store of torch.distributed. Thread-safe. A call costs one request to the scheduler, a wait several.

    Raises SchedulerUnavailable, and torch's DistStoreError where a wait takes longer than its time limit.
    """

    timeout: timedelta  # torch's

    def __init__(self, values: RendezvousValues) -> None:
        super().__init__()
        self.values = values

    def set(self, key: str, value: str | bytes) -> None:
        self.values.write(key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._awaited(keys, self.timeout))

    def add(self, key: str, value: int) -> int:
        return int(self.values.write(key, add=value)[0].value or b"0")

    def check(self, keys: list[str]) -> bool:
        return all(found.value is not None for found in self.values.read(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._awaited(keys, timeout or self.timeout)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        while True:
            (found,) = self.values.read([key])
            if (found.value or b"") != expected:
                return expected if found.value is None else found.value
            now, was_written = self.values.write(key, desired, expected=found.version)
            if was_written:
                return now.value or b""

    def delete_key(self, key: str) -> bool:
        (found,) = self.values.read([key])
        self.values.write(key)
        return found.value is not None

    deleteKey = delete_key  # noqa: N815  # by this name C++ asks for it

    def _awaited(self, keys: Sequence[str], timeout: timedelta) -> tuple[bytes, ...]:
        values = self.values.wait(keys, timeout.total_seconds())
        if values is None:
            raise dist.DistStoreError(f"no value of {', '.join(keys)} arrived within {timeout}: is a rank missing?")
        return values


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None) -> None:
    """Join the ranks that torchrun started, as ``torch.distributed.init_process_group(backend)`` does.

    Under ``torchrun --rdzv-backend geartrain`` ranks find each other by the scheduler, under the certificates of the
    cluster (``security.folder``), and rank 0 opens no port for it. Any other rendezvous works as torch's. Neither gloo
    nor NCCL encrypts the traffic between ranks.

    Args:
        backend: ``"gloo"``, ``"nccl"``, or another of torch's.
        timeout: Longest wait of ranks for one another; None: torch's own.

    Raises:
        SchedulerUnavailable: It does not answer.
        AccessDenied: The scheduler does not know this process by its certificate.
    """
    scheduler, _, job = os.environ.get(VARIABLE, "").partition("/")
    if not job:
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world_size = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE"))
    name = job
    if (port := os.environ.get("MASTER_PORT")) is not None:  # of torchrun; on Ray each start is a job of its own
        job_store = SchedulerStore(RendezvousValues(scheduler, job))
        name = f"{job}/{job_store.get(ranks_key(port)).decode()}"
        job_store.values.close()
    global _store
    store = _store = SchedulerStore(RendezvousValues(scheduler, name))
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
