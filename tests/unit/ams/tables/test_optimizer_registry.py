"""Optimizers by name: the lists of all parts agree, and what travels or lies in snapshots is read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.pb.v1 import types_pb2
from geartrain.ams.rpc.codec.specs import spec_from_pb, spec_to_pb
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import (
    OPTIMIZERS,
    SGD,
    Adam,
    Momentum,
    RowOptimizerSpec,
    SparseMomentum,
    optimizer_of,
)
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.kernels.optimizers import TENSOR_OPTIMIZERS

OPTIMIZERS_WITH_SETTINGS: list[RowOptimizerSpec] = [
    SGD(0.1, 0.01),
    Momentum(0.1, 0.8, nesterov=True),
    SparseMomentum(0.1, 0.9, 0.2, "elapsed"),
    Adam(0.05, (0.8, 0.99), 1e-6, 0.01),
]


def test_every_part_lists_the_same_optimizers() -> None:
    assert list(OPTIMIZERS) == _core.optimizer_names() == list(TENSOR_OPTIMIZERS)
    assert {kind.name for kind in OPTIMIZERS.values()} == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_survives_json_and_the_wire(name: str) -> None:
    optimizer = optimizer_of(name, {"lr": 0.25})
    spec = TableSpec(name="t", dim=2, optimizer=optimizer)
    assert TableSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert spec_from_pb(types_pb2.TableSpec.FromString(spec_to_pb(spec).SerializeToString())) == spec
    assert optimizer.lr == 0.25
    assert all(type(value) is float for value in optimizer.scalars().values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS_WITH_SETTINGS, ids=repr)
def test_no_setting_is_lost_on_the_wire(optimizer: RowOptimizerSpec) -> None:
    assert spec_from_pb(spec_to_pb(TableSpec(name="t", dim=2, optimizer=optimizer))).optimizer == optimizer


@pytest.mark.parametrize(
    ("name", "scalars", "text"),
    [
        ("lamb", {"lr": 0.1}, "there is no optimizer 'lamb'; there are sgd, momentum, sparse_momentum, adam, "),
        ("sgd", {}, "optimizer 'sgd' cannot be made from .*'lr'"),
        ("sgd", {"lr": 0.1, "betas": 1.0}, "optimizer 'sgd' cannot be made from .*'betas'"),
        ("adam", {"beta3": 1.0}, "optimizer 'adam' cannot be made from .*'beta3'"),
        ("sparse_momentum", {"lr": 0.1, "elapsed": 0.5}, "elapsed is 0.5; it must be 0 or 1"),
        ("momentum", {"lr": 0.1, "nesterov": 2.0}, "nesterov is 2.0; it must be 0 or 1"),
        ("sgd", {"lr": float("nan")}, "lr is nan"),
    ],
)
def test_what_is_no_optimizer_is_refused(name: str, scalars: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        optimizer_of(name, scalars)
    pb = types_pb2.TableSpec(name="t", dim=2, optimizer=types_pb2.Optimizer(name=name, scalars=scalars))
    with pytest.raises(InvalidArgument, match=text):
        spec_from_pb(pb)


def test_a_spec_without_an_optimizer_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="the spec of table 't' names no optimizer"):
        spec_from_pb(types_pb2.TableSpec(name="t", dim=2))
    with pytest.raises(InvalidArgument, match="optimizer is 'sgd'; it must be an instance of SGD"):
        TableSpec(name="t", dim=2, optimizer="sgd")  # type: ignore[arg-type]
