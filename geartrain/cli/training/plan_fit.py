"""``geartrain plan --fit``: the most classes, or samples of a rank, that memory allows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geartrain.ams.server.machine import default_row_memory
from geartrain.ams.values.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from geartrain.bridge.head.memory import MemoryReport
    from geartrain.bridge.parallel.plan.plan import Plan

_MOST_CLASSES, _MOST_SAMPLES = 2**36, 2**20
_SAMPLES = 8, 16
"""Batches that are traced: what a network keeps grows in proportion to the samples between them, and beyond."""

ReportOf = Callable[..., "MemoryReport"]
"""Takes what is to be changed of the arguments of ``memory_report``."""


def check_fit(fit: str | None, classes: int | None, batch_size: int | None, hardware: str | None) -> None:
    """Raise ConfigError for a question that cannot be answered."""
    if fit not in (None, "classes", "batch"):
        raise ConfigError(f"--fit is {fit!r}; it must be classes, or batch")
    if fit == "classes" and classes is not None:
        raise ConfigError("--fit classes finds the number of classes: leave --classes out, or --fit")
    if fit == "batch" and batch_size is not None:
        raise ConfigError("--fit batch finds the samples of a rank: leave --batch-size out, or --fit")
    if fit == "batch" and hardware is None:
        raise ConfigError("--fit batch needs a network's activations and a rank's memory: say --hardware, too")


def most_classes(report_of: ReportOf, memory: int, network: int, shards_of_host: int) -> int:
    """Whose head fits a rank of so much ``memory`` beside the ``network``, and the shards of a host of as much."""

    def is_too_large(classes: int) -> bool:
        report = report_of(num_classes=classes)
        too_many_rows = shards_of_host * report.shard_bytes > default_row_memory(memory)
        return too_many_rows or network + report.rank_bytes > memory

    return _most(is_too_large, _MOST_CLASSES, f"not one class fits into {memory / 1e9:,.1f} GB")


def most_samples(report_of: ReportOf, step_of: Callable[[int], Plan], others: dict[str, Any]) -> dict[str, int]:
    """Of a rank, as asked, and with each of the ``others``, which change arguments of ``memory_report``."""
    few, more = (step_of(samples) for samples in _SAMPLES)
    a_sample = (network_bytes(more) - network_bytes(few)) / (more.batch - few.batch)
    memory = few.hardware.memory_bytes

    def most(changed: dict[str, Any]) -> int:
        def is_too_large(samples: int) -> bool:
            network = network_bytes(few) + a_sample * (samples - few.batch)
            return network + report_of(batch_size=samples, **changed).rank_bytes > memory

        return _most(is_too_large, _MOST_SAMPLES, f"not one sample a rank fits into {memory / 1e9:,.1f} GB")

    asked = {"samples a rank": most({})}
    return asked | {f"with {name}": most(changed) for name, changed in others.items() if changed}


def fit_line(found: dict[str, int]) -> str:
    """What was found, in words: "at least" of what ended at the largest number that is tried."""

    def how(what: str, number: int) -> str:
        limit = _MOST_CLASSES if what == "classes" else _MOST_SAMPLES
        return "at least" if number == limit - 1 else "at most"

    return "; ".join(f"{how(what, number)} {number:,} {what}" for what, number in found.items())


def network_bytes(step: Plan) -> int:
    """What a rank holds beside the head."""
    return sum(part.bytes for part in step.parts if part.name != "head")


def _most(is_too_large: Callable[[int], bool], limit: int, none: str) -> int:
    found = bisect_left(range(1, limit), True, key=is_too_large)
    if not found:
        raise InvalidArgument(f"{none}: take more ranks, hosts or memory, rows of 16 bits, or a smaller network")
    return found
