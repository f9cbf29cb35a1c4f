"""A run through ``gt.prefetch`` against the plain loop, and what is left of it however it ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.bridge.pipeline.stages import Pipeline, Stage, StageTime, _taken
from tests.support.frames import frames

DIM, ROWS, BATCH, STEPS = 4, 60, 16, 12
Batch = dict[str, Any]


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with gt.local(num_shards=request.param) as made:
        yield made
    assert_no_thread_is_left()


def assert_no_thread_is_left() -> None:
    assert [item.name for item in threading.enumerate() if "prefetch" in item.name] == []


def group_of(cluster: Cluster, optimizer: Any, where: Any = "pull") -> gt.EmbeddingGroup:
    return gt.EmbeddingGroup(
        cluster,
        "ctr",
        [
            gt.Field("user", dim=DIM),
            gt.Field("item", dim=DIM, pooling="mean", where=where),
            gt.Field("history", table="item", pooling=None),
            gt.Field("wide", dim=1, optimizer=gt.SGD(0.1), num_rows=ROWS, initializer=gt.Normal(std=0.5)),
        ],
        optimizer=optimizer,
    )


def batches(steps: int = STEPS) -> list[Batch]:
    """Ids that come again and again, so that most rows of a batch were written since they were pulled."""
    rng = torch.Generator().manual_seed(3)

    def ids(*shape: int) -> Tensor:
        return torch.randint(ROWS, shape, generator=rng)

    return [
        {
            "user": ids(BATCH),
            "item": ids(BATCH, 2),
            "history": (ids(2 * BATCH), torch.arange(0, 2 * BATCH + 1, 2)),
            "wide": ids(BATCH),
            "click": torch.rand(BATCH, generator=rng),
        }
        for _ in range(steps)
    ]


def plain(loader: Iterable[Batch], fields: gt.EmbeddingGroup) -> Iterator[tuple[Batch, Any]]:
    for batch in loader:
        yield batch, fields(batch)


def loss_of(network: nn.Module, batch: Batch, vectors: dict[str, Tensor]) -> Tensor:
    history = vectors["history"].values().view(BATCH, -1)  # type: ignore[operator]
    logits = network(torch.cat([vectors["user"], vectors["item"], history, vectors["wide"]], 1)).squeeze(1)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch["click"])


def wait_for_pulls(loop: Any, count: int, most: int) -> None:
    """Until all that can be is pulled: as stale as it gets."""
    while loop.times["pull"].items < min(count, most):
        threading.Event().wait(0.001)


Loop = Callable[[Iterable[Batch], gt.EmbeddingGroup], Iterable[tuple[Batch, Any]]]


def trained(cluster: Cluster, loop: Loop, optimizer: Any, where: Any = "pull") -> list[Tensor]:
    """Losses, and all rows."""
    fields = group_of(cluster, optimizer, where)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4 * DIM + 1, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    both = gt.joint(torch.optim.Adam(network.parameters(), 0.05), fields)
    losses = []
    data = torch.utils.data.DataLoader(batches(), batch_size=None, shuffle=True)  # type: ignore[arg-type]
    for batch, vectors in loop(data, fields):
        loss = loss_of(network, batch, vectors)
        loss.backward()  # type: ignore[no-untyped-call]
        both.step()
        both.zero_grad()
        losses.append(loss.detach())
    rows = [fields.table(item).pull(torch.arange(ROWS)) for item in ("user", "item", "wide")]
    for item in ("user", "item", "wide"):
        cluster.drop_table(f"ctr/{item}")
    return [torch.stack(losses), *rows]


OPTIMIZERS = {"Adagrad": gt.Adagrad(0.5), "momentum that moves all rows": gt.Momentum(0.1, momentum=0.9)}


@pytest.mark.parametrize(("name", "where"), [*((name, "pull") for name in OPTIMIZERS), ("Adagrad", "hosted")])
@pytest.mark.parametrize(("depth", "threads"), [(1, 1), (3, 1), (2, 3)])
def test_a_run_equals_the_plain_loop_bit_by_bit(
    cluster: Cluster, name: str, where: str, depth: int, threads: int
) -> None:
    loops: list[gt.prefetch] = []

    def ahead(loader: Iterable[Batch], fields: gt.EmbeddingGroup) -> Iterator[tuple[Batch, Any]]:
        loops.append(gt.prefetch(loader, fields, depth=depth, stages=[(dict, threads)], pull_threads=threads))
        for step, loop in enumerate(loops[0]):
            wait_for_pulls(loops[0], step + depth + threads, STEPS)
            yield loop

    expected = trained(cluster, plain, OPTIMIZERS[name], where)
    found = trained(cluster, ahead, OPTIMIZERS[name], where)
    for item, other in zip(found, expected, strict=True):
        torch.testing.assert_close(item, other, rtol=0, atol=0)
    assert loops[0].refreshed_rows > 0
    assert loops[0].times["pull"].items == loops[0].times["loop"].items == STEPS


def test_rows_lack_at_most_as_many_pushes_as_said(cluster: Cluster) -> None:
    """Each step adds 1 to a row that every batch has: what a batch sees of it is how many pushes it knows."""
    for staleness in (0, 1, 2, 5):
        one = gt.Embedding(
            cluster, f"t{staleness}", 1, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0), num_rows=ROWS
        )
        rows = gt.RowOptimizer(one)
        name = f"t{staleness}"
        loop = gt.prefetch([{name: torch.tensor([7, n % 5])} for n in range(STEPS)], one, depth=4, staleness=staleness)
        missing = []
        for step, (_, vectors) in enumerate(loop):
            missing.append(step + float(vectors.detach()[0, 0]))
            vectors[0].sum().backward()
            rows.step()
            rows.zero_grad()
            wait_for_pulls(loop, step + 5, STEPS)
        assert min(staleness, 4) <= max(missing) <= staleness, missing
        assert loop.refreshed_rows > 0 or staleness > 0


def test_only_rows_that_were_written_are_pulled_again(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))
    rows = gt.RowOptimizer(one)
    ids = torch.arange(0, 6 * 8).view(6, 8)  # each its own ...
    ids[:, 0] = 1000  # ... but for one
    loop = gt.prefetch([{"t": own} for own in ids], one, depth=1)
    for step, (_, vectors) in enumerate(loop):
        vectors.sum().backward()
        wait_for_pulls(loop, step + 2, 6)
        rows.step()
        rows.zero_grad()
    assert loop.refreshed_rows == 5


def test_writes_of_ones_own_and_restored_tables_are_seen(cluster: Cluster, tmp_path: Any) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0), initializer=gt.Constant(2.0))
    table = one.table("t")
    table.assign(torch.tensor([3]), torch.full((1, DIM), 5.0))
    saved = cluster.snapshot(tmp_path, "s").result()
    loop = gt.prefetch([{"t": torch.tensor([3, 4])}] * 3, one, depth=2)
    run = iter(loop)
    assert next(run)[1][:, 0].tolist() == [5.0, 2.0]
    wait_for_pulls(loop, 3, 3)
    table.assign(torch.tensor([4]), torch.full((1, DIM), 6.0))
    assert next(run)[1][:, 0].tolist() == [5.0, 6.0]
    cluster.restore(saved, replace=True)
    assert next(run)[1][:, 0].tolist() == [5.0, 2.0]
    assert next(run, None) is None


def test_stages_of_ones_own_several_groups_and_no_grad(cluster: Cluster) -> None:
    users = gt.Embedding(cluster, "user", DIM, optimizer=gt.SGD(1.0))
    items = gt.EmbeddingGroup(cluster, "g", [gt.Field("item", dim=DIM)], optimizer=gt.SGD(1.0))
    texts = [["ann", "bob"], ["eve", "ann"]]

    def hashed(names: list[str]) -> Batch:
        return {"user": gt.hash_strings(names), "item": torch.arange(len(names))}

    def marked(batch: Batch) -> Batch:
        return {**batch, "thread": threading.current_thread().name}

    loop = gt.prefetch(texts, [users, items], stages=[hashed, marked])
    assert len(loop) == 2
    for _ in range(2):  # as often as one likes
        with torch.no_grad():
            seen = list(loop)
        assert [batch["thread"] for batch, _ in seen] == ["geartrain-prefetch-2: marked"] * 2
        for (batch, (user, item)), names in zip(seen, texts, strict=True):
            torch.testing.assert_close(user, users(gt.hash_strings(names)).detach())
            torch.testing.assert_close(item["item"], items(batch)["item"].detach())
            assert not user.requires_grad and not item["item"].requires_grad
    for _, (user, item) in loop:
        assert user.requires_grad and item["item"].requires_grad


def test_threads_of_a_stage_work_at_once_and_keep_the_order(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))
    all_three = threading.Barrier(3)
    is_done = [threading.Event() for _ in range(9)]

    def last_first(batch: Batch) -> Batch:
        number = int(batch["t"][0])
        all_three.wait(20)  # passes only if three batches are worked at
        if number % 3 < 2:
            is_done[number + 1].wait(20)
        is_done[number].set()
        return batch

    loop = gt.prefetch([{"t": torch.tensor([n])} for n in range(9)], one, stages=[(last_first, 3)], pull_threads=2)
    assert [int(batch["t"][0]) for batch, _ in loop] == list(range(9))
    assert loop.times["1: last_first"].items == loop.times["pull"].items == 9


def test_an_error_of_one_of_several_threads_comes_after_the_batches_before_it(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))
    has_failed = threading.Event()

    def third_fails(batch: Batch) -> Batch:
        if int(batch["t"][0]) == 3:
            has_failed.set()
            raise OSError("no third")
        has_failed.wait(20)  # what comes before it is done later
        return batch

    seen = []
    with pytest.raises(OSError, match="no third") as caught:
        for batch, _ in gt.prefetch(
            [{"t": torch.tensor([n])} for n in range(50)], one, depth=4, stages=[(third_fails, 4)]
        ):
            seen.append(int(batch["t"][0]))
    assert seen == [0, 1, 2]
    assert caught.traceback[-1].name == "third_fails"


class Counted:
    """A generator that knows how it ended."""

    def __init__(self, given: Iterable[Any]) -> None:
        self.given = given
        self.thread: str | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.given
        finally:
            self.thread = threading.current_thread().name


@pytest.mark.parametrize("way", ["break", "error", "interrupt", "close", "forgotten", "in a circle", "to the end"])
def test_nothing_is_left_however_it_ends(cluster: Cluster, way: str) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))
    loader = Counted([{"t": torch.tensor([n])} for n in range(20)])
    if way == "break":
        for _ in gt.prefetch(loader, one):
            break
    elif way in ("error", "interrupt"):
        kind = ValueError if way == "error" else KeyboardInterrupt
        with pytest.raises(kind):
            for _ in gt.prefetch(loader, one):
                raise kind
    elif way == "to the end":
        assert len(list(gt.prefetch(loader, one))) == 20
    else:
        run = iter(gt.prefetch(loader, one))
        next(run)
        if way == "close":
            run.close()
            assert next(run, None) is None
            run.close()
        elif way == "in a circle":
            run.itself = run  # type: ignore[attr-defined]
        del run
        gc.collect()
    assert_no_thread_is_left()
    assert loader.thread == "geartrain-prefetch-read"


def test_an_error_comes_where_the_plain_loop_has_it(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))

    def failing() -> Iterator[Batch]:
        yield {"t": torch.tensor([1])}
        yield {"t": torch.tensor([2])}
        raise OSError("the disk is gone")

    def refuses(batch: Batch) -> Batch:
        if int(batch["t"][0]) == 2:
            raise StopIteration
        return batch

    bad = [{"t": torch.tensor([1])}, {"t": torch.tensor([-1])}, {"t": torch.tensor([3])}]
    for loader, stages, error, good in (
        (failing(), [], OSError, 2),
        (bad, [], InvalidIds, 1),
        (failing(), [refuses], RuntimeError, 1),
        (iter(()), [], None, 0),
    ):
        seen = []
        run = iter(gt.prefetch(loader, one, stages=stages))
        if error is None:
            assert next(run, None) is None
            continue
        with pytest.raises(error) as caught:
            for batch, _ in run:
                seen.append(batch)
        assert len(seen) == good
        assert next(run, None) is None
        assert any(frame.name in ("_read", "_work", "next") for frame in caught.traceback)
        assert_no_thread_is_left()


def test_ctrl_c_while_the_loop_waits_for_a_batch(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))
    go_on = threading.Event()

    def slow() -> Iterator[Batch]:
        yield {"t": torch.tensor([1])}
        go_on.wait()
        yield {"t": torch.tensor([2])}

    def interrupts() -> None:
        main = threading.main_thread().ident
        assert main is not None
        while frames()[main].f_code is not _taken.__code__:
            threading.Event().wait(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        go_on.set()

    thread = threading.Thread(target=interrupts)
    run = iter(gt.prefetch(slow(), one))
    next(run)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        next(run)
    thread.join()
    assert next(run, None) is None
    assert_no_thread_is_left()
    assert one(torch.tensor([5])).shape == (1, DIM)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"loader": 3}, "the loader is 3"),
        ({"fields": nn.Linear(1, 1)}, "fields"),
        ({"fields": [nn.Linear(1, 1)]}, "must be a gt.EmbeddingGroup"),
        ({"depth": 0}, "depth is 0"),
        ({"staleness": -1}, "staleness is -1"),
        ({"stages": ["x"]}, "a stage is 'x'"),
        ({"stages": [("x", 2)]}, "a function batch -> batch, or"),
        ({"stages": [(dict, 0)]}, "threads of a stage is 0"),
        ({"pull_threads": 0}, "pull_threads is 0"),
    ],
)
def test_what_is_something_else_is_named(arguments: dict[str, Any], named: str) -> None:
    with gt.local() as cluster:
        given = {"loader": [], "fields": gt.Embedding(cluster, "t", 1, optimizer=gt.SGD(1.0)), **arguments}
        with pytest.raises(InvalidArgument, match=named):
            gt.prefetch(**given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_vectors_are_on_the_device_of_the_module() -> None:
    with gt.local() as cluster:
        one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0)).to("cuda")
        data = torch.utils.data.DataLoader(np.arange(64), batch_size=8, pin_memory=True)  # type: ignore[arg-type]
        for batch, vectors in gt.prefetch(data, one, stages=[lambda ids: {"t": ids}]):
            assert batch["t"].is_pinned() and vectors.is_cuda
            torch.testing.assert_close(vectors.cpu(), torch.from_numpy(one.table("t").pull(batch["t"].numpy())))


def test_a_loader_with_processes(cluster: Cluster) -> None:
    one = gt.Embedding(cluster, "t", DIM, optimizer=gt.SGD(1.0))
    data = torch.utils.data.DataLoader(range(24), batch_size=4, num_workers=1)  # type: ignore[arg-type]
    seen = [batch["t"].tolist() for batch, _ in gt.prefetch(data, one, stages=[lambda ids: {"t": ids}])]
    assert seen == torch.arange(24).view(6, 4).tolist()


@pytest.mark.parametrize("staleness", [0, 1])
def test_with_a_bounded_lead_no_step_sees_less_of_the_others_than_without(
    cluster: Cluster, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = gt.EmbeddingGroup(
        cluster, "g", [gt.Field("t", 1, initializer=gt.Constant(0.0))], optimizer=gt.SGD(1.0), mode=gt.SSP(0)
    )
    rows, table = gt.RowOptimizer(one), one.table("t")

    def push_as_another_worker() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(table.write_log, "start", lambda *_: None)
            table.push(torch.tensor([5]), torch.tensor([[-1.0]]))

    loop = gt.prefetch([{"t": torch.tensor([5, 6])}] * STEPS, one, depth=3, staleness=staleness)
    missing = []
    for step, (_, vectors) in enumerate(loop):
        missing.append(step - float(vectors["t"][0].detach()))
        vectors["t"][1].sum().backward()
        wait_for_pulls(loop, step + 4, STEPS)
        push_as_another_worker()
        rows.step()
        rows.zero_grad()
    assert max(missing) == staleness


def test_all_threads_of_a_stage_end_where_nobody_takes_what_they_have() -> None:
    pipeline = Pipeline(["read", "work"], 2, [Stage(lambda item: item, 4)])
    pipeline.start(0, iter(range(1, 1000)), [StageTime(), StageTime()])
    assert [pipeline.next(), pipeline.next()] == [0, 1]
    pipeline.stop(5.0)
    assert not any(thread.is_alive() for thread in pipeline._threads)
