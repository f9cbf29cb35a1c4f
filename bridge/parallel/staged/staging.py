"""Makes a model in two stages out of an ordinary one: every rank keeps the part that is its stage's."""

from __future__ import annotations

import torch
from torch import nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.mesh import Mesh
from geartrain.bridge.parallel.replicated import Replicas, replicated
from geartrain.bridge.parallel.scopes import ScopedModel
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.linear import SplitLinear
from geartrain.bridge.parallel.split.registry import SplitPlace, split_layer
from geartrain.bridge.parallel.staged.sender import DistantLinear
from geartrain.bridge.parallel.staged.staged_model import StagedModel


def check_stages(mesh: Mesh, found: ScopedModel, loss: LossFunction | None) -> None:
    """Raise InvalidArgument for a model that the stages of ``mesh`` cannot have."""
    if len(mesh.stages) != 2:
        raise InvalidArgument(
            f"the mesh has {len(mesh.stages)} stages; there are two, the ranks of the replicated parts and those of "
            "the split layer"
        )
    kinds = {name: type(module).__name__ for name, module in found.split.items()}
    if len(kinds) != 1 or not all(isinstance(module, nn.Linear) for module in found.split.values()):
        raise InvalidArgument(
            f"with stages one nn.Linear is split, and these are: {kinds or 'none'}. Without stages, gt.mesh(), any "
            "number of layers can be"
        )
    if loss is None:
        raise InvalidArgument("with stages the loss is computed beside the split layer: give loss=")


def stage(model: nn.Module, mesh: Mesh, found: ScopedModel, loss: LossFunction, seed: int) -> StagedModel:
    """This rank's part of ``model``. Collective over all ranks; a stage begins with the values of its first rank."""
    group = mesh.stage
    agreement = StepAgreement(group.link)
    ((name, linear),) = found.split.items()
    assert isinstance(linear, nn.Linear)
    if mesh.whole.link.world_size > 1:
        # NCCL: the first call over a group is one that all of it take part in.
        mesh.whole.link.sum(torch.zeros(1, device=group.device))
    if mesh.own_stage == 1:
        layer = split_layer(SplitPlace(name, group, agreement, seed), linear)
        assert isinstance(layer, SplitLinear)
        split_parameters = {id(parameter) for parameter in layer.parameters()}
        module = _alone(name, layer).train(model.training)
        return StagedModel(module, layer, mesh, found, loss, Replicas(group, {}, [], split_parameters), agreement)
    distant = DistantLinear(name, linear.in_features, linear.out_features)
    if name:
        model.set_submodule(name, distant)
    else:
        model = distant
    replicas = replicated(model, found.replicated, group, seed, set())
    return StagedModel(model, distant, mesh, found, loss, replicas, agreement)


def _alone(name: str, layer: nn.Module) -> nn.Module:
    """A module with ``layer`` in the place ``name``, and nothing else."""
    for part in reversed(name.split(".") if name else []):
        holder = nn.Module()
        holder.add_module(part, layer)
        layer = holder
    return layer
