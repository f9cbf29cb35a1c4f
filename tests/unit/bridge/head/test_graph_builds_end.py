"""A graph that is built beside the training: what is left of it when the training, or the process, ends before it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.rows.optimizer import RowOptimizer
from tests.support.plain_graph import use_plain_graphs
from tests.support.reference import UNIT_SGD, FakeCluster

CLASSES, DIM = 60, 6


@pytest.fixture(autouse=True)
def plain_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_graphs(monkeypatch)


def make_head(rebuild: str | int) -> tuple[ClassHead, KNNSelection]:
    head = ClassHead(
        FakeCluster(),
        "classes",
        num_classes=CLASSES,
        dim=DIM,
        select=KNNSoftmax(active=0.2, k=3, rebuild=rebuild),
        margin=ArcFace(scale=64),
        optimizer=UNIT_SGD,
    )
    assert isinstance(head.select, KNNSelection)
    return head, head.select


def train(head: ClassHead) -> None:
    rows = RowOptimizer(head, lr=0.1)
    head(torch.randn(4, DIM, generator=torch.Generator().manual_seed(head.step)), torch.arange(4)).backward()
    rows.step()


def test_a_build_that_the_training_outran_is_begun_again_by_the_next_one() -> None:
    head, select = make_head("background")
    train(head)
    head.next_epoch()
    train(head)
    assert select._pending is not None
    select.cancel()  # as a job does when it is interrupted, before its last snapshot
    state, graph = head.get_extra_state(), select.graph_to_bytes()
    again, again_select = make_head("background")
    assert graph is not None
    again_select.graph_from_bytes(graph)
    again.set_extra_state(state)
    train(again)
    assert again_select._pending is not None
    again_select._pending.result.result(30)
    train(again)
    assert again_select.graph is not None and again_select.graph.version == 2


def test_a_process_that_ends_in_the_middle_of_a_build_ends_well() -> None:
    script = """
import threading, numpy as np
from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import Cancelled
from geartrain.bridge.head.selection import graph_build
from tests.support.plain_graph import plain_build
from tests.unit.bridge.head.test_graph_builds_end import make_head, train

graph_build.build_graph = plain_build
head, _ = make_head("background")
train(head)
begun = threading.Event()

def build_until_cancelled(rows, k, progress, cancelled):
    while not cancelled():  # back and forth between compiled code and the interpreter
        ops.make_unit_rows(np.ones((1000, 100), np.float32), 2)
        begun.set()
    raise Cancelled("cancelled")

graph_build.build_graph = build_until_cancelled
head.next_epoch()
train(head)
assert begun.wait(30)
"""
    root = Path(__file__).parents[4]
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=root, timeout=120, check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
