"""Which modules are attached to a cluster, and what saving and loading a model do with their tables."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from torch import nn

from geartrain.bridge.dense.factory import Store
from geartrain.bridge.placements.placement import ClusterPlacement, Placement
from geartrain.bridge.rows.ranks import SyncRanks

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster


class Attachment(Protocol):
    """What trains one module whose values are in a cluster: a DenseTable."""

    @property
    def row_placement(self) -> Placement:
        """What saving and loading do with its tables."""

    def refresh(self) -> bool:
        """Pull the values; True if there were others."""


_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Attachment]] = weakref.WeakKeyDictionary()


def note(module: nn.Module, dense: Attachment) -> None:
    """``dense`` trains ``module``, for as long as somebody has both."""
    _attached[module] = weakref.ref(dense)


def placement_of(module: nn.Module) -> Placement | None:
    """Who keeps the weights of ``module``; None: it is not attached."""
    noted = _attached.get(module)
    dense = None if noted is None else noted()
    return None if dense is None else dense.row_placement


class DenseRows(ClusterPlacement):
    """The tables of one module, of parameters and of what is not trained."""

    first_writes = 1  # that of the first values

    def __init__(self, dense: Attachment, cluster: Cluster, stores: list[Store], ranks: SyncRanks | None) -> None:
        super().__init__(cluster, [store.table for store in stores], ranks)
        self._dense = dense

    def go_on(self) -> None:
        """Pull the values; what the module changed before is dropped."""
        super().go_on()
        self._dense.refresh()
