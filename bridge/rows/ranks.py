"""Synchronous data parallel training: what the ranks of one head tell each other, and the numbering of their pushes.

Per training forward: two all-gathers (batch sizes, labels; 8 bytes a sample). Per backward: one all-reduce of one
number. Rows and their gradients travel between ranks only through the shards.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from geartrain.ams.values.errors import SpecMismatch, SyncError
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.ams.values.specs import Ids

T = TypeVar("T")

TELL_SECONDS = 5.0
"""How often rank 0 tells those who wait for it that it is at work: below any sensible time limit of a group."""
_FAILED, _SUCCEEDED, _AT_WORK = range(3)


def float_bits(value: float) -> int:
    """An int64 that stands for the number among integers that are exchanged."""
    return int(np.float64(value).view(np.int64))


def float_of(bits: int) -> float:
    """The number of :func:`float_bits`."""
    return float(np.int64(bits).view(np.float64))


class FailsTogether(Protocol):
    """Ranks that tell one another of failures."""

    def fail_together(self, failure: Exception | None, what: str) -> None:
        """Raise on every rank if any gives a ``failure``: its own there, elsewhere that ``what`` did not happen."""


def run_together(ranks: FailsTogether, action: Callable[[], T], what: str) -> T:
    """Run on every rank an ``action`` without collectives; if it fails on any, raise on all as ``fail_together``."""
    results: list[T] = []
    failure: Exception | None = None
    try:
        results.append(action())
    except Exception as exc:  # of any kind: the others wait for this rank
        failure = exc
    ranks.fail_together(failure, what)
    return results[0]


class Ranks:
    """The ranks that train one head together; every rank makes the same calls in the same order.

    Attributes: ``world_size``, ``rank``, ``job`` (a name no other run has), ``sequence`` (of the next push, from 1).
    """

    def __init__(self, name: str, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        group = process_group or dist.group.WORLD
        assert group is not None
        self._first = dist.get_global_rank(group, 0)  # group_src, which would say the same, came with PyTorch 2.6
        nccl = "nccl" in str(dist.get_backend(process_group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._name = name
        self.begin_anew()

    def begin_anew(self) -> None:
        """Push as a run that no shard has heard of: the table is another one. Every rank calls it; one broadcast."""
        nonce = self._from_first(secrets.randbits(62))
        self.job = f"{self._name}/{nonce:016x}"
        self.sequence = 1

    def _from_first(self, value: int) -> int:
        shared = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.broadcast(shared, self._first, group=self._group)
        return int(shared.item())

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
                self._from_first(succeeded)
            return result
        while (said := self._from_first(_FAILED)) == _AT_WORK:
            pass
        if said == _FAILED:
            raise SyncError(f"rank 0 of {self.job} failed; its error tells why")
        return others()

    @property
    def acts(self) -> bool:
        """Whether this rank runs the ``action`` of :meth:`first_then_others`."""
        return self.rank == 0

    def write_together(self, action: Callable[[], None], what: str) -> None:
        """Let rank 0 write rows of all; raise on every rank if that fails."""
        del what
        self.first_then_others(action, lambda: None)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell the other ranks now and then, on a thread, that they are still to wait."""
        ended = threading.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # a rank is lost: what is said last meets that, too
                while not ended.wait(TELL_SECONDS):
                    self._from_first(_AT_WORK)

        thread = threading.Thread(target=tell, name="geartrain-at-work", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def agree(self, value: bool) -> bool:
        """Rank 0's ``value``, on every rank."""
        return bool(self._from_first(int(value)))

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, in rank order; as many on each. Two all-gathers."""
        said: list[list[int]] = self.gather_labels(np.array(values, np.int64)).reshape(self.world_size, -1).tolist()
        return said

    def array_from_first(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rank 0's vector of int64 or int32, on every rank; the others give one of any length."""
        length, is_wide = self._from_first(len(array)), self._from_first(int(array.itemsize == 8))
        shared = torch.empty(length, dtype=torch.int64 if is_wide else torch.int32, device=self._device)
        if self.rank == 0:
            shared.copy_(torch.from_numpy(array))
        dist.broadcast(shared, self._first, group=self._group)
        return np.asarray(shared.cpu().numpy())

    def gather_labels(self, labels: Ids) -> Ids:
        """Labels of all ranks in rank order; batches may differ in size."""
        return np.concatenate(self.gather_samples(labels)[0])

    def gather_samples(
        self,
        labels: Ids,
        *,
        amount: float = 0.0,
        failure: Exception | None = None,
        classes: int = 0,
        settings: str = "",
    ) -> tuple[list[Ids], list[float]]:
        """Labels and ``amount`` of each rank; batches may differ in size.

        If any rank gives a ``failure`` every rank raises, its own there and SyncError elsewhere; if ``classes``, the
        fingerprint of what the labels are numbers of, or ``settings`` are not the same on all, SpecMismatch.
        """
        digest = xxhash.xxh3_64_intdigest(settings.encode()) >> 2
        numbers = [len(labels), failure is None, classes, digest, float_bits(amount)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        said = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(said, mine, group=self._group)
        counts, sound, fingerprints, digests, amounts = (
            list(column) for column in zip(*(one.tolist() for one in said), strict=True)
        )
        if failure is not None:
            raise failure
        if 0 in sound:
            raise SyncError(f"rank {sound.index(0)} was given features or labels that it refused; its error tells why")
        if len(set(fingerprints)) > 1:
            raise SpecMismatch(
                "the ranks have different living classes; add, retire and load the same ones on every rank"
            )
        if len(set(digests)) > 1:
            other = next(rank for rank, its in enumerate(digests) if its != digest)
            raise SpecMismatch(
                f"the ranks have different settings of {self._name!r}: here {settings}, others on rank {other}; give "
                "the same on every rank"
            )
        padded = torch.zeros(max(*counts, 1), dtype=torch.int64, device=self._device)
        padded[: len(labels)] = torch.from_numpy(labels)
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self._group)
        labels_of = [part[:count].cpu().numpy() for part, count in zip(parts, counts, strict=True)]
        return labels_of, [float_of(bits) for bits in amounts]

    def gather_rows(self, rows: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """The rows [N, W] of every rank, in rank order; N may differ. Two all-gathers, R · max(N) · W · 4 bytes."""
        counts = self.gather_labels(np.array([len(rows)], np.int64)).tolist()
        padded = torch.zeros(max(counts), rows.shape[1], device=self._device)
        padded[: len(rows)] = torch.from_numpy(rows)
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self._group)
        return [part[:count].cpu().numpy() for part, count in zip(parts, counts, strict=True)]

    def fail_together(self, failure: Exception | None, what: str) -> None:
        """Raise on every rank if any gives a ``failure``: its own there, SyncError elsewhere. Two all-gathers.

        ``what`` did not happen, as the start of a sentence.
        """
        sound = self.gather_labels(np.array([failure is None], np.int64)).tolist()
        if failure is not None:
            raise failure
        if 0 in sound:
            raise SyncError(f"{what}: rank {sound.index(0)} failed; its error tells why")

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, on the device of ``tensor``."""
        shared = tensor.detach().to(self._device, copy=True)
        dist.all_reduce(shared, group=self._group)
        return shared.to(tensor.device)

    def sync_group(self, sample_count: int) -> SyncGroup:
        """This rank's part of the next write."""
        return SyncGroup(
            job=self.job,
            world_size=self.world_size,
            rank=self.rank,
            sequence=self.sequence,
            sample_count=sample_count,
        )
