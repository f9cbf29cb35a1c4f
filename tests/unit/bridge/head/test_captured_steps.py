"""Steps that a CUDA graph replays make the rows of steps without one, and count; in the place of a graph one that runs
the step again as it was captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import geartrain as gt
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.bridge.head.backends.ranks import device_labels
from geartrain.bridge.kernels import launch
from geartrain.bridge.placements.workspace import BufferPool
from geartrain.bridge.rows.transfers import Readback
from tests.support.heads import make_batch, make_head
from tests.support.rank_processes import run_ranks

NUM, DIM, SIZE = 300, 24, 10
COMMON: dict[str, Any] = {"num_classes": NUM, "dim": DIM, "initializer": gt.Normal(0.1), "margin": gt.ArcFace(scale=16)}
FULL, SAMPLED = {"select": gt.FullSoftmax()}, {"select": gt.PartialFC(0.4)}
CASES: dict[str, dict[str, Any]] = {
    "SGD, sampled": {"optimizer": gt.SGD(0.5), **SAMPLED},
    "momentum, 16 bits": {"optimizer": gt.SparseMomentum(0.5, 0.9), "dtype": "bfloat16", **FULL},
    "8 bits, sampled": {"optimizer": gt.SparseMomentum(0.5), "dtype": "float8_e4m3fn", "slot_dtype": "int8", **SAMPLED},
    "AdamW, no margin": {"optimizer": gt.AdamW(0.5), "margin": None, **SAMPLED},
}


class Graph:
    """A captured step: what ran meanwhile has changed nothing."""

    def __init__(self, head: gt.ClassHead, step: Callable[[], object]) -> None:
        self._head, self._step = head, step
        table: Any = head.table
        before = {name: value.clone() for name, value in vars(table).items() if isinstance(value, Tensor)}
        with launch.captured():
            step()
        for name, value in before.items():
            getattr(table, name).view(torch.uint8 if value.ndim else value.dtype).copy_(
                value.view(torch.uint8 if value.ndim else value.dtype)
            )

    def replay(self) -> None:
        with launch.captured():
            self._step()
        self._head.row_update._captured.clear()


class Training:
    """A head with the tensors that its steps read."""

    def __init__(self, *, share: slice = slice(None), **settings: Any) -> None:
        self.head = make_head(late=True, fused=True, **{**COMMON, **settings})
        self.rows = gt.RowOptimizer(self.head)
        self.share = share
        self.features, self.labels = (item.detach()[share] for item in make_batch(SIZE, NUM, DIM))
        self.losses: list[float] = []

    def read(self, number: int) -> None:
        """The batch and the learning rate of a step."""
        features, labels = make_batch(SIZE, NUM, DIM, number)
        self.features.copy_(features.detach()[self.share])
        self.labels.copy_(labels[self.share])
        self.rows.param_groups[0]["lr"] = 2.0**-number

    def step(self) -> None:
        loss = self.head(self.features, self.labels)
        loss.backward()
        self.rows.step()
        self.rows.zero_grad()
        self.losses.append(float(loss.detach()))

    def trained(self, *, graph_from: int | None = None, steps: int = 6) -> tuple[list[float], Tensor]:
        """Losses and rows; from that step on by replays."""
        graph: Graph | None = None
        for number in range(steps):
            self.read(number)
            if number == graph_from:
                graph = Graph(self.head, self.step)
                assert self.head.step == number
                self.losses.pop()
            if graph is None:
                self.step()
            else:
                self.rows.replay(graph)
        return self.losses, self.head.weights()


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_steps_without_a_graph(case: str) -> None:
    (losses, weights), training = Training(**CASES[case]).trained(), Training(**CASES[case])
    found_losses, found = training.trained(graph_from=3)
    assert found_losses == losses and training.head.step == 6
    assert torch.equal(found, weights)
    training.read(6)
    training.step()  # without the graph it goes on where the replays ended
    other = Training(**CASES[case])
    assert torch.equal(training.head.weights(), other.trained(steps=7)[1])


@pytest.mark.parametrize("case", ["SGD, sampled", "AdamW, no margin"])
def test_kernels_read_step_and_rate_where_they_lie(case: str) -> None:
    with launch.interpreted():
        (_, weights), (_, found) = (Training(**CASES[case]).trained(graph_from=at, steps=4) for at in (None, 2))
    assert torch.equal(found, weights)


def test_a_bad_label_of_a_replay_changes_no_row_and_raises_at_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_labels, "Readback", lambda labels: Readback(labels.clone()))  # a device copies them
    training = Training(**CASES["SGD, sampled"])
    training.step()
    monkeypatch.setattr(training.head.row_update, "check_finite", lambda: None)  # and are not looked at
    graph = Graph(training.head, training.step)
    training.labels[3] = NUM
    before = training.head.weights()
    training.rows.replay(graph)
    assert torch.equal(training.head.weights(), before)
    training.read(0)
    with pytest.raises(InvalidIds, match=r"step 1, .* label 300 at index 3"):
        training.rows.replay(graph)
    training.rows.replay(graph)
    assert training.head.step == 3 and not torch.equal(training.head.weights(), before)


def test_what_a_graph_holds_cannot_change() -> None:
    training = Training(num_live_classes=NUM - 1, **CASES["SGD, sampled"])
    graph = Graph(training.head, training.step)
    with pytest.raises(InvalidArgument, match="0 steps of table"):
        gt.RowOptimizer(training.head).replay(Graph(training.head, lambda: training.rows.replay(graph)))
    training.rows.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(InvalidArgument, match="only lr may change"):
        training.rows.replay(graph)
    training.rows.param_groups[0]["weight_decay"] = 0.0
    training.head.add_classes(1)
    with pytest.raises(InvalidArgument, match="capture it anew"):
        training.rows.replay(graph)
    graph = Graph(training.head, training.step)
    training.head.to("meta")
    with pytest.raises(InvalidArgument, match="moved"):
        training.rows.replay(graph)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"margin": gt.AdaFace(scale=16)}, "depends on the step"),
        ({"label_smoothing": 0.1}, "Triton kernels do not compute all of it"),
        ({"select": gt.PartialFC(0.01)}, "at least as many"),
        ({"select": gt.KNNSoftmax(active=0.4, k=4)}, "graph of classes"),
        ({"optimizer": gt.RMSProp(0.5)}, "by RMSProp"),
    ],
)
def test_what_cannot_be_captured_says_so(settings: dict[str, Any], message: str) -> None:
    training = Training(**{"optimizer": gt.SGD(0.5), **settings})
    training.step()
    with pytest.raises(InvalidArgument, match=message), launch.captured():
        training.step()


def test_micro_batches_with_classes_of_their_own_are_in_no_graph() -> None:
    training = Training(optimizer=gt.SGD(0.5), **SAMPLED)
    with pytest.raises(InvalidArgument, match="micro-batches"), launch.captured():
        for number in range(2):
            training.read(number)
            training.head(training.features, training.labels).backward()


def test_labels_of_the_host_and_rows_elsewhere_are_in_no_graph() -> None:
    training = Training(optimizer=gt.SGD(0.5))
    training.head.backend.checks_late = False
    with pytest.raises(InvalidArgument, match="labels are on the host"), launch.captured():
        training.step()
    with gt.local() as cluster:
        head = gt.ClassHead(cluster, "pulled", num_classes=10, dim=4)
        with pytest.raises(InvalidArgument, match="no CUDA graph"):
            gt.RowOptimizer(head).replay(Graph(training.head, lambda: None))


def replays_of_ranks(rank: int, ranks: int) -> None:
    from geartrain.bridge.collectives.communicator import Communicator

    share = slice(rank * SIZE // ranks, (rank + 1) * SIZE // ranks)
    with pytest.raises(InvalidArgument, match="gloo"), launch.captured():
        Training(share=share, **CASES["SGD, sampled"]).step()
    Communicator.require_capturable = lambda link: None  # type: ignore[method-assign]  # noqa: ARG005
    (_, weights), (_, found) = (
        Training(share=share, **CASES["SGD, sampled"]).trained(graph_from=at) for at in (None, 2)
    )
    assert torch.equal(found, weights)


def test_several_ranks_replay_together(tmp_path: Path) -> None:
    run_ranks(replays_of_ranks, 2, tmp_path)


def test_a_captured_step_shares_no_buffer_with_others() -> None:
    pool, device = BufferPool(), torch.device("cpu")
    pool.release(other := pool.acquire(8, device))
    with launch.captured():
        own = pool.acquire(8, device)
        pool.release(own)
    assert own is not other and pool.acquire(8, device) is other
    assert pool.acquire(8, device) is not own


def test_a_replay_is_a_step_for_schedulers() -> None:
    training = Training(**CASES["SGD, sampled"])
    schedule = torch.optim.lr_scheduler.LambdaLR(training.rows, lambda step: 0.5**step)
    graph = Graph(training.head, training.step)
    for _ in range(3):
        training.rows.replay(graph)
        schedule.step()
    expected = Training(**CASES["SGD, sampled"])
    schedule = torch.optim.lr_scheduler.LambdaLR(expected.rows, lambda step: 0.5**step)
    for _ in range(3):
        expected.step()
        schedule.step()
    assert torch.equal(training.head.weights(), expected.head.weights())
