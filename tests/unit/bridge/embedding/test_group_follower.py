"""Followers of a group of embeddings: the group's own vectors, of one version whatever is applied meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt
from geartrain.ams.client.snapshots.follower import FollowedTables
from geartrain.ams.kernels.embedding import POOLINGS
from geartrain.bridge.embedding.group_follower import GroupFollower

FIELDS = [
    *(gt.Field(f"f{number}", dim=4, table="shared", pooling=pooling) for number, pooling in enumerate(POOLINGS)),
    gt.Field("dense", dim=3, num_rows=50, padding_id=0),
    gt.Field("narrow", dim=2, dtype="bfloat16", optimizer=gt.Adam(0.1)),
]


@pytest.fixture
def group() -> Iterator[gt.EmbeddingGroup]:
    with gt.local(2) as cluster:
        yield gt.EmbeddingGroup(cluster, "ctr", FIELDS, optimizer=gt.Adagrad(0.1))


def batch_of(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    offsets = np.array([0, 3, 3, 8])
    ragged = (random.integers(0, 50, 8), offsets)
    weights = random.random(8).astype(np.float32)
    batch: dict[str, Any] = {field.name: random.integers(0, 50, (3, 2)) for field in FIELDS}
    return batch | {"f0": ragged, "f2": (*ragged, weights), "narrow": random.integers(0, 50, 3)}


def train(group: gt.EmbeddingGroup, seed: int) -> None:
    rows = gt.RowOptimizer(group)
    vectors = group(batch_of(seed))
    sum((vector.values() if vector.is_nested else vector).square().sum() for vector in vectors.values()).backward()
    rows.step()


def assert_same(follower: GroupFollower, group: gt.EmbeddingGroup, batch: dict[str, Any]) -> None:
    with torch.no_grad():
        ours, theirs = follower(batch), group(batch)
    assert list(ours) == list(theirs)
    for name, vectors in ours.items():
        if vectors.is_nested:
            assert torch.equal(vectors.offsets(), theirs[name].offsets())
            vectors, theirs[name] = vectors.values(), theirs[name].values()
        assert torch.equal(vectors, theirs[name]), name


def test_vectors_of_a_follower_are_those_of_the_group_at_its_version(group: gt.EmbeddingGroup, tmp_path: Path) -> None:
    train(group, 0)
    group.cluster.export("ctr/*", tmp_path).result()
    follower = GroupFollower(tmp_path, "ctr", group.fields)
    for seed in range(1, 4):
        train(group, seed)
        assert group.cluster.export("ctr/*", tmp_path).result() == follower.refresh() == follower.version
        assert_same(follower, group, batch_of(seed))
    assert not follower(batch_of(0))["f1"].requires_grad
    assert follower.to("cpu")(batch_of(0)).keys() == {field.name for field in FIELDS}


def test_what_does_not_fit_is_named(group: gt.EmbeddingGroup, tmp_path: Path) -> None:
    group.cluster.export("ctr/*", tmp_path).result()
    follower = GroupFollower(tmp_path, "ctr", group.fields)
    with pytest.raises(gt.errors.InvalidIds, match=r"id 50 of field 'dense' in row 1 is out of range"):
        follower(batch_of(0) | {"dense": np.array([1, 50, 2])})
    with pytest.raises(gt.errors.InvalidArgument, match="no ids of field 'narrow'"):
        follower({name: ids for name, ids in batch_of(0).items() if name != "narrow"})
    with pytest.raises(gt.errors.SpecMismatch, match=r"field 'dense' has dim 7, its table in .* 3"):
        GroupFollower(tmp_path, "ctr", [gt.Field("dense", dim=7)])
    with pytest.raises(gt.errors.TableNotFound, match="'ctr/other'"):
        GroupFollower(tmp_path, "ctr", [gt.Field("other")])


def test_what_is_pulled_while_versions_are_applied_is_of_one_version(tmp_path: Path) -> None:
    ids, done, mixed = np.arange(3000), threading.Event(), []
    with gt.local(2) as cluster:
        tables = [cluster.create_table(name, dim=4, optimizer=gt.SGD(1.0)) for name in ("a", "b")]

        def export(value: int) -> None:
            for table in tables:
                if value % 3 == 2:
                    table.remove(ids[::2])
                table.assign(ids, np.full((len(ids), 4), value, np.float32))
            cluster.export("*", tmp_path).result()

        export(1)
        follower, pulls = FollowedTables(tmp_path), [0]

        def read() -> None:
            while not done.is_set():
                pulled = follower.pull_together({"a": ids, "b": ids})
                values = {float(value) for rows in pulled.values() for value in np.unique(rows)}
                mixed.extend([values] if len(values) != 1 else [])
                pulls[0] += 1

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for value in range(2, 12):
            export(value)
            before = pulls[0]
            follower.refresh()
            while pulls[0] < before + 3:
                done.wait(0.001)
        done.set()
        for reader in readers:
            reader.join()
    assert not mixed
    assert follower.pull("a", ids[:1]).tolist() == [[11.0] * 4]
