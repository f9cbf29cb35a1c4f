"""Fields that shards pool beside their rows, against the same fields whose rows are pulled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.programs.bag_pooling import NAME, POOL
from geartrain.ams.values.shard_messages import HostedInputs

DIM, ROWS = 5, 40


@pytest.fixture(params=[1, 3])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with gt.local(num_shards=request.param) as made:
        yield made


def bags(seed: int, padding_id: int | None, is_weighted: bool) -> tuple[Tensor, ...]:
    """Ids that repeat, offsets with empty bags, and weights."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 0, 1, 30, 2, 0])
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=rng) // 2
    if padding_id is not None:
        ids[::4] = padding_id
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return (ids, offsets, torch.rand(len(ids), generator=rng) + 0.5) if is_weighted else (ids, offsets)


def group(cluster: Cluster, name: str, where: Any, pooling: Any = "sum", **settings: Any) -> gt.EmbeddingGroup:
    history = gt.Field("history", DIM, table="item", pooling=pooling, where=where, **settings)
    seen = gt.Field("seen", table="item", pooling="mean", where=where)
    return gt.EmbeddingGroup(
        cluster,
        name,
        [gt.Field("user", 3), history, gt.Field("item", table="item"), seen],
        optimizer=gt.Adagrad(0.5),
    )


def rows_of(fields: gt.EmbeddingGroup) -> dict[str, np.ndarray]:
    return {name: fields.table(name).pull(np.arange(ROWS)) for name in ("user", "item")}


@pytest.mark.parametrize(("padding_id", "is_weighted"), [(None, False), (-1, True), (3, False), (None, True)])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
def test_hosted_fields_train_as_pulled_ones(
    cluster: Cluster, pooling: Any, padding_id: int | None, is_weighted: bool
) -> None:
    """Vectors, the norm of the gradients and, with an optimizer that counts its updates, the rows."""
    both = [group(cluster, where, where, pooling, padding_id=padding_id) for where in ("pull", "hosted")]
    for fields in both:  # equal values under both names
        fields.table("user").assign(np.arange(ROWS), np.arange(3 * ROWS, dtype=np.float32).reshape(ROWS, 3) / 50)
        values = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
        fields.table("item").assign(np.arange(ROWS), values)
    optimizers = [gt.RowOptimizer(fields) for fields in both]
    for step in range(3):
        norms = []
        for fields, rows in zip(both, optimizers, strict=True):
            for micro in range(2):
                seed = 10 * step + micro
                batch = {
                    "user": torch.arange(6) + step,
                    "history": bags(seed, padding_id, is_weighted),
                    "item": torch.tensor([[1], [2], [3], [2], [1], [step]]),
                    "seen": bags(seed + 100, None, False),
                }
                vectors = fields(batch)
                rng = torch.Generator().manual_seed(seed)
                targets = {name: torch.randn(item.shape, generator=rng) for name, item in sorted(vectors.items())}
                if fields is both[1]:
                    with torch.no_grad():
                        for name, item in both[0](batch).items():
                            torch.testing.assert_close(vectors[name], item, rtol=1e-4, atol=1e-5)
                sum((vectors[name] * target).sum() for name, target in targets.items()).backward()  # type: ignore[union-attr]
            norms.append(float(rows.clip_grad_norm_(3.0)))
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        for rows in reversed(optimizers):
            rows.step()
            rows.zero_grad()
    for name, expected in rows_of(both[0]).items():
        np.testing.assert_allclose(rows_of(both[1])[name], expected, rtol=1e-4, atol=1e-5)
        assert {max(fields.table(name).versions()) for fields in both} == {4}  # each step is one write


def test_a_table_is_told_of_hosted_batches_what_it_asks(cluster: Cluster) -> None:
    """Ids are admitted by their occurrences in bags and beside them, whichever way they came."""
    tables = []
    for where in ("pull", "hosted"):
        members = [
            gt.Field("history", DIM, table="item", where=where, admission=gt.MinCount(12, max_bytes=1 << 16)),  # type: ignore[arg-type]
            gt.Field("item", table="item"),
        ]
        fields = gt.EmbeddingGroup(cluster, where, members, optimizer=gt.SGD(0.5))
        rows, tables = gt.RowOptimizer(fields), [*tables, fields.table("item")]
        for step in range(3):
            for micro in range(2):
                history = bags(10 * step + micro, None, False)
                vectors = fields({"history": history, "item": torch.arange(6) + step})
                sum(vector.sum() for vector in vectors.values()).backward()  # type: ignore[union-attr]
            rows.step()
            rows.zero_grad()
    admitted = [table.present(np.arange(ROWS)) for table in tables]
    assert 0 < admitted[0].sum() < ROWS // 2
    np.testing.assert_array_equal(*admitted)


