"""Embeddings whose rows are split over the ranks' devices, against torch's own and against rows in a cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.embedding.ids import batch_ids, tensor_ids
from geartrain.bridge.kernels.launch import interpreted
from geartrain.bridge.kernels.lookup import FieldShape, VectorGradients, index_fields
from geartrain.bridge.placements.device_lookup import UnsummedGradient, _Waiting
from tests.support.forkserver import FORKSERVER
from tests.support.rank_processes import run_ranks

ROWS, JOINT, STEPS = 23, 12, 4
FIELDS = [
    gt.Field("user", dim=3, num_rows=ROWS),
    gt.Field("item", dim=4, pooling="mean", num_rows=2),  # fewer rows than ranks
    gt.Field("seen", table="user", pooling="sqrtn", padding_id=-1),
    gt.Field("last", table="item", pooling=None),
    gt.Field("best", dim=2, pooling="max", num_rows=ROWS, optimizer=gt.SGD(0.5, weight_decay=0.1)),
    gt.Field("idle", table="best"),
]
OPTIMIZERS = [
    gt.SGD(0.5, weight_decay=0.01),
    gt.Adagrad(0.5),
    gt.Adam(0.1),
    gt.RowWiseAdagrad(0.5),
    gt.SparseMomentum(0.5, momentum=0.9, weight_decay=0.01),
    gt.SparseMomentum(0.5, momentum=0.9, weight_decay=0.01, untouched="elapsed"),
]


def group(
    rows: str, optimizer: RowOptimizerSpec = OPTIMIZERS[0], cluster: Cluster | None = None, **more: Any
) -> gt.EmbeddingGroup:
    return gt.EmbeddingGroup(cluster, "ctr", FIELDS, optimizer=optimizer, rows=rows, seed=3, **more)


def batch_of(step: int, samples: slice = slice(0, JOINT)) -> dict[str, Any]:
    """Ids that repeat within and between ranks, empty bags and padding."""
    rng = torch.Generator().manual_seed(step)
    ids = torch.randint(ROWS, (JOINT, 5), generator=rng)
    seen = torch.where(torch.rand(JOINT, 3, generator=rng) < 0.3, -1, ids[:, :3])
    lengths = torch.randint(4, (JOINT,), generator=rng)
    items = torch.randint(2, (JOINT, 4), generator=rng)
    own = [items[row, : lengths[row]] for row in range(samples.start, samples.stop)]
    offsets = nn.functional.pad(lengths[samples].cumsum(0), (1, 0))
    weights = torch.cat([torch.arange(1, len(item) + 1) / 2 for item in own])
    return {
        "user": ids[samples, :2],
        "item": (torch.cat(own), offsets, weights),
        "seen": seen[samples],
        "last": items[samples, :2],
        "best": ids[samples, 2:4],
        "idle": ids[samples, 4:],
    }


def loss_of(vectors: dict[str, Tensor], step: int, samples: slice = slice(0, JOINT)) -> Tensor:
    rng = torch.Generator().manual_seed(100 + step)
    used = torch.cat([vector.flatten(1) for name, vector in vectors.items() if name != "idle"], dim=1)
    targets = torch.randn(JOINT, used.shape[1], generator=rng)[samples]
    return (used - targets).square().sum(1).mean()


def train(fields: gt.EmbeddingGroup, steps: range, samples: slice = slice(0, JOINT), max_norm: float = 3.0) -> float:
    rows, norm = gt.RowOptimizer(fields), 0.0
    for step in steps:
        for micro in (slice(samples.start, samples.start + 1), slice(samples.start + 1, samples.stop)):
            share = (micro.stop - micro.start) / (samples.stop - samples.start)
            (loss_of(fields(batch_of(step, micro)), step, micro) * share).backward()
        norm = float(rows.clip_grad_norm_(max_norm))
        rows.step()
        rows.zero_grad()
    return norm


def all_rows(fields: gt.EmbeddingGroup) -> dict[str, Tensor]:
    return {
        name: torch.as_tensor(fields.table(name).pull(torch.arange(num)))
        for name, num in (("user", ROWS), ("item", 2), ("best", ROWS))
    }


def share_of(rank: int, ranks: int) -> slice:
    return slice(rank * JOINT // ranks, (rank + 1) * JOINT // ranks)


def train_a_rank(rank: int, ranks: int, folder: Path, numbers: list[int]) -> None:
    for number in numbers:
        fields = group("ranks", OPTIMIZERS[number])
        norm = train(fields, range(STEPS), share_of(rank, ranks))
        torch.save({"norm": norm, **all_rows(fields)}, folder / f"{number}-{rank}.pt")


def expected_rows(number: int) -> tuple[float, dict[str, Tensor]]:
    """What one worker makes of the same pushes in a cluster."""
    with gt.local(num_shards=2) as cluster:
        fields = group("pull", OPTIMIZERS[number], cluster)
        return train(fields, range(STEPS)), all_rows(fields)


def require_equal(number: int, norm: float, rows: dict[str, Tensor]) -> None:
    wanted_norm, wanted = expected_rows(number)
    assert norm == pytest.approx(wanted_norm, rel=1e-4)
    for name, item in wanted.items():
        torch.testing.assert_close(rows[name], item, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_rows_here_train_as_those_of_a_cluster(number: int) -> None:
    fields = group("ranks", OPTIMIZERS[number])
    require_equal(number, train(fields, range(STEPS)), all_rows(fields))


@pytest.mark.parametrize(("ranks", "numbers"), [(2, list(range(len(OPTIMIZERS)))), (3, [1])])
def test_rows_on_ranks_train_as_those_of_a_cluster(ranks: int, numbers: list[int], tmp_path: Path) -> None:
    """Micro-batches of unlike weights are those of each rank's share: here all ranks have as many samples."""
    run_ranks(train_a_rank, ranks, tmp_path, numbers)
    for number in numbers:
        first, *others = (torch.load(tmp_path / f"{number}-{rank}.pt") for rank in range(ranks))
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)
        require_equal(number, first.pop("norm"), first)


