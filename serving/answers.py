"""Interface of a loaded model: a version with operations on arrays of items.

An operation is asked in batches: HTTP reads JSON into arrays, gRPC brings arrays, the batcher joins those of equal
parameters along their first axis, :meth:`Operation.run` answers them together, and each asker gets its rows.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]
"""By name, each [N, …] of one N."""
Parameters = tuple[tuple[str, Any], ...]
"""Sorted pairs, hashable: what must be equal for items to be answered together, such as ``(("k", 5),)``."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One array that an operation takes or gives."""

    name: str
    dtype: str
    """Of numpy; ``object``: bytes of any length, such as an image file."""
    shape: tuple[int | None, ...]
    """[N, …]; None: any size."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Items of one request, checked."""

    arrays: Arrays
    parameters: Parameters = ()

    @property
    def num_items(self) -> int:
        """N."""
        return len(next(iter(self.arrays.values())))


class Operation(Protocol):
    """Something that a model can be asked, such as ``classify``. Thread-safe."""

    name: str
    help: str
    """One sentence, for OpenAPI and the page."""
    inputs: Sequence[TensorSpec]
    """What gRPC takes; :meth:`accept` checks it."""
    outputs: Sequence[TensorSpec]
    request: Mapping[str, Any]
    """JSON schema of the body, with an example."""
    answer: Mapping[str, Any]
    """JSON schema of one item's answer."""

    def read(self, body: Mapping[str, Any]) -> Question:
        """Check a JSON body. Raises InvalidArgument, whose sentence names the value and the remedy."""

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        """Check arrays as gRPC brings them. Raises InvalidArgument."""

    def run(self, question: Question) -> Arrays:
        """Answer all items: each array [N, …] in their order."""

    def write(self, answered: Arrays) -> list[Any]:
        """The JSON answer of each item."""


class Servable(Protocol):
    """One version of a model, loaded and unchanging; thread-safe.

    All of it (dense part, rows, index, names) is of one moment of the training.
    """

    kind: str
    """Its entry in :data:`geartrain.serving.models.registry.KINDS`."""
    version: int
    created: float
    """Unix time in seconds of the moment that it is of."""
    operations: Mapping[str, Operation]
    facts: Mapping[str, Any]
    """What people want to know of it: classes, dim, index and its recall, precision, training."""

    def close(self) -> None:
        """Let its files and memory go; nobody asks it any more."""


class PutOff(Exception):
    """A question takes long to be read: the thread that answers leaves it to another one."""


reading = threading.local()
"""``is_hasty``: this thread answers questions, and reads none that takes milliseconds."""


def require_time() -> None:
    """Called before what takes milliseconds. Raises PutOff on a thread that answers questions."""
    if getattr(reading, "is_hasty", False):
        raise PutOff


def concatenated(several: Sequence[Question]) -> Question:
    """Items of requests with equal parameters as one."""
    names = several[0].arrays
    return Question(
        arrays={name: np.concatenate([question.arrays[name] for question in several]) for name in names},
        parameters=several[0].parameters,
    )
