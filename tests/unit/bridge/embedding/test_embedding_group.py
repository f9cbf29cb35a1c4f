"""Embeddings of rows in a cluster against torch's own in float64, and what a batch may look like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table

DIM = 5
ROWS = 40


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with gt.local(num_shards=request.param) as made:
        yield made


def reference(table: Table) -> Tensor:
    """All rows in float64, as a parameter."""
    return table.pull(torch.arange(ROWS)).double().requires_grad_()


def bags(seed: int, count: int = 6) -> tuple[Tensor, Tensor]:
    """Ids that repeat, and offsets with an empty bag."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 0, 1, 4, 2, 5])[:count]
    ids = torch.randint(ROWS, (int(lengths.sum()),), generator=rng) // 2
    return ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def torch_vectors(rows: Tensor, ids: Tensor, offsets: Tensor, pooling: str, weights: Tensor | None = None) -> Tensor:
    """nn.EmbeddingBag's, in float64; what it does not have is made of its sums."""
    if pooling in ("sum", "max") or (pooling == "mean" and weights is None):
        return nn.functional.embedding_bag(
            ids, rows, offsets, mode=pooling, include_last_offset=True, per_sample_weights=weights
        )
    ones = torch.ones(len(ids), dtype=torch.float64) if weights is None else weights
    total = nn.functional.embedding_bag(
        ids, rows, offsets, mode="sum", include_last_offset=True, per_sample_weights=ones
    )
    bag = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    by = torch.zeros(len(offsets) - 1, dtype=torch.float64).index_add(0, bag, ones**2 if pooling == "sqrtn" else ones)
    by = by.sqrt() if pooling == "sqrtn" else by
    return torch.where(by[:, None] != 0, total / torch.where(by == 0, 1, by)[:, None], 0.0)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn", "max"])
