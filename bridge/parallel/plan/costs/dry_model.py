"""A model as rank 0 of some ranks has it, without values and without the other ranks: its own code runs, on meta."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.mesh import Mesh, MeshGroup
from geartrain.bridge.parallel.parallel_model import ParallelModel
from geartrain.bridge.parallel.plan.costs.dry_link import DryLink
from geartrain.bridge.parallel.plan.costs.head_costs import HeadSkeleton
from geartrain.bridge.parallel.plan.costs.skeleton import skeleton_of
from geartrain.bridge.parallel.plan.costs.trace import StepTrace
from geartrain.bridge.parallel.replicated import Replicas
from geartrain.bridge.parallel.scopes import Scope, Split, scoped
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.embedding import SplitEmbedding
from geartrain.bridge.parallel.split.layer import SplitLayer
from geartrain.bridge.parallel.split.linear import SplitLinear
from geartrain.bridge.parallel.split.shard import RowShard


def dry_model(
    model: nn.Module, scopes: Mapping[str, Scope], loss: LossFunction | None, ranks: int, trace: StepTrace
) -> ParallelModel:
    """``model`` as :func:`parallelize` makes it, as the first of ``ranks``, which has the most rows; on meta.

    Without the averaging of replicated parts: that is not seen in a forward pass. Raises InvalidArgument for scopes
    that do not fit.
    """
    link = DryLink(ranks, trace)
    group = MeshGroup(tuple(range(ranks)), link, None)
    agreement = StepAgreement(link)
    skeleton = skeleton_of(model)
    scoped(skeleton, scopes)
    for name, scope in scopes.items():
        if not isinstance(scope, Split):
            continue
        module = skeleton.get_submodule(name)
        if isinstance(module, HeadSkeleton):
            module.on_ranks(link, trace)
            continue
        layer = _first_of_ranks(name, module, group, agreement, trace)
        if name:
            parent, _, last = name.rpartition(".")
            setattr(skeleton.get_submodule(parent), last, layer)
        else:
            skeleton = layer
    none = Replicas(_alone(trace), {}, [], set())
    return ParallelModel(skeleton, Mesh(group, (), group), scopes, loss, none, agreement)


def _alone(trace: StepTrace) -> MeshGroup:
    return MeshGroup((0,), DryLink(1, trace), None)


def _first_of_ranks(
    name: str, module: nn.Module, group: MeshGroup, agreement: StepAgreement, trace: StepTrace
) -> SplitLayer:
    if type(module) not in _DRY_LAYERS:
        raise InvalidArgument(
            f"{name!r} is a {type(module).__name__}, which cannot be split: an nn.Linear, an nn.Embedding and a "
            "gt.ClassHead with rows='ranks' can be. Name such a layer inside it, or replicate it"
        )
    rows = next(module.parameters()).shape[0]
    shard = RowShard(rows, group)
    layer = _DRY_LAYERS[type(module)](name, module, shard.num_local, _alone(trace), agreement)
    layer.shard = shard  # a DTensor over ranks that are not there cannot be made: its rows are those of one alone
    return layer


def _linear(name: str, whole: Any, rows: int, group: MeshGroup, agreement: StepAgreement) -> SplitLayer:
    local = nn.Linear(whole.in_features, rows, whole.bias is not None, device="meta", dtype=whole.weight.dtype)
    return SplitLinear(name, local, local.weight, local.bias, group, agreement)


def _embedding(name: str, whole: Any, rows: int, group: MeshGroup, agreement: StepAgreement) -> SplitLayer:
    dtype = whole.weight.dtype
    local = nn.Embedding(rows, whole.embedding_dim, whole.padding_idx, device="meta", dtype=dtype)
    layer = SplitEmbedding(name, local, local.weight, group, agreement)
    layer.num_embeddings = whole.num_embeddings
    return layer


_DRY_LAYERS: dict[type[nn.Module], Callable[[str, Any, int, MeshGroup, StepAgreement], SplitLayer]] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
}
