"""Batches of samples as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor

from geartrain.bridge.embedding.levels import Nodes

Values = Tensor | tuple[Tensor, Tensor]


class SampleBatch(dict[str, Values]):
    """The columns of B samples by name, as ``EmbeddingGroup`` takes them.

    A column of single values is a tensor [B], one of lists ``(values, offsets)`` with B + 1 offsets, one of lists of L
    values [B, L]. Ids are int64; floats are float32 or float64, as the source has them.

    Of sample trees, and with ``dedup``, a batch has levels: a column that is in :attr:`level_of` has a value for each
    of the N nodes of that level instead of the B samples, and ``index[level]`` [B] says which node a sample has.
    ``EmbeddingGroup``, ``gt.per_level`` and ``gt.LevelLinear`` know that.
    """

    num_samples: int
    """B."""
    cursors: Mapping[int, tuple[int, int]]
    """Where the data streams that it was read from go on after it: (epoch, position) by stream."""
    part: tuple[int, int] | None = None
    """(number, of): which part of a source of files it is of, if it was read in parts."""

    level_of: Mapping[str, str]
    """The level of each column that has values by node."""
    nodes: Mapping[str, Nodes]
    """The nodes of each level, the outermost first."""

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

    @property
    def index(self) -> dict[str, Tensor]:
        """Of each level the node of each sample, int64 [B]."""
        return {level: nodes.index for level, nodes in self.nodes.items()}

    @property
    def parents(self) -> dict[str, Tensor]:
        """Of trees: of each level but the outermost, for each of its nodes that of the level before; int64 [N]."""
        found: dict[str, Tensor] = {}
        for (_, before), (level, nodes) in pairwise(self.nodes.items()):
            samples, starts = nodes.by_node
            found[level] = before.index[samples[starts]]
        return found
