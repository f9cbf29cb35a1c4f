"""What the ranks that hold parts of a layer say to each other, over torch.distributed (gloo, NCCL).

Numbers that decide shapes travel between the hosts (gloo), so that nobody waits for a device; tensors travel between
the devices. One rank, or none of torch.distributed, says nothing. What travels is counted (``traffic.py``). A
collective that a lost rank ends raises RankLost: on gloo at once where its process died, else after the time limit of
the group.

Legend: R ranks, B samples of all ranks, D width.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from geartrain.ams.values.errors import GeartrainError, InvalidArgument, SpecMismatch, SyncError
from geartrain.bridge.collectives.pending import Pending
from geartrain.bridge.collectives.traffic import Traffic, lost_ranks_named
from geartrain.bridge.rows.ranks import run_together

T = TypeVar("T")

_HOST = torch.device("cpu")
_PIECE_BYTES = 8 << 20

# PyTorch 2.13 gave them these names, and warns of the older ones.
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_SHOWN = 5
"""Of what ranks disagree on."""


def _differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys whose values differ, those of mappings within by "key['inner']", with both values; None: not there."""
    for key in sorted({*first, *other}):
        one, two = first.get(key), other.get(key)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            yield from ((f"{key}[{inner!r}]", *values) for inner, *values in _differences(one, two))
        elif one != two:
            yield key, one, two


