"""Batches of samples as a click model takes them: to train on, to choose the best step by, and to test with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
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
    """B samples."""

    ids: Mapping[str, Any]
    """As the embeddings take them."""
    images: Mapping[str, Tensor]
    """As the network takes them beside the vectors."""
    clicks: Tensor
    """[B], 0 or 1."""

    def scores(self, logits: Tensor, user: str | None) -> Scores:
        """Those that ``logits`` [B] are of; ``user`` is the field of users."""
        users = None
        if user is not None:
            users, level = self.ids[user], getattr(self.ids, "level_of", {}).get(user)
            users = np.asarray(users if level is None else users[self.ids.index[level]])  # type: ignore[attr-defined]
        return Scores(logits.detach().double().sigmoid().numpy(), self.clicks.double().numpy(), users)


class ClickBatches(ABC):
    """All samples of a training."""

    num_trained: int
    num_validated: int = 0
    num_tested: int = 0
    identity: str = ""
    """What tells their source from others."""
    ends: Mapping[int, int] | None = None
    """Of a topic that is not followed: the offset where each partition ends."""

    @abstractmethod
    def some(self) -> ClickSamples:
        """Samples to train on, or the first of many."""

    @abstractmethod
    def trained(self, step: int) -> ClickBatch:
        """The batch of ``step``, which may run over from one epoch into the next. Raises SourceError."""

    def is_ready(self) -> bool:
        """Whether the next batch is there; waits for half a second at most. Raises SourceError, BrokerUnavailable."""
        return True

    def has_ended(self) -> bool:
        """Whether no further batch comes, now that :meth:`is_ready` has said no."""
        return False

    def apply(self, step: Callable[[], object]) -> bool:
        """Have ``step`` train on the batch that is ready; False: the job goes back, and the samples come again."""
        step()
        return True

    def where(self) -> Mapping[int, tuple[int, int]]:
        """Where each data stream goes on behind what was trained on; none where that follows from the step."""
        return {}

    def go_on(self, cursors: Mapping[int, tuple[int, int]]) -> None:  # noqa: B027
        """Read on from :meth:`where` it was."""

    def settle(self) -> None:  # noqa: B027
        """Wait until the scheduler saves the job no more."""

    def close(self) -> None:  # noqa: B027
        """Leave what is not read to other workers."""

    def told(self) -> dict[str, Any]:
        """What the report says of how they came."""
        return {}

    def validated(self) -> Iterator[ClickBatch]:
        """Those that the best step is chosen by."""
        return iter(())

    def tested(self) -> Iterator[ClickBatch]:
        """The others that are held out."""
        return iter(())


class BatchesInMemory(ClickBatches):
    """Those of samples that are all in memory."""

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
        """See ClickBatches."""
        return self._trained

    def trained(self, step: int) -> ClickBatch:
        """See ClickBatches."""
        indices = self._order.indices(step).numpy()
        if self._negatives < 1:  # the place in the order makes it another choice in each epoch
            places = step * len(indices) + np.arange(len(indices))
            columns = (*(ids[indices] for ids in self._trained.fields.values()), places)
            indices = indices[learned_from(columns, self._trained.clicks[indices], self._negatives)]
        return _batch(self._design, self._trained, indices)

    def validated(self) -> Iterator[ClickBatch]:
        """See ClickBatches."""
        return batches_of(self._design, self._validated)

    def tested(self) -> Iterator[ClickBatch]:
        """See ClickBatches."""
        return batches_of(self._design, self._tested)


def batches_of(design: Design, samples: ClickSamples) -> Iterator[ClickBatch]:
    """All of the samples, in order."""
    for first in range(0, len(samples), AT_ONCE):
        yield _batch(design, samples, np.arange(first, min(first + AT_ONCE, len(samples))))


def _batch(design: Design, samples: ClickSamples, indices: npt.NDArray[np.int64]) -> ClickBatch:
    clicks = torch.from_numpy(samples.clicks[indices])
    return ClickBatch(design.ids(samples, indices), design.images(samples, indices), clicks)
