"""Which modules are attached to a cluster, and what saving and loading a model do with their tables."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

from torch import nn

from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.dense.factory import Store
from geartrain.bridge.rows.keeper import RowKeeper
from geartrain.bridge.rows.ranks import SyncRanks

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster


class Attachment(Protocol):
    """What trains one module whose values are in a cluster: a DenseTable."""

    @property
    def row_keeper(self) -> RowKeeper:
        """What saving and loading do with its tables."""

    def refresh(self) -> bool:
        """Pull the values; True if there were others."""


_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Attachment]] = weakref.WeakKeyDictionary()


def note(module: nn.Module, dense: Attachment) -> None:
    """``dense`` trains ``module``, for as long as somebody has both."""
    _attached[module] = weakref.ref(dense)


def row_keeper_of(module: nn.Module) -> RowKeeper | None:
    """Who keeps the weights of ``module``; None: it is not attached."""
    noted = _attached.get(module)
    dense = None if noted is None else noted()
    return None if dense is None else dense.row_keeper


class DenseRows(RowKeeper):
    """The tables of one module, of parameters and of what is not trained."""

    def __init__(self, dense: Attachment, cluster: Cluster, stores: list[Store], ranks: SyncRanks | None) -> None:
        self._dense = dense
        self.cluster = cluster
        self._stores = stores
        self.peers = ranks
        self._ranks = ranks

    def specs(self) -> list[TableSpec]:
        """Of one or two tables."""
        return [store.table.spec for store in self._stores]

    def is_trained(self) -> bool:
        """Whether there was a write after that of the first values."""
        return max(self._stores[0].table.versions()) > 1

    def go_on(self) -> None:
        """Pull the values; what the module changed before is dropped."""
        if self._ranks is not None:
            self._ranks.begin_anew()
        self._dense.refresh()
