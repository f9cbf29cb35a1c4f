"""Batches of samples of a Kafka topic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geartrain.workers.ctr.batches import ClickBatch, ClickBatches
from geartrain.workers.ctr.designs import Design
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.click_samples import ClickSamples
from geartrain.workers.ctr.samples.topic import TopicSamples
from geartrain.workers.ctr.streamed import click_batch
from geartrain.workers.job.options import ENDLESS
from geartrain.workers.samples.batches import SampleBatch
from geartrain.workers.samples.late_labels import LabelledBatches
from geartrain.workers.samples.reader import StreamBatches


class TopicBatches(ClickBatches):
    """Batches of a topic: all samples are trained on, in the order of each partition, and none is held out."""

    num_trained = ENDLESS << 22

    def __init__(self, samples: TopicSamples, recipe: CtrRecipe, design: Design) -> None:
        self._samples, self._design, self._negatives = samples, design, recipe.negatives
        self.identity = samples.messages.identity
        self._reader = samples.messages.reader()
        self._cursors: dict[int, tuple[int, int]] = {**self._reader.positions}
        self._next: SampleBatch | None = None

    def some(self) -> ClickSamples:
        return self._samples.none()

    def is_ready(self) -> bool:
        if self._next is None and self._reader.has_more:
            self._next = self._reader.next_batch(0)
        return self._next is not None

    def has_ended(self) -> bool:
        return not self._reader.has_more

    def where(self) -> Mapping[int, tuple[int, int]]:
        return self._cursors

    def go_on(self, cursors: Mapping[int, tuple[int, int]]) -> None:
        """Continue from these cursors; partitions that are new since are read from their start."""
        self._reader.add(cursors)
        self._cursors.update(cursors)

    def told(self) -> dict[str, Any]:
        return late_labels(self._reader)

    def trained(self, step: int) -> ClickBatch:
        """Return the next batch, for any ``step``."""
        del step
        batch, self._next = self._next, None
        assert batch is not None  # is_ready was True
        self._cursors.update(batch.cursors)
        return click_batch(self._design, batch, self._negatives)


def late_labels(reader: StreamBatches) -> dict[str, Any]:
    """Return what the report says about late labels; empty without them."""
    if not isinstance(reader, LabelledBatches):
        return {}
    return {"late_labels": {"late_clicks": reader.late_clicks, "forced_impressions": reader.forced}}
