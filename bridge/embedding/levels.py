"""Batches with levels, in which samples share nodes: compute once a node, then expand to the samples.

Shapes: B samples, N nodes of a level. The idea is from XDL, section 4.1 (sample trees), and RecD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted

try:
    # Of its public name torch 2.13 warns every user: torch itself calls there what it tells others not to.
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets as _view
except ImportError:
    _view = torch.nested.nested_tensor_from_jagged  # type: ignore[assignment]

NO_NODES: Mapping[str, Nodes] = {}


class Nodes:
    """The nodes of one level in a batch."""

    def __init__(self, index: Tensor, count: int) -> None:
        """``index`` [B] int64: the node of each sample, from 0 to ``count`` − 1."""
        self.index = index
        self.count = count
        self._by_node: tuple[Tensor, Tensor] | None = None

    @property
    def by_node(self) -> tuple[Tensor, Tensor]:
        """Samples [B] in the order of their nodes, and the start of each node's samples [N]."""
        if self._by_node is None:
            counts = torch.bincount(self.index, minlength=self.count)
            order = torch.argsort(self.index, stable=True)
            self._by_node = (order, torch.cumsum(counts, 0) - counts)
        return self._by_node

    def expand(self, vectors: Tensor) -> Tensor:
        """Return each sample's vector [B, ...] from the nodes' vectors [N, ...]; gradients are summed by node.

        Jagged vectors [N, ?, D] give jagged ones [B, ?, D]. Raises InvalidArgument for another number of nodes.
        """
        if len(vectors) != self.count:
            raise InvalidArgument(
                f"there are {len(vectors)} vectors for {self.count} nodes; look fields up in a group with "
                "per_node=True, and give each level its own"
            )
        if vectors.is_nested:
            return self._expand_jagged(vectors)
        return cast("Tensor", _Expand.apply(vectors, self))  # type: ignore[no-untyped-call]

    def _expand_jagged(self, vectors: Tensor) -> Tensor:
        values, offsets = vectors.values(), vectors.offsets()  # type: ignore[attr-defined]
        index = self.index.to(offsets.device)
        lengths = offsets.diff()[index]
        ends = torch.cumsum(lengths, 0)
        within = torch.arange(int(ends[-1]) if len(ends) else 0, device=ends.device)
        within = within - (ends - lengths).repeat_interleave(lengths)
        places = offsets[:-1][index].repeat_interleave(lengths) + within
        bounds = torch.cat([ends.new_zeros(1), ends])
        return jagged_tensor(Nodes(places, len(values)).expand(values), bounds)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, nodes: Nodes) -> Tensor:
        ctx.nodes = nodes
        return vectors.index_select(0, nodes.index.to(vectors.device))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        # Bags of samples, one a node: many times as fast as adding row by row.
        order, starts = (item.to(upstream.device) for item in ctx.nodes.by_node)
        shape = (ctx.nodes.count, *upstream.shape[1:])
        if not upstream.numel():
            return upstream.new_zeros(shape), None
        flat = upstream.reshape(len(upstream), -1)
        return nn.functional.embedding_bag(order, flat, starts, mode="sum").view(shape), None


def nodes_of(batch: Any, name: str) -> Nodes | None:
    """Return the nodes of the level of column ``name`` in a batch; None: each sample has its own value."""
    level = getattr(batch, "level_of", {}).get(name)
    return None if level is None else getattr(batch, "nodes", NO_NODES)[level]


def per_level(module: Callable[..., Any], batch: Any, level: str, *inputs: Any, **settings: Any) -> Any:
    """Compute ``module(*inputs)`` once for each node of a level, and give every sample its node's result.

        fields = gt.EmbeddingGroup(cluster, "ctr", [...], per_node=True)
        vectors = fields(batch)
        users = gt.per_level(user_tower, batch, "user", vectors["user"], vectors["history"])   # [B, D]

    Args:
        module: Function of tensors [N, ...] that returns tensors [N, ...], or a tuple, list or dict of them; each row
            from its own row alone. One that mixes rows (batch norm) sees every node once.
        batch: Batch of ``gt.TreeSamples``, or of samples with ``dedup``. For a batch without levels the result is
            that of ``module``, so that one model takes both.
        level: Name of the level.
        inputs: Tensors of the nodes: vectors of a group with ``per_node=True``, or columns of the level.
        settings: Named arguments of ``module``.

    Returns the result with B rows instead of N; gradients are summed by node. Raises InvalidArgument.
    """
    result = module(*inputs, **settings)
    nodes = getattr(batch, "nodes", NO_NODES)
    if not nodes:
        return result
    if level not in nodes:
        raise InvalidArgument(f"the batch has no level {quoted(level)}; it has {', '.join(map(repr, nodes))}")
    return pytree.tree_map_only(Tensor, nodes[level].expand, result)