def test_a_feature_without_a_gradient_moves_no_row(cluster: Cluster) -> None:
    fields = group(cluster, "g", "hosted")
    rows = gt.RowOptimizer(fields)
    before = fields.table("item").pull(np.arange(ROWS))
    batch = {"user": [1, 2], "history": [[1, 2], [3, 4]], "item": [[5], [6]], "seen": [[7, 8], [9, 9]]}
    fields(batch)["seen"].sum().backward()
    rows.step()
    moved = np.flatnonzero((fields.table("item").pull(np.arange(ROWS)) != before).any(axis=1))
    np.testing.assert_array_equal(moved, [7, 8, 9])


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
def test_a_batch_without_ids_has_vectors_of_zeros(cluster: Cluster, pooling: Any) -> None:
    fields = group(cluster, "g", "hosted", pooling)
    rows = gt.RowOptimizer(fields)
    none = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    vectors = fields({"user": [1, 2], "history": none, "item": [[5], [6]], "seen": none})
    for name in ("history", "seen"):
        assert torch.equal(vectors[name].detach(), torch.zeros(2, DIM))
    sum(vector.sum() for vector in vectors.values()).backward()  # type: ignore[union-attr]
    rows.step()
    np.testing.assert_array_equal(np.flatnonzero(fields.table("item").present(np.arange(ROWS))), [5, 6])


def test_what_is_not_finite_is_pushed_to_nobody(cluster: Cluster) -> None:
    fields = group(cluster, "g", "hosted")
    rows = gt.RowOptimizer(fields)
    batch = {"user": [1], "history": [[1, 2]], "item": [[5]], "seen": [[7]]}
    (fields(batch)["history"] * torch.inf).sum().backward()
    with pytest.raises(gt.errors.NonFinite):
        rows.step()
    assert set(fields.table("item").versions()) == {0}


def test_a_step_that_stopped_goes_on_and_applies_nothing_twice(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = group(cluster, "g", "hosted")
    rows = gt.RowOptimizer(fields)
    batch = {"user": [1], "history": [[1, 2]], "item": [[5]], "seen": [[7]]}
    sum(field.sum() for field in fields(batch).values()).backward()  # type: ignore[union-attr]
    table = fields.table("item")
    deliver, fails = table._calls.deliver, [True]

    def failing(calls: Any, *arguments: Any, **settings: Any) -> Any:
        outcomes = deliver(calls, *arguments, **settings)  # it arrives, and the answer of the last shard does not
        return [*outcomes[:-1], gt.errors.ShardUnavailable("gone")] if fails.pop() else outcomes

    monkeypatch.setattr(table._calls, "deliver", failing)
    with pytest.raises(gt.errors.ShardUnavailable):
        rows.step()
    monkeypatch.undo()
    rows.step()
    assert set(table.versions()) == {1} and set(fields.table("user").versions()) <= {0, 1}


def test_wrong_fields_are_named() -> None:
    with pytest.raises(gt.errors.InvalidArgument, match="field 'a' is hosted and has pooling 'max'"):
        gt.Field("a", 3, pooling="max", where="hosted")
    with pytest.raises(gt.errors.InvalidArgument, match="where of field 'a' is 'there'; it must be 'pull' or 'hosted'"):
        gt.Field("a", 3, where="there")  # type: ignore[arg-type]
    with gt.local() as cluster:
        fields = group(cluster, "g", "hosted")
        batch = {"user": [1] * 6, "history": bags(0, None, True), "item": [[5]] * 6, "seen": [[-7]] * 6}
        with pytest.raises(gt.errors.InvalidIds, match="id -7 of field 'seen' in row 0 is out of range"):
            fields(batch)
        ids, offsets, weights = bags(0, None, True)
        batch |= {"seen": [[7]] * 6, "history": (ids, offsets, weights.requires_grad_())}
        with pytest.raises(gt.errors.InvalidArgument, match="weights of field 'history' need a gradient"):
            fields(batch)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"places": np.array([0, 2], np.int32)}, "places be those of rows"),
        ({"places": np.array([0, -1], np.int32)}, "places be those of rows"),
        ({"counts": np.array([3], np.int32)}, "counts must add up"),
        ({"counts": np.array([3, -1], np.int32)}, "counts must add up"),
        ({"weights": np.ones(3, np.float32)}, "weights must be as many"),
        ({"ids": np.array([1.0, 2.0], np.float32)}, r"ids of bag_pooling is float32 \[2\]"),
        ({"places": np.array([0, 1])}, r"places of bag_pooling is int64 \[2\]"),
        ({"ids": np.array([1, -2])}, "-2"),
    ],
)
def test_a_shard_refuses_bags_that_cannot_be(wrong: dict[str, Any], match: str) -> None:
    with gt.local() as cluster:
        table = cluster.create_table("t", dim=3, optimizer=gt.SGD(1.0))
        sound = {
            "ids": np.array([1, 2]),
            "places": np.array([0, 1], np.int32),
            "counts": np.array([2], np.int32),
            "vectors": np.ones((1, 3), np.float32),
        }
        inputs = (HostedInputs(arrays={**sound, **wrong}),)
        with pytest.raises(gt.errors.InvalidArgument, match=match):
            table.hosted(NAME).compute(POOL, lambda _: inputs)
        with pytest.raises(gt.errors.InvalidArgument, match=match):
            table.hosted(NAME).prepare_update(lambda _: inputs).send()
        assert table.version() == 0