def test_vectors_and_a_step_are_those_of_embedding_bag(cluster: Cluster, pooling: Any, is_weighted: bool) -> None:
    if pooling == "max" and is_weighted:
        pytest.skip("a maximum takes no weights")
    one = gt.Embedding(cluster, "t", DIM, pooling=pooling, optimizer=gt.SGD(0.5), initializer=gt.Normal(std=1.0))
    rows = reference(one.table("t"))
    ids, offsets = bags(0)
    weights = (torch.rand(len(ids)) + 0.5) if is_weighted else None
    wide = None if weights is None else weights.double().requires_grad_()
    own = None if weights is None else weights.clone().requires_grad_()
    expected = torch_vectors(rows, ids, offsets, pooling, wide)
    mine = one((ids, offsets) if own is None else (ids, offsets, own))
    torch.testing.assert_close(mine.double(), expected, rtol=1e-5, atol=1e-6)

    upstream = torch.randn(mine.shape)
    mine.backward(upstream)
    expected.backward(upstream.double())
    assert rows.grad is not None
    optimizer = gt.RowOptimizer(one)
    assert optimizer.squared_norm() == pytest.approx(float(rows.grad.square().sum()), rel=1e-5)
    optimizer.step()
    torch.testing.assert_close(
        one.table("t").pull(torch.arange(ROWS)).double(), rows.detach() - 0.5 * rows.grad, rtol=1e-5, atol=1e-6
    )
    if own is not None and wide is not None:
        assert own.grad is not None and wide.grad is not None
        torch.testing.assert_close(own.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding_id", [None, 0])
def test_ids_in_rows_of_one_length_keep_it_without_pooling(cluster: Cluster, padding_id: int | None) -> None:
    one = gt.Embedding(cluster, "t", DIM, pooling=None, padding_id=padding_id, optimizer=gt.SGD(1.0))
    rows = reference(one.table("t"))
    ids = torch.tensor([[1, 2, 0], [2, 0, 0], [7, 7, 7]])
    mine = one(ids)
    expected = nn.functional.embedding(ids, rows, padding_idx=padding_id)
    if padding_id is not None:
        expected = expected * (ids != padding_id)[:, :, None]
    torch.testing.assert_close(mine.double(), expected)
    mine.square().sum().backward()
    expected.square().sum().backward()
    gt.RowOptimizer(one).step()
    assert rows.grad is not None
    torch.testing.assert_close(one.table("t").pull(torch.arange(ROWS)).double(), rows.detach() - rows.grad)
    assert one(ids[:, 0]).shape == (3, DIM)


def test_sequences_stay_jagged(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, pooling=None, optimizer=gt.SGD(1.0))
    ids, offsets = bags(1)
    jagged = one(torch.nested.nested_tensor_from_jagged(ids, offsets))
    assert jagged.is_nested and [len(each) for each in jagged.unbind()] == offsets.diff().tolist()
    torch.testing.assert_close(jagged.values(), one.table("t").pull(ids))
    (jagged.values() * 2).sum().backward()
    optimizer = gt.RowOptimizer(one)
    before = one.table("t").pull(ids)
    optimizer.step()
    counts = torch.bincount(ids, minlength=ROWS)[ids]
    torch.testing.assert_close(one.table("t").pull(ids), before - 2.0 * counts[:, None])


class Keyed:
    """As TorchRec's KeyedJaggedTensor."""

    def __init__(self, keys: list[str], values: Tensor, lengths: Tensor) -> None:
        self._all = keys, values, lengths

    def keys(self) -> list[str]:
        return self._all[0]

    def values(self) -> Tensor:
        return self._all[1]

    def lengths(self) -> Tensor:
        return self._all[2]


def test_fields_share_rows_and_one_step_trains_them_all(cluster: Cluster) -> None:
    fields = gt.EmbeddingGroup(
        cluster,
        "ctr",
        [
            gt.Field("user", dim=3),
            gt.Field("item", dim=4, pooling="mean"),
            gt.Field("history", table="item", pooling=None),
            gt.Field("wide", dim=1, optimizer=gt.Adagrad(0.1)),
        ],
        optimizer=gt.SGD(0.5),
    )
    assert [part.row_update.name for part in fields] == ["ctr/user, ctr/item", "ctr/wide"]
    item = fields.table("item")
    assert item is fields.table("history") and item.spec.name == "ctr/item"
    rows = reference(item)
    users, (ids, offsets), (seen, seen_offsets) = torch.tensor([3, 3, 9, 1, 0, 5]), bags(2), bags(3)
    batch = {"user": users, "item": (ids, offsets), "history": (seen, seen_offsets), "wide": users, "click": users}
    vectors = fields(batch)
    assert list(vectors) == ["user", "item", "history", "wide"]
    expected = torch_vectors(rows, ids, offsets, "mean").square().sum() + rows[seen].pow(3).sum()
    loss = vectors["item"].square().sum() + vectors["history"].values().pow(3).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-7)
    (loss + vectors["user"].sum() + vectors["wide"].sum()).backward()
    expected.backward()
    optimizer = gt.RowOptimizer(fields)
    assert [group["table"] for group in optimizer.param_groups] == ["ctr/user, ctr/item", "ctr/wide"]
    before = {name: fields.table(name).pull(users) for name in ("user", "wide")}
    optimizer.step()
    assert rows.grad is not None
    torch.testing.assert_close(item.pull(torch.arange(ROWS)).double(), rows.detach() - 0.5 * rows.grad)
    counts = torch.bincount(users)[users][:, None]
    torch.testing.assert_close(fields.table("user").pull(users), before["user"] - 0.5 * counts)
    assert (fields.table("wide").pull(users) < before["wide"]).all()


def test_rows_of_a_field_without_gradient_are_left_alone(cluster: Cluster) -> None:
    fields = gt.EmbeddingGroup(
        cluster, "g", [gt.Field("a", dim=2), gt.Field("b", table="a"), gt.Field("c", dim=2)], optimizer=gt.SGD(1.0)
    )
    vectors = fields({"a": torch.tensor([1, 2]), "b": torch.tensor([2, 3]), "c": torch.tensor([1, 2])})
    vectors["b"].sum().backward()
    gt.RowOptimizer(fields).step()
    assert fields.table("a").present(np.arange(5)).tolist() == [False, False, True, True, False]
    assert fields.table("c").versions() == (0,) * len(fields.table("c").versions())


def test_every_form_of_a_batch_gives_the_same_vectors(cluster: Cluster) -> None:
    fields = gt.EmbeddingGroup(cluster, "g", [gt.Field("a", dim=2), gt.Field("b", dim=3)], optimizer=gt.SGD(1.0))
    (a, a_offsets), (b, b_offsets) = bags(0), bags(1)
    expected = fields({"a": (a, a_offsets), "b": (b, b_offsets)})
    keyed = Keyed(["b", "a"], torch.cat([b, a]), torch.cat([b_offsets.diff(), a_offsets.diff()]))
    jagged = {name: torch.nested.nested_tensor_from_jagged(*own) for name, own in (("a", bags(0)), ("b", bags(1)))}
    arrays = {
        "a": (a.numpy(), a_offsets.numpy().astype(np.int32)),
        "b": (b.numpy().astype(np.uint16), b_offsets.numpy()),
    }
    for batch in (keyed, jagged, arrays):
        for name, vectors in fields(batch).items():
            assert torch.equal(vectors, expected[name])


