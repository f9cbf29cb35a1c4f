"""Heads under autocast against float64, as if they had millions of classes: nothing of the negatives vanishes.

A head of 4,096 rows has the probabilities of one with ``count`` active classes once its log-sum-exp is raised by
log(count / 4096); gradients of the rows are compared class by class. Legend: A rows, B samples, D width.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from geartrain.ams.client.factory import local
from geartrain.ams.programs.selection import FullSoftmax
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Normal
from geartrain.bridge.head.loss import chunk_pass
from geartrain.bridge.head.loss.batch import Batch, Targets
from geartrain.bridge.head.loss.chunk_pass import TensorPass, pass_for
from geartrain.bridge.head.loss.margins.angular import ArcFace, CombinedMargin, CosFace
from geartrain.bridge.head.loss.softmax import OnlineSoftmax
from geartrain.bridge.placements import workspace as workspace_module
from geartrain.bridge.placements.workspace import Arithmetic, Scratch, Workspace
from geartrain.bridge.rows import native_types
from geartrain.bridge.rows.optimizer import RowOptimizer
from tests.support import heads
from tests.support.reference import plain_gradients

ROWS, DIM, BATCH = 4096, 256, 64
LR = 2.0**40
"""A step of plain SGD with it is the gradient, and nothing else is left of the row."""
MEDIANS = {torch.float16: 0.002, torch.bfloat16: 0.012}
"""Of the relative errors of the gradients of rows: operands have 11 bits, and 8, and logits are 92 times a cosine."""
FEATURES = {torch.float16: 0.0005, torch.bfloat16: 0.003}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_module, "product_type", lambda _device, wanted, _compute: wanted)


def raise_log_sum(monkeypatch: pytest.MonkeyPatch, count: float) -> None:
    """Make every sample's log-sum-exp that of a head with ``count`` active classes."""
    finish = OnlineSoftmax.finish

    @functools.wraps(finish)
    def raised(self: Any) -> Any:
        result = finish(self)
        self.batch.lse2_B += math.log2(count / ROWS)
        return result

    monkeypatch.setattr(OnlineSoftmax, "finish", raised)


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(BATCH, DIM, generator=generator, requires_grad=True)
    return features, torch.randint(ROWS, (BATCH,), generator=generator)


def negative_gradients(features: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor, count: float) -> torch.Tensor:
    """The part of the negatives [A, D], in float64."""
    x, w = (torch.nn.functional.normalize(item.detach().double()) for item in (features, rows))
    cos = x @ w.t()
    margin = CombinedMargin(scale=64.0, m3=0.35)
    logits = 64 * cos
    at = (torch.arange(len(x)), labels)
    logits[at] = margin.target(cos[at])[0]
    probabilities = torch.softmax(logits, 1) / (count / len(w))
    probabilities[at] = 0
    unit_gradient = 64 / len(x) * probabilities.t() @ x
    lengths = rows.double().norm(dim=1, keepdim=True)
    return (unit_gradient - (unit_gradient * w).sum(1, keepdim=True) * w) / lengths


def check_negatives(place: str, device: str, count: float, kind: torch.dtype) -> None:
    with local(num_shards=2) as cluster:
        head = heads.make_head(
            cluster,
            "classes",
            num_classes=ROWS,
            dim=DIM,
            select=FullSoftmax(),
            margin=CosFace(scale=64),
            optimizer=SGD(lr=LR),
            initializer=Normal(std=1.0),
            **heads.PLACES[place],
        ).to(device)
        before = head.weights().clone()
        features, labels = sample()
        with torch.autocast(device, dtype=kind):
            head(features.to(device), labels.to(device)).backward()
        RowOptimizer(head).step()
        gradients = (before.double() - head.weights().double()) / LR
    negatives = torch.ones(ROWS, dtype=torch.bool)
    negatives[labels] = False
    expected = negative_gradients(features, before, labels, count)[negatives]
    found = gradients[negatives]
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float((found == 0).all(dim=1).float().mean()) == 0
    assert float(errors.median()) < MEDIANS[kind]
    assert float(errors.quantile(0.99)) < 3 * MEDIANS[kind]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1e6, 1e7, 1e8])
