"""Synchronous data parallel training: communication of the ranks of one head, and the numbering of their pushes.

Per training forward: two all-gathers (batch sizes, labels; 8 bytes a sample) and an all-reduce of the loss. Per
backward: one all-reduce of one number. Rows and their gradients travel between ranks only through the shards.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash

from geartrain.ams.values.errors import RankLost, SpecMismatch, SyncError
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.ams.values.specs import Ids
from geartrain.bridge.collectives.communicator import Communicator

T = TypeVar("T")

TELL_SECONDS = 5.0
"""Interval at which rank 0 tells waiting ranks that it is at work: below any sensible time limit of a group."""
_FAILED, _SUCCEEDED, _AT_WORK = range(3)


def float_bits(value: float) -> int:
    """Return the bits of the number as an int64, to be exchanged among integers."""
    return int(np.float64(value).view(np.int64))


def float_of(bits: int) -> float:
    """Return the number of :func:`float_bits`."""
    return float(np.int64(bits).view(np.float64))


class SyncRanks(Communicator):
    """Ranks that train rows of a cluster in step; every rank makes the same calls in the same order.

    Attributes: ``job`` (a name no other run has), ``sequence`` (of the next push, from 1).
    """

    def __init__(self, name: str, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self._name = name
        self.restart()

    def restart(self) -> None:
        """Start a new job name and sequence, for another table. Every rank calls it; one broadcast."""
        nonce = self.share(secrets.randbits(62))
        self.job = f"{self._name}/{nonce:016x}"
        self.sequence = 1

    def first_then_others(self, action: Callable[[], T], others: Callable[[], T]) -> T:
        """Run ``action``, without collectives, on rank 0 and, once it succeeded, ``others`` on the other ranks.

        It may take longer than the time limit of the process group, as the building of a graph does.
        """
        if self.rank == 0:
            succeeded = _FAILED
            try:
                with self._telling():
                    result = action()
                succeeded = _SUCCEEDED
            finally:
                self.share(succeeded)
            return result
        while (news := self.share(_FAILED)) == _AT_WORK:
            pass
        if news == _FAILED:
            raise SyncError(f"rank 0 of {self.job} failed; its error tells why")
        return others()

    @property
    def acts(self) -> bool:
        """Whether this rank runs the ``action`` of :meth:`first_then_others`."""
        return self.rank == 0

    def write_together(self, action: Callable[[], None], what: str) -> None:
        """Write the rows of all by rank 0; raise on every rank if that fails."""
        del what
        self.first_then_others(action, lambda: None)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """During the block, tell the other ranks from a thread to go on waiting."""
        ended = threading.Event()

        def report() -> None:
            with contextlib.suppress(RankLost):  # a rank is lost: the last share meets that, too
                while not ended.wait(TELL_SECONDS):
                    self.share(_AT_WORK)

        thread = threading.Thread(target=report, name="geartrain-at-work", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def array_from_first(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return rank 0's vector of int64 or int32, on every rank; the others give one of any length."""
        length, is_wide = self.share(len(array)), self.share(int(array.itemsize == 8))
        shared = torch.empty(length, dtype=torch.int64 if is_wide else torch.int32, device="cpu")
        if self.rank == 0:
            shared.copy_(torch.from_numpy(array))
        self.broadcast_from_first(shared)
        return np.asarray(shared.numpy())

    def gather_labels(self, labels: Ids) -> Ids:
        """Return the labels of all ranks in rank order; batches may differ in size."""
        return np.concatenate(self.gather_rows(labels))

    def gather_samples(
        self,
        labels: Ids,
        *,
        amount: float = 0.0,
        failure: Exception | None = None,
        classes: int = 0,
        settings: str = "",
    ) -> tuple[list[Ids], list[float]]:
        """Return the labels and the ``amount`` of each rank; batches may differ in size.

        If any rank has a ``failure`` every rank raises, its own there and SyncError elsewhere. Raises SpecMismatch if
        ``classes``, the fingerprint of the classes that labels number, or ``settings`` differ between ranks.
        """
        digest = xxhash.xxh3_64_intdigest(settings.encode()) >> 2
        numbers = [len(labels), failure is None, classes, digest, float_bits(amount)]
        counts, sound, fingerprints, digests, amounts = map(list, zip(*self.exchange(numbers), strict=True))
        if failure is not None:
            raise failure
        if 0 in sound:
            raise SyncError(f"rank {sound.index(0)} was given features or labels that it refused; its error tells why")
        if len(set(fingerprints)) > 1:
            raise SpecMismatch("the ranks have different classes; add, retire and load the same ones on every rank")
        if len(set(digests)) > 1:
            other = next(rank for rank, its in enumerate(digests) if its != digest)
            raise SpecMismatch(
                f"the ranks have different settings of {self._name!r}: here {settings}, others on rank {other}; give "
                "the same on every rank"
            )
        parts = torch.split(self.gather(torch.from_numpy(labels), counts), counts)
        return [part.numpy() for part in parts], [float_of(bits) for bits in amounts]

    def gather_rows(self, rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the rows [N, …] of every rank, in rank order; N may differ. Two all-gathers, of R · max(N) rows."""
        counts = [count for (count,) in self.exchange([len(rows)])]
        return [part.numpy() for part in torch.split(self.gather(torch.from_numpy(rows), counts), counts)]

    def sync_group(self, sample_count: int) -> SyncGroup:
        """Return this rank's part of the next write."""
        return SyncGroup(
            job=self.job,
            world_size=self.world_size,
            rank=self.rank,
            sequence=self.sequence,
            sample_count=sample_count,
        )