def train_a_rank_by_kernels(rank: int, ranks: int, folder: Path) -> None:
    with interpreted():
        fields = group("ranks", OPTIMIZERS[1])
        rows = gt.RowOptimizer(fields)
        loss_of(fields(batch_of(0, share_of(rank, ranks))), 0, share_of(rank, ranks)).backward()
        rows.step()
    torch.save(all_rows(fields), folder / f"{rank}.pt")


def test_kernels_train_rows_on_ranks_as_tensor_operations_do(tmp_path: Path) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    run_ranks(train_a_rank_by_kernels, 2, tmp_path)
    whole = group("ranks", OPTIMIZERS[1])
    rows = gt.RowOptimizer(whole)
    loss_of(whole(batch_of(0)), 0).backward()
    rows.step()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, wanted in all_rows(whole).items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5)


@given(data=st.data(), mode=st.sampled_from(["sum", "mean"]), is_weighted=st.booleans())
@settings(max_examples=60, deadline=None)
def test_vectors_and_gradients_are_those_of_an_embedding_bag(data: st.DataObject, mode: Any, is_weighted: bool) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=sum(lengths), max_size=sum(lengths))), dtype=int)
    offsets = nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    weights = torch.rand(len(ids)).requires_grad_() if is_weighted and mode == "sum" else None
    table = gt.Embedding(None, "t", 3, pooling=mode, num_rows=7, rows="ranks", optimizer=gt.SGD(1.0))
    before = table.table("t").pull(torch.arange(7))
    twin = nn.EmbeddingBag.from_pretrained(before.clone(), freeze=False, mode=mode, include_last_offset=True)
    own = None if weights is None else weights.detach().clone().requires_grad_()
    found = table(ids, offsets[:-1], weights)
    wanted = twin(ids, offsets, own)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn(wanted.shape)
    found.backward(upstream)
    wanted.backward(upstream)
    gt.RowOptimizer(table).step()
    torch.testing.assert_close(before - table.table("t").pull(torch.arange(7)), twin.weight.grad)
    if weights is not None and own is not None:
        torch.testing.assert_close(weights.grad, own.grad)


