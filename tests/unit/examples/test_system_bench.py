"""The graph by which the bench of the whole system selects: parts of one whole, without hubs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest


def test_every_class_is_in_as_many_lists_and_in_none_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    ring = importlib.import_module("system").ring_of_classes
    whole, parts = ring(100, 0, 100, 7), [ring(100, 0, 40, 7), ring(100, 40, 100, 7)]
    np.testing.assert_array_equal(np.concatenate([part.neighbours for part in parts]), whole.neighbours)
    lists = whole.neighbours.reshape(100, 7)
    assert (np.bincount(lists.ravel(), minlength=100) == 7).all()
    assert not (lists == np.arange(100)[:, None]).any()
    sys.modules.pop("system")
