"""Modules with rows and tables under another default type of PyTorch: rows, features and gradients stay float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.bridge.head.backends.active_rows import DeviceActive, HostActive
from geartrain.bridge.parallel.topk.compaction import TensorCompaction


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16], ids=str, autouse=True)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_a_dense_module_of_the_default_type_is_attached_and_trained(
    cluster: Cluster, default_dtype: torch.dtype
) -> None:
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    dense = gt.attach(module, cluster, name="dense", optimizer=gt.SGD(1.0))
    module(torch.ones(1, 3)).sum().backward()
    dense.step()
    assert module.weight.dtype == default_dtype
    torch.testing.assert_close(module.weight.detach(), before - 1)


def test_dense_features_are_delivered(cluster: Cluster) -> None:
    samples = torch.randn(6, 3, dtype=torch.float32)
    image = gt.SlowGear(
        cluster,
        "image",
        dim=4,
        gradients_per_id=1,
        mode="sync",
        build=lambda: nn.Linear(3, 4).float(),
        samples=samples,
        optimizer=gt.SGD(0.1),
    )
    rows = gt.RowOptimizer(image)
    for ids in ([1, 2], [2, 3]):  # two micro-batches
        features = image(torch.tensor(ids))
        assert features.dtype == torch.float32
        features.sum().backward()
    rows.step()
    assert image.account().applied == 3
    image.close()


def test_classes_are_imprinted_and_added(cluster: Cluster) -> None:
    head = gt.ClassHead(cluster, "classes", num_classes=6, dim=4, num_live_classes=4, margin=gt.ArcFace(scale=8.0))
    images = torch.eye(4, dtype=torch.float32)
    assert head.imprint([(images, torch.arange(4))], nn.Identity()) == 4
    torch.testing.assert_close(head.weights(torch.arange(4)), images)
    assert head.add_classes(1, examples=[(images[:1], torch.zeros(1, dtype=torch.int64))], backbone=nn.Identity()) == 4
    assert head.biases().dtype == torch.float32


def test_embeddings_are_trained_by_gradients_beyond_float16(cluster: Cluster) -> None:
    table = gt.Embedding(cluster, "t", dim=3, optimizer=gt.SGD(1.0))
    rows = gt.RowOptimizer(table)
    vectors = table(torch.tensor([1, 2]), torch.tensor([0, 1]))
    with torch.no_grad():
        before = table(torch.tensor([1]), torch.tensor([0]))
    (vectors * 1e5).sum().backward()
    norm = gt.clip_grad_norm_((), rows, 1.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(6**0.5 * 1e5, dtype=torch.float32))
    rows.step()
    after = table(torch.tensor([1]), torch.tensor([0]))
    torch.testing.assert_close(before - after, torch.full_like(before, 6**-0.5))


def test_offsets_of_classes_on_a_device_are_those_of_the_host() -> None:
    host, device = HostActive(3), DeviceActive(3, None, torch.device("cpu"))
    for weight in (1.2345678, torch.tensor(1.2345678, dtype=torch.float32)):
        offsets = device.offsets(np.array([1]), weight)
        torch.testing.assert_close(offsets, host.offsets(np.array([1]), float(weight)), rtol=0, atol=0)


def test_the_largest_gradients_are_found_by_tensor_operations() -> None:
    compaction = TensorCompaction([8], [2], torch.device("cpu"))
    velocity, residual = torch.zeros(2, 8, dtype=torch.float32)
    gradient = torch.arange(8, dtype=torch.float32)
    indices, values, _ = compaction.start([gradient], [velocity], [residual], momentum=0.9)
    assert indices.tolist() == [6, 7]
    assert values.dtype == torch.float32


@pytest.mark.parametrize("pooling", ["mean", "sqrtn"])
def test_vectors_on_ranks_are_those_of_pulled_rows(cluster: Cluster, pooling: Any) -> None:
    ids, offsets = torch.tensor([1, 2, 3, 4, 5, 6, 7]), torch.tensor([0, 3, 7])
    one, other = (
        gt.Embedding(place, "t", dim=3, pooling=pooling, rows=rows)
        for place, rows in ((cluster, "pull"), (None, "ranks"))
    )
    expected, found = one(ids, offsets[:-1]), other(ids, offsets[:-1])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
