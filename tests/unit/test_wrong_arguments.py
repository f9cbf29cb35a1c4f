"""Arguments of the wrong type are named in an error of ours, as wrong values are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.errors import ConfigError, GeartrainError, InvalidArgument

anything: Any = gt


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda: anything.local("2"), ConfigError, "num_shards is '2'; it must be an integer"),
        (lambda: anything.local(2.5), ConfigError, "num_shards is 2.5"),
        (lambda: anything.connect(None), ConfigError, "address is None; .*'host:port'"),
        (lambda: anything.connect(7000), ConfigError, "address is 7000"),
        (lambda: anything.SGD("0.1"), InvalidArgument, "lr is '0.1'; it must be a number"),
        (lambda: anything.SGD(True), InvalidArgument, "lr is True"),
        (lambda: anything.Momentum(0.1, momentum="0.9"), InvalidArgument, "momentum is '0.9'"),
        (lambda: anything.SparseMomentum(0.1, momentum=None), InvalidArgument, "momentum is None"),
        (lambda: anything.Constant("0"), InvalidArgument, "value is '0'"),
        (lambda: anything.Uniform(0, "1"), InvalidArgument, "high is '1'"),
        (lambda: anything.Normal([0]), InvalidArgument, r"mean is \[0\]"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(
    call: Callable[[], object], error: type[GeartrainError], named: str
) -> None:
    with pytest.raises(error, match=named):
        call()


def test_numbers_of_numpy_are_numbers() -> None:
    assert gt.SGD(float(np.float32(0.5))) == gt.SGD(np.float32(0.5))  # type: ignore[arg-type]
    gt.Constant(np.int64(1))  # type: ignore[arg-type]
