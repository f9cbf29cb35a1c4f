"""Batches of samples as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from geartrain.ams.values.specs import Ids
from geartrain.bridge.embedding.levels import Nodes

Values = Tensor | tuple[Tensor, Tensor]


def taken(values: Values, places: Tensor) -> Values:
    """Return the values at ``places``."""
    if isinstance(values, Tensor):
        return values[places]
    items, offsets = values
    starts, lengths = offsets[places], offsets.diff()[places]
    ends = lengths.cumsum(0)
    at = torch.repeat_interleave(starts - (ends - lengths), lengths) + torch.arange(int(lengths.sum()))
    return items[at], torch.cat([ends.new_zeros(1), ends])


def joined(batches: Sequence[SampleBatch], cursors: Mapping[int, tuple[int, int]]) -> SampleBatch:
    """Join the samples of all ``batches``, which have no levels, in order."""
    columns = {name: _concatenated([batch[name] for batch in batches]) for name in batches[0]}
    return SampleBatch(columns, sum(batch.num_samples for batch in batches), cursors)


def _concatenated(parts: Sequence[Values]) -> Values:
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if tensors:
        return torch.cat(tensors)
    jagged = [part for part in parts if not isinstance(part, Tensor)]
    lengths = torch.cat([offsets.diff() for _, offsets in jagged])
    return torch.cat([items for items, _ in jagged]), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


class SampleBatch(dict[str, Values]):
    """The columns of B samples by name, as ``EmbeddingGroup`` takes them.

    A column of single values is a tensor [B], one of lists ``(values, offsets)`` with B + 1 offsets, one of lists of L
    values [B, L]. Ids are int64; floats are float32 or float64, as in the source.

    With sample trees or ``dedup``, a batch has levels: a column in :attr:`level_of` has a value for each of the N nodes
    of that level instead of the B samples, and ``index[level]`` [B] is the node of each sample. ``EmbeddingGroup``,
    ``gt.per_level`` and ``gt.LevelLinear`` use that.
    """

    num_samples: int
    """Number of samples, B."""
    cursors: Mapping[int, tuple[int, int]]
    """Position after the batch in each data stream that it was read from: (epoch, position) by stream."""
    part: tuple[int, int] | None = None
    """(number, of): its part of a source of files that is read in parts."""

    places: tuple[Ids, Ids] | None = None
    """Data stream of each sample [B], and its position there [B], if the reader gives them."""

    level_of: Mapping[str, str]
    """Level of each column that has values by node."""
    nodes: Mapping[str, Nodes]
    """Nodes of each level, outermost first."""

    def __init__(
        self,
        columns: Mapping[str, Values],
        num_samples: int,
        cursors: Mapping[int, tuple[int, int]],
        level_of: Mapping[str, str] | None = None,
        nodes: Mapping[str, Nodes] | None = None,
    ) -> None:
        super().__init__(columns)
        self.num_samples = num_samples
        self.cursors = cursors
        self.level_of, self.nodes = level_of or {}, nodes or {}
        self.is_committed_by: object = None

    def take(self, places: Tensor) -> SampleBatch:
        """Return the samples at ``places`` [K] int64, with their nodes, and the same cursors. Copies them."""
        nodes: dict[str, Nodes] = {}
        kept: dict[str | None, Tensor] = {None: places}
        for level, of in self.nodes.items():
            kept[level], index = torch.unique(of.index[places], return_inverse=True)
            nodes[level] = Nodes(index, len(kept[level]))
        columns = {name: taken(values, kept[self.level_of.get(name)]) for name, values in self.items()}
        return SampleBatch(columns, len(places), self.cursors, self.level_of, nodes)

    @property
    def index(self) -> dict[str, Tensor]:
        """Node of each sample by level, int64 [B]."""
        return {level: nodes.index for level, nodes in self.nodes.items()}

    @property
    def parents(self) -> dict[str, Tensor]:
        """Parent of each node by level, for all levels of trees but the outermost; int64 [N]."""
        found: dict[str, Tensor] = {}
        for (_, before), (level, nodes) in pairwise(self.nodes.items()):
            samples, starts = nodes.by_node
            found[level] = before.index[samples[starts]]
        return found