@pytest.mark.parametrize("place", ["held", "streamed", "ranks"])
def test_negatives_keep_their_gradients_among_many_classes(
    place: str, count: float, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_log_sum(monkeypatch, count)
    check_negatives(place, "cpu", count, kind)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", ["held", "streamed", "ranks"])
def test_negatives_keep_their_gradients_on_a_device(
    place: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_log_sum(monkeypatch, 1e8)
    check_negatives(place, "cuda", 1e8, kind)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("place", ["held", "streamed", "ranks"])
def test_negatives_keep_their_gradients_in_the_compiled_pass(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with AMX; without it the same products are made in plain C++."""
    monkeypatch.setattr(chunk_pass, "has_bfloat16_class_pass", lambda: True)
    monkeypatch.setattr(chunk_pass, "TensorPass", None)
    raise_log_sum(monkeypatch, 1e8)
    check_negatives(place, "cpu", 1e8, torch.bfloat16)


def check_features(device: str, kind: torch.dtype, margin: CosFace | ArcFace) -> None:
    settings: dict[str, Any] = {"num_classes": ROWS, "dim": DIM, "select": FullSoftmax(), "rows": "ranks"}
    head = heads.make_head(None, "classes", margin=margin, **settings).to(device)
    features, labels = sample()
    with torch.autocast(device, dtype=kind):
        loss = head(features.to(device), labels.to(device))
    loss.backward()
    expected_loss, expected, _ = plain_gradients(features, head.weights(), labels, margin.combined)
    assert features.grad is not None
    assert float((features.grad - expected).norm() / expected.norm()) < FEATURES[kind]
    assert float(loss.detach()) == pytest.approx(float(expected_loss), rel=FEATURES[kind])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("margin", [CosFace(scale=64), ArcFace(scale=64)])
def test_the_feature_gradient_has_the_accuracy_of_its_operands(kind: torch.dtype, margin: CosFace | ArcFace) -> None:
    check_features("cpu", kind, margin)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_the_feature_gradient_has_the_accuracy_of_its_operands_on_a_device(kind: torch.dtype) -> None:
    check_features("cuda", kind, CosFace(scale=64))


@pytest.mark.parametrize("gives", [False, True])
def test_products_are_narrow_only_where_their_sums_are_not(gives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_types, "gives_float32_products", lambda _device, _dtype: gives)
    device, narrow = torch.device("cuda"), torch.float16
    assert native_types.product_type(device, narrow, torch.float32) == (narrow if gives else torch.float32)
    assert native_types.product_type(device, narrow, torch.float64) == torch.float64


def narrow_batch(features: torch.Tensor, rows: int, margin: CosFace | None) -> Batch:
    arithmetic = Arithmetic(device=torch.device("cpu"), compute=torch.float32, matmul=torch.float16)
    nothing = Targets(np.full(len(features), -1, np.int64))
    labels = np.zeros(len(features), np.int64)
    return Batch.of(features, nothing, labels, None if margin is None else margin.combined, rows, arithmetic)


def test_a_hard_class_does_not_hide_all_others_from_a_feature() -> None:
    """One class has a logit 17 above the others, each of whose exponentials float16 has no number for."""
    features = torch.eye(1, 8)
    rows = torch.zeros(3000, 8)
    rows[0, 0], rows[0, 1] = 17 / 64, math.sqrt(1 - (17 / 64) ** 2)
    rows[1:, 2:] = torch.rand(2999, 6, generator=torch.Generator().manual_seed(0)) + 0.1
    batch = narrow_batch(features, len(rows), CosFace(scale=64))
    softmax = OnlineSoftmax(batch, 1, want_gradient=True)
    pass_for(batch).forward(Workspace(batch.arithmetic, Scratch()), softmax.parts[0], rows, 0, None)
    sums = softmax.parts[0]
    assert sums.weighted_PBD is not None
    unit = torch.nn.functional.normalize(rows.double())
    expected = torch.exp(64 * unit[:, 0] - 17) @ unit  # beside the hard class
    torch.testing.assert_close(sums.weighted_PBD[0, 0].double(), expected, rtol=0.01, atol=1e-12)


@pytest.mark.parametrize("margin", [CosFace(scale=64), None])
def test_loss_scales_of_ranks_do_not_overflow_the_operands(margin: CosFace | None) -> None:
    """Weights [B] as ranks give them; features and one row's probability are as large as they can be."""
    features = torch.eye(2, 8)
    batch = narrow_batch(features, 3, margin)
    batch.lse2_B, batch.target_weight_B = torch.full((2,), 64.0), torch.zeros(2)
    rows = torch.eye(3, 8)[[0, 1, 1]] + 0.1
    plain, weighted = rows.clone(), rows.clone()
    work = Workspace(batch.arithmetic, Scratch())
    TensorPass(batch).overwrite(work, plain, 0, torch.tensor(1.0))
    factor, weights_B = batch.row_factors(torch.full((2,), 2.0**20))
    check = TensorPass(batch, weights_B).overwrite(work, weighted, 0, factor)
    assert math.isfinite(float(check))
    torch.testing.assert_close(weighted, plain * 2.0**20 * batch.scale)


def test_rows_that_moved_since_the_forward_pass_do_not_overflow() -> None:
    """Other workers may have brought them nearer: their probabilities under the old log-sum-exp are beyond 1."""
    batch = narrow_batch(torch.eye(1, 8), 2, CosFace(scale=64))
    rows = torch.eye(2, 8) + 0.1
    cos = float(torch.nn.functional.normalize(rows)[0, 0])
    batch.lse2_B = torch.tensor([batch.logit_factor * cos - 12.0])
    batch.target_weight_B = torch.zeros(1)
    check = TensorPass(batch).overwrite(Workspace(batch.arithmetic, Scratch()), rows, 0, torch.tensor(1.0))
    assert math.isfinite(float(check))
    assert float(rows[0].norm()) > 100
