"""The classes that lists of neighbours choose: the kernels' are the reference's, and those of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.bridge.head.selection.torch_selection import TorchGraph
from geartrain.bridge.kernels import sampling
from geartrain.bridge.kernels.sampling import candidates_here, nearest_first
from tests.support.plain_graph import table_of


def lists_of(num_classes: int, k: int) -> NeighbourTable:
    """Of any lengths, none among them; a class may come twice, or be in its own."""
    random = np.random.default_rng(num_classes)
    lengths = random.integers(0, k + 1, num_classes)
    return table_of([random.integers(0, num_classes, length).tolist() for length in lengths], k)


@pytest.mark.parametrize(
    ("num_classes", "k", "num_labels", "near", "budget"),
    [(40, 3, 9, 1.0, 20), (1000, 40, 70, 0.125, 300), (3000, 33, 45, 0.1, 50), (50, 5, 1, 0.5, 2), (9, 2, 6, 0.5, 9)],
)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_kernels_choose_what_the_reference_does(
    num_classes: int,
    k: int,
    num_labels: int,
    near: float,
    budget: int,
    dtype: torch.dtype,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = lists_of(num_classes, k)
    labels = np.sort(np.random.default_rng(budget).integers(0, num_classes, num_labels))
    given = torch.from_numpy(np.append(labels, [num_classes] * 2))  # no classes
    on = kernel_device
    graph = TorchGraph.of(table, on)
    neighbours = graph.neighbours.to(dtype)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "runs_kernels", lambda _: False)
        said = candidates_here(given, graph.offsets.cpu(), neighbours.cpu(), graph.longest)
        expected = nearest_first(said, num_classes, near, budget)
    found = candidates_here(given.to(on), graph.offsets, neighbours, graph.longest)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found[1:].cpu(), said[1:])
    if dtype != torch.int16:  # places in lists, whose first row says nothing
        np.testing.assert_array_equal(found.cpu(), said)
        np.testing.assert_array_equal(nearest_first(found, num_classes, near, budget).cpu(), expected)
