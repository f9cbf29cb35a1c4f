"""The largest batch that fits into memory."""

from __future__ import annotations

from collections.abc import Callable

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.parallel.plan.explanation import bytes_text

USED = 0.9
"""Of a device's memory; the rest is for its libraries, and for what an allocator cannot use."""


def largest_batch(bytes_of: Callable[[int], int], *, first: int, limit: int, most: int) -> int:
    """The largest number of samples, up to ``most``, of which ``bytes_of`` is within ``limit``.

    Memory grows nearly evenly with samples, so a few looks from ``first`` on find it. Raises InvalidArgument if not
    even one fits.
    """
    fits, too_many = 0, most + 1
    guess = min(most, max(1, first))
    while too_many - fits > 1:
        needed = bytes_of(guess)
        if needed <= limit:
            fits, fitting_bytes = guess, needed
        else:
            too_many, failing_bytes = guess, needed
        if not fits:
            guess = max(1, guess // 2)
        elif too_many > most:
            guess = min(most, 2 * fits)
        else:
            slope = (failing_bytes - fitting_bytes) / (too_many - fits)
            guess = min(too_many - 1, max(fits + 1, fits + int((limit - fitting_bytes) / max(slope, 1e-9))))
    if not fits:
        raise InvalidArgument(
            f"not one sample of a rank fits into {bytes_text(limit)}: {bytes_text(needed)} are needed. Split more "
            "of the model, or use more ranks"
        )
    return fits
