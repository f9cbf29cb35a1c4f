"""``geartrain plan --fit``: the largest number of classes, or samples of a rank, that fits in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geartrain.ams.server.machine import default_row_memory
from geartrain.ams.values.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from geartrain.bridge.head.memory import MemoryReport
    from geartrain.bridge.parallel.plan.plan import Plan

_MAX_CLASSES, _MAX_SAMPLES = 2**36, 2**20
_SAMPLES = 8, 16
"""Batch sizes that are traced: a network's activations grow linearly between them and beyond."""

ReportOf = Callable[..., "MemoryReport"]
"""Function that returns a memory report; its arguments replace those of ``memory_report``."""


def check_fit(fit: str | None, classes: int | None, batch_size: int | None, hardware: str | None) -> None:
    """Raise ConfigError unless --fit can be computed from these options."""
    if fit not in (None, "classes", "batch"):
        raise ConfigError(f"--fit is {fit!r}; it must be classes, or batch")
    if fit == "classes" and classes is not None:
        raise ConfigError("--fit classes finds the number of classes: leave --classes out, or --fit")
    if fit == "batch" and batch_size is not None:
        raise ConfigError("--fit batch finds the samples of a rank: leave --batch-size out, or --fit")
    if fit == "batch" and hardware is None:
        raise ConfigError("--fit batch needs a network's activations and a rank's memory: say --hardware, too")


def max_classes(report_of: ReportOf, memory: int, network: int, shards_of_host: int) -> int:
    """Return the most classes whose head fits a rank of ``memory`` bytes beside the ``network``, and the shards of a
    host with as much memory.
    """

    def is_too_large(classes: int) -> bool:
        report = report_of(num_classes=classes)
        too_many_rows = shards_of_host * report.shard_bytes > default_row_memory(memory)
        return too_many_rows or network + report.rank_bytes > memory

    return _most(is_too_large, _MAX_CLASSES, f"not one class fits into {memory / 1e9:,.1f} GB")


def max_samples(report_of: ReportOf, step_of: Callable[[int], Plan], others: dict[str, Any]) -> dict[str, int]:
    """Return the most samples of a rank, as asked, and with each of the ``others``: changed arguments of
    ``memory_report``, by name.
    """
    few, more = (step_of(samples) for samples in _SAMPLES)
    a_sample = (network_bytes(more) - network_bytes(few)) / (more.batch - few.batch)
    memory = few.hardware.memory_bytes

    def most(changed: dict[str, Any]) -> int:
        def is_too_large(samples: int) -> bool:
            network = network_bytes(few) + a_sample * (samples - few.batch)
            return network + report_of(batch_size=samples, **changed).rank_bytes > memory

        return _most(is_too_large, _MAX_SAMPLES, f"not one sample a rank fits into {memory / 1e9:,.1f} GB")

    asked = {"samples a rank": most({})}
    return asked | {f"with {name}": most(changed) for name, changed in others.items() if changed}


def fit_line(found: dict[str, int]) -> str:
    """Return the result in words, with "at least" where the search ended at its limit."""

    def how(what: str, number: int) -> str:
        limit = _MAX_CLASSES if what == "classes" else _MAX_SAMPLES
        return "at least" if number == limit - 1 else "at most"

    return "; ".join(f"{how(what, number)} {number:,} {what}" for what, number in found.items())


def network_bytes(step: Plan) -> int:
    """Return the bytes of a rank beside the head."""
    return sum(part.bytes for part in step.parts if part.name != "head")


def _most(is_too_large: Callable[[int], bool], limit: int, none: str) -> int:
    found = bisect_left(range(1, limit), True, key=is_too_large)
    if not found:
        raise InvalidArgument(f"{none}: take more ranks, hosts or memory, rows of 16 bits, or a smaller network")
    return found
