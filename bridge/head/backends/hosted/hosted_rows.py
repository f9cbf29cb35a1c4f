"""Active rows that stay where they are: features go to the shards, which compute beside their rows.

Per training step and shard two requests, whatever the number of classes: the forward pass takes features and labels
(4·B·D + 8·B bytes) and answers sums (4·B·D + 16·B) and the rows of the targets there (all shards together 4·B·D); the
update takes features, labels, log-sum-exp and target weights (4·B·D + 16·B). With ranks or a batch in several calls a
partial selection also takes the labels of all samples (8 bytes each); with retired classes every request but those of
KNN softmax takes their runs (16 bytes each). The features travel twice, so that a shard keeps nothing between the two
(``docs/decisions/0015-hosted-models-keep-nothing.md``). The shards compute in float32.
Legend: B samples, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.client.hosted_calls import HostedCalls
from geartrain.ams.programs.class_head import FORWARD, SQUARED_NORM
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import Selection
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.placement import split_by_shard
from geartrain.ams.values.shard_messages import HostedInputs, SyncGroup
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.loss.batch import Batch, Targets
from geartrain.bridge.head.loss.margins.margin import Margin
from geartrain.bridge.head.loss.softmax import OnlineSoftmax, PartialSums
from geartrain.bridge.placements.workspace import Arithmetic
from geartrain.bridge.rows.ranks import SyncRanks
from geartrain.bridge.rows.row_update import RowGradient, RowUpdate
from geartrain.bridge.rows.tables import counted_as
from geartrain.bridge.rows.transfers import DeviceEvent, download, start_download

_BYTES_PER_NUMBER = 8
"""Bytes of a feature number, both ways: float32 to the shard, float32 of the weighted sum."""


@dataclass(frozen=True)
class StepSelection:
    """Selection of one step, as sent to the shards."""

    select: Selection
    live_classes: LiveClasses
    step: int
    labels: Ids
    """Labels of all samples of all ranks."""
    is_corrected: bool = False
    """Whether the logits are corrected for sampling."""

    def inputs(self, calls: HostedCalls, labels_B: Ids) -> tuple[int, dict[str, float], list[dict[str, Any]]]:
        """Return (seed, settings, arrays for each shard) for ``labels_B``; ids are left out where a rule gives them."""
        shards = range(calls.view.num_shards)
        more = {} if self.live_classes.are_all else {"retired_runs": self.live_classes.retired_runs.ravel()}
        rule = self.select.shard_rule(corrected=self.is_corrected)
        if rule is not None:
            if rule.takes_labels and len(self.labels) != len(labels_B):
                more["batch_labels"] = self.labels
            return rule.seed, dict(rule.settings), [more for _ in shards]
        if self.is_corrected:
            raise InvalidArgument(
                f"{self.select!r} corrects its logits, which shards do for PartialFC alone; let corrects() be False, "
                "or use rows='pull' or 'ranks'"
            )
        ids = self._ids
        routes = dict(split_by_shard(ids, calls.view.bucket_shards, len(shards), dense=True))
        none = np.empty(0, np.int64)
        mine = [ids if len(shards) == 1 else ids[routes.get(shard, none)] for shard in shards]
        return 0, {}, [{"active": part} for part in mine]

    @cached_property
    def _ids(self) -> Ids:
        """Active classes, chosen once: the graph may be replaced before the update, which needs the same classes."""
        return self.live_classes.select(self.select, self.labels, self.step).ids


class RowsOnShards:
    """Rows of one forward pass. Costs one request per shard (more for a batch that exceeds ``part_bytes``)."""

    def __init__(
        self,
        calls: HostedCalls,
        features: Tensor,
        labels_B: Ids,
        margin: Margin | None,
        chosen: StepSelection,
        required_sync: SyncGroup | None,
        smoothing: float = 0.0,
        centers: int = 1,
    ) -> None:
        compute = Arithmetic.of(features).compute
        arithmetic = Arithmetic(device=features.device, compute=compute, matmul=compute)
        unused = Targets(np.zeros(len(labels_B), np.int64))
        num_live_classes = chosen.live_classes.num_live_classes
        self.batch = Batch.of(
            features, unused, labels_B, margin, num_live_classes, arithmetic, smoothing, centers=centers
        )
        self.batch.shifted = True  # a shard that needs no shift answers with 0
        self.batch.shifts_by_highest = False
        self._calls = calls
        self._labels_B = labels_B
        self._chosen = chosen
        self._required_sync = required_sync
        self._features_BD = np.ascontiguousarray(download(self.batch.features_BD.float()).numpy())
        self._feature_dtype = features.dtype
        self._gradient_BD: Tensor | None = None

    def forward(self, *, want_gradient: bool, keep_bytes: int) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002
        """Return losses [B] and feature gradients [B, D]."""
        batch = self.batch
        num_shards = self._calls.view.num_shards
        softmax = OnlineSoftmax(batch, num_shards, want_gradient=want_gradient, begins_on=torch.device("cpu"))
        spread_over = 0.0
        wants = {"want_gradient": float(want_gradient), "want_row_sum": float(batch.smoothing > 0)}
        for part in self._parts(wants):
            inputs = [(of_shard,) for of_shard in part.inputs]
            with counted_as("pull"):
                answers = self._calls.compute(FORWARD, inputs.__getitem__, required_sync=self._required_sync)
            for sums, arrays in zip(softmax.parts, answers, strict=True):
                _fill(sums, arrays, part.start, part.stop)
                batch.num_active += int(arrays["num_active"][0]) if part.start == 0 else 0
                if sums.row_sum_PD is not None and part.start == 0:
                    sums.row_sum_PD[0].copy_(torch.tensor(arrays["row_sum"], device="cpu"))
                    spread_over += float(arrays["row_weight"][0])
        batch.spread_over = spread_over
        softmax.move()
        losses_B, gradient_BD = softmax.finish()
        self._gradient_BD = gradient_BD
        return losses_B, gradient_BD

    def gradient(self, upstream: Tensor) -> tuple[HostedGradient, Tensor]:
        """Return the factors of which shards make the row gradients, and a sum that is finite only if all of them
        are."""
        batch = self.batch
        factor, weights_B = batch.row_factors(upstream)
        checksum = factor + batch.lse2_B.sum() + batch.target_weight_B.sum()
        if self._gradient_BD is not None:  # as it is passed to the network: loss scales overflow float16
            each = upstream / batch.divisor if upstream.ndim == 0 else upstream.unsqueeze(1)
            checksum = checksum + (0 * (self._gradient_BD * each).to(self._feature_dtype)).sum()
            self._gradient_BD = None
        return HostedGradient(self._calls, [_Pending(self, factor, weights_B)]), checksum

    def discard(self) -> None:
        """Do nothing: no memory is held."""

    def update_inputs(self, weight: float, samples: SummedBatch) -> list[tuple[HostedInputs, ...]]:
        """Return the update inputs of each shard. ``samples`` are those of this batch, or of another rank's batch."""
        more = {"lse2": samples.lse2_B, "target_weight": samples.target_weight_B}
        if samples.weight_B is not None:
            more["sample_weight"] = samples.weight_B
        parts = list(self._parts({"class_smoothing": self.batch.class_smoothing}, more, weight, samples=samples))
        return [tuple(part.inputs[shard] for part in parts) for shard in range(self._calls.view.num_shards)]

    def _parts(
        self,
        settings: dict[str, float],
        more: dict[str, npt.NDArray[Any]] | None = None,
        weight: float = 1.0,
        *,
        samples: SummedBatch | None = None,
    ) -> Iterator[_Part]:
        """Return the batch in as few calls as its size allows; sums over samples of different calls are separate
        anyway.

        ``samples`` are sent in one call.
        """
        batch = self.batch
        features_BD = self._features_BD if samples is None else samples.features_BD
        labels_B = self._labels_B if samples is None else samples.labels_B
        size, width = features_BD.shape
        at_once = self._calls.part_bytes // (_BYTES_PER_NUMBER * (width + 8)) if samples is None else size
        for start in range(0, size, max(1, at_once)):
            stop = min(start + max(1, at_once), size)
            labels = labels_B[start:stop]
            seed, chosen, arrays = self._chosen.inputs(self._calls, labels)
            common: dict[str, npt.NDArray[Any]] = {"features": features_BD[start:stop], "labels": labels}
            common |= more or {}
            yield _Part(
                start,
                stop,
                [
                    HostedInputs(
                        arrays={**common, **its},
                        settings={
                            "logit_factor": batch.logit_factor,
                            "normalised": float(batch.margin is not None),
                            "sub_centers": float(batch.centers),
                            **chosen,
                            **settings,
                        },
                        seed=seed,
                        step=self._chosen.step,
                        weight=weight,
                    )
                    for its in arrays
                ],
            )