class RankLink:
    """The ranks of ``process_group`` (None: all of them); every rank makes the same calls in the same order.

    Attributes: ``world_size``, ``rank``, ``traffic`` (what this rank took part in).
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.world_size, self.rank = 1, 0
        self.traffic = Traffic()
        self._group = process_group
        self._host_group = process_group
        self._is_gloo = True
        if not dist.is_initialized():
            if process_group is not None:
                raise InvalidArgument("process_group was given without init_process_group(); call that first")
            return
        self.world_size, self.rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        if self.rank < 0:
            raise InvalidArgument("this process is not of process_group; make the head on its ranks only")
        backend = str(dist.get_backend(process_group))
        self._is_gloo = backend == "gloo"
        if self.world_size > 1 and "gloo" not in backend:
            members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            self._host_group = _gloo_group(members, process_group)

    def apart(self) -> RankLink:
        """The same ranks over a gloo group of their own, for a thread beside the training. Every rank calls it.

        It has the time limit of theirs.
        """
        if self.world_size == 1:
            return self
        members = dist.get_process_group_ranks(self._host_group or dist.group.WORLD)
        return RankLink(_gloo_group(members, self._group))

    @property
    def device(self) -> torch.device:
        """Where rows begin: the current CUDA device if the group cannot carry the host's tensors, else the host."""
        if self.world_size > 1 and not self._is_gloo and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.empty(0).device

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, in rank order; as many on each. One all-gather between the hosts."""
        return self.start_exchange(values).result()

    def start_exchange(self, values: Sequence[int]) -> Pending[list[list[int]]]:
        """Begin :meth:`exchange`; it goes on beside what is computed until its result is asked for."""
        if self.world_size == 1:
            return Pending.done([list(values)])
        mine = torch.tensor(values, dtype=torch.int64, device=_HOST)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self._counted("all-gather", mine.nbytes * self.world_size):
            work = dist.all_gather(parts, mine, group=self._host_group, async_op=True)

        def take() -> list[list[int]]:
            return [[int(value) for value in part.tolist()] for part in parts]

        return Pending(work, take, "all-gather")

    def gather_json(self, value: Any) -> list[Any]:
        """The JSON value of every rank, in rank order. Two all-gathers between the hosts."""
        if self.world_size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [size for (size,) in self.exchange([len(text)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=_HOST)
        padded[: len(text)] = text
        parts = [torch.empty_like(padded) for _ in sizes]
        with self._counted("all-gather", padded.nbytes * self.world_size):
            dist.all_gather(parts, padded, group=self._host_group)
        return [json.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def require_equal(self, values: Mapping[str, Any], what: str) -> None:
        """Raise SpecMismatch on every rank unless all of them give equal JSON values."""
        said = self.gather_json(dict(values))
        for rank, theirs in enumerate(said):
            unlike = [
                f"{key} is {first!r} on rank 0, {other!r} on rank {rank}"
                for key, first, other in _differences(said[0], theirs)
            ]
            if unlike:
                more = f"; and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
                differences = "; ".join(unlike[:_SHOWN]) + more
                raise SpecMismatch(f"the ranks disagree on {what}: {differences}. Give the same on every rank")

    def fail_together(
        self, failure: Exception | None, what: str, error: Callable[[str], GeartrainError] = SyncError
    ) -> None:
        """Raise on every rank if any gives a ``failure``: its own there, elsewhere ``error``, which names the rank.

        One exchange. ``what`` did not happen, as the start of a sentence.
        """
        sound = [good for (good,) in self.exchange([failure is None])]
        if failure is not None:
            raise failure
        if 0 in sound:
            raise error(f"{what}: rank {sound.index(0)} failed; its error tells why")

    def gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """The tensors [n_r, …] of all ranks, one behind the other: [Σ n_r, …]. One all-gather of R · max(n_r) rows."""
        return self.start_gather(tensor, sizes).result()

    def start_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Begin :meth:`gather`; it goes on beside what is computed until its result is asked for."""
        if self.world_size == 1:
            return Pending.done(tensor)
        most = max(sizes)
        width = math.prod(tensor.shape[1:])
        wire = torch.zeros(most, width, dtype=tensor.dtype, device=self._wire(tensor.device))
        wire[: len(tensor)] = tensor.detach().reshape(len(tensor), width)
        parts = wire.new_empty(self.world_size * most, width)
        device, shape = tensor.device, tensor.shape[1:]

        def take() -> Tensor:
            joint = parts
            if min(sizes) < most:
                joint = torch.cat([parts[rank * most :][:size] for rank, size in enumerate(sizes)])
            return joint.to(device).reshape(len(joint), *shape)

        if not most:
            return Pending.done(take())
        with self._counted("all-gather", parts.nbytes):
            work = all_gather_tensor(
                parts.view(torch.uint8), wire.view(torch.uint8), group=self._carrier(wire), async_op=True
            )
        return Pending(work, take, "all-gather")

    def pass_on(self, block_LD: Tensor, room_LD: Tensor, num_expected: int) -> None:
        """Send ``block_LD`` to the next rank; write the ``num_expected`` rows of the previous one's to ``room_LD``.

        Host tensors of one dtype; both may lie in the same memory: they travel in pieces of 8 MiB, with one of room.
        """
        after, before = (self._global_rank(self.rank + step) for step in (1, -1))
        rows = max(1, _PIECE_BYTES // max(1, block_LD.element_size() * block_LD.shape[1]))
        arriving_ND = room_LD.new_empty(min(rows, num_expected), room_LD.shape[1])
        for start in range(0, max(len(block_LD), num_expected), rows):
            leaving, arriving = block_LD[start : start + rows], arriving_ND[: max(0, num_expected - start)]
            with self._counted("send", leaving.nbytes):
                sent = dist.isend(leaving, after, group=self._host_group) if len(leaving) else None
                if len(arriving):
                    dist.recv(arriving, before, group=self._host_group)
                if sent is not None:
                    sent.wait()
            room_LD[start : start + len(arriving)] = arriving

    def start_transfers(
        self, leaving: Sequence[tuple[Tensor, int]], arriving: Sequence[tuple[Tensor, int]]
    ) -> Pending[None]:
        """Begin to send each tensor of ``leaving`` to its rank, and to fill each of ``arriving`` from its rank.

        They are contiguous, on one device, none of them empty, and left alone until the result was asked for. What one
        rank sends to another arrives in the order it was sent.
        """
        what = "exchange between two ranks"
        wires = [tensor.detach().to(self._wire(tensor.device)) for tensor, _ in leaving]
        rooms = [torch.empty_like(tensor, device=self._wire(tensor.device)) for tensor, _ in arriving]
        rooms = [one if one.device == room.device else room for (one, _), room in zip(arriving, rooms, strict=True)]
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
        with lost_ranks_named(what):
            works = dist.batch_isend_irecv(messages)

        def take() -> None:
            with lost_ranks_named(what):
                for work in works:
                    work.wait()
            for (tensor, _), room in zip(arriving, rooms, strict=True):
                if room is not tensor:
                    tensor.copy_(room)

        return Pending(None, take, what)

    def agree(self, value: bool) -> bool:
        """Whether every rank says so."""
        return all(said for (said,) in self.exchange([value]))

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the ranks: one all-reduce."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks: one all-reduce."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def start_sum(self, tensor: Tensor) -> Pending[Tensor]:
        """Begin to sum a contiguous tensor over the ranks: one all-reduce. It is read and written until the result is
        asked for, and is the result itself where the ranks can reach its memory."""
        if self.world_size == 1:
            return Pending.done(tensor)
        wire = tensor.detach().to(self._wire(tensor.device))
        device = tensor.device
        with self._counted("all-reduce", wire.nbytes):
            work = dist.all_reduce(wire, group=self._carrier(wire), async_op=True)
        return Pending(work, lambda: wire.to(device), "all-reduce")

    def sum_to_owners(self, tensor_BD: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum over the ranks of [B, D], of which each rank gets its own samples [n_r, D]: one reduce-scatter."""
        return self.start_sum_to_owners(tensor_BD, sizes).result()

    def start_sum_to_owners(self, tensor_BD: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Begin :meth:`sum_to_owners`; ``tensor_BD`` must not be written before its result was asked for."""
        if self.world_size == 1:
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

        def take() -> Tensor:
            return out[:own].to(device)

        if not most:
            return Pending.done(out.to(device))
        with self._counted("reduce-scatter", wire.nbytes):
            work = reduce_scatter_tensor(out, wire, group=self._carrier(wire), async_op=True)
        return Pending(work, take, "reduce-scatter")

    def all_to_all(self, values: Tensor, leaving: Sequence[int], arriving: Sequence[int]) -> Tensor:
        """Send the first ``leaving[0]`` numbers of ``values`` [N] to rank 0, the next to rank 1, …; one all-to-all.

        Returns what arrives, ``arriving[r]`` numbers of each rank r in rank order.
        """
        if self.world_size == 1:
            return values
        wire = values.detach().to(self._wire(values.device)).contiguous()
        parts = wire.new_empty(sum(arriving))
        width = wire.element_size()
        with self._counted("all-to-all", parts.nbytes):
            dist.all_to_all_single(
                parts.view(torch.uint8),
                wire.view(torch.uint8),
                [num * width for num in arriving],
                [num * width for num in leaving],
                group=self._carrier(wire),
            )
        return parts.to(values.device)

    def take_from_first(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` by rank 0's, of the same shape and dtype: one broadcast."""
        if self.world_size == 1 or not tensor.numel():
            return
        wire = tensor.detach().to(self._wire(tensor.device)).contiguous()
        with self._counted("broadcast", wire.nbytes):
            dist.broadcast(wire, self._global_rank(0), group=self._carrier(wire))
        if wire.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(wire)

    def deal(self, whole_ND: Tensor, sizes: Sequence[int]) -> Tensor:
        """Rank 0's rows [N, …], of which each rank gets its ``sizes[r]``, one behind the other: point to point."""
        if self.world_size == 1:
            return whole_ND
        parts = torch.split(whole_ND.detach(), list(sizes))
        if self.rank == 0:
            for rank, part in enumerate(parts):
                if rank and len(part):
                    wire = part.to(self._wire(part.device)).contiguous()
                    with self._counted("send", wire.nbytes):
                        dist.send(wire, self._global_rank(rank), group=self._carrier(wire))
            return parts[0].clone()
        own = parts[self.rank]
        arriving = torch.empty_like(own, device=self._wire(own.device), memory_format=torch.contiguous_format)
        if len(own):
            with lost_ranks_named("send"):
                dist.recv(arriving, self._global_rank(0), group=self._carrier(arriving))
        return arriving.to(own.device)

    @property
    def acts(self) -> bool:
        """Every rank works on the rows that it holds."""
        return True

    def first_then_others(self, action: Callable[[], T], others: Callable[[], T]) -> T:
        """Run ``action``: every rank does."""
        del others
        return action()

    def write_together(self, action: Callable[[], None], what: str) -> None:
        """Let every rank write the rows that it holds; raise as :meth:`fail_together` if it fails on any."""
        run_together(self, action, what)

    def array_from_first(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array itself: every rank has made the same."""
        return array

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.world_size == 1:
            return tensor
        shared = tensor.detach().to(self._wire(tensor.device), copy=True).contiguous()
        with self._counted("all-reduce", shared.nbytes):
            dist.all_reduce(shared, op=operation, group=self._carrier(shared))
        return shared.to(tensor.device)

    @contextlib.contextmanager
    def _counted(self, operation: str, num_bytes: int) -> Iterator[None]:
        self.traffic.count(operation, num_bytes)
        with lost_ranks_named(operation):
            yield

    def _global_rank(self, rank: int) -> int:
        group = self._host_group or dist.group.WORLD
        assert group is not None
        return dist.get_global_rank(group, rank % self.world_size)

    def _carrier(self, wire: Tensor) -> dist.ProcessGroup | None:
        """NCCL carries no tensors of the host, such as labels."""
        return self._host_group if wire.device.type == "cpu" else self._group

    def _wire(self, device: torch.device) -> torch.device:
        """Where a tensor of ``device`` is sent from: gloo carries the host's only."""
        return _HOST if self._is_gloo else device


def time_limit(group: dist.ProcessGroup | None = None) -> timedelta | None:
    """How long collectives of ``group`` (None: of all ranks) wait for a rank; torch does not hand it on to others."""
    of: Any = group or dist.group.WORLD
    device = torch.device("cuda") if "nccl" in str(dist.get_backend(group)) else _HOST
    limit: timedelta | None = getattr(getattr(of._get_backend(device), "options", None), "_timeout", None)
    return limit


def _gloo_group(members: Sequence[int], like: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A new group with the time limit of ``like``."""
    made: dist.ProcessGroup = dist.new_group(members, time_limit(like), backend="gloo", use_local_synchronization=True)
    return made
