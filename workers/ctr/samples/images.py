"""Images of items, by their ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.specs import Ids


@dataclass(frozen=True)
class ItemImages:
    """An image for each of K items."""

    items: Ids
    """[K], rising."""
    pixels: npt.NDArray[np.float32]
    """[K, P], in [0, 1]."""

    @property
    def dim(self) -> int:
        """P."""
        return int(self.pixels.shape[1])

    def of(self, ids: Ids) -> npt.NDArray[np.float32]:
        """The images [B, P] of the items ``ids`` [B]. Raises ConfigError that names an item without one."""
        places = np.minimum(np.searchsorted(self.items, ids), len(self.items) - 1)
        missing = np.flatnonzero(self.items[places] != ids)
        if len(missing):
            raise ConfigError(f"item {ids[missing[0]]} has no image; give every item one")
        return self.pixels[places]
