"""How much the ranks say to each other, and what is raised when one of them is lost."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from geartrain.ams.values.errors import RankLost


@dataclass
class Traffic:
    """What one rank took part in, by kind of operation ("all-gather", "all-reduce", ...). Not thread-safe."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    """Of the tensor on one rank: of an all-gather what it gets, of a reduce-scatter what it gives."""

    def count(self, operation: str, num_bytes: int) -> None:
        """Note one operation."""
        self.calls[operation] += 1
        self.bytes[operation] += num_bytes

    def clear(self) -> None:
        """Begin anew."""
        self.calls.clear()
        self.bytes.clear()


@contextlib.contextmanager
def lost_ranks_named(operation: str) -> Iterator[None]:
    """Turn what torch.distributed raises when a rank is gone or silent into RankLost, which names ``operation``."""
    try:
        yield
    except RuntimeError as exc:  # all of torch.distributed's errors; gloo raises no other
        reason, _, _ = next(iter(str(exc).splitlines()), type(exc).__name__).partition(". This is typically")
        article = "an" if operation[0] in "aeiou" else "a"
        raise RankLost(
            f"a rank died, or did not take part in {article} {operation} within the time limit of its process group: "
            f"{reason}. Look at the other ranks' logs; end all ranks and start them from the last snapshot"
        ) from exc
