"""Labels on the rows' device: checked there, the same results as of labels on the host, and errors one step late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.bridge.placements import device_update
from tests.support.heads import make_batch, make_head
from tests.support.rank_processes import run_ranks

NUM, DIM, SIZE = 60, 8, 12
COMMON: dict[str, Any] = {"num_classes": NUM, "dim": DIM, "initializer": gt.Normal(0.1), "optimizer": gt.SGD(0.5)}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"margin": None, "select": gt.FullSoftmax()},
    "linear sampled": {"margin": None, "select": gt.PartialFC(0.4)},
    "sampled fewer than labels": {"margin": None, "select": gt.PartialFC(0.05)},
    "margin": {"margin": gt.ArcFace(scale=16), "select": gt.PartialFC(0.4)},
    "adaptive": {"margin": gt.AdaFace(scale=16), "select": gt.PartialFC(0.4)},
    "sum": {"margin": gt.CosFace(scale=16), "select": gt.FullSoftmax(), "reduction": "sum"},
    "none": {"margin": None, "select": gt.FullSoftmax(), "reduction": "none", "label_smoothing": 0.1},
    "retired": {"margin": None, "select": gt.PartialFC(0.5), "num_live_classes": 50},
    "ignored, adaptive": {"margin": gt.AdaFace(scale=16), "select": gt.FullSoftmax(), "ignore_index": -100},
    "ignored": {"margin": gt.ArcFace(scale=16), "select": gt.FullSoftmax(), "ignore_index": -100},
    "a class ignored": {"margin": gt.ArcFace(scale=16), "select": gt.FullSoftmax(), "ignore_index": 7},
    "ignored, each": {"margin": None, "select": gt.PartialFC(0.4), "ignore_index": -100, "reduction": "none"},
}


def steps(case: str, *, late: bool, weighted: bool, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    head = make_head(late=late, on_device=True, **COMMON, **CASES[case])
    rows, found = gt.RowOptimizer(head), {}
    for step in range(3):
        features, labels = make_batch(SIZE, head.num_live_classes, DIM, step)
        if "ignored" in case:
            labels[step::4] = CASES[case]["ignore_index"]
        weight = torch.arange(SIZE).float() if weighted else None
        share = slice(rank * SIZE // ranks, (rank + 1) * SIZE // ranks)
        own = features.detach()[share].requires_grad_()
        loss = head(own, labels[share], None if weight is None else weight[share])
        loss.sum().backward()
        rows.step()
        rows.zero_grad()
        found |= {f"loss {step}": loss.detach(), f"gradient {step}": own.grad}
    assert head.stats is not None and (head.stats.counts is not None) == late
    found["means"] = torch.tensor([head.stats.loss, head.stats.target])
    return found | {"rows": head.weights()}


@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_labels_on_the_host(case: str, weighted: bool) -> None:
    expected, found = (steps(case, late=late, weighted=weighted) for late in (False, True))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


def on_two_ranks(rank: int, folder: Path) -> None:
    for case in ("linear sampled", "margin", "ignored"):
        for weighted in (False, True):
            of = {"case": case, "weighted": weighted, "rank": rank, "ranks": 2}
            expected, found = steps(late=False, **of), steps(late=True, **of)
            for name in expected:
                torch.testing.assert_close(found[name], expected[name])
    head = make_head(late=True, **COMMON)
    features, labels = make_batch(SIZE, NUM, DIM, rank)
    if rank == 1:
        labels[2] = NUM
    loss = head(features, labels)
    loss.backward()
    assert torch.isnan(loss)  # which is that of all ranks
    assert features.grad is not None and torch.isfinite(features.grad).all() and features.grad[3].any()
    head.row_update.discard()
    with pytest.warns(UserWarning, match=f"label {NUM} at index {SIZE + 2} is outside"):
        head.snapshot(folder, "label")
    with pytest.raises(gt.errors.InvalidIds, match=f"label {NUM} at index {SIZE + 2} is outside"):
        head(*make_batch(SIZE, NUM, DIM))
    head(*make_batch(SIZE, NUM, DIM))
    head.backend.table.refused.fill_(3 * rank)
    with pytest.warns(UserWarning, match="carried 3 rows"):
        head.snapshot(folder, "rows")


def test_two_ranks_gather_and_check_labels_on_their_devices(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)


@pytest.mark.parametrize("bad", [NUM, -1, 55], ids=["too large", "negative", "retired"])
def test_a_bad_label_changes_no_row_and_is_named_by_the_next_step(bad: int) -> None:
    head = make_head(late=True, **COMMON, num_live_classes=50, margin=gt.ArcFace(scale=16))
    rows, before = gt.RowOptimizer(head), head.weights()
    head.backend.update.check_finite = lambda: None  # as on a GPU
    features, labels = make_batch(SIZE, 50, DIM)
    labels[3] = bad
    loss = head(features, labels)
    loss.backward()
    rows.step()
    rows.zero_grad()
    assert torch.isnan(loss)
    assert features.grad is not None and torch.isfinite(features.grad).all()
    assert not features.grad[3].any() and features.grad[2].any()
    with pytest.warns(UserWarning, match=f"label {bad} at index 3"):  # and the error is still raised
        head.state_dict()
    torch.testing.assert_close(head.weights(), before, rtol=0, atol=0)
    with pytest.raises(gt.errors.InvalidIds, match=f"step 0, which has changed no row.*label {bad} at index 3"):
        head(*make_batch(SIZE, 50, DIM))
    head.backend.update.pop_refused()
    assert torch.isfinite(head(*make_batch(SIZE, 50, DIM)))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_found_alike(bad: float) -> None:
    head = make_head(late=True, **COMMON)
    weight = torch.ones(SIZE)
    weight[5] = bad
    features, labels = make_batch(SIZE, NUM, DIM)
    head(features, labels, weight).backward()
    assert features.grad is not None and torch.isfinite(features.grad).all()
    with pytest.raises(gt.errors.InvalidIds, match="weight at index 5"):
        head(*make_batch(SIZE, NUM, DIM))


@pytest.mark.filterwarnings("ignore:step 0, which has changed no row")
@pytest.mark.parametrize("spoiled", ["a bad label", "nothing counts"])
def test_a_margin_learns_nothing_of_a_batch_that_rows_learn_nothing_of(spoiled: str) -> None:
    head = make_head(late=True, **COMMON, margin=gt.AdaFace(scale=16), ignore_index=-100)
    head(*make_batch(SIZE, NUM, DIM)).backward()
    before = head.get_extra_state()["margin_learned"]
    assert before["norm_batches"] == 1
    features, labels = make_batch(SIZE, NUM, DIM, 1)
    if spoiled == "a bad label":
        labels[3] = NUM
    else:
        labels[:] = -100
    head(features, labels)
    assert head.get_extra_state()["margin_learned"] == before


def test_what_the_last_of_several_steps_under_way_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowReadback:
        """What a device tells: later, and as it was when it was asked."""

        is_here = False

        def __init__(self, values: torch.Tensor) -> None:
            self._values = values.clone()

        def values(self) -> torch.Tensor:
            return self._values

    monkeypatch.setattr(device_update, "Readback", SlowReadback)
    head = make_head(**COMMON, margin=None)
    rows = gt.RowOptimizer(head)
    head.backend.update.check_finite = lambda: None
    for factor in (1.0, 1.0, torch.inf):
        (head(*make_batch(SIZE, NUM, DIM)) * factor).backward()
        rows.step()
        rows.zero_grad()
    SlowReadback.is_here = True
    head(*make_batch(SIZE, NUM, DIM))  # learns of the first step
    with pytest.warns(UserWarning, match=f"{NUM} rows"):
        head.state_dict()
    with pytest.raises(gt.errors.NonFinite, match=f"{NUM} rows"):
        head.eval()(*make_batch(SIZE, NUM, DIM))
    assert head.backend.table.refused == 0
