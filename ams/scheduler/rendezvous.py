"""Key-value store by which the processes of a job find each other before they train: torchrun's rendezvous and the
store of its ranks. Values are in memory alone; after a scheduler restart they are written again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from geartrain.ams.values.arguments import checked_name
from geartrain.ams.values.errors import InvalidArgument, OutOfMemory
from geartrain.ams.values.scheduler_messages import RendezvousValue, WriteRendezvous
from geartrain.ams.values.text import quoted

LEASE_SECONDS = 60.0
"""Seconds after which a job's values go if nobody asks for them; torchrun's agents ask each second."""
MAX_BYTES = 256 << 20
"""Most bytes of the values of all jobs."""
MAX_VALUE_BYTES = 1 << 20
_MAX_KEY = 1024
_MAX_KEYS = 4096
"""Most keys in one call."""
_ENTRY_BYTES = 200
_NOTHING = RendezvousValue()


@dataclass
class _Job:
    values: dict[str, RendezvousValue] = field(default_factory=dict)
    deadline: float = 0.0


class Rendezvous:
    """The values of all jobs. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._bytes = 0

    def read(self, job: str, keys: Sequence[str]) -> tuple[RendezvousValue, ...]:
        """Return the value of each key. Raises InvalidArgument."""
        if len(keys) > _MAX_KEYS:
            raise InvalidArgument(f"{len(keys)} keys are asked for; at most {_MAX_KEYS} at once")
        with self._lock:
            known = self._known(job)
            values = {} if known is None else known.values
            return tuple(values.get(key, _NOTHING) for key in keys)

    def write(self, write: WriteRendezvous) -> RendezvousValue:
        """Write if the version is the expected one; return the value afterwards. Raises InvalidArgument,
        OutOfMemory."""
        if not 1 <= len(write.key) <= _MAX_KEY:
            raise InvalidArgument(f"key is {quoted(write.key)}; it must have 1 … {_MAX_KEY} characters")
        if write.version == 0:
            raise InvalidArgument("version is 0, which means that there is no value; give a random number")
        with self._lock:
            job = self._known(write.job) or _Job(deadline=self._clock() + LEASE_SECONDS)
            values = job.values
            now = values.get(write.key, _NOTHING)
            if now.version == write.version or write.expected not in (None, now.version):
                return now  # done before, or lost to another
            value = write.value if write.add is None else _sum(write.key, now.value, write.add)
            more = _size(write.key, value) - _size(write.key, now.value)
            if value is not None and len(value) > MAX_VALUE_BYTES:
                raise InvalidArgument(
                    f"the value of {quoted(write.key)} has {len(value)} bytes; at most {MAX_VALUE_BYTES}"
                )
            if more > 0 and self._bytes + more > MAX_BYTES:
                raise OutOfMemory(
                    f"the rendezvous of {len(self._jobs)} jobs takes {self._bytes} bytes, of at most {MAX_BYTES}; "
                    f"values of ended jobs expire within {LEASE_SECONDS:g} s: try again then"
                )
            self._bytes += more
            if value is None:
                values.pop(write.key, None)
                return _NOTHING
            self._jobs[write.job] = job
            values[write.key] = written = RendezvousValue(value, write.version)
            return written

    def _known(self, name: str) -> _Job | None:
        """Return an existing job with its lease renewed; drops jobs whose lease has ended."""
        now = self._clock()
        for ended in [other for other, job in self._jobs.items() if job.deadline < now]:
            self._bytes -= sum(_size(key, kept.value) for key, kept in self._jobs.pop(ended).values.items())
        job = self._jobs.get(checked_name("job", name))
        if job is not None:
            job.deadline = now + LEASE_SECONDS
        return job


def _size(key: str, value: bytes | None) -> int:
    return 0 if value is None else len(key) + len(value) + _ENTRY_BYTES


def _sum(key: str, value: bytes | None, more: int) -> bytes:
    try:
        return b"%d" % (int(value or b"0") + more)
    except ValueError as exc:
        raise InvalidArgument(f"the value of {quoted(key)} is no decimal number: nothing can be added to it") from exc
