"""Status of the slow gears that serve dense parts now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from geartrain.ams.gear.partitions import job_of
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.gear_messages import GearState
from geartrain.ams.values.scheduler_messages import StreamHolders

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 2.0


def describe_gears(names: Iterable[str], holders: Callable[[str], StreamHolders]) -> tuple[list[GearState], list[str]]:
    """Query the slow gears of these dense parts; return their states, and complaints about those that do not answer.

    One call to the scheduler per name, one to each slow gear.
    """
    from geartrain.ams.rpc.client.gear import GrpcGearCarrier  # only where slow gears are queried: it loads gRPC

    states, complaints = [], []
    for name in names:
        for address in sorted({holder for holder in holders(job_of(name)).holders if holder}):
            carrier = GrpcGearCarrier(address)
            try:
                states.append(carrier.describe([], _TIMEOUT_SECONDS)())
            except (AttemptFailed, GeartrainError) as exc:
                complaints.append(f"slow gear {address} of {name!r}: {exc}")
            finally:
                carrier.close()
    return states, complaints