@dataclass(frozen=True)
class SummedBatch:
    """A batch whose log-sum-exp is known: features [B, D], labels [B], log-sum-exp and target weights [B], and sample
    weights [B] (None: 1)."""

    features_BD: npt.NDArray[np.float32]
    labels_B: Ids
    lse2_B: npt.NDArray[np.float32]
    target_weight_B: npt.NDArray[np.float32]
    weight_B: npt.NDArray[np.float32] | None = None

    def of_ranks(self, ranks: SyncRanks) -> list[SummedBatch]:
        """Return the batch of every rank, in rank order. Collective: all-gathers of 4·(D + 3) + 8 bytes a sample."""
        weight_B = np.ones_like(self.lse2_B) if self.weight_B is None else self.weight_B
        columns = [values_B[:, None] for values_B in (self.lse2_B, self.target_weight_B, weight_B)]
        packed = np.concatenate([self.features_BD, *columns], axis=1, dtype=np.float32)
        labels = ranks.gather_labels(self.labels_B)
        gathered = []
        for rows in ranks.gather_rows(packed):
            its, labels = labels[: len(rows)], labels[len(rows) :]
            lse2_B, target_weight_B, weight_B = rows[:, -3:].T.copy()
            features_BD = np.ascontiguousarray(rows[:, :-3])
            gathered.append(SummedBatch(features_BD, its, lse2_B, target_weight_B, weight_B))
        return gathered


