"""Interface of a loaded model: a version, with operations on arrays of items.

Operations run on batches: HTTP reads JSON into arrays, gRPC brings arrays, the batcher joins requests of equal
parameters along the first axis, :meth:`Operation.run` answers them together, and each request gets its rows.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted

Arrays = Mapping[str, npt.NDArray[Any]]
"""Arrays by name, each [N, …] with the same N."""
Parameters = tuple[tuple[str, Any], ...]
"""Sorted, hashable pairs such as ``(("k", 5),)``; only items with equal parameters are batched."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One input or output array of an operation."""

    name: str
    dtype: str
    """dtype of numpy; ``object``: bytes of any length, such as an image file."""
    shape: tuple[int | None, ...]
    """[N, …]; None: any size."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Checked items of one request."""

    arrays: Arrays
    parameters: Parameters = ()

    @property
    def num_items(self) -> int:
        """Number of items, N."""
        return len(next(iter(self.arrays.values())))


class Operation(Protocol):
    """An operation of a model, such as ``classify``. Thread-safe."""

    name: str
    help: str
    """One sentence, for OpenAPI and the page."""
    inputs: Sequence[TensorSpec]
    """Inputs over gRPC; :meth:`accept` checks them."""
    outputs: Sequence[TensorSpec]
    request: Mapping[str, Any]
    """JSON schema of the request body, with an example."""
    answer: Mapping[str, Any]
    """JSON schema of one item's answer."""

    def read(self, body: Mapping[str, Any]) -> Question:
        """Read and check a JSON body. Raises InvalidArgument, which names the value and the remedy."""

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        """Check arrays from gRPC. Raises InvalidArgument."""

    def run(self, question: Question) -> Arrays:
        """Compute the answers of all items: arrays [N, …] in their order."""

    def write(self, answered: Arrays) -> list[Any]:
        """Return the JSON answer of each item."""


class Servable(Protocol):
    """A loaded, immutable version of a model. Thread-safe.

    Its dense part, rows, index and names are all of one moment of the training.
    """

    kind: str
    """Key in :data:`geartrain.serving.models.registry.KINDS`."""
    version: int
    created: float
    """Unix time in seconds of its moment of the training."""
    operations: Mapping[str, Operation]
    facts: Mapping[str, Any]
    """Facts for people: classes, dim, index and its recall, precision, training."""

    def close(self) -> None:
        """Release files and memory; no request uses it any more."""


class TooSlow(Exception):
    """Reading a question takes long: the answering thread leaves it to another thread."""


reading = threading.local()
"""``fast_only``: this thread answers questions, and does not read one that takes milliseconds."""


def require_time() -> None:
    """Raise TooSlow on a thread that answers questions; to be called before milliseconds of work."""
    if getattr(reading, "fast_only", False):
        raise TooSlow


def require_same_items(arrays: Arrays) -> None:
    """Raise InvalidArgument unless all arrays have the same number of items."""
    if len({len(array) for array in arrays.values()}) > 1:
        found = ", ".join(f"{quoted(name)} {len(array)}" for name, array in arrays.items())
        raise InvalidArgument(f"the inputs have several numbers of items: {found}; each is of the same items")


def concatenated(several: Sequence[Question]) -> Question:
    """Join questions with equal parameters into one."""
    names = several[0].arrays
    return Question(
        arrays={name: np.concatenate([question.arrays[name] for question in several]) for name in names},
        parameters=several[0].parameters,
    )
