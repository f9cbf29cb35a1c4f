"""Steps that can be recorded, by name: each a context that gives the step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.recorder.steps.heads import head, head_in_cluster

Step = Callable[[], None]

STEPS: dict[str, Callable[..., AbstractContextManager[Step]]] = {
    "head": head,
    "pull": head_in_cluster,
}
