"""A model that needs no file: it tells the lengths of images, and the largest of four numbers, with its version."""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from geartrain.ams.values.errors import InvalidArgument
from geartrain.serving.answers import Arrays, Question, TensorSpec


class Lengths:
    """Bytes of any length -> how many there are, and what is before them; the version answers, too."""

    name = "lengths"
    help = "How long images are."
    inputs = (TensorSpec(name="images", dtype="object", shape=(None,)),)
    outputs = (
        TensorSpec(name="lengths", dtype="int64", shape=(None,)),
        TensorSpec(name="versions", dtype="int64", shape=(None,)),
        TensorSpec(name="first", dtype="object", shape=(None,)),
    )
    request: Mapping[str, Any] = {"type": "object", "properties": {"images": {"type": "array"}}}
    answer: Mapping[str, Any] = {"type": "object"}

    def __init__(self, version: int, before: Callable[[], object] = lambda: None) -> None:
        self._version, self._before = version, before

    def read(self, body: Mapping[str, Any]) -> Question:
        images = body.get("images")
        if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
            raise InvalidArgument("images must be a list of texts in base64")
        try:
            found = [base64.b64decode(one, validate=True) for one in images]
        except (binascii.Error, ValueError) as exc:
            raise InvalidArgument(f"images has what is no base64: {exc}") from exc
        array = np.empty(len(found), object)
        array[:] = found
        return self.accept({"images": array}, {name: value for name, value in body.items() if name != "images"})

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        if set(arrays) != {"images"} or arrays["images"].dtype != object or arrays["images"].ndim != 1:
            raise InvalidArgument(f"lengths takes images, BYTES of shape [items], not {', '.join(arrays)}")
        if parameters:
            raise InvalidArgument(f"lengths knows no parameter {next(iter(parameters))!r}")
        return Question(arrays=arrays)

    def run(self, question: Question) -> Arrays:
        self._before()
        images = question.arrays["images"]
        return {
            "lengths": np.array([len(one) for one in images], np.int64),
            "versions": np.full(len(images), self._version),
            "first": np.array([one[:4] for one in images], object),
        }

    def write(self, answered: Arrays) -> list[Any]:
        return [{"length": int(n)} for n in answered["lengths"]]


class Largest:
    """Four numbers -> the ``k`` largest and their places."""

    name = "largest"
    help = "The largest numbers."
    inputs = (TensorSpec(name="numbers", dtype="float32", shape=(None, 4)),)
    outputs = (
        TensorSpec(name="places", dtype="int64", shape=(None, None)),
        TensorSpec(name="scores", dtype="float32", shape=(None, None)),
    )
    request: Mapping[str, Any] = {"type": "object", "properties": {"numbers": {"type": "array"}}}
    answer: Mapping[str, Any] = {"type": "array"}

    def read(self, body: Mapping[str, Any]) -> Question:
        try:
            numbers = np.asarray(body.get("numbers"), np.float32)
        except (TypeError, ValueError, OverflowError) as exc:
            raise InvalidArgument(f"numbers must be a list of lists of four: {exc}") from exc
        return self.accept({"numbers": numbers}, {"k": body.get("k", 1)})

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        numbers, k = arrays.get("numbers"), parameters.get("k", 1)
        if numbers is None or numbers.dtype != np.float32 or numbers.ndim != 2 or numbers.shape[1] != 4:
            raise InvalidArgument("largest takes numbers, FP32 of shape [items, 4]")
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= 4:
            raise InvalidArgument(f"k is {k!r}; it must be in 1 … 4")
        if not np.isfinite(numbers).all():
            raise InvalidArgument("numbers has NaN or infinity")
        return Question(arrays={"numbers": numbers}, parameters=(("k", k),))

    def run(self, question: Question) -> Arrays:
        k = dict(question.parameters)["k"]
        numbers = question.arrays["numbers"]
        places = np.argsort(-numbers, axis=1, kind="stable")[:, :k]
        return {"places": places, "scores": np.take_along_axis(numbers, places, 1)}

    def write(self, answered: Arrays) -> list[Any]:
        return [
            [{"place": int(p), "score": float(s)} for p, s in zip(places, scores, strict=True)]
            for places, scores in zip(answered["places"], answered["scores"], strict=True)
        ]


class ToyServable:
    """A version of both."""

    kind = "toy"
    created = 1e9

    def __init__(self, version: int, before: Callable[[], object] = lambda: None) -> None:
        self.version = version
        self.operations = {"lengths": Lengths(version, before), "largest": Largest()}
        self.facts: Mapping[str, Any] = {"classes": 4}
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()
