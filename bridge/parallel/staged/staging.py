"""Conversion of an ordinary model into one in stages, of which every rank keeps its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.collectives.communicator import Communicator, time_limit
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.mesh import Mesh
from geartrain.bridge.parallel.replicated import replicated
from geartrain.bridge.parallel.scopes import Scope, ScopedModel, Split, called_parts, is_inside, replaced
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.registry import SplitPlace, backend_of, split_layer
from geartrain.bridge.parallel.staged.distant import DistantLayer
from geartrain.bridge.parallel.staged.stage_link import StageLink
from geartrain.bridge.parallel.staged.staged_model import Neighbours, StagedModel


class StagePart(nn.Module):
    """Layers of a later stage, at their places in the model, called one after the other."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.order = list(layers)
        for name, layer in layers.items():
            holder: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.add_module(last, layer)

    def forward(self, rows: Any) -> Any:
        """Return the output of the last layer."""
        for name in self.order:
            rows = self.get_submodule(name)(rows)
        return rows


def check_stages(model: nn.Module, mesh: Mesh, found: ScopedModel, loss: LossFunction | None) -> None:
    """Raise InvalidArgument for a model that cannot run in the stages of ``mesh``."""
    last = len(mesh.stages) - 1
    for name, scope in found.scopes.items():
        if _stage_of(scope, last) > last:
            raise InvalidArgument(
                f"scope {name!r} has stage={scope.stage}, and the mesh has stages 0 to {last}; give "
                "gt.mesh(stages=...) a list of ranks for each stage"
            )
        outer = next((other for other in found.scopes if other != name and is_inside(name, other)), name)
        its = _stage_of(found.scopes[outer], last)
        if its not in (0, _stage_of(scope, last)):
            raise InvalidArgument(
                f"scope {name!r} lies inside {outer!r}, which is of stage {its}; give both stage={its}, or name parts "
                "that lie side by side"
            )
    for name, module in found.split.items():
        if backend_of(module) is not None:
            raise InvalidArgument(
                f"{name!r} is a gt.ClassHead, which computes the loss itself; with stages split an nn.Linear, or leave "
                "out the stages, gt.mesh()"
            )
        if isinstance(module, nn.Embedding) and _stage_of(found.scopes[name], last):
            raise InvalidArgument(f"{name!r} is an nn.Embedding, and ids are in the first stage: gt.Split(stage=0)")
    parts = _layers_of_stages(mesh, found)
    empty = [number for number, layers in enumerate(parts) if number and not layers]
    if empty:
        raise InvalidArgument(
            f"stage {empty[0]} (ranks {list(mesh.stages[empty[0]])}) has no layer; give it a scope, such as "
            f"gt.Replicate(stage={empty[0]}), or leave it out of gt.mesh(stages=...)"
        )
    stages: dict[int, tuple[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = next((n for n, layers in enumerate(parts) if n and any(is_inside(name, layer) for layer in layers)), 0)
        other, tied = stages.setdefault(id(parameter), (own, name))
        if other != own:
            raise InvalidArgument(
                f"parameters {tied!r} and {name!r} are one, in stages {other} and {own}; untie them, or put both into "
                "one stage"
            )
    if loss is None:
        raise InvalidArgument("with stages the loss is computed by the last one: give loss=")


def stage(
    model: nn.Module, mesh: Mesh, found: ScopedModel, loss: LossFunction, seed: int, micro_batches: int
) -> StagedModel:
    """Return this rank's part of ``model``. Collective over all ranks; a stage starts with its first rank's values."""
    group, own = mesh.stage, mesh.own_stage
    agreement = StepAgreement(group.link)
    parts, trains = _layers_of_stages(mesh, found), model.training
    later = {name: layer for layers in parts[1:] for name, layer in layers.items()}
    if own:
        model = parts[own][""] if "" in parts[own] else StagePart(parts[own])
    for name in {} if own else later:
        model = replaced(model, name, DistantLayer(name))
    own_scopes = {name for name, scope in found.scopes.items() if _stage_of(scope, len(mesh.stages) - 1) == own}
    split_parameters: set[int] = set()
    for name, module in found.split.items():
        if name in own_scopes:
            layer = split_layer(SplitPlace(name, group, agreement, seed), module)
            model = replaced(model, name, layer)
            split_parameters.update(id(parameter) for parameter in layer.parameters())
    scopes = {name: scope for name, scope in found.replicated.items() if name in own_scopes}
    replicas = replicated(model, scopes, group, seed, split_parameters)
    links = _links(mesh)
    assert own is not None
    neighbours = Neighbours(links.get(own - 1), links.get(own), later)
    return StagedModel(model.train(trains), mesh, found, loss, replicas, agreement, neighbours, micro_batches)


def _links(mesh: Mesh) -> dict[int, StageLink]:
    """Return this rank's links to next stages, by the number of the earlier stage. All ranks make every group."""
    found = {}
    for number, (senders, owners) in enumerate(zip(mesh.stages, mesh.stages[1:], strict=False)):
        link = mesh.whole.link
        if len(mesh.stages) > 2:
            members = sorted([*senders, *owners])
            group = dist.new_group(members, time_limit())
            if mesh.rank not in members:
                continue
            link = Communicator(group)
        # NCCL: all ranks of a group must take part in its first call.
        link.sum(torch.zeros(1, device=mesh.device))
        found[number] = StageLink(link, mesh.rank, senders, owners)
    return found


def _stage_of(scope: Scope, last: int) -> int:
    if scope.stage is not None:
        return scope.stage
    return last if isinstance(scope, Split) else 0


def _layers_of_stages(mesh: Mesh, found: ScopedModel) -> list[dict[str, nn.Module]]:
    """Return each stage's layers by name, in the order of the scopes, without layers inside others."""
    parts: list[dict[str, nn.Module]] = [{} for _ in mesh.stages]
    modules = {**found.split, **{name: module for name, (_, module) in found.replicated.items()}}
    for name, scope in found.scopes.items():
        number = _stage_of(scope, len(parts) - 1)
        if not any(is_inside(name, other) for other in parts[number] if other != name):
            parts[number].update(called_parts(name, modules[name]))
    return parts