def test_a_weight_that_is_no_number_and_ids_that_are_none_are_named(cluster: Cluster) -> None:
    fields = gt.EmbeddingGroup(
        cluster, "g", [gt.Field("a", dim=2), gt.Field("b", dim=2, num_rows=10)], optimizer=gt.SGD(1.0)
    )
    good = torch.tensor([1, 2])
    bad: list[tuple[Any, type[Exception], str]] = [
        ({"a": good}, gt.errors.InvalidArgument, "no ids of field 'b'; it has 'a'"),
        ({"a": torch.tensor([1.0]), "b": good}, gt.errors.InvalidIds, "field 'a' have dtype float32"),
        ({"a": np.array(["x"]), "b": good}, gt.errors.InvalidIds, "hash_strings"),
        ({"a": np.array(["x", "y"], object), "b": good}, gt.errors.InvalidIds, "hash_strings"),
        ({"a": [2**70, 1], "b": good}, gt.errors.InvalidIds, r"field 'a' have dtype object; .* \(int64\)$"),
        ({"a": good, "b": None}, gt.errors.InvalidIds, "the ids of field 'b' are None; they must be integers"),
        ({"a": good, "b": (good, None)}, gt.errors.InvalidIds, "the offsets of field 'b' are None"),
        ({"a": [3, None], "b": good}, gt.errors.InvalidIds, "the ids of field 'a' hold None at index 1; "),
        ({"a": [[3, 4], [5, None]], "b": good}, gt.errors.InvalidIds, "'a' hold None at index 1, 1; "),
        (None, gt.errors.InvalidArgument, "the batch is None"),
        ({"a": torch.tensor([[1, 2], [3, -1]]), "b": good}, gt.errors.InvalidIds, "id -1 of field 'a' in row 1"),
        ({"a": good, "b": torch.tensor([9, 10])}, gt.errors.InvalidIds, r"id 10 of field 'b' in row 1 .*\[0, 10\)"),
        ({"a": (good, torch.tensor([0, 1])), "b": good}, gt.errors.InvalidIds, "go from 0 to 1"),
        ({"a": torch.arange(3), "b": good}, gt.errors.InvalidIds, "'a' has ids of 3 samples and field 'b' of 2"),
        ({"a": (good, torch.tensor([0, 2, 1, 2])), "b": good}, gt.errors.InvalidIds, "fall from 2 to 1 in row 1"),
        ({"a": (good, [0, 2], [1.0, np.nan]), "b": good}, gt.errors.InvalidArgument, "weight at index 1 of field 'a'"),
        ({"a": (good, [0, 2], [1.0]), "b": good}, gt.errors.InvalidArgument, "weights of field 'a'"),
        (7, gt.errors.InvalidArgument, "the batch is 7"),
    ]
    for batch, kind, message in bad:
        with pytest.raises(kind, match=message):
            fields(batch)
    with pytest.raises(gt.errors.InvalidArgument, match="share table 'a' and differ in dim: 2 and 3"):
        gt.EmbeddingGroup(cluster, "h", [gt.Field("a", dim=2), gt.Field("b", dim=3, table="a")], optimizer=gt.SGD(1.0))
    with pytest.raises(gt.errors.TableExists):
        gt.EmbeddingGroup(cluster, "g", [gt.Field("new", dim=2), gt.Field("a", dim=2)], optimizer=gt.SGD(1.0))
    with pytest.raises(gt.errors.TableNotFound):
        cluster.table("g/new")  # made with the others or not at all


def test_micro_batches_equal_one_batch_and_zero_grad_drops_them(cluster: Cluster) -> None:
    fields = gt.EmbeddingGroup(cluster, "g", [gt.Field("a", dim=2), gt.Field("b", dim=3)], optimizer=gt.Adagrad(0.1))
    same = gt.EmbeddingGroup(
        cluster, "s", [gt.Field("a", dim=2, table="x"), gt.Field("b", dim=3)], optimizer=gt.Adagrad(0.1)
    )
    for mine, theirs in (("a", "a"), ("b", "b")):
        ids = torch.arange(ROWS)
        same.table(theirs).assign(ids, fields.table(mine).pull(ids))
    first, second = torch.tensor([1, 2, 3]), torch.tensor([3, 4, 1])
    rows, other = gt.RowOptimizer(fields), gt.RowOptimizer(same)
    fields({"a": first, "b": first})["a"].sum().backward()
    rows.zero_grad()
    for ids in (first, second):
        sum(field.square().sum() for field in fields({"a": ids, "b": ids}).values()).backward()
    both = torch.cat([first, second])
    sum(item.square().sum() for item in same({"a": both, "b": both}).values()).backward()
    assert rows.squared_norm() == pytest.approx(other.squared_norm())
    rows.step()
    other.step()
    for name in ("a", "b"):
        ids = torch.arange(6)
        torch.testing.assert_close(fields.table(name).pull(ids), same.table(name).pull(ids))


