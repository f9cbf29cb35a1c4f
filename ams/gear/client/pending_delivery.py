"""Parts of a delivery of gradients, split by the holders of their ids, until they are acknowledged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from geartrain.ams.gear.partitions import partitions_of
from geartrain.ams.values.gear_messages import Delivery
from geartrain.ams.values.specs import Ids

Positions = npt.NDArray[np.int64]
Holders = Sequence[str | None]
"""Address of the holder of each partition; None: unheld."""


def routes(ids: Ids, positions: Positions, holders: Holders, max_ids: int) -> Iterator[tuple[str | None, Positions]]:
    """Split positions in ``ids`` by the holders of their partitions, into messages of at most ``max_ids``."""
    addresses = np.array([holders[part] or "" for part in partitions_of(ids[positions])], object)
    for address in sorted(set(addresses)):
        mine = positions[addresses == address]
        for start in range(0, len(mine), max_ids):
            yield address or None, mine[start : start + max_ids]


@dataclass(frozen=True, eq=False)
class DeliveryPart:
    """Part of a delivery for one slow gear, with a name and number of its own."""

    source: str
    address: str | None
    positions: Positions
    process: str = ""
    """Process that may have counted the part without reply; no other one may receive it."""


class PendingDelivery:
    """Unacknowledged parts of a delivery."""

    def __init__(self, delivery: Delivery, holders: Holders, max_ids: int) -> None:
        self.number = delivery.source, delivery.sequence
        self._ids = delivery.ids
        self._names: set[tuple[str, str]] = set()
        """(address, source) of all parts so far: each is unique."""
        self.parts = self._cut(delivery.source, np.arange(len(delivery.ids)), holders, max_ids)

    def cut_anew(self, part: DeliveryPart, holders: Holders, max_ids: int) -> list[DeliveryPart]:
        """Split a part that no process can have received among the present holders of its ids."""
        if part.address is None:
            return self._cut(part.source, part.positions, holders, max_ids)
        anew = self._cut(_series(part.source, f"@{part.address}"), part.positions, holders, max_ids)
        return [replace(cut, source=part.source) if cut.address == part.address else cut for cut in anew]

    def _cut(self, source: str, positions: Positions, holders: Holders, max_ids: int) -> list[DeliveryPart]:
        """Return parts for each slow gear; a second one to the same has a name, and so numbers, of its own."""
        parts = []
        for address, mine in routes(self._ids, positions, holders, max_ids):
            name, nth = source, 0
            while address is not None and (address, name) in self._names:
                nth += 1
                name = _series(source, f"+{nth}")
            if address is not None:
                self._names.add((address, name))
            parts.append(DeliveryPart(name, address, mine))
        return parts


def _series(source: str, mark: str) -> str:
    """Return the name of a series of deliveries of the same fast gear, with numbers of its own."""
    return f"{source}{mark}" if "\t" in source else f"{source}\t{mark}"
