"""Mesh of a job's ranks, with the part of a model that each works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.collectives.communicator import Communicator, time_limit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class MeshGroup:
    """Ranks that together work on one part of a model, seen from one of them."""

    ranks: tuple[int, ...]
    """Ranks of the group, as numbers among all ranks of the job."""
    link: Communicator
    process_group: dist.ProcessGroup | None
    """Group of torch.distributed; None: all ranks of the job, or a process alone."""

    @property
    def device(self) -> torch.device:
        """Initial device of their parts: the current CUDA device if their group is NCCL's, else the host."""
        return self.link.device

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """One-dimensional mesh for DTensor and ``fully_shard``. Raises InvalidArgument without ranks."""
        # Slow to import, and not needed by a single process.
        from torch.distributed.device_mesh import DeviceMesh

        group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        if group is None:
            raise InvalidArgument(
                "torch.distributed is not initialised, so there is no DeviceMesh; call init_process_group() first"
            )
        return DeviceMesh.from_group(group, self.device.type)


class Mesh:
    """The ranks that train one model; :func:`mesh` makes it.

    Attributes: ``world_size``, ``rank``, ``whole`` (all ranks), ``stages``: the numbers of each stage's ranks;
    ``own_stage``: the number of this rank's stage, ``stage``: its :class:`MeshGroup`. Without stages every rank works
    on every part (Whale calls it fusion): ``stages`` is empty, ``stage`` is ``whole``.
    """

    def __init__(self, whole: MeshGroup, stages: tuple[tuple[int, ...], ...], stage: MeshGroup) -> None:
        self.whole = whole
        self.stages = stages
        self.stage = stage

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.whole.link.world_size

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.whole.link.rank

    @property
    def device(self) -> torch.device:
        """Device of this rank's parts and samples, as :attr:`MeshGroup.device`."""
        return self.stage.device

    @property
    def own_stage(self) -> int | None:
        """Number of this rank's stage; None without stages."""
        return next((number for number, ranks in enumerate(self.stages) if self.rank in ranks), None)

    def __repr__(self) -> str:
        """Return the arguments of :func:`mesh`, and the rank."""
        stages = f"stages={[list(ranks) for ranks in self.stages]}, " if self.stages else ""
        return f"mesh({stages}rank {self.rank} of {self.world_size})"


def mesh(stages: Sequence[Sequence[int]] | None = None) -> Mesh:
    """Assign the ranks of ``torch.distributed`` to the parts of a model.

    Without ``stages`` every rank works on every part. ``stages=[[0, 1, 2, 3], [4, 5]]`` gives the first part of the
    model to ranks 0 to 3, the second to ranks 4 and 5: the lists are disjoint and name every rank. One process without
    torch.distributed is a mesh of one. Every rank calls it with equal arguments: two all-gathers between the hosts, and
    with stages a process group for each.

    Raises InvalidArgument for stages that do not fit the ranks, SpecMismatch on every rank if they differ.
    """
    link = Communicator()
    failure: InvalidArgument | None = None
    lists: tuple[tuple[int, ...], ...] = ()
    try:
        lists = _checked(stages, link.world_size)
    except InvalidArgument as exc:
        failure = exc
    error = None if failure is None else str(failure)
    link.require_equal({"stages": [list(ranks) for ranks in lists], "error": error}, "gt.mesh()")
    if failure is not None:
        raise failure
    whole = MeshGroup(tuple(range(link.world_size)), link, None)
    stage = whole
    for ranks in lists:
        group = dist.new_group(list(ranks), time_limit())  # every rank takes part in making every group
        if link.rank in ranks:
            stage = MeshGroup(ranks, Communicator(group), group)
    return Mesh(whole, lists, stage)


def _checked(stages: Sequence[Sequence[int]] | None, world_size: int) -> tuple[tuple[int, ...], ...]:
    if stages is None:
        return ()
    if not _is_list(stages) or not all(_is_list(ranks) for ranks in stages):
        raise InvalidArgument(
            f"stages is {quoted(stages)}; it must be a list of lists of ranks, such as [[0, 1], [2]], or None"
        )
    lists = tuple(tuple(ranks) for ranks in stages)
    named = [rank for ranks in lists for rank in ranks]
    odd = [rank for rank in named if isinstance(rank, bool) or not isinstance(rank, int)]
    if odd:
        raise InvalidArgument(f"stages name {quoted(odd[0])}; a rank is an int from 0 to {world_size - 1}")
    if len(lists) < 2 or not all(lists):
        raise InvalidArgument(
            f"stages is {quoted(stages)}; there must be two or more of them, each with a rank. Leave it out "
            "where every rank works on every part"
        )
    if sorted(named) != list(range(world_size)):
        missing, far = sorted({*range(world_size)} - {*named}), sorted({*named} - {*range(world_size)})
        wrong = f"no stage has rank {missing[0]}" if missing else f"rank {max(named, key=named.count)} is there twice"
        wrong = f"there are {world_size} ranks, and none is {far[0]}" if far else wrong
        raise InvalidArgument(f"stages is {quoted(stages)}: {wrong}. Name every rank once")
    return lists


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
