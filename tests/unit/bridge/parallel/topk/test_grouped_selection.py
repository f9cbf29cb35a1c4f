"""Selection in many tensors at once, against the specification."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.bridge.parallel.topk.grouping import GroupedTopK
from geartrain.bridge.parallel.topk.selection import counts
from tests.specification.gradients import largest

few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-42, -1e-42, 3e38])
some_values = st.lists(few | st.floats(-4, 4, width=32), min_size=1, max_size=300)


def check_selected(tensors: list[torch.Tensor], ks: list[int]) -> None:
    """That indices and values are what the definition says."""
    grouping = GroupedTopK([tensor.numel() for tensor in tensors], ks, torch.device("cpu"))
    buffer = torch.zeros(grouping.buffer_numel)
    torch._foreach_copy_(grouping.views(buffer), tensors)
    indices, places = grouping.select(buffer)
    expected = [largest(tensor.numpy(), k) for tensor, k in zip(tensors, ks, strict=True)]
    assert indices.tolist() == np.concatenate(expected).tolist()
    assert torch.equal(buffer[places], torch.cat([t[at] for t, at in zip(tensors, expected, strict=True)]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(some_values, st.floats(0, 1)), min_size=1, max_size=6))
def test_what_the_definition_says_is_selected(cases: list[tuple[list[float], float]]) -> None:
    tensors = [torch.tensor(values, dtype=torch.float32) for values, _ in cases]
    check_selected(tensors, [max(1, math.ceil(part * len(values))) for values, part in cases])


def test_tensors_of_many_sizes_are_selected_in_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    numels = [70_000, 1, 4096, 4097, 69_000, 12, 300_000, 52_500, 640, 640]
    check_selected(
        [torch.randn(numel, generator=generator).round(decimals=2) for numel in numels], counts(numels, 0.99)
    )
