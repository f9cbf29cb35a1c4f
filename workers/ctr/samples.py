"""Samples with sparse features, and which of them are held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted

PADDING = -1
"""Stands for no id."""
SPLITS = ("random", "time")


@dataclass(frozen=True)
class ClickSamples:
    """N samples: the ids of every field, and whether there was a click."""

    fields: Mapping[str, Ids]
    """[N], or [N, L] with :data:`PADDING` after the last id of each."""
    clicks: npt.NDArray[np.float32]
    """[N], 0 or 1."""
    times: Ids
    """[N], Unix seconds."""

    def __len__(self) -> int:
        return len(self.clicks)

    def batch(self, indices: npt.NDArray[np.int64]) -> dict[str, Ids]:
        """The ids of the samples at ``indices``, as ``EmbeddingGroup`` takes them."""
        return {name: ids[indices] for name, ids in self.fields.items()}

    def subset(self, indices: npt.NDArray[np.int64]) -> ClickSamples:
        """Those at ``indices``."""
        return ClickSamples(self.batch(indices), self.clicks[indices], self.times[indices])


def split(samples: ClickSamples, kind: str, seed: int) -> tuple[ClickSamples, ClickSamples]:
    """Part samples in four fifths to train on and one to test with.

    ``random``: the last fifth of a permutation by ``seed``. ``time``: the latest fifth; of equal times the order stays.
    Raises ConfigError for another kind, or if a part would be empty.
    """
    if kind not in SPLITS:
        raise ConfigError(f"split is {quoted(kind)}; it must be one of {', '.join(SPLITS)}")
    held_out = len(samples) // 5
    if not held_out:
        raise ConfigError(f"there are {len(samples)} samples; a fifth of them is held out, so give at least 5")
    if kind == "random":
        order = np.random.default_rng(seed).permutation(len(samples))
    else:
        order = np.argsort(samples.times, kind="stable")
    return samples.subset(order[:-held_out]), samples.subset(order[-held_out:])
