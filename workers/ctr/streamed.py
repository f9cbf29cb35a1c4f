"""Batches of samples from files, read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.workers.ctr.batches import AT_ONCE, ClickBatch, ClickBatches
from geartrain.workers.ctr.designs import Design
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.click_samples import ClickSamples
from geartrain.workers.ctr.samples.held_out import HeldOut, HeldOutPart
from geartrain.workers.ctr.samples.negatives import columns_of, learned_from
from geartrain.workers.ctr.samples.own import CLICK, OwnSamples
from geartrain.workers.samples.batches import SampleBatch
from geartrain.workers.samples.order import EpochOrder, Window
from geartrain.workers.samples.reader import FileBatches
from geartrain.workers.samples.rows import ChangedRows, Rows, SampleRows
from geartrain.workers.samples.source import fingerprint

_MAX_EXAMPLE_SAMPLES = 65_536
"""Number of training samples, from the first on, among which examples are chosen."""


class StreamedBatches(ClickBatches):
    """Batches of samples from files.

    Memory: two parts of the files (row groups, or blocks of lines), a window of the order, and a batch.
    """

    def __init__(self, samples: OwnSamples, recipe: CtrRecipe, design: Design) -> None:
        self._samples, self._design, self._batch_size = samples, design, recipe.batch_size
        self._negatives = recipe.negatives
        self._held_out = held_out = HeldOut(samples, recipe)
        self.part_rows: Sequence[int] = held_out.train_rows
        self.num_trained, self.num_validated = sum(self.part_rows), held_out.num_validated
        self.num_tested = held_out.num_tested
        self.identity = fingerprint(samples.identity, list(samples.part_rows), recipe.window_rows, recipe.held_out)
        order = _Endless(self.part_rows, seed=recipe.seed, num_streams=1, window_rows=recipe.window_rows)
        self._reader = FileBatches(self, order, batch_size=recipe.batch_size, drop_last=False)

    def read(self, part: int) -> Rows:
        """Return the training rows of a part; this is a :class:`~geartrain.workers.samples.source.SampleSource`."""
        rows = self._samples.read(part)

        def trained(first: int, end: int) -> SampleRows:
            return _select_rows(rows, self._held_out.parted(part).train[first:end])

        return ChangedRows(self.part_rows[part], trained)

    def some(self) -> ClickSamples:
        found: list[SampleRows] = []
        missing = _MAX_EXAMPLE_SAMPLES
        for part in range(len(self.part_rows)):
            found.append(self.read(part).slice(0, missing))
            missing -= found[-1].num_rows
            if not missing:
                break
        return self._samples.gathered(found)

    def trained(self, step: int) -> ClickBatch:
        place = (0, step * self._batch_size)
        if self._reader.positions.get(0) != place:
            self._reader.add({0: place})
        batch = self._reader.next_batch(0)
        assert batch is not None
        return click_batch(self._design, batch, self._negatives)

    def validated(self) -> Iterator[ClickBatch]:
        return self._batches(lambda parted: parted.validation)

    def tested(self) -> Iterator[ClickBatch]:
        return self._batches(lambda parted: parted.test)

    def _batches(self, chosen: Callable[[HeldOutPart], npt.NDArray[Any]]) -> Iterator[ClickBatch]:
        for part in self._held_out.parts:
            rows, indices = self._samples.read(part), chosen(self._held_out.parted(part))
            for first in range(0, len(indices), AT_ONCE):
                yield click_batch(self._design, _select_rows(rows, indices[first : first + AT_ONCE]).batch({}))


def click_batch(design: Design, batch: SampleBatch, negatives: float = 1.0) -> ClickBatch:
    """Return a model's batch of samples from files or a topic.

    It has all clicked samples, and about the share ``negatives`` of the others.
    """
    clicks, level = batch.pop(CLICK), batch.level_of.get(CLICK)
    assert isinstance(clicks, Tensor)
    clicks = (clicks if level is None else clicks[batch.index[level]]).float()
    if negatives < 1:
        places = torch.from_numpy(learned_from(columns_of(batch), clicks.numpy(), negatives))
        batch, clicks = batch.take(places), clicks[places]
    return ClickBatch(design.ids_of(batch), {}, clicks)


def _select_rows(rows: Rows, indices: npt.NDArray[Any]) -> SampleRows:
    """Return the samples at ascending ``indices``."""
    if not len(indices):
        return rows.slice(0, 0)
    first, count = int(indices[0]), int(indices[-1] - indices[0]) + 1
    found = rows.slice(first, count)
    return found if count == len(indices) else found.take(indices - first)


class _Endless(EpochOrder):
    """Order of the samples of all epochs, one after another, as one endless stream."""

    def stream_rows(self, stream: int) -> int:
        del stream
        return 2**63 - 1

    def windows(self, epoch: int, stream: int, position: int) -> Iterator[Window]:
        while True:
            epoch, at = divmod(position, self.num_rows)
            yield from super().windows(epoch, stream, at)
            position += self.num_rows - at