def test_nothing_is_queued_without_gradients_and_none_made_by_looking(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))
    with torch.no_grad():
        assert not one(torch.tensor([1, 2])).requires_grad
    assert not one.table("t").present(np.arange(3)).any()


def test_joint_optimizer_and_norm_clipping_take_embeddings(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))
    dense = nn.Linear(DIM, 1)
    optimizer = gt.joint(torch.optim.SGD(dense.parameters(), lr=1.0), one)
    before = one.table("t").pull(torch.arange(3))
    dense(one(torch.tensor([1, 2]))).sum().backward()
    rows_squared = 2 * float(dense.weight.detach().square().sum())
    dense_squared = sum(float(p.grad.square().sum()) for p in dense.parameters() if p.grad is not None)
    norm = gt.clip_grad_norm_(dense.parameters(), optimizer, max_norm=0.1)
    assert float(norm) == pytest.approx((rows_squared + dense_squared) ** 0.5, rel=1e-5)
    weight = dense.weight.detach().clone()
    optimizer.step()
    after = one.table("t").pull(torch.arange(3))
    torch.testing.assert_close(after[1], before[1] - weight[0] * 0.1 / norm, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_one_embedding_is_called_as_torch_is(cluster: Cluster, pooling: Any) -> None:
    """Offsets with and without the last one, an empty bag at the end, weights, ids [B, L]."""
    one = gt.Embedding(cluster, "t", DIM, pooling=pooling)
    ends = gt.Embedding(cluster, "t", DIM, pooling=pooling, include_last_offset=True, reuse=True)
    rows = one.table("t").pull(torch.arange(ROWS))
    ids, begins = torch.tensor([4, 1, 4, 2, 0]), torch.tensor([0, 2, 2, 5])
    theirs = nn.EmbeddingBag.from_pretrained(rows, mode=pooling)
    torch.testing.assert_close(one(ids, begins), theirs(ids, begins))
    bounds = torch.tensor([0, 2, 2, 5, 5])
    torch.testing.assert_close(ends(ids, offsets=bounds), theirs(ids, begins))
    square = torch.tensor([[4, 1], [3, 3]])
    torch.testing.assert_close(one(square), theirs(square))
    if pooling == "sum":
        weights = torch.rand(5)
        torch.testing.assert_close(one(ids, begins, weights), theirs(ids, begins, weights))
        torch.testing.assert_close(
            one(square, per_sample_weights=weights[:4].view(2, 2)), theirs(square, None, weights[:4].view(2, 2))
        )
    with pytest.raises(gt.errors.InvalidArgument, match=r"weights of field 't' have shape \[3\] and its ids \[2, 2\]"):
        one(square, per_sample_weights=torch.rand(3))
    with pytest.raises(gt.errors.InvalidIds, match="offsets of field 't' go from 1 to 5"):
        one(ids, torch.tensor([1, 2]))


def test_an_embedding_trains_with_nothing_said_of_its_optimizer(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM)
    fields = gt.EmbeddingGroup(cluster, "g", [gt.Field("a", dim=2), gt.Field("b", dim=2, optimizer=gt.SGD(1.0))])
    assert one.table("t").spec.optimizer == fields.table("a").spec.optimizer == gt.Adagrad(0.05)
    assert fields.table("b").spec.optimizer == gt.SGD(1.0)
    rows, wanted = gt.RowOptimizer(one), torch.randn(4, DIM)
    for _ in range(200):
        loss = (one(torch.arange(4)) - wanted).square().mean()
        loss.backward()
        rows.step()
        rows.zero_grad()
    assert float(loss.detach()) < 0.1 * float(wanted.square().mean())


def test_a_batch_may_be_overwritten_before_its_backward_pass(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, pooling="mean", optimizer=gt.SGD(1.0))
    rows = reference(one.table("t"))
    ids, offsets = bags(0)
    weights = torch.rand(len(ids)) + 0.5
    expected = torch_vectors(rows, ids.clone(), offsets.clone(), "mean", weights.double())
    mine = one((ids, offsets, weights))
    for own in (ids, offsets, weights):
        own.fill_(9)  # as loaders do that fill the same memory again
    mine.sum().backward()
    expected.sum().backward()
    gt.RowOptimizer(one).step()
    assert rows.grad is not None
    torch.testing.assert_close(one.table("t").pull(torch.arange(ROWS)).double(), rows.detach() - rows.grad)


def test_nested_tensors_with_holes_are_refused(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))
    ids, offsets = torch.arange(6), torch.tensor([0, 3, 6])
    holes = torch.nested.nested_tensor_from_jagged(ids, offsets, torch.tensor([1, 2]))
    with pytest.raises(gt.errors.InvalidIds, match="with holes"):
        one(holes)


