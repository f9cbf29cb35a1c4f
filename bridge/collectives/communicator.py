"""Communicator of a job's ranks over torch.distributed (gloo, NCCL): all collectives except those of DDP and FSDP2
(``bridge/parallel/averaging.py``).

Numbers that decide shapes are sent between the hosts (gloo), so that no host waits for a device; tensors are sent
between the devices. With one rank, or without torch.distributed, nothing is sent. Traffic is counted. A collective that
a lost rank makes fail raises RankLost: on gloo at once if its process died, else after the time limit of the group.

Legend: R ranks, B samples of all ranks, D width.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from geartrain.ams.values.errors import GeartrainError, InvalidArgument, RankLost, SpecMismatch, SyncError

T = TypeVar("T")

_HOST = torch.device("cpu")
_PIECE_BYTES = 8 << 20

# PyTorch 2.13 renamed them, and warns of the older names.
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_SHOWN = 5
"""Largest number of differences between ranks that an error names."""


@dataclass
class Traffic:
    """Traffic of one rank, by kind of operation ("all-gather", "all-reduce", ...). Not thread-safe."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of the tensor on one rank: received ones of an all-gather, sent ones of a reduce-scatter."""

    def count(self, operation: str, num_bytes: int) -> None:
        """Count one operation."""
        self.calls[operation] += 1
        self.bytes[operation] += num_bytes

    def clear(self) -> None:
        """Reset all counts."""
        self.calls.clear()
        self.bytes.clear()


