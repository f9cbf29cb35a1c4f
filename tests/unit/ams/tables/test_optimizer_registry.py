"""Optimizers by name: the lists of all parts agree, and what travels or lies in snapshots is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.factory import local
from geartrain.ams.kernels import _core
from geartrain.ams.pb.v1 import types_pb2
from geartrain.ams.rpc.codec.specs import spec_from_pb, spec_to_pb
from geartrain.ams.storage.snapshot.manifest import MANIFEST, seal_json, unseal_json
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
from geartrain.bridge.placements.optimizers import TENSOR_OPTIMIZERS

BEFORE_NAMES: dict[str, RowOptimizerSpec] = {
    '{"kind": "SGD", "lr": 0.1, "weight_decay": 0.01}': SGD(0.1, 0.01),
    '{"kind": "Momentum", "lr": 0.1, "momentum": 0.8, "nesterov": true, "weight_decay": 0.0}': Momentum(
        0.1, 0.8, nesterov=True
    ),
    '{"kind": "SparseMomentum", "lr": 0.1, "momentum": 0.9, "untouched": "elapsed", "weight_decay": 0.2}': (
        SparseMomentum(0.1, 0.9, 0.2, "elapsed")
    ),
    '{"betas": [0.8, 0.99], "eps": 1e-06, "kind": "Adam", "lr": 0.05, "weight_decay": 0.01}': Adam(
        0.05, (0.8, 0.99), 1e-6, 0.01
    ),
}
"""As the manifests and schemas of versions before names and scalars have them."""


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


@pytest.mark.parametrize("optimizer", BEFORE_NAMES.values(), ids=repr)
def test_no_setting_is_lost_on_the_wire(optimizer: RowOptimizerSpec) -> None:
    assert spec_from_pb(spec_to_pb(TableSpec(name="t", dim=2, optimizer=optimizer))).optimizer == optimizer


@pytest.mark.parametrize("text", BEFORE_NAMES)
def test_the_form_of_older_versions_is_read(text: str) -> None:
    fields = TableSpec(name="t", dim=2, optimizer=SGD(1.0)).to_dict()
    assert TableSpec.from_dict(fields | {"optimizer": json.loads(text)}).optimizer == BEFORE_NAMES[text]


@pytest.mark.parametrize("text", BEFORE_NAMES)
def test_a_snapshot_with_the_form_of_older_versions_is_restored(text: str, tmp_path: Path) -> None:
    ids, gradients = np.arange(20), np.ones((20, 3), np.float32)
    with local(2) as cluster:
        table = cluster.create_table("t", dim=3, optimizer=BEFORE_NAMES[text])
        table.push(ids, gradients)
        path = Path(cluster.snapshot(tmp_path, "old").result(60))
        table.push(ids, gradients)
        after = table.pull(ids)
    manifest = path / MANIFEST
    content = unseal_json(manifest.read_bytes())
    content["tables"][0]["optimizer"] = json.loads(text)
    manifest.write_bytes(seal_json(content))
    with local(1) as cluster:
        cluster.restore(path)
        cluster.table("t").push(ids, gradients)
        np.testing.assert_array_equal(cluster.table("t").pull(ids), after)


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
