"""Embeddings on ranks whose ids have no bound, against a cluster's tables that grow and against torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.kernels.launch import interpreted
from tests.support.rank_processes import run_ranks

JOINT, STEPS = 12, 5
FIELDS = [
    gt.Field("user", dim=3),
    gt.Field("item", dim=4, pooling="mean", num_rows=50),  # one table with a bound, beside
    gt.Field("seen", table="user", pooling="sqrtn", padding_id=-1),
    gt.Field("last", table="user", pooling=None),
    gt.Field("half", dim=8, dtype="bfloat16", slot_dtype="float32", initializer=gt.Uniform(-1, 1)),
    gt.Field("best", dim=2, pooling="max", initializer=gt.Constant(0.5), optimizer=gt.SGD(0.5)),
]
OPTIMIZERS: list[RowOptimizerSpec] = [gt.SGD(0.5), gt.Adagrad(0.5), gt.Adam(0.1), gt.RowWiseAdagrad(0.5)]


def group(rows: str, optimizer: RowOptimizerSpec, cluster: Cluster | None = None) -> gt.EmbeddingGroup:
    return gt.EmbeddingGroup(cluster, "ctr", FIELDS, optimizer=optimizer, rows=rows, seed=3)


def known_ids(step: int, count: int = 40) -> Tensor:
    """As hashes are, of 63 bits; each step has most of those before and as many new ones."""
    rng = torch.Generator().manual_seed(7)
    return torch.randint(2**63 - 1, (1000,), generator=rng)[: count * (step + 1)]


def batch_of(step: int, samples: slice = slice(0, JOINT)) -> dict[str, Any]:
    """Ids that repeat within and between ranks, and padding. About 80 new ones a step."""
    rng, known = torch.Generator().manual_seed(step), known_ids(step, 80)
    ids = known[torch.randint(len(known), (JOINT, 14), generator=rng)]
    ids[0, 0], ids[5, 3] = 2**63 - 1, 0
    seen = torch.where(torch.rand(JOINT, 3, generator=rng) < 0.3, -1, ids[:, :3])
    items = torch.randint(50, (JOINT, 4), generator=rng)
    return {
        "user": ids[samples, :6],
        "item": items[samples],
        "seen": seen[samples],
        "last": ids[samples, 6:9],
        "half": ids[samples, 4:],
        "best": ids[samples, 2:6],
    }


def train(fields: gt.EmbeddingGroup, steps: range, samples: slice = slice(0, JOINT)) -> None:
    rows = gt.RowOptimizer(fields)
    for step in steps:
        for micro in (slice(samples.start, samples.start + 1), slice(samples.start + 1, samples.stop)):
            share = (micro.stop - micro.start) / (samples.stop - samples.start)
            vectors = fields(batch_of(step, micro))
            used = torch.cat([vector.flatten(1) for vector in vectors.values()], dim=1)
            rng = torch.Generator().manual_seed(100 + step)
            targets = torch.randn(JOINT, used.shape[1], generator=rng)[micro]
            ((used - targets).square().sum(1).mean() * share).backward()
        rows.step()
        rows.zero_grad()


def all_rows(fields: gt.EmbeddingGroup) -> dict[str, Tensor]:
    """Among them rows of ids that nobody has looked up."""
    ids = torch.cat([known_ids(9, 100), torch.tensor([2**63 - 1, 0])])
    found = {name: torch.as_tensor(fields.table(name).pull(ids)) for name in ("user", "half", "best")}
    return {**found, "item": torch.as_tensor(fields.table("item").pull(torch.arange(50)))}


def share_of(rank: int, ranks: int) -> slice:
    return slice(rank * JOINT // ranks, (rank + 1) * JOINT // ranks)


def train_a_rank(rank: int, ranks: int, folder: Path, numbers: list[int]) -> None:
    for number in numbers:
        fields = group("ranks", OPTIMIZERS[number])
        train(fields, range(STEPS), share_of(rank, ranks))
        there = {name: fields.table(name).num_present for name in ("user", "half", "best")}
        torch.save((all_rows(fields), there), folder / f"{number}-{rank}.pt")


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, item in wanted.items():
        bits = 0.02 if name == "half" else 1e-4  # where a sum of float32 differs 16 bits may be rounded otherwise
        torch.testing.assert_close(
            found[name], item, rtol=bits, atol=bits / 10, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_rows_that_come_as_ids_do_train_as_those_of_a_cluster(number: int, cluster: Cluster, tmp_path: Path) -> None:
    theirs = group("pull", OPTIMIZERS[number], cluster)
    train(theirs, range(STEPS))
    wanted = all_rows(theirs)
    fields = group("ranks", OPTIMIZERS[number])
    train(fields, range(STEPS))
    close(all_rows(fields), wanted)
    present = {name: fields.table(name).num_present for name in ("user", "half", "best")}
    assert fields.table("user").num_local == 384 >= present["user"] > 192  # has grown twice
    for ranks in (2, 3) if number == 2 else (2,):
        run_ranks(train_a_rank, ranks, tmp_path, [number])
        results = [torch.load(tmp_path / f"{number}-{rank}.pt") for rank in range(ranks)]
        for rows, _ in results:
            torch.testing.assert_close(rows, results[0][0], rtol=0, atol=0)
            close(rows, wanted)
        assert {name: sum(there[name] for _, there in results) for name in present} == present


def test_they_have_the_bits_of_a_cluster() -> None:
    """Where no sum has two orders: one id a bag and no micro-batches, 16 bits rounded by chance."""
    ids = [known_ids(step)[torch.randperm(40 * (step + 1))] for step in range(6)]
    found = []
    for rows, cluster in (("ranks", None), ("pull", gt.local(num_shards=2))):
        table = gt.Embedding(cluster, "t", 6, rows=rows, optimizer=gt.Adagrad(0.1), dtype="bfloat16", seed=5)
        train = gt.RowOptimizer(table)
        for own in ids:
            (table(own) * torch.arange(6)).square().sum().backward()
            train.step()
            train.zero_grad()
        found.append(torch.as_tensor(table.table("t").pull(known_ids(9))))
        if cluster is not None:
            cluster.close()
    assert torch.equal(found[0], found[1])


def test_vectors_without_gradient_make_no_rows() -> None:
    table = gt.Embedding(None, "t", 3, rows="ranks", optimizer=gt.Adam(0.1))
    rows, ids = table.table("t"), known_ids(6)
    first = rows.pull(ids)
    with torch.no_grad():
        torch.testing.assert_close(table(ids), first, rtol=0, atol=0)
        torch.testing.assert_close(table(ids.repeat(2, 1).T), first + first, rtol=0, atol=0)
    assert rows.num_present == 0
    table(ids[:5]).sum().backward()
    gt.RowOptimizer(table).step()
    assert rows.num_present == 5 and rows.present_ids().tolist() == ids[:5].tolist()
    with torch.inference_mode():
        found = table(ids)
    assert torch.equal(found[5:], first[5:]) and (found[:5] != first[:5]).all()
    assert rows.num_present == 5
    table(ids).sum().backward()  # those that were there for a moment begin with nothing in their slots
    assert rows.num_present == len(ids) and not rows.slots_LS[5:].any() and not rows.steps_L[5:].any()
    assert torch.equal(rows.pull(ids)[5:], first[5:])


def test_rows_are_assigned_and_pulled_by_their_ids() -> None:
    rows = gt.Embedding(None, "t", 2, rows="ranks").table("t")
    ids = known_ids(9)
    rows.assign(ids[:300].numpy(), torch.arange(600.0).view(300, 2).numpy())
    assert rows.num_present == 300
    assert torch.equal(rows.pull(ids[[299, 7, 7]]), torch.tensor([[598.0, 599], [14, 15], [14, 15]]))
    rows.assign(torch.tensor([5]), torch.tensor([[3.0, 4]]))
    assert torch.equal(rows.pull(torch.tensor([5])), torch.tensor([[3.0, 4]]))
    with pytest.raises(gt.errors.InvalidIds, match="id -3 at index 1 is out of range"):
        rows.pull([4, -3])


def test_ids_and_rows_on_ranks_are_checked_as_those_of_a_cluster() -> None:
    rows = gt.Embedding(None, "t", 2, rows="ranks", num_rows=9).table("t")
    before, one = rows.pull(range(9)), torch.ones(1, 2)
    for ids, message in (
        ([9], "id 9 at index 0 is out of range"),
        ([-1], "id -1 at index 0 is out of range"),
        ([1.5], "dtype float64; they must be integers"),
        ([[1, 2]], r"shape \(1, 2\); they must be one-dimensional"),
    ):
        for action in (rows.pull, lambda ids: rows.assign(ids, one)):
            with pytest.raises(gt.errors.InvalidIds, match=message):
                action(ids)
    for ids, values, message in (
        ([4, 4], one.expand(2, 2), "1 duplicate: id 4 is at positions 0 and 1"),
        ([1], one[:, :1], r"rows have shape \(1, 1\); 1 ids of dim 2 need \(1, 2\)"),
        ([1], one.double(), "rows have dtype float64; allowed: float32"),
        ([1], one / 0, "NaN or infinity"),
    ):
        with pytest.raises(gt.errors.GeartrainError, match=message):
            rows.assign(ids, values)
    assert torch.equal(rows.pull(range(9)), before)


def test_rows_go_to_another_device_with_their_numbers_and_to_a_snapshot_if_there_are_none(tmp_path: Path) -> None:
    model = nn.ModuleDict({"t": gt.Embedding(None, "t", 2, rows="ranks", optimizer=gt.Adam(0.1))})
    rows: Any = model["t"].table("t")  # type: ignore[operator]
    gt.save(model, tmp_path / "empty")
    rows.assign(known_ids(9).numpy(), torch.arange(800.0).view(400, 2).numpy())
    rows.move_to(torch.device("cpu"))
    assert rows.present_ids().tolist() == known_ids(9).tolist()
    assert torch.equal(rows.pull(known_ids(9)[[399, 0]]), torch.tensor([[798.0, 799], [0, 1]]))
    gt.save(model, tmp_path / "full")
    gt.load(model, tmp_path / "empty", replace=True)
    assert rows.num_present == 0 and rows.num_local == 96 == len(rows.slots_LS)
    with torch.inference_mode():  # as a server may
        gt.load(model, tmp_path / "full", replace=True)
    rows.assign(torch.tensor([1]).numpy(), torch.tensor([[5.0, 6.0]]).numpy())
    assert rows.num_present == 401 and rows.pull([1, int(known_ids(9)[7])]).tolist() == [[5, 6], [14, 15]]


def test_an_id_below_zero_is_refused_and_makes_no_row() -> None:
    table = gt.Embedding(None, "t", 2, rows="ranks")
    with pytest.raises(
        gt.errors.InvalidIds, match=r"id -5 of field 't' in row 1 is out of range; ids lie in \[0, 9223"
    ):
        table(torch.tensor([3, -5]))
    assert table.table("t").num_present == 0


def save_and_load(rank: int, ranks: int, folder: Path, steps: range) -> None:
    model = nn.ModuleDict({"fields": group("ranks", OPTIMIZERS[2])})
    fields: Any = model["fields"]
    if steps.start:
        gt.load(model, folder / "model")
    train(fields, steps, share_of(rank, ranks))
    gt.save(model, folder / "model")
    rows = all_rows(fields)
    if rank == 0:
        torch.save(rows, folder / "rows.pt")


def test_rows_are_saved_and_loaded_on_other_numbers_of_ranks_and_in_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    for ranks, steps in ((2, range(2)), (3, range(2, 4)), (1, range(4, 6)), (2, range(6, 7))):
        run_ranks(save_and_load, ranks, tmp_path, steps)
    whole = group("ranks", OPTIMIZERS[2])
    train(whole, range(7))
    found = torch.load(tmp_path / "rows.pt")
    close(found, all_rows(whole))
    theirs = nn.ModuleDict({"fields": group("pull", OPTIMIZERS[2], cluster)})
    gt.load(theirs, tmp_path / "model")
    torch.testing.assert_close(all_rows(theirs["fields"]), found, rtol=0, atol=0)  # type: ignore[arg-type]
    train(theirs["fields"], range(7, 8))  # type: ignore[arg-type]
    gt.save(theirs, tmp_path / "theirs")
    back = nn.ModuleDict({"fields": group("ranks", OPTIMIZERS[2])})
    gt.load(back, tmp_path / "theirs")
    torch.testing.assert_close(all_rows(back["fields"]), all_rows(theirs["fields"]), rtol=0, atol=0)  # type: ignore[arg-type]


def lack_memory(rank: int, folder: Path) -> None:
    table = gt.Embedding(None, "t", 2, rows="ranks", optimizer=gt.SGD(1.0))
    rows, train = table.table("t"), gt.RowOptimizer(table)
    ids = known_ids(9)[:150]
    table(ids[:20]).sum().backward()
    before = rows.pull(ids)
    grow = rows.ids.table.grow
    if rank == 1:
        rows.ids.table.grow = refuse
    with pytest.raises(gt.errors.OutOfMemory if rank == 1 else gt.errors.SyncError, match=r"would grow to|no room"):
        table(ids.repeat(2))
    assert torch.equal(rows.pull(ids[:20]), before[:20]) and rows.num_local == len(rows.ids.ids_L) == len(rows.rows_LD)
    rows.ids.table.grow = grow
    train.step()  # what was pending still is
    assert torch.equal(rows.pull(ids[:20]), before[:20] - 1)
    table(ids).sum().backward()
    (folder / f"ok-{rank}").touch()


def refuse(num_slots: int) -> None:
    raise RuntimeError(f"there is no memory for {num_slots}")


def test_a_table_that_finds_no_memory_stays_as_it_was_on_every_rank(tmp_path: Path) -> None:
    run_ranks(lack_memory, 2, tmp_path)
    assert (tmp_path / "ok-0").exists() and (tmp_path / "ok-1").exists()


def test_rows_whose_first_values_find_no_memory_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    table, ids = gt.Embedding(None, "t", 2, rows="ranks"), known_ids(0)
    rows = table.table("t")
    first = rows.pull(ids)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(type(rows), "_first_values", Mock(side_effect=MemoryError))
        table(ids)
    assert rows.num_present == 0
    assert torch.equal(table(ids).detach(), first)


@pytest.mark.parametrize("number", [1, 2])
def test_kernels_train_them_alike(number: int) -> None:
    pytest.importorskip("triton")
    found = []
    for way in (None, interpreted()):
        if way is not None:
            way.__enter__()
        fields = gt.EmbeddingGroup(None, "ctr", FIELDS[:5], optimizer=OPTIMIZERS[number], rows="ranks", seed=3)
        train = gt.RowOptimizer(fields)
        for step in range(2):
            vectors = fields(batch_of(step))
            sum(vector.square().sum() for vector in vectors.values()).backward()  # type: ignore[union-attr]
            train.step()
            train.zero_grad()
        with torch.no_grad():
            found.append(fields(batch_of(4)))
        if way is not None:
            way.__exit__(None, None, None)
    close(found[1], found[0])