class LevelPart(NamedTuple):
    """The vectors of all fields of one level."""

    names: Sequence[str]
    """Of the fields."""
    vectors: Tensor
    """[N, W], those of the fields side by side."""
    nodes: Nodes | None
    """None: each sample has its own."""

    def expand(self, values: Tensor) -> Tensor:
        """Return each sample's value [B, ...] of those of the level [N, ...]."""
        return values if self.nodes is None else self.nodes.expand(values)


def level_parts(vectors: Mapping[str, Tensor], names: Iterable[str], batch: Any) -> list[LevelPart]:
    """Return the vectors of the fields ``names`` by level, those that each sample has of its own last."""
    by_level: dict[str | None, list[str]] = {}
    for name in names:
        by_level.setdefault(getattr(batch, "level_of", {}).get(name), []).append(name)
    return [
        LevelPart(own, torch.cat([vectors[name] for name in own], dim=1), None if level is None else batch.nodes[level])
        for level, own in sorted(by_level.items(), key=lambda item: item[0] is None)
    ]


def linear_by_level(
    parts: Sequence[LevelPart], widths: Mapping[str, int], weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return [B, O], what a linear layer makes of the vectors of the fields ``widths``, which ``parts`` are of.

    ``weight`` is [O, W], its columns in the order of ``widths``; ``bias`` is [O].
    """
    columns = dict(zip(widths, torch.split(weight, list(widths.values()), dim=1), strict=True))
    total: Tensor | None = None
    for part in parts:
        of_part = torch.cat([columns[name] for name in part.names], dim=1)
        if part.nodes is None and total is not None:
            return torch.addmm(total, part.vectors, of_part.t())
        own, bias = part.expand(nn.functional.linear(part.vectors, of_part, bias)), None
        total = own if total is None else total + own
    assert total is not None
    return total


class LevelLinear(nn.Module):
    """A linear layer over the concatenated vectors of fields, computed level by level.

        first = gt.LevelLinear({"user": 16, "history": 16, "item": 16}, 200)
        hidden = first(fields(batch), batch)             # [B, 200]; fields with per_node=True

    The columns of a level's fields are multiplied once a node. Up to rounding the result is that of ``nn.Linear`` over
    ``torch.cat`` of the vectors of all samples; ``weight`` and ``bias`` are as there.
    """

    def __init__(self, widths: Mapping[str, int], out_features: int, *, bias: bool = True) -> None:
        """``widths`` holds the width of each field, in the order of the weights' columns."""
        super().__init__()
        self.widths = dict(widths)
        linear = nn.Linear(sum(self.widths.values()), out_features, bias=bias)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, vectors: Mapping[str, Tensor], batch: Any) -> Tensor:
        """Return [B, out_features] from the fields' vectors [N, width]; N is that of the field's level, or B.

        Raises InvalidArgument.
        """
        missing = [name for name in self.widths if name not in vectors]
        if missing:
            raise InvalidArgument(f"there are no vectors of field {missing[0]!r}; there are {', '.join(vectors)}")
        return linear_by_level(level_parts(vectors, self.widths, batch), self.widths, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the fields and widths, for print()."""
        return f"{self.widths} -> {len(self.weight)}"


def jagged_tensor(values: Tensor, offsets: Tensor) -> Tensor:
    """Return a nested tensor of layout torch.jagged [B, ?, ...] that is a view of ``values`` [N, ...].

    ``offsets`` [B + 1] on the same device go from 0 to N; they are not checked.
    """
    return cast("Tensor", _view(values, offsets))  # type: ignore[no-untyped-call]
