"""``nn.Embedding`` split by rows.

Per step: one exchange of six integers between the hosts, an all-gather of the ids (8·N bytes of all ranks) and a
reduce-scatter of N·D numbers; backward an all-gather of N·D. For a batch that looks up few of very many ids,
``gt.Embedding`` is better: it sends those rows alone.

Legend: N ids of all ranks, n of this one, V rows, L of them here, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidIds
from geartrain.bridge.parallel.mesh import MeshGroup
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.layer import SplitLayer
from geartrain.bridge.parallel.split.travel import own_samples


class SplitEmbedding(SplitLayer):
    """An ``nn.Embedding`` with rows spread over ranks; returns the vectors of the own ids, as that does.

    Attributes: ``weight`` [V, D], as in :class:`SplitLayer`; ``num_embeddings``, ``embedding_dim``, ``padding_idx``.
    """

    weight: nn.Parameter

    def __init__(
        self,
        name: str,
        embedding: nn.Embedding,
        rows: Mapping[str, Tensor | None],
        group: MeshGroup,
        agreement: StepAgreement,
    ) -> None:
        super().__init__(name, embedding, rows, group, agreement)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """Return vectors [..., D] of ids [...], int32 or int64; ids on a device that are out of range give NaN.

        Raises InvalidIds for those on a CPU, SyncError for another rank's, SpecMismatch where ranks differ.
        """
        link, shard = self.shard.group.link, self.shard
        flat_n = ids.reshape(-1) if isinstance(ids, Tensor) else torch.empty(0, dtype=torch.int64)
        sizes = self.agreement.sizes(self.layer_name, flat_n, lambda: self._check(ids))
        ids_N = link.gather(flat_n, sizes)
        weight_LD = self.local("weight")
        assert weight_LD is not None
        places_N = ids_N - shard.first
        is_elsewhere_N = (places_N < 0) | (places_N >= shard.num_local)
        if shard.num_local:
            pads_here = self.padding_idx is not None and shard.first <= self.padding_idx < shard.stop
            padding = self.padding_idx - shard.first if pads_here and self.padding_idx is not None else None
            rows_ND = F.embedding(places_N.clamp(0, shard.num_local - 1), weight_LD, padding)
            rows_ND = rows_ND.masked_fill(is_elsewhere_N.unsqueeze(1), 0.0)
        else:
            rows_ND = weight_LD.new_zeros(len(ids_N), self.embedding_dim) + weight_LD.sum()
        if link.rank == 0 and ids_N.device.type != "cpu":
            rows_ND = rows_ND.masked_fill(((ids_N < 0) | (ids_N >= shard.num)).unsqueeze(1), torch.nan)
        vectors = own_samples(rows_ND, link, sizes)
        self.agreement.collectives_end()
        return vectors.view(*ids.shape, self.embedding_dim)

    def _check(self, ids: Any) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            given = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
            raise InvalidIds(f"split layer {self.layer_name!r} was given {given}; it takes a tensor of int64 or int32")
        if ids.device.type == "cpu":
            wrong = ids[(ids < 0) | (ids >= self.num_embeddings)]
            if len(wrong):
                raise InvalidIds(
                    f"id {int(wrong[0])} is no row of split layer {self.layer_name!r}: they are 0 to "
                    f"{self.num_embeddings - 1}"
                )

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, here={self.shard.first}:{self.shard.stop}"