@pytest.mark.parametrize("rows", ["pull", "ranks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_may_have_any_floating_type(cluster: Cluster, rows: str, dtype: torch.dtype) -> None:
    place = cluster if rows == "pull" else None
    one = gt.Embedding(place, "t", dim=3, pooling="mean", optimizer=gt.SGD(0.1), rows=rows)
    ids, begins, given = torch.tensor([1, 2, 3]), torch.tensor([0, 2]), torch.tensor([0.5, 2.0, 1.0])
    weights = [given.clone().to(kind).requires_grad_() for kind in (dtype, torch.float32)]
    found, expected = (one(ids, begins, its) for its in weights)
    torch.testing.assert_close(found, expected)
    (found.square().sum() + expected.square().sum()).backward()
    assert weights[0].grad is not None and weights[0].grad.dtype == dtype
    torch.testing.assert_close(weights[0].grad.float(), weights[1].grad, rtol=0.01, atol=1e-3)


def test_weights_of_a_vector_that_is_not_used_have_no_gradient(cluster: Cluster) -> None:
    fields = gt.EmbeddingGroup(cluster, "g", [gt.Field("a", dim=2), gt.Field("b", dim=2)], optimizer=gt.SGD(1.0))
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 2])
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    fields({"a": (ids, offsets, used), "b": (ids, offsets, unused)})["a"].sum().backward()
    assert used.grad is not None and unused.grad is None


def test_a_backward_pass_that_is_refused_leaves_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [gt.Field("a", dim=2), gt.Field("b", dim=2, optimizer=gt.SGD(2.0))]
    fields = gt.EmbeddingGroup(cluster, "g", members, optimizer=gt.SGD(1.0))
    rows, ids = gt.RowOptimizer(fields), torch.tensor([1])
    before = {name: fields.table(name).pull(ids) for name in ("a", "b")}

    def backward() -> None:
        torch.stack(list(fields({"a": ids, "b": ids}).values())).sum().backward()

    first, second = (part.row_update for part in fields)
    backward()
    with monkeypatch.context() as broken:
        broken.setattr(second, "apply", lambda _: (_ for _ in ()).throw(gt.errors.Unavailable("planted")))
        with pytest.raises(gt.errors.Unavailable):
            rows.step()
    assert first.step == 1 and second.step == 0
    with pytest.raises(gt.errors.InvalidArgument, match="call step"):
        backward()
    rows.step()
    torch.testing.assert_close(fields.table("a").pull(ids), before["a"] - 1.0)
    torch.testing.assert_close(fields.table("b").pull(ids), before["b"] - 2.0)


def test_the_largest_id_there_is_can_be_looked_up(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))
    ids = torch.tensor([2**63 - 1])
    assert torch.equal(one(ids), one.table("t").pull(ids))


def test_places_of_ids_among_those_of_a_batch(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0), padding_id=0)
    rng = np.random.default_rng(0)
    for count in (0, 1, 300):
        given, asked = rng.integers(0, 2**40, count), rng.permutation(2000)
        given[::2] %= 1000
        pulled = one.merged({"t": given})
        places = pulled.lookup.places_among(0, asked)
        assert pulled.ids[0][places].tolist() == [n for n in asked if n != 0 and n in given]


def test_rows_that_move_at_every_step_do_so_at_one_without_ids(cluster: Cluster) -> None:
    optimizer = gt.SparseMomentum(0.1, momentum=0.9, weight_decay=0.1, untouched="elapsed")
    one = gt.Embedding(cluster, "t", DIM, optimizer=optimizer, initializer=gt.Normal(std=1.0))
    rows = reference(one.table("t"))
    both = gt.RowOptimizer(one), torch.optim.SGD([rows], 0.1, momentum=0.9, weight_decay=0.1)
    none = torch.empty(0, dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
    for ids, offsets in (bags(1), none, bags(2), none):
        one((ids, offsets)).sum().backward()
        torch_vectors(rows, ids, offsets, "sum").sum().backward()
        for its in both:
            its.step()
            its.zero_grad()
    expected = rows.detach().numpy()
    np.testing.assert_allclose(one.table("t").pull(np.arange(ROWS)), expected, rtol=1e-5, atol=1e-6)