def weigh_on_one_rank(rank: int, ranks: int, folder: Path) -> None:
    del ranks, folder
    table = gt.Embedding(None, "t", 3, num_rows=8, rows="ranks", optimizer=gt.SGD(1.0))
    before = table.table("t").pull(torch.arange(8))
    ids, weights = torch.tensor([0, 7]), torch.tensor([2.0, 3.0]) if rank else None
    factors = torch.ones(2, 1) if weights is None else weights[:, None]
    found = table(ids, torch.arange(2), weights)
    torch.testing.assert_close(found, before[ids] * factors)
    found.sum().backward()
    gt.RowOptimizer(table).step()
    # Each rank's samples count half.
    torch.testing.assert_close((before - table.table("t").pull(torch.arange(8)))[ids, 0], torch.tensor([1.5, 2.0]))


def test_ids_have_weights_on_one_rank_and_none_on_another(tmp_path: Path) -> None:
    run_ranks(weigh_on_one_rank, 2, tmp_path)


def save_and_load(rank: int, ranks: int, folder: Path, steps: range, first: bool) -> None:
    model = nn.ModuleDict({"fields": group("ranks", OPTIMIZERS[2])})
    fields: Any = model["fields"]
    if not first:
        gt.load(model, folder / "model")
    train(fields, steps, share_of(rank, ranks), max_norm=1e9)
    gt.save(model, folder / "model")
    rows = all_rows(fields)
    if rank == 0:
        torch.save(rows, folder / "rows.pt")


def test_rows_are_saved_and_loaded_on_other_numbers_of_ranks_and_in_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    for ranks, steps in ((2, range(2)), (3, range(2, 4)), (1, range(4, 6))):
        run_ranks(save_and_load, ranks, tmp_path, steps, steps.start == 0)
    whole = group("ranks", OPTIMIZERS[2])
    train(whole, range(6), max_norm=1e9)
    found = torch.load(tmp_path / "rows.pt")
    for name, wanted in all_rows(whole).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5)
    model = nn.ModuleDict({"fields": group("pull", OPTIMIZERS[2], cluster)})
    gt.load(model, tmp_path / "model")
    torch.testing.assert_close(all_rows(model["fields"]), found, rtol=0, atol=0)  # type: ignore[arg-type]


def killed_within(number: int) -> Callable[..., Any]:
    """A collective of torch's that kills this process where it is called for the ``number``-th time."""
    calls = iter(range(number))

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if next(calls, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **more)

        return call

    return wrapped


COLLECTIVES = ("all_gather", "all_to_all_single", "all_reduce")


