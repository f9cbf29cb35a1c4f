"""A model that echoes numbers, and says of which version it is: for tests of what lies around models."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from geartrain.ams.values.errors import InvalidArgument
from geartrain.serving.answers import Arrays, Question, TensorSpec, require_time


class EchoModel:
    """Answers each number x with [version, x * k]; 13 is no number to it. Counts what it is asked, and its end."""

    kind = "echo"

    def __init__(self, version: int = 1, *, created: float = 1.5) -> None:
        self.version, self.created = version, created
        self.operations = {"echo": Echo(self), "show": Show(self)}
        self.facts: Mapping[str, Any] = {"classes": 3}
        self.batches: list[int] = []
        """Items of each batch."""
        self.is_closed = False
        self.may_answer = threading.Event()
        """Batches wait for it."""
        self.may_answer.set()
        self.is_asked = threading.Event()
        """A batch has begun."""
        self.is_read, self.may_read = threading.Event(), threading.Event()
        """A file that begins with "slow" is being read, and may be."""

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class Echo:
    name = "echo"
    help = "Each number times k."
    inputs = (TensorSpec(name="numbers", dtype="float64", shape=(None,)),)
    outputs = (TensorSpec(name="said", dtype="float64", shape=(None, 2)),)
    request: Mapping[str, Any] = {
        "type": "object",
        "properties": {"numbers": {"type": "array", "items": {"type": "number"}}, "k": {"type": "integer"}},
        "required": ["numbers"],
        "example": {"numbers": [1, 2], "k": 3},
    }
    answer: Mapping[str, Any] = {"type": "array", "items": {"type": "number"}}

    def __init__(self, model: EchoModel) -> None:
        self.model = model

    def read(self, body: Mapping[str, Any]) -> Question:
        if not isinstance(body.get("numbers"), list):
            raise InvalidArgument(f"numbers is {body.get('numbers')!r}; give a list of numbers")
        return self.accept({"numbers": np.asarray(body["numbers"], np.float64)}, {"k": body.get("k", 1)})

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        return Question(arrays=arrays, parameters=(("k", parameters.get("k", 1)),))

    def run(self, question: Question) -> Arrays:
        assert not self.model.is_closed
        self.model.is_asked.set()
        assert self.model.may_answer.wait(30)
        numbers = question.arrays["numbers"]
        self.model.batches.append(len(numbers))
        if (numbers == 13).any():
            raise InvalidArgument("13 is no number")
        said = numbers * dict(question.parameters)["k"]
        return {"said": np.stack([np.full(len(said), float(self.model.version)), said], axis=1)}

    def write(self, answered: Arrays) -> list[Any]:
        assert not self.model.is_closed
        answers: list[Any] = answered["said"].tolist()
        return answers


class Show(Echo):
    """Takes files, and answers how long they are."""

    name = "show"
    help = "How long a file is."
    inputs = (TensorSpec(name="files", dtype="object", shape=(None,)),)

    def read(self, body: Mapping[str, Any]) -> Question:  # noqa: ARG002
        raise InvalidArgument("send the file itself")

    def accept(self, arrays: Arrays, parameters: Mapping[str, Any]) -> Question:
        if arrays["files"][0].startswith(b"slow"):
            require_time()
            self.model.is_read.set()
            assert self.model.may_read.wait(30)
        return super().accept({"numbers": np.array([float(len(file)) for file in arrays["files"]])}, parameters)