@dataclass(frozen=True)
class _Part:
    """Samples ``start`` … ``stop`` − 1, and each shard's inputs made of them."""

    start: int
    stop: int
    inputs: list[HostedInputs]


def _fill(sums: PartialSums, arrays: Any, start: int, stop: int) -> None:
    """Copy a shard's answer for samples ``start`` … ``stop`` − 1 into the sums."""
    for name, values_PB in (("shift", sums.shift_PB), ("sum", sums.sum_PB), ("highest", sums.highest_PB)):
        if values_PB is not None:
            values_PB[0, start:stop] = torch.tensor(arrays[name], device="cpu")
    if sums.weighted_PBD is not None:
        sums.weighted_PBD[0, start:stop] = torch.tensor(arrays["weighted"], device="cpu").to(sums.weighted_PBD)
    samples = torch.tensor(arrays["target_samples"], device="cpu") + start
    sums.target_rows_BD[samples] = torch.tensor(arrays["target_rows"], device="cpu").to(sums.target_rows_BD)


class _Pending:
    """Batch, and the factors of its row gradients, which may still be on their way from a device."""

    def __init__(self, rows: RowsOnShards, factor: Tensor, weights_B: Tensor | None) -> None:
        """``factor`` and ``weights_B`` come from ``Batch.row_factors``."""
        self.rows = rows
        batch = rows.batch
        self._factor = start_download(factor)
        numbers = [batch.lse2_B, batch.target_weight_B, *([] if weights_B is None else [weights_B])]
        self._numbers = [start_download(values_B.float()) for values_B in numbers]
        self._arrival = DeviceEvent(factor.device)

    @property
    def factor(self) -> float:
        """Factor of all row gradients."""
        self._arrival.wait()
        return float(self._factor)

    def samples(self) -> SummedBatch:
        """Return the batch that the update is made of."""
        self._arrival.wait()
        return SummedBatch(
            self.rows._features_BD, self.rows._labels_B, *(values_B.numpy() for values_B in self._numbers)
        )


class HostedGradient:
    """Gradients that the shards compute at the step, of one or several micro-batches. Holds B·D numbers for each.

    With asynchronous workers the rows may have moved since the forward pass; the gradient is then that of the new rows
    under the old log-sum-exp.
    """

    is_one_push = False
    prepared = 0

    def __init__(self, calls: HostedCalls, pending: list[_Pending]) -> None:
        self._calls = calls
        self._pending = pending

    def merge(self, other: RowGradient) -> None:
        """Add the gradient of another micro-batch, which is used up."""
        assert isinstance(other, HostedGradient), "the rows of a head are in one place"
        if self.prepared:
            raise InvalidArgument(
                "the last step() stopped with an error; call step() again, or zero_grad() to give it up, before the "
                "next backward()"
            )
        self._pending += other._pending

    def push(self, update: RowUpdate) -> None:
        """Prepare one update for each shard, once."""
        if not self.prepared:
            inputs = self._inputs(self._batches())
            update.prepare_push(partial(self._calls.prepare_update, inputs.__getitem__))

    def squared_norm(self) -> float:
        """Return Σ g² over all rows, in float64; the shards compute the gradients once more."""
        return self._squared_norm(self._batches())

    def _squared_norm(self, batches: list[list[tuple[HostedInputs, ...]]]) -> float:
        with counted_as("pull"):
            answers = self._calls.compute(SQUARED_NORM, self._inputs(batches).__getitem__)
        return float(sum(float(arrays["squared_norm"][0]) for arrays in answers))

    squares = None
    """None: only the shards can compute Σ g²."""

    def joint_squared_norm(self, ranks: SyncRanks, weight: float) -> float:
        """Return Σ g² as :class:`RowGradient`. Every rank's samples go to rank 0, which asks the shards for all of
        them."""
        batches = [(batch, batch.samples().of_ranks(ranks)) for batch in self._pending]
        mine = np.array([[weight * batch.factor for batch in self._pending]], np.float32)
        weights_RM = np.concatenate(ranks.gather_rows(mine))

        def fetch() -> float:
            inputs = [
                batch.rows.update_inputs(float(weights_RM[rank, number]), samples)
                for number, (batch, of_ranks) in enumerate(batches)
                for rank, samples in enumerate(of_ranks)
            ]
            return self._squared_norm(inputs)

        return float(
            ranks.sum(torch.tensor(ranks.first_then_others(fetch, lambda: 0.0), dtype=torch.float64, device="cpu"))
        )

    def discard(self) -> None:
        """Do nothing: only the batches are held."""

    def _batches(self) -> list[list[tuple[HostedInputs, ...]]]:
        return [batch.rows.update_inputs(batch.factor, batch.samples()) for batch in self._pending]

    def _inputs(self, batches: list[list[tuple[HostedInputs, ...]]]) -> list[tuple[HostedInputs, ...]]:
        """Return the inputs of all batches for each shard; a rank's empty batch has none."""
        return [
            tuple(inputs for batch in batches for inputs in batch[shard])
            for shard in range(self._calls.view.num_shards)
        ]
