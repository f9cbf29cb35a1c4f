"""How the head behaves in a user's hands."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.ams.kernels.ops import has_bfloat16_class_pass
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, NonFinite
from geartrain.ams.values.specs import Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss import chunk_pass
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.rows import native_types
from geartrain.bridge.rows.optimizer import RowOptimizer
from tests.support import heads
from tests.support.reference import UNIT_SGD, FakeCluster, FakeTable, merged_gradient


def make_head(num_classes: int = 50, dim: int = 8, **settings: Any) -> tuple[ClassHead, FakeTable]:
    cluster = FakeCluster()
    defaults = {"select": PartialFC(0.1), "margin": ArcFace(scale=64), "optimizer": UNIT_SGD, "initializer": Normal()}
    head = heads.make_head(cluster, "classes", num_classes=num_classes, dim=dim, **{**defaults, **settings})
    return head, cluster.tables["classes"]


def batch(size: int = 12, num_classes: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    return heads.make_batch(size, num_classes, 8)


def test_labels_and_features_are_left_as_they_were() -> None:
    head, _ = make_head()
    features, labels = batch()
    before = features.detach().clone(), labels.clone()
    head(features, labels).backward()
    assert torch.equal(features.detach(), before[0])
    assert torch.equal(labels, before[1])


@pytest.mark.parametrize("streamed", [False, True])
def test_eval_queues_no_row_gradients_but_features_get_theirs(streamed: bool) -> None:
    head, table = make_head(rows_cache_bytes=0 if streamed else 1 << 20)
    features, labels = batch()
    training = head(features, labels).detach()
    head.eval()
    loss = head(features, labels)
    torch.testing.assert_close(loss.detach(), training)
    loss.backward()
    assert features.grad is not None and features.grad.abs().sum() > 0
    RowOptimizer(head).step()
    assert table.pushes == []


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_loss_without_gradients_queues_nothing_and_leaves_training_intact(context: Any) -> None:
    head, table = make_head()
    features, labels = batch()
    with context():
        silent = head(features, labels)
        scores, ids = head.predict(features)
    assert not silent.requires_grad
    assert scores.shape == ids.shape == (12, 5)
    rows = RowOptimizer(head)
    loss = head(features, labels)
    torch.testing.assert_close(loss.detach(), silent.clone())
    loss.backward()
    rows.step()
    assert len(table.pushes) == 1


def test_a_second_backward_is_refused() -> None:
    head, _ = make_head()
    features, labels = batch()
    loss = head(features, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidArgument, match="second time"):
        loss.backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_head_is_not_copied(copied: Callable[[object], object]) -> None:
    head, _ = make_head()
    with pytest.raises(
        InvalidArgument, match=r"cannot be copied or pickled: its rows are not in the module.*geartrain\.save"
    ):
        copied(nn.Sequential(nn.Linear(2, 8), head))


@pytest.mark.parametrize("ids", [3, [1, 2], torch.tensor([1.0]), torch.tensor([[1]])])
def test_ids_of_weights_are_a_vector_of_int64(ids: Any) -> None:
    with pytest.raises(InvalidIds, match=r"ids are .*; they must be a torch.int64 tensor \[N\], or None"):
        make_head()[0].weights(ids)


def test_second_derivatives_are_refused() -> None:
    """A gradient penalty would silently count for nothing."""
    head, table = make_head()
    features, labels = batch()
    loss = head(features, labels)
    with pytest.raises(InvalidArgument, match="no second derivatives"):
        torch.autograd.grad(loss, features, create_graph=True)
    loss.backward()  # without them the same loss still goes
    RowOptimizer(head).step()
    assert len(table.pushes) == 1


def test_predict_refuses_features_that_are_not_finite() -> None:
    head, _ = make_head()
    features, _ = batch()
    with torch.no_grad():
        features[3, 0] = torch.nan
    with pytest.raises(NonFinite, match="first at index 3"):
        head.predict(features)


def test_a_negative_label_is_told_of_ignore_index_which_takes_it() -> None:
    features, labels = batch()
    labels[3] = -1
    with pytest.raises(InvalidIds, match=r"label -1 at index 3 .* give ignore_index=-1"):
        make_head()[0](features, labels)
    assert make_head(ignore_index=-1)[0](features, labels).isfinite()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_on_a_cpu_without_amx_the_products_of_autocast_are_made_in_float32(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_types, "has_bfloat16_class_pass", lambda: False)
    heads = [make_head(select=FullSoftmax())[0] for _ in range(2)]
    features, labels = batch(16)
    expected = heads[0](features, labels)
    with torch.autocast("cpu", dtype=kind):
        assert torch.equal(heads[1](features, labels), expected)


@pytest.mark.skipif(not has_bfloat16_class_pass(), reason="this CPU has no AMX, or may not use it")
@pytest.mark.parametrize("select", [FullSoftmax(), PartialFC(0.3)])
def test_with_amx_the_products_of_autocast_are_the_compiled_ones_in_bfloat16(
    select: FullSoftmax | PartialFC, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = [make_head(select=select)[0] for _ in range(2)]
    features, labels = batch(64)
    expected = heads[0](features, labels)
    monkeypatch.setattr(chunk_pass, "TensorPass", None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = heads[1](features, labels)
    assert loss.dtype == torch.float32
    assert 0 < float((loss.detach() - expected.detach()).abs() / expected.detach()) < 0.02
    with torch.autocast("cpu", dtype=torch.float16):  # for which there is no unit
        assert torch.equal(heads[0](features, labels), expected)


@pytest.mark.parametrize("has_amx", [False, True])
def test_on_a_cpu_networks_run_in_bfloat16_only_with_amx(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_types, "has_bfloat16_class_pass", lambda: has_amx)
    assert native_types.has_fast_bfloat16(torch.device("cpu")) == has_amx


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [None, ArcFace(scale=64)])
def test_predict_equals_brute_force(
    margin: ArcFace | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geartrain.bridge.head.backends.row_stream.block_rows_for", lambda _: 17)
    monkeypatch.setattr("geartrain.bridge.head.backends.predict._MIN_ROWS", 17)
    monkeypatch.setattr("geartrain.bridge.head.backends.predict.SAMPLES_AT_ONCE", 5)
    head, table = make_head(margin=margin, rows_cache_bytes=0)
    features, rows = batch()[0].to(dtype), torch.from_numpy(table.rows).to(dtype)
    plain = features @ rows.t() if margin is None else F.normalize(features) @ F.normalize(rows).t()
    expected = plain.detach().topk(7, dim=1)
    scores, ids = head.predict(features, k=7)
    torch.testing.assert_close(scores, expected.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids, expected.indices)
    with pytest.raises(InvalidArgument, match="k is 51"):
        head.predict(features, k=51)
    assert head.predict(features[:0])[1].shape == (0, 5)


def test_predict_follows_what_others_do_with_the_rows_that_it_keeps(tmp_path: Path) -> None:
    rows, features = torch.randn(40, 8), torch.randn(6, 8)

    def require_best() -> None:
        for _ in range(2):
            scores, ids = head.predict(features, k=3)
            best = (features @ rows.t()).topk(3, dim=1)
            torch.testing.assert_close(scores, best.values)
            assert torch.equal(ids, best.indices)

    with gt.local(num_shards=2) as cluster:
        head = gt.ClassHead(cluster, "classes", num_classes=40, dim=8, margin=None)
        table = cluster.table("classes")
        table.assign(np.arange(40), rows.numpy())
        require_best()
        saved = cluster.snapshot(tmp_path).result(60)
        table.assign(np.array([7]), np.zeros((1, 8), np.float32))
        before, rows[7] = rows[7].clone(), 0
        require_best()
        rows[7] = before
        cluster.restore(saved, replace=True)
        table.assign(np.array([7]), 9 * features[:1].numpy())  # as many writes as before
        rows[7] = 9 * features[0]
        require_best()
        head.retire_classes(torch.tensor([7]))
        rows[7] = -1e3 * features[0]
        assert not (head.predict(features, k=3)[1] == 7).any()


def test_imprinted_centers_are_the_unit_mean_features() -> None:
    head, table = make_head(num_classes=8, dim=4)
    before = table.rows.copy()
    backbone = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.9)).train()
    generator = torch.Generator().manual_seed(0)
    loader = [(torch.randn(5, 3, generator=generator), torch.tensor([0, 4, 0, 1, 4])) for _ in range(4)]
    seen: list[int] = []
    assert head.imprint(loader, backbone, progress=seen.append) == 3
    assert seen == [5, 10, 15, 20]
    assert backbone.training and backbone[1].training
    features = torch.cat([backbone[0](images) for images, _ in loader]).detach()
    labels = torch.cat([labels for _, labels in loader])
    for class_id in (0, 1, 4):
        mean = F.normalize(features[labels == class_id].mean(0), dim=0)
        np.testing.assert_allclose(table.rows[class_id], mean.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(table.rows[[2, 3, 5]], before[[2, 3, 5]])


def test_weights_come_in_the_order_asked_for() -> None:
    head, table = make_head()
    np.testing.assert_array_equal(head.weights().numpy(), table.rows)
    np.testing.assert_array_equal(head.weights(torch.tensor([7, 3, 7])).numpy(), table.rows[[7, 3, 7]])
    with pytest.raises(InvalidIds, match="50"):
        head.weights(torch.tensor([50]))


def _with(value: float) -> torch.Tensor:
    """Features of three samples, the last of which holds ``value``."""
    features = torch.zeros(3, 8)
    features[2, 5] = value
    return features


@pytest.mark.parametrize(
    ("features", "labels", "error", "named"),
    [
        (torch.zeros(2, 7), torch.zeros(2, dtype=torch.int64), InvalidRows, r"\[2, 7\]"),
        (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), InvalidRows, "int64"),
        (torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), InvalidRows, "empty"),
        (_with(math.nan), torch.zeros(3, dtype=torch.int64), NonFinite, r"1 of 3 samples .* first at index 2;"),
        (_with(-math.inf).half(), torch.zeros(3, dtype=torch.int64), NonFinite, "first at index 2;"),
        (torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32), InvalidIds, "int32"),
        (torch.zeros(2, 8), torch.zeros(3, dtype=torch.int64), InvalidIds, r"\[3\]"),
        (torch.zeros(2, 8), torch.tensor([0, -1]), InvalidIds, "label -1 at index 1"),
        (torch.zeros(2, 8), torch.tensor([50, 0]), InvalidIds, r"label 50 at index 0 is outside \[0, 50\)"),
        (torch.zeros(2, 8), [0, 1], InvalidIds, "list"),
    ],
)
def test_bad_input_is_refused_by_name(features: Any, labels: Any, error: type[Exception], named: str) -> None:
    head, table = make_head()
    with pytest.raises(error, match=named):
        head(features, labels)
    assert table.pulled_rows == 0


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"rows is 'moon'"):
        make_head(rows="moon")
    with pytest.raises(InvalidArgument, match=r"margin is 0\.5"):
        make_head(margin=0.5)
    with pytest.raises(InvalidArgument, match=r"select is 0\.1"):
        make_head(select=0.1)


def test_a_full_softmax_never_holds_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geartrain.bridge.head.backends.row_stream.block_rows_for", lambda _: 64)
    largest = 0
    real = torch.empty

    def watched(*shape: Any, **options: Any) -> torch.Tensor:
        nonlocal largest
        tensor = real(*shape, **options)
        largest = max(largest, tensor.nbytes)
        return tensor

    head, table = make_head(num_classes=5000, select=FullSoftmax(), rows_cache_bytes=0)
    monkeypatch.setattr(torch, "empty", watched)
    features, labels = batch(num_classes=5000)
    head(features, labels).backward()
    RowOptimizer(head).step()
    assert table.largest_pull == 64
    assert table.pulled_rows == 2 * 5000
    assert max(len(push.ids) for push in table.pushes) == 64
    assert 0 < largest < 5000 * 8 * 4 / 4


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    losses, gradients = [], []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            head, table = make_head(num_classes=5000, dim=8, select=FullSoftmax())
            features, labels = batch(num_classes=5000)
            loss = head(features, labels)
            loss.backward()
            RowOptimizer(head).step()
            assert torch.get_num_threads() == count
            losses.append(float(loss.detach()))
            gradients.append(merged_gradient(table))
    finally:
        torch.set_num_threads(threads)
    assert losses[0] == losses[1] == losses[2]
    np.testing.assert_array_equal(gradients[1], gradients[0])
    np.testing.assert_array_equal(gradients[1], gradients[2])
