"""The four methods of selection: the exact ones against the specification, and what sampling promises."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels.reference.gradients import largest
from geartrain.bridge.parallel.topk.grouping import GroupedTopK
from geartrain.bridge.parallel.topk.methods import SelectedElements, select_by_sampling, select_divided
from geartrain.bridge.parallel.topk.selection import counts


def select_grouped(tensors: list[torch.Tensor], ks: list[int]) -> SelectedElements:
    grouping = GroupedTopK([tensor.numel() for tensor in tensors], ks, torch.device("cpu"))
    buffer = torch.zeros(grouping.buffer_numel)
    torch._foreach_copy_(grouping.views(buffer), tensors)
    indices, places = grouping.select(buffer)
    return SelectedElements(indices.to(torch.int32), buffer[places], ks)


EXACT = (select_divided, select_grouped)
few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-42, -1e-42, 3e38])
some_values = st.lists(few | st.floats(-4, 4, width=32), min_size=1, max_size=300)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(some_values, st.floats(0, 1)), min_size=1, max_size=6))
def test_exact_methods_select_what_the_definition_says(cases: list[tuple[list[float], float]]) -> None:
    tensors = [torch.tensor(values, dtype=torch.float32) for values, _ in cases]
    ks = [max(1, math.ceil(part * len(values))) for values, part in cases]
    expected = [largest(tensor.numpy(), k) for tensor, k in zip(tensors, ks, strict=True)]
    for select in EXACT:
        selected = select(tensors, ks)
        assert selected.indices.dtype == torch.int32 and selected.counts == ks
        assert selected.indices.tolist() == np.concatenate(expected).tolist(), select
        picked = torch.cat([tensor[at] for tensor, at in zip(tensors, expected, strict=True)])
        assert torch.equal(selected.values, picked), select


def test_tensors_of_many_sizes_are_selected_in_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    numels = [70_000, 1, 4096, 4097, 69_000, 12, 300_000, 52_500, 640, 640]
    ks = counts(numels, 0.99)
    tensors = [torch.randn(numel, generator=generator).round(decimals=2) for numel in numels]
    divided, grouped = select_divided(tensors, ks), select_grouped(tensors, ks)
    assert torch.equal(divided.indices, grouped.indices) and torch.equal(divided.values, grouped.values)


def test_sampling_selects_at_most_k_and_all_of_them_above_its_threshold() -> None:
    tensor = torch.randn(50_000, generator=torch.Generator().manual_seed(1))
    for seed in range(8):
        selected = select_by_sampling([tensor], [500], seed=seed)
        (count,) = selected.counts
        assert 0.3 * 500 < count <= 500
        assert selected.indices.tolist() == largest(tensor.numpy(), count).tolist()