def lose_a_rank(rank: int, ranks: int, folder: Path, meeting: str, number: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    fields = group("ranks", OPTIMIZERS[1])
    rows = gt.RowOptimizer(fields)
    dist.barrier()
    if rank == 1:
        wrap = killed_within(number)
        for name in COLLECTIVES:
            setattr(dist, name, wrap(getattr(dist, name)))
    try:
        loss_of(fields(batch_of(0)), 0).backward()
        rows.clip_grad_norm_(1.0)
        time.sleep(0.2)
        loss_of(fields(batch_of(1)), 1).backward()
    except gt.errors.RankLost:
        (folder / f"lost-{rank}").touch()
    os._exit(0)  # without the handshake of those that are left


@pytest.mark.parametrize("number", range(7))
def test_a_rank_killed_in_any_collective_is_named_on_the_others(number: int, tmp_path: Path) -> None:
    """Counts, ids, vectors, gradients, whether they are finite, and the norm of each of two optimizers."""
    meeting = str(tmp_path / "meeting")
    processes = [FORKSERVER.Process(target=lose_a_rank, args=(rank, 2, tmp_path, meeting, number)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert processes[1].exitcode == -signal.SIGKILL
    assert processes[0].exitcode == 0
    assert (tmp_path / "lost-0").exists()


def refuse(rank: int, ranks: int, folder: Path) -> None:
    fields = group("ranks")
    batch = batch_of(0, share_of(rank, ranks))
    bad = {**batch, "user": batch["user"] + ROWS} if rank == 1 else batch
    error = gt.errors.InvalidIds if rank == 1 else gt.errors.SyncError
    with pytest.raises(error, match="user" if rank == 1 else "rank 1"):
        fields(bad)
    with pytest.raises(gt.errors.SpecMismatch, match="with gradients on some ranks"), torch.set_grad_enabled(rank == 0):
        fields(batch)
    fields(batch)["user"].sum().backward()  # and goes on
    with pytest.raises(gt.errors.SpecMismatch, match="the ranks disagree"):
        gt.EmbeddingGroup(None, "x", [gt.Field("a", 2 + rank, num_rows=4)], rows="ranks")
    (folder / f"ok-{rank}").touch()


def test_what_one_rank_refuses_no_rank_goes_on_with(tmp_path: Path) -> None:
    run_ranks(refuse, 2, tmp_path)
    assert (tmp_path / "ok-0").exists() and (tmp_path / "ok-1").exists()


@pytest.mark.parametrize(
    ("field", "more", "said"),
    [
        (gt.Field("user", 3, optimizer=OPTIMIZERS[5]), {}, r"has no num_rows.*num_rows=1_000_000.*'freeze'"),
        (gt.Field("user", 3, dtype="float8_e4m3fn"), {}, "has no num_rows.* 8 bits"),
        (gt.Field("user", 3, max_bytes=1 << 20), {}, "has max_bytes"),
        (gt.Field("user", 3, num_rows=5, where="hosted"), {}, "where='hosted'.*leave where= out"),
        (gt.Field("user", 3, num_rows=5, expiry=gt.Unseen(steps=9)), {}, "has expiry"),
        (gt.Field("user", 3, num_rows=5), {"mode": gt.SSP(1)}, "ranks step together"),
        (gt.Field("user", 3, num_rows=5), {"rows": "rank"}, "rows is 'rank'; it must be one of 'pull'"),
        (gt.Field("user", 3, num_rows=5), {"rows": "pull"}, "has no cluster"),
    ],
)
def test_what_rows_on_ranks_cannot_be_is_said(field: gt.Field, more: dict[str, Any], said: str) -> None:
    with pytest.raises(gt.errors.InvalidArgument, match=said):
        gt.EmbeddingGroup(None, "ctr", [field], **{"rows": "ranks", **more})


def test_rows_that_leave_their_type_are_named_by_the_next_batch() -> None:
    fields = gt.Embedding(None, "t", 2, num_rows=4, rows="ranks", optimizer=gt.SGD(1.0), dtype="float16")
    rows = gt.RowOptimizer(fields)
    (fields(torch.tensor([1])) * 1e6).sum().backward()
    rows.step()
    with pytest.raises(gt.errors.NonFinite, match="1 rows of embeddings 't'"):
        fields(torch.tensor([2]))
    assert torch.isfinite(fields(torch.tensor([1]))).all()


def test_a_run_through_prefetch_is_the_plain_loop() -> None:
    plain, ahead = group("ranks"), group("ranks")
    for fields, batches in ((plain, None), (ahead, gt.prefetch([batch_of(step) for step in range(3)], ahead))):
        rows = gt.RowOptimizer(fields)
        taken = ((batch_of(step), fields(batch_of(step))) for step in range(3)) if batches is None else batches
        for step, (_, vectors) in enumerate(taken):
            loss_of(vectors, step).backward()
            rows.step()
    torch.testing.assert_close(all_rows(ahead), all_rows(plain), rtol=0, atol=0)


def train_ahead(rank: int, ranks: int, folder: Path) -> None:
    plain, ahead = group("ranks"), group("ranks")
    batches = [batch_of(step, share_of(rank, ranks)) for step in range(3)]
    for fields, steps in ((plain, ((batch, plain(batch)) for batch in batches)), (ahead, gt.prefetch(batches, ahead))):
        rows = gt.RowOptimizer(fields)
        for step, (_, vectors) in enumerate(steps):
            loss_of(vectors, step, share_of(rank, ranks)).backward()
            rows.step()
    torch.testing.assert_close(all_rows(ahead), all_rows(plain), rtol=0, atol=0)
    (folder / f"ok-{rank}").touch()


def test_ranks_run_through_prefetch_as_in_the_plain_loop(tmp_path: Path) -> None:
    run_ranks(train_ahead, 2, tmp_path)
    assert (tmp_path / "ok-0").exists() and (tmp_path / "ok-1").exists()


def test_a_gradient_that_is_changed_between_micro_batches_is_refused() -> None:
    """Kernels read it at the step."""
    entries, _ = index_fields([FieldShape(0, 2, 2, 1)], torch.tensor([0, 1]), None, None, [4])
    first, second = torch.ones(2, 3), torch.ones(2, 3)
    pending, other = (
        UnsummedGradient({}, _Waiting([VectorGradients(entries, [gradient])])) for gradient in (first, second)
    )
    first.mul_(2)
    pending.merge(other)
    with pytest.raises(gt.errors.InvalidArgument, match="changed in place"):
        pending.apply(gt.SGD(1.0), torch.ones(()))


@pytest.mark.parametrize("padding_id", [None, 2])
def test_of_equal_maxima_the_first_has_the_gradient(padding_id: int | None) -> None:
    ids, offsets = torch.tensor([3, 1, 2, 2, 5, 1]), torch.tensor([0, 3, 3, 5])
    settings: Any = {"pooling": "max", "num_rows": 6, "initializer": gt.Constant(0.0), "padding_id": padding_id}
    table = gt.Embedding(None, "t", 2, rows="ranks", optimizer=gt.SGD(1.0), **settings)
    twin = nn.EmbeddingBag.from_pretrained(torch.zeros(6, 2), freeze=False, mode="max", padding_idx=padding_id)
    for module in (table, twin):
        (module(ids, offsets) * torch.tensor([[1.0], [2.0], [3.0], [4.0]])).sum().backward()
    gt.RowOptimizer(table).step()
    assert torch.equal(-table.table("t").pull(torch.arange(6)), twin.weight.grad)


class Jagged:
    """As TorchRec's JaggedTensor."""

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        self.parts = values, lengths

    def values(self) -> Tensor:
        return self.parts[0]

    def lengths(self) -> Tensor:
        return self.parts[1]


@pytest.mark.parametrize(
    "given_ids",
    [
        torch.tensor([3, 1, 2]),
        torch.tensor([[3, 1], [2, 2]], dtype=torch.int32),
        torch.empty(2, 0, dtype=torch.int64),
        (torch.tensor([3, 1, 2]), torch.tensor([0, 0, 3])),
        [torch.tensor([3, 1]), torch.tensor([0, 2]), torch.tensor([1, 2])],
        torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged),
        Jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 3])),
        [[1, 2], [3, 4]],
    ],
)
def test_ids_in_tensors_are_what_they_are_on_the_host(given_ids: Any) -> None:
    host, found = batch_ids(given_ids, "user"), tensor_ids(given_ids, "user")
    assert found.values.tolist() == host.values.tolist()
    assert torch.as_tensor(found.bags).tolist() == torch.as_tensor(host.bags).tolist()
    assert (found.is_vector, found.num_bags) == (host.is_vector, host.num_bags)
    assert host.weights is None if found.weights is None else found.weights.tolist() == host.weights.tolist()


@pytest.mark.parametrize(
    "given_ids", [torch.tensor([1.5]), (torch.tensor([1, 2]), torch.tensor([0, 1])), (torch.tensor([1]), [0, 2, 1])]
)
def test_what_is_wrong_with_tensors_of_ids_is_named(given_ids: Any) -> None:
    with pytest.raises(gt.errors.InvalidIds, match="field 'user'"):
        tensor_ids(given_ids, "user")
