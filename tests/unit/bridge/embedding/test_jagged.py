"""Jagged vectors are torch's own, and are made without a warning of torch's that no user can do anything about."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.fx import _symbolic_trace

import geartrain as gt
from geartrain.bridge.embedding.levels import Nodes, jagged_tensor

OFFSETS = torch.tensor([0, 2, 2, 5])


def test_it_is_the_tensor_that_torch_makes_and_has_its_gradients() -> None:
    values = torch.randn(5, 3, dtype=torch.float64)
    gradients = []
    for make in (jagged_tensor, torch.nested.nested_tensor_from_jagged):
        leaf = values.clone().requires_grad_()
        jagged = make(leaf, OFFSETS)
        assert jagged.layout is torch.jagged and jagged.shape[::2] == (3, 3) and jagged.lengths() is None
        assert jagged.values().data_ptr() == leaf.data_ptr() and torch.equal(jagged.offsets(), OFFSETS)
        (jagged.to_padded_tensor(0.0) ** 3).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_a_user_of_sequences_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    said = getattr(_symbolic_trace, "is_fx_tracing_warning", None)
    if said is not None:
        said.cache_clear()  # torch says it once in a process
    log = logging.getLogger(_symbolic_trace.__name__)
    log.addHandler(caplog.handler)
    try:
        with gt.local() as cluster:
            fields = gt.Embedding(cluster, "t", 3, pooling=None, optimizer=gt.SGD(1.0))
            vectors = fields((torch.arange(5), OFFSETS))
            expanded = Nodes(torch.tensor([2, 0, 2]), 3).expand(vectors)
            (expanded.values() ** 2).sum().backward()
            gt.RowOptimizer(fields).step()
    finally:
        log.removeHandler(caplog.handler)
    assert "is_fx_tracing" not in caplog.text
