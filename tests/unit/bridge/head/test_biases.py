"""A head whose classes have biases."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from tests.support import heads

CLASSES, DIM = 40, 6
PLACES = ["pull", "hosted", "ranks"]


made = partial(heads.make_head, num_classes=CLASSES, dim=DIM, bias=True)


def linear_of(head: gt.ClassHead) -> nn.Linear:
    linear = nn.Linear(DIM, CLASSES, bias=head.bias).double()
    linear.weight.data.copy_(head.weights())
    if head.bias:
        linear.bias.data.copy_(head.biases())
    return linear


batch = partial(heads.make_batch, 12, CLASSES // 4, DIM)


@pytest.mark.parametrize("rows", PLACES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_with_nothing_said_trains_as_linear_under_cross_entropy_and_adamw(
    cluster: Cluster, rows: str, bias: bool
) -> None:
    head = made(cluster, rows=rows, bias=bias)
    linear = linear_of(head)
    assert (0 < float(head.biases().abs().max()) <= DIM**-0.5) == bias
    ours, theirs = gt.RowOptimizer(head), torch.optim.AdamW(linear.parameters(), lr=1e-3)
    for step in range(20):
        features, labels = batch(step)
        reference = features.detach().double().requires_grad_()
        loss, expected = head(features, labels), F.cross_entropy(linear(reference), labels)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
        loss.backward()
        expected.backward()
        assert features.grad is not None and reference.grad is not None
        torch.testing.assert_close(features.grad.double(), reference.grad, rtol=1e-4, atol=1e-6)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(head.weights().double(), linear.weight.data, rtol=1e-4, atol=1e-5)
    if bias:
        torch.testing.assert_close(head.biases().double(), linear.bias.data, rtol=1e-4, atol=1e-5)
    features, _ = batch(99)
    scores, ids = head.predict(features.detach(), k=3)
    top = linear(features.detach().double()).detach().topk(3)
    torch.testing.assert_close(scores.double(), top.values, rtol=1e-4, atol=1e-5)
    assert torch.equal(ids, top.indices)


@pytest.mark.parametrize("rows", PLACES)
def test_features_of_another_width_are_refused_by_the_width_of_the_head(cluster: Cluster, rows: str) -> None:
    head = made(cluster, rows=rows)
    for width in (DIM - 1, DIM + 1):
        named = rf"features are \[2, {width}\].*\[B, {DIM}\]"
        with pytest.raises(gt.errors.InvalidRows, match=named):
            head(torch.ones(2, width), torch.tensor([0, 1]))
        with pytest.raises(gt.errors.InvalidRows, match=named):
            head.predict(torch.ones(2, width))


def test_a_margin_is_refused() -> None:
    with gt.local() as cluster:
        with pytest.raises(gt.errors.InvalidArgument, match=r"margin is ArcFace.* and bias is True"):
            made(cluster, margin=gt.ArcFace())
        head = made(cluster)
        with pytest.raises(gt.errors.InvalidArgument, match="bias is True"):
            head.margin = gt.CosFace()
        assert head.margin is None and "bias=True" in repr(head)


def test_a_state_is_of_a_head_with_biases_or_of_one_without() -> None:
    with gt.local() as cluster:
        head, bare = made(cluster), made(cluster, name="bare", bias=False)
        head.load_state_dict(head.state_dict())
        assert head.weights(torch.tensor([3, 1])).shape == (2, DIM)
        assert torch.equal(head.biases(torch.tensor([3, 1])), head.biases()[[3, 1]])
        assert not bare.biases().any()
        state = {"_extra_state": {**head.get_extra_state(), "bias": False}}
        with pytest.raises(gt.errors.SpecMismatch, match="bias False, this one True"):
            head.load_state_dict(state)


@pytest.mark.parametrize("rows", PLACES)
def test_weights_and_biases_go_out_to_a_file_and_come_back(cluster: Cluster, rows: str, tmp_path: Path) -> None:
    head, again, bare = (made(cluster, name, rows=rows, seed=seed) for seed, name in enumerate("abc"))
    path = gt.export_class_weights(head, tmp_path / "w.safetensors")
    held = load_file(path)
    assert torch.equal(held["weight"], head.weights()) and torch.equal(held["bias"], head.biases())
    gt.import_class_weights(again, path)
    assert torch.equal(again.weights(), head.weights()) and torch.equal(again.biases(), head.biases())
    torch.save({"fc.weight": held["weight"], "fc.bias": held["bias"] + 1}, tmp_path / "w.pt")
    gt.import_class_weights(again, tmp_path / "w.pt")
    assert torch.equal(again.biases(), head.biases() + 1)
    np.save(tmp_path / "w.npy", held["weight"].numpy())
    gt.import_class_weights(bare, tmp_path / "w.npy")
    assert torch.equal(bare.weights(), head.weights()) and not bare.biases().any()


def test_new_and_imprinted_classes_have_no_bias_yet() -> None:
    with gt.local() as cluster:
        head = made(cluster, num_live_classes=30)
        pictures, labels = torch.randn(16, DIM), torch.arange(16)
        assert head.imprint([(pictures, labels)], nn.Identity()) == 16
        torch.testing.assert_close(head.weights(labels), F.normalize(pictures))
        ids = head.add_classes(2, rows=pictures[:2])
        assert torch.equal(head.weights(ids), pictures[:2])
        assert not head.biases(torch.cat([labels, ids])).any() and head.biases(torch.tensor([20])).any()
        head(pictures, labels).backward()
        gt.RowOptimizer(head).step()
        assert head.biases(labels).all()


def test_the_plan_counts_the_column() -> None:
    plain, biased = (gt.memory_report(num_classes=1000, dim=8, bias=bias) for bias in (False, True))
    column, pages = 1000 * 3 * 4, 3 * 4096  # of the rows and of each of two moments
    assert 0 <= biased.table_bytes - plain.table_bytes - column < pages