@contextlib.contextmanager
def lost_ranks_named(operation: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turn errors of torch.distributed about a lost or silent rank into RankLost, which names group and operation.

    ``group`` is that of ``operation``; None: all ranks.
    """
    try:
        yield
    except RuntimeError as exc:  # all of torch.distributed's errors; gloo raises no other
        reason, _, _ = next(iter(str(exc).splitlines()), type(exc).__name__).partition(". This is typically")
        article = "an" if operation[0] in "aeiou" else "a"
        raise RankLost(
            f"a rank died, or did not take part in {article} {operation} within the time limit of its process group, "
            f"ranks {dist.get_process_group_ranks(group or dist.group.WORLD)}, as rank {dist.get_rank()} met: "
            f"{reason}. Look at the other ranks' logs; end all ranks and start them from the last snapshot. If one "
            "ended without an error, it had fewer batches than the others: give all ranks as many (DistributedSampler, "
            "drop_last=True)"
        ) from exc


class Pending(Generic[T]):
    """Result of a started collective. Either every rank calls :meth:`result`, or none does."""

    def __init__(
        self, work: dist.Work | None, take: Callable[[], T], operation: str, group: dist.ProcessGroup | None = None
    ) -> None:
        """``take()`` returns the result once ``work`` is done; errors name ``operation`` and ``group``."""
        self._work = work
        self._take: Callable[[], T] | None = take
        self._operation, self._group = operation, group
        self._result: list[T] = []

    @staticmethod
    def done(result: T) -> Pending[T]:
        """Return a pending result that is known already."""
        return Pending(None, lambda: result, "")

    def result(self) -> T:
        """Wait for the result (on CUDA: let the current stream wait). Raises RankLost."""
        if self._take is not None:
            if self._work is not None:
                with lost_ranks_named(self._operation, self._group):
                    self._work.wait()
            self._result.append(self._take())
            self._work = self._take = None
        return self._result[0]


def _differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key with different values, such as "key['inner']", and both values; None: absent."""
    for key in sorted({*first, *other}):
        ours, theirs = first.get(key), other.get(key)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            yield from ((f"{key}[{inner!r}]", *values) for inner, *values in _differences(ours, theirs))
        elif ours != theirs:
            yield key, ours, theirs


class Communicator:
    """Communication of the ranks of ``process_group`` (None: all); every rank makes the same calls in the same order.

    Attributes: ``world_size``, ``rank``, ``traffic`` (of this rank), ``is_alone`` (whether nothing is sent).
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.world_size, self.rank = 1, 0
        self.is_alone = True
        self.traffic = Traffic()
        self._group = process_group
        self._is_gloo = True
        if not dist.is_initialized():
            if process_group is not None:
                raise InvalidArgument("process_group was given without init_process_group(); call that first")
            return
        self.world_size, self.rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        if self.rank < 0:
            raise InvalidArgument("this process is not of process_group; make the head on its ranks only")
        self._is_gloo = str(dist.get_backend(process_group)) == "gloo"
        # NCCL allows one rank per card: a single rank makes its collectives on request, to test them there.
        self.is_alone = self.world_size == 1 and os.environ.get("GEARTRAIN_COLLECTIVES_OF_ONE") != "1"

    @functools.cached_property
    def _host_group(self) -> dist.ProcessGroup | None:
        """Group for tensors of the host, which NCCL cannot send; made on first use."""
        if self.is_alone or "gloo" in str(dist.get_backend(self._group)):
            return self._group
        with lost_ranks_named("beginning of a gloo group", self._group):
            return _gloo_group(dist.get_process_group_ranks(self._group or dist.group.WORLD), self._group)

    def require_capturable(self) -> None:
        """Raise InvalidArgument if collectives run on the host, where a CUDA graph cannot capture them."""
        if not self.is_alone and self._is_gloo:
            raise InvalidArgument(
                "the ranks communicate by gloo, through the hosts, which a CUDA graph cannot capture; call "
                "init_process_group('nccl') to capture a step"
            )

    def apart(self) -> Communicator:
        """Return a communicator of the same ranks over another gloo group, for a background thread.

        It has the time limit of this group. Every rank calls it.
        """
        if self.is_alone:
            return self
        members = dist.get_process_group_ranks(self._host_group or dist.group.WORLD)
        return Communicator(_gloo_group(members, self._group))

    @property
    def device(self) -> torch.device:
        """Device of new rows: the current CUDA device if the group cannot send the host's tensors, else the host."""
        if not self.is_alone and not self._is_gloo and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.empty(0).device

    def barrier(self, name: str) -> None:
        """Return once every rank has called it; errors contain ``name``. One all-gather of a number."""
        self.start_exchange([0], f"barrier ({name})").result()

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Return the ``values`` of every rank, in rank order; each gives equally many. One all-gather of the hosts."""
        return self.start_exchange(values).result()

    def start_exchange(self, values: Sequence[int], operation: str = "all-gather") -> Pending[list[list[int]]]:
        """Start :meth:`exchange` in the background."""
        if self.is_alone:
            return Pending.done([list(values)])
        mine = torch.tensor(values, dtype=torch.int64, device=_HOST)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._counted(operation, mine.nbytes * self.world_size):
            work = dist.all_gather(parts, mine, group=self._host_group, async_op=True)

        def collect() -> list[list[int]]:
            return [[int(value) for value in part.tolist()] for part in parts]

        return Pending(work, collect, operation, self._group)

    def gather_json(self, value: Any) -> list[Any]:
        """Return the JSON value of every rank, in rank order. Two all-gathers between the hosts."""
        return [json.loads(text) for text in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, in rank order; lengths may differ. Two all-gathers between the hosts."""
        if self.is_alone:
            return [data]
        own = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        sizes = [size for (size,) in self.exchange([len(data)])]
        return [part.numpy().tobytes() for part in torch.split(self.gather(own, sizes), sizes)]

    def share(self, value: int) -> int:
        """Return rank 0's ``value`` (below 2^63), on every rank. One broadcast between the hosts."""
        shared = torch.tensor([value], device=_HOST)
        self.broadcast_from_first(shared)
        return int(shared.item())

    def require_equal(self, values: Mapping[str, Any], what: str) -> None:
        """Raise SpecMismatch on every rank unless all of them give equal JSON values."""
        answers = self.gather_json(dict(values))
        for rank, theirs in enumerate(answers):
            unlike = [
                f"{key} is {first!r} on rank 0, {other!r} on rank {rank}"
                for key, first, other in _differences(answers[0], theirs)
            ]
            if unlike:
                more = f"; and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
                differences = "; ".join(unlike[:_SHOWN]) + more
                raise SpecMismatch(f"the ranks disagree on {what}: {differences}. Give the same on every rank")

    def raise_on_all_ranks(
        self, failure: Exception | None, what: str, error: Callable[[str], GeartrainError] = SyncError
    ) -> None:
        """Raise on every rank if any has a ``failure``: that rank its own, the others ``error``, which names the rank.

        One exchange. ``what``: the start of its message, such as "rows were not saved".
        """
        is_well = [well for (well,) in self.exchange([failure is None])]
        if failure is not None:
            raise failure
        if 0 in is_well:
            raise error(f"{what}: rank {is_well.index(0)} failed; its error tells why")

    def run_together(self, action: Callable[[], T], what: str) -> T:
        """Run ``action``, which has no collectives; if it fails on any rank, raise as :meth:`raise_on_all_ranks`."""
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(action())
        except Exception as exc:  # any kind: the other ranks wait for this one
            failure = exc
        self.raise_on_all_ranks(failure, what)
        return results[0]

    def gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the tensors [n_r, …] of all ranks, in rank order, [Σ n_r, …]. One all-gather of R · max(n_r) rows."""
        return self.start_gather(tensor, sizes).result()

    def start_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Start :meth:`gather` in the background."""
        if self.is_alone:
            return Pending.done(tensor)
        most = max(sizes)
        width = math.prod(tensor.shape[1:])
        wire = tensor.detach().reshape(len(tensor), width).to(self._wire(tensor.device)).contiguous()
        if min(sizes) < most:
            wire, own = wire.new_zeros(most, width), wire
            wire[: len(own)] = own
        parts = wire.new_empty(self.world_size * most, width)
        device, shape = tensor.device, tensor.shape[1:]

        def collect() -> Tensor:
            joint = parts
            if min(sizes) < most:
                joint = torch.cat([parts[rank * most :][:size] for rank, size in enumerate(sizes)])
            return joint.to(device).reshape(len(joint), *shape)

        if not most:
            return Pending.done(collect())
        with self._counted("all-gather", parts.nbytes):
            work = all_gather_tensor(
                parts.view(torch.uint8), wire.view(torch.uint8), group=self._carrier(wire), async_op=True
            )
        return Pending(work, collect, "all-gather", self._group)

    def pass_on(self, block_LD: Tensor, room_LD: Tensor, num_expected: int, via: torch.device) -> None:
        """Send ``block_LD`` to the next rank; write the ``num_expected`` rows from the previous one to ``room_LD``.

        Both have one dtype, and may share memory: rows are sent between the ranks' devices ``via`` (on gloo between the
        hosts) in pieces of 8 MiB, with one piece of extra memory.
        """
        via = self._wire(via)
        rows = max(1, _PIECE_BYTES // max(1, block_LD.element_size() * block_LD.shape[1]))
        arriving_ND = room_LD.new_empty(min(rows, num_expected), room_LD.shape[1], device=via)
        for start in range(0, max(len(block_LD), num_expected), rows):
            leaving, arriving = block_LD[start : start + rows].to(via), arriving_ND[: max(0, num_expected - start)]
            to_next = [(leaving, self.rank + 1)] if len(leaving) else []
            self.start_transfers(to_next, [(arriving, self.rank - 1)] if len(arriving) else []).result()
            room_LD[start : start + len(arriving)] = arriving

    def start_transfers(
        self, leaving: Sequence[tuple[Tensor, int]], arriving: Sequence[tuple[Tensor, int]]
    ) -> Pending[None]:
        """Start to send each tensor of ``leaving`` to its rank, and to fill each of ``arriving`` from its rank.

        They must be contiguous, not empty, on one device, and unused until the result is there. Tensors from one rank
        to another arrive in the order in which they were sent.
        """
        what = "exchange between two ranks"
        wires = [tensor.detach().to(self._wire(tensor.device)) for tensor, _ in leaving]
        rooms = [torch.empty_like(tensor, device=self._wire(tensor.device)) for tensor, _ in arriving]
        rooms = [
            tensor if tensor.device == room.device else room for (tensor, _), room in zip(arriving, rooms, strict=True)
        ]
        if not wires and not rooms:
            return Pending.done(None)
        group = self._carrier([*wires, *rooms][0])
        ends: list[tuple[Any, Tensor, int]] = [
            *((dist.isend, wire, rank) for wire, (_, rank) in zip(wires, leaving, strict=True)),
            *((dist.irecv, room, rank) for room, (_, rank) in zip(rooms, arriving, strict=True)),
        ]
        messages = [
            dist.P2POp(end, wire.view(-1).view(torch.uint8), self._global_rank(rank), group) for end, wire, rank in ends
        ]
        self.traffic.count("send", sum(wire.nbytes for wire in wires))
        self.traffic.count("receive", sum(room.nbytes for room in rooms))
        with lost_ranks_named(what, self._group):
            works = dist.batch_isend_irecv(messages)

        def collect() -> None:
            with lost_ranks_named(what, self._group):
                for work in works:
                    work.wait()
            for (tensor, _), room in zip(arriving, rooms, strict=True):
                if room is not tensor:
                    tensor.copy_(room)

        return Pending(None, collect, what, self._group)

    def agree(self, value: bool) -> bool:
        """Return whether ``value`` is true on every rank."""
        return all(values for (values,) in self.exchange([value]))

    def any(self, value: bool) -> bool:
        """Return whether ``value`` is true on some rank."""
        return self.any_of(value)[0]

    def any_of(self, *values: bool) -> tuple[bool, ...]:
        """Return for each value whether it is true on some rank."""
        return tuple(map(any, zip(*self.exchange(values), strict=True)))

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks: one all-reduce."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks: one all-reduce."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def start_sum(self, tensor: Tensor) -> Pending[Tensor]:
        """Start to sum a contiguous tensor over the ranks: one all-reduce.

        Its memory must not be used until the result is there; on a device that the group can send from, the result
        overwrites it.
        """
        if self.is_alone:
            return Pending.done(tensor)
        wire = tensor.detach().to(self._wire(tensor.device))
        device = tensor.device
        with self._counted("all-reduce", wire.nbytes):
            work = dist.all_reduce(wire, group=self._carrier(wire), async_op=True)
        return Pending(work, lambda: wire.to(device), "all-reduce", self._group)

    def sum_to_owners(self, tensor_BD: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return this rank's samples [n_r, D] of the sum over the ranks of [B, D]: one reduce-scatter."""
        return self.start_sum_to_owners(tensor_BD, sizes).result()

    def start_sum_to_owners(self, tensor_BD: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Start :meth:`sum_to_owners`; ``tensor_BD`` must not be written before the result is there."""
        if self.is_alone:
            return Pending.done(tensor_BD)
        most, own = max(sizes), sizes[self.rank]
        wire = tensor_BD.to(self._wire(tensor_BD.device))
        if min(sizes) < most:
            padded = wire.new_zeros(self.world_size, most, wire.shape[1])
            for part, own_part in zip(padded, torch.split(wire, list(sizes)), strict=True):
                part[: len(own_part)] = own_part
            wire = padded.view(-1, wire.shape[1])
        out = wire.new_empty(most, wire.shape[1])
        device = tensor_BD.device

        def collect() -> Tensor:
            return out[:own].to(device)

        if not most:
            return Pending.done(out.to(device))
        with self._counted("reduce-scatter", wire.nbytes):
            work = reduce_scatter_tensor(out, wire, group=self._carrier(wire), async_op=True)
        return Pending(work, collect, "reduce-scatter", self._group)

    def all_to_all(self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """Send the first ``leaving[0]`` of ``values`` [N, …] to rank 0, the next ``leaving[1]`` to rank 1, and so on.

        Returns the received values in rank order, ``arriving[r]`` from rank r: [Σ arriving, …]. One all-to-all.
        """
        if self.is_alone:
            return values
        wire = values.detach().to(self._wire(values.device)).contiguous()
        parts = wire.new_empty(sum(arriving), *wire.shape[1:])
        width = wire.element_size() * math.prod(wire.shape[1:])
        with self._counted("all-to-all", parts.nbytes):
            dist.all_to_all_single(
                parts.view(-1).view(torch.uint8),
                wire.view(-1).view(torch.uint8),
                [num * width for num in arriving],
                [num * width for num in leaving],
                group=self._carrier(wire),
            )
        return parts.to(values.device)

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` by that of rank 0, of the same shape and dtype: one broadcast."""
        if self.is_alone or not tensor.numel():
            return
        wire = tensor.detach().to(self._wire(tensor.device)).contiguous()
        with self._counted("broadcast", wire.nbytes):
            dist.broadcast(wire.view(-1).view(torch.uint8), self._global_rank(0), group=self._carrier(wire))
        if wire.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(wire)

    def deal(self, whole_ND: Tensor, sizes: Sequence[int]) -> Tensor:
        """Divide rank 0's rows [N, …] among the ranks in order; return this rank's, ``sizes[rank]``. Point to point."""
        if self.is_alone:
            return whole_ND
        parts = torch.split(whole_ND.detach(), list(sizes))
        if self.rank == 0:
            for rank, part in enumerate(parts):
                if rank and len(part):
                    wire = part.to(self._wire(part.device)).contiguous()
                    with self._counted("send", wire.nbytes):
                        dist.send(wire.view(-1).view(torch.uint8), self._global_rank(rank), group=self._carrier(wire))
            return parts[0].clone()
        own = parts[self.rank]
        arriving = torch.empty_like(own, device=self._wire(own.device), memory_format=torch.contiguous_format)
        if len(own):
            with lost_ranks_named("send", self._group):
                dist.recv(arriving.view(-1).view(torch.uint8), self._global_rank(0), group=self._carrier(arriving))
        return arriving.to(own.device)

    @property
    def acts(self) -> bool:
        """Whether this rank runs the ``action`` of :meth:`first_then_others`: every rank does, on its own rows; where
        they are in a cluster (``SyncRanks``), only rank 0."""
        return True

    def first_then_others(self, action: Callable[[], T], others: Callable[[], T]) -> T:
        """Run ``action`` where :attr:`acts`, then ``others`` elsewhere."""
        del others
        return action()

    def write_together(self, action: Callable[[], None], what: str) -> None:
        """Write rows on every rank that holds some; raise as :meth:`raise_on_all_ranks` if it fails on any."""
        self.run_together(action, what)

    def array_from_first(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return ``array``, which is equal on every rank already."""
        return array

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.is_alone:
            return tensor
        shared = tensor.detach().to(self._wire(tensor.device), copy=True).contiguous()
        with self._counted("all-reduce", shared.nbytes):
            dist.all_reduce(shared, op=operation, group=self._carrier(shared))
        return shared.to(tensor.device)

    @contextlib.contextmanager
    def _counted(self, operation: str, num_bytes: int) -> Iterator[None]:
        self.traffic.count(operation, num_bytes)
        with lost_ranks_named(operation, self._group):
            yield

    def _global_rank(self, rank: int) -> int:
        group = self._host_group or dist.group.WORLD
        assert group is not None
        return dist.get_global_rank(group, rank % self.world_size)

    def _carrier(self, wire: Tensor) -> dist.ProcessGroup | None:
        """Return the group that sends a tensor: NCCL cannot send the host's, such as labels."""
        return self._host_group if wire.device.type == "cpu" else self._group

    def _wire(self, device: torch.device) -> torch.device:
        """Return the device from which a tensor is sent: gloo sends only from the host."""
        return _HOST if self._is_gloo else device


def time_limit(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """Return the time limit of collectives of ``group`` (None: all ranks), which torch does not pass to new groups."""
    of: Any = group or dist.group.WORLD
    device = torch.device("cuda") if "nccl" in str(dist.get_backend(group)) else _HOST
    limit: timedelta | None = getattr(getattr(of._get_backend(device), "options", None), "_timeout", None)
    return limit


def _gloo_group(members: Sequence[int], like: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a new group with the time limit of ``like``."""
    made: dist.ProcessGroup = dist.new_group(members, time_limit(like), backend="gloo", use_local_synchronization=True)
    return made
