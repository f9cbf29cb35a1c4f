"""Steps that can be recorded, by name: each a context that gives the step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from tests.recorder.steps.heads import head, head_in_cluster
from tests.recorder.steps.parallel import split, topk
from tests.recorder.steps.probe import probe
from tests.recorder.steps.sparse import dense, embedding, gear, hashing

Step = Callable[[], None]

STEPS: dict[str, Callable[..., AbstractContextManager[Step]]] = {
    "head": head,
    "pull": head_in_cluster,
    "hosted": partial(head_in_cluster, rows="hosted"),
    "clip": partial(head, clip=True),
    "ranks": partial(head, ranks=8),
    "embedding": embedding,
    "hashing": hashing,
    "dense": dense,
    "gear": gear,
    "split": split,
    "topk": topk,
    "probe": probe,
}
