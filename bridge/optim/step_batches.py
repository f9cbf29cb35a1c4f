"""The micro-batches of one step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any


class StepBatches:
    """The micro-batches of one step, read one by one; ``len()`` is how many there are. Iterated once."""

    def __init__(self, batches: Iterator[Any], count: int) -> None:
        self._batches = itertools.islice(batches, count)
        self._count = count
        self._read = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._read += 1
            yield batch

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch that was handed out is the step's last one."""
        return self._read == self._count

    @property
    def num_read(self) -> int:
        """Micro-batches that were handed out."""
        return self._read

    @contextlib.contextmanager
    def no_sync(self, *models: Any) -> Iterator[None]:
        """Let the ranks of DDP and FSDP2 ``models`` sum gradients in the last micro-batch alone.

            for images, labels in step:
                with step.no_sync(model):
                    (criterion(model(images), labels) / len(step)).backward()

        Other models are left as they are. FSDP2 keeps the gradients of whole weights until then.
        """
        with contextlib.ExitStack() as stack:
            for model in models:
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(self.is_last)
                elif hasattr(model, "no_sync") and not self.is_last:
                    stack.enter_context(model.no_sync())
            yield
