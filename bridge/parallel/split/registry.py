"""Kinds of layers that can be split, each with its split form on a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.backends.backend import RowBackend
from geartrain.bridge.parallel.mesh import MeshGroup
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.embedding import SplitEmbedding
from geartrain.bridge.parallel.split.first_values import first_rows
from geartrain.bridge.parallel.split.layer import SplitLayer
from geartrain.bridge.parallel.split.linear import SplitLinear
from geartrain.bridge.parallel.split.shard import RowShard


@dataclass(frozen=True)
class SplitPlace:
    """Place of a split layer, with the inputs of its first values."""

    name: str
    group: MeshGroup
    agreement: StepAgreement
    seed: int

    def rows(self, module: nn.Module, of: str) -> Tensor | None:
        """Return this rank's rows of the parameter ``of`` [num, …]; None if ``module`` has none.

        They are rank 0's values, or newly initialized if it is on the meta device.
        """
        parameter = module._parameters[of]
        if parameter is None:
            return None
        shard = RowShard(parameter.shape[0], self.group)
        if parameter.device.type == "meta":
            return first_rows(self.name, module, of, shard.rows, self.group.device, self.seed)
        return self.group.link.deal(parameter.detach(), shard.sizes)


def _check_embedding(name: str, embedding: nn.Embedding) -> None:
    for setting, remedy in (
        ("max_norm", "clip the rows between steps, or replicate it"),
        ("scale_grad_by_freq", "replicate it"),
        ("sparse", "gt.Embedding trains sparse rows"),
    ):
        if getattr(embedding, setting):
            raise InvalidArgument(f"{name!r} is an nn.Embedding with {setting}, which cannot be split; {remedy}")


_SPLIT: dict[type[nn.Module], Callable[..., SplitLayer]] = {nn.Linear: SplitLinear, nn.Embedding: SplitEmbedding}
_CAN_BE = (
    "an nn.Linear (by output features), an nn.Embedding (by rows) and a gt.ClassHead with rows='ranks' can be split"
)


def backend_of(module: nn.Module) -> RowBackend | None:
    """Return the backend with the rows of a class head; None for any other module."""
    backend = getattr(module, "backend", None)
    return backend if hasattr(module, "row_update") else None


def check_can_split(name: str, module: nn.Module, ranks: tuple[int, ...]) -> bool:
    """Return whether ``module`` is to be replaced; a class head over ``ranks`` stays as it is.

    Raises InvalidArgument for a module that cannot be split.
    """
    if (backend := backend_of(module)) is not None:
        _check_head(name, backend, ranks)
        return False
    if type(module) not in _SPLIT:
        raise InvalidArgument(
            f"{name!r} is a {type(module).__name__}, which cannot be split: {_CAN_BE}. Name such a layer inside it, or "
            "replicate it"
        )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in hooks):
        raise InvalidArgument(f"{name!r} has hooks, which a split layer would not run; remove them")
    if any(parameter.dtype.is_complex for parameter in module.parameters()):
        raise InvalidArgument(f"{name!r} has complex parameters, which cannot be split; replicate it")
    if isinstance(module, nn.Embedding):
        _check_embedding(name, module)
    return True


def _check_head(name: str, backend: Any, ranks: tuple[int, ...]) -> None:
    if backend.needs_cluster:
        raise InvalidArgument(
            f"{name!r} is a gt.ClassHead whose rows are in a cluster; make it with rows='ranks' to split it over the "
            "ranks, or leave it out of the scopes: it has no parameters"
        )
    peers = backend.peers
    group = backend.process_group
    its = tuple(range(peers.world_size)) if group is None else tuple(torch.distributed.get_process_group_ranks(group))
    if its != ranks:
        raise InvalidArgument(
            f"{name!r} is a gt.ClassHead over ranks {list(its)}, and the mesh gives it {list(ranks)}; make the "
            "head with the process_group of the mesh"
        )


def split_layer(place: SplitPlace, module: nn.Module) -> SplitLayer:
    """Return the split layer of a ``module`` that passed :func:`check_can_split`. Collective."""
    rows = {of: place.rows(module, of) for of in module._parameters}
    return _SPLIT[type(module)](place.name, module, rows, place.group, place.agreement)
