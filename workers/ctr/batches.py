"""Batches of samples for a click model: to train on, to choose the best step by, and to test with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.workers.ctr.designs import Design
from geartrain.workers.ctr.metrics import Scores
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.click_samples import ClickSamples, part_validation, split
from geartrain.workers.ctr.samples.negatives import learned_from
from geartrain.workers.data.streams import JointOrder

AT_ONCE = 4096


class ClickBatch(NamedTuple):
    """Batch of B samples."""

    ids: Mapping[str, Any]
    """Ids by field, as the embeddings take them."""
    images: Mapping[str, Tensor]
    """Images by input name, which the network takes beside the vectors."""
    clicks: Tensor
    """[B], 0 or 1."""

    def scores(self, logits: Tensor, user: str | None) -> Scores:
        """Return the scores of these samples by ``logits`` [B]; ``user`` is the field of users."""
        users = None
        if user is not None:
            users, level = self.ids[user], getattr(self.ids, "level_of", {}).get(user)
            users = np.asarray(users if level is None else users[self.ids.index[level]])  # type: ignore[attr-defined]
        return Scores(logits.detach().double().sigmoid().numpy(), self.clicks.double().numpy(), users)


class ClickBatches(ABC):
    """All samples of a training, in batches."""

    num_trained: int
    num_validated: int = 0
    num_tested: int = 0
    identity: str = ""
    """Identity of the samples' source."""
    ends: Mapping[int, int] | None = None
    """End offset of each partition, for a topic that is not followed; else None."""

    @abstractmethod
    def some(self) -> ClickSamples:
        """Return samples to train on; of many the first ones."""

    @abstractmethod
    def trained(self, step: int) -> ClickBatch:
        """Return the batch of ``step``, which may cross the end of an epoch. Raises SourceError."""

    def is_ready(self) -> bool:
        """Return whether the next batch is ready; wait half a second at most. Raises SourceError, BrokerUnavailable."""
        return True

    def has_ended(self) -> bool:
        """Return whether no further batch comes, after :meth:`is_ready` returned False."""
        return False

    def apply(self, step: Callable[[], object]) -> bool:
        """Train on the ready batch by ``step``; return False if the job was restored: its samples come again."""
        step()
        return True

    def where(self) -> Mapping[int, tuple[int, int]]:
        """Return the cursor of each data stream behind the trained samples; empty if the step number is enough."""
        return {}

    def go_on(self, cursors: Mapping[int, tuple[int, int]]) -> None:  # noqa: B027
        """Continue reading from cursors of :meth:`where`."""

    def kept(self, batches: Iterable[ClickBatch]) -> Iterable[ClickBatch]:
        """Return ``batches``; while they are read this worker keeps its place among those that train."""
        return batches

    def alone(self) -> AbstractContextManager[None]:
        """Let no other worker of the job train meanwhile: rows, and :meth:`where`, are of one moment."""
        return nullcontext()

    def require_alone(self) -> None:  # noqa: B027
        """Raise SnapshotFailed if other workers may have trained since this one was :meth:`alone` and asked
        :meth:`where` it is.
        """

    def keep_lease(self) -> None:  # noqa: B027
        """Keep this worker's share of the samples while it waits for something else."""

    @property
    def has_others(self) -> bool:
        """Whether other workers have trained on the rows, and may do so again."""
        return False

    def settle(self) -> bool:
        """Close, and wait while the scheduler saves or restores the job; return whether it restores it after a loss."""
        return False

    def reopen(self) -> bool:
        """Read on from where the scheduler restored the job to; False: it does not restore it."""
        return False

    def wait_alone(self) -> None:  # noqa: B027
        """Release unread samples, and wait until no other worker reads the samples of the job."""

    def close(self) -> None:  # noqa: B027
        """Release samples that are not read, to other workers."""

    def told(self) -> dict[str, Any]:
        """Return what the report says about the samples' arrival."""
        return {}

    def validated(self) -> Iterator[ClickBatch]:
        """Yield the validation batches, by which the best step is chosen."""
        return iter(())

    def tested(self) -> Iterator[ClickBatch]:
        """Yield the test batches: the rest of the samples held out."""
        return iter(())


class BatchesInMemory(ClickBatches):
    """Batches of samples that are all in memory."""

    def __init__(self, samples: ClickSamples, recipe: CtrRecipe, design: Design) -> None:
        self._design, self._negatives = design, recipe.negatives
        self._trained, held_out = split(
            samples,
            recipe.split,
            recipe.seed,
            history=recipe.history,
            fresh=recipe.fresh,
            validation=recipe.validation,
        )
        self._validated, self._tested = part_validation(held_out, recipe.seed)
        self.num_trained, self.num_validated, self.num_tested = map(len, (self._trained, self._validated, self._tested))
        self._order = JointOrder(self.num_trained, recipe.batch_size, recipe.seed)

    def some(self) -> ClickSamples:
        return self._trained

    def trained(self, step: int) -> ClickBatch:
        indices = self._order.indices(step).numpy()
        # Hashing the place in the order makes another choice in each epoch.
        return self.numbered(indices, step * len(indices) + np.arange(len(indices)))

    def numbered(self, indices: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> ClickBatch:
        """Return the samples at ``indices`` to train on; ``places`` choose those without a click that are kept."""
        if self._negatives < 1:
            columns = (*(ids[indices] for ids in self._trained.fields.values()), places)
            indices = indices[learned_from(columns, self._trained.clicks[indices], self._negatives)]
        return _batch(self._design, self._trained, indices)

    def validated(self) -> Iterator[ClickBatch]:
        return batches_of(self._design, self._validated)

    def tested(self) -> Iterator[ClickBatch]:
        return batches_of(self._design, self._tested)


def batches_of(design: Design, samples: ClickSamples) -> Iterator[ClickBatch]:
    """Yield all samples, in order."""
    for first in range(0, len(samples), AT_ONCE):
        yield _batch(design, samples, np.arange(first, min(first + AT_ONCE, len(samples))))


def _batch(design: Design, samples: ClickSamples, indices: npt.NDArray[np.int64]) -> ClickBatch:
    clicks = torch.from_numpy(samples.clicks[indices])
    return ClickBatch(design.ids(samples, indices), design.images(samples, indices), clicks)
