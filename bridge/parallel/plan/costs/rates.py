"""What the cost model divides by; :class:`geartrain.Hardware` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Rates(Protocol):
    """Rates of a rank's device and of the links; see :class:`geartrain.Hardware` for what each is."""

    @property
    def memory_bandwidth(self) -> float:
        """Bytes a second."""

    @property
    def cache_bytes(self) -> int:
        """Up to which ``cache_bandwidth`` counts."""

    @property
    def cache_bandwidth(self) -> float | None:
        """Bytes a second."""

    @property
    def fresh_bytes(self) -> int:
        """From which ``fresh_bandwidth`` counts."""

    @property
    def fresh_bandwidth(self) -> float | None:
        """Bytes a second."""

    @property
    def exponentials(self) -> float | None:
        """A second."""

    @property
    def operation_seconds(self) -> float:
        """Of beginning an operation."""

    @property
    def collective_bandwidth(self) -> Mapping[str, float]:
        """Bytes a second by kind of collective."""

    def flops_of(self, dtype: str) -> float:
        """A second, of products of ``dtype``."""

    def link(self, ranks: int) -> tuple[float, float]:
        """Bytes a second and seconds of latency."""
