"""Pushes that a run with a staleness sends in the background: late, but each once, and none without a word."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import GeartrainError
from geartrain.bridge.pipeline import background_pushes, prefetch
from geartrain.bridge.pipeline.background_pushes import BackgroundPushes
from tests.support.frames import frames

STEPS = 6


class Broken(GeartrainError):
    pass


class Gate:
    """Lets the pushes of a step pass when it is told to, or fails them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._send = background_pushes._send
        self.orders = threading.Semaphore(0)
        self.fails = 0
        self.threads: list[str] = []
        monkeypatch.setattr(background_pushes, "_send", self)

    def __call__(self, writes: Sequence[Any]) -> None:
        self.orders.acquire()
        self.threads.append(threading.current_thread().name)
        if self.fails:
            self.fails -= 1
            raise Broken("the shard is away")
        self._send(writes)

    def open(self, steps: int = 1000) -> None:
        self.orders.release(steps)

    def open_when_main_is_in(self, code: CodeType) -> threading.Thread:
        def work() -> None:
            main = threading.main_thread().ident
            assert main is not None
            while not is_in(frames()[main], code):
                threading.Event().wait(0.001)
            self.open()

        thread = threading.Thread(target=work)
        thread.start()
        return thread


def is_in(frame: Any, code: CodeType) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with gt.local(num_shards=2) as made:
        yield made
    assert [item.name for item in threading.enumerate() if "prefetch" in item.name] == []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def one(cluster: Cluster) -> gt.Embedding:
    return gt.Embedding(cluster, "t", 1, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0))


def run_of(one: gt.Embedding, **settings: Any) -> Any:
    return iter(gt.prefetch([{"t": torch.tensor([7, n])} for n in range(STEPS)], one, **{"staleness": 1, **settings}))


def pushed(one: gt.Embedding) -> float:
    """How often row 7 was."""
    return -float(one.table("t").pull(torch.tensor([7]))[0, 0])


def test_a_step_does_not_wait_and_the_batch_after_the_next_does(one: gt.Embedding, gate: Gate) -> None:
    rows, run = gt.RowOptimizer(one), run_of(one)
    for _ in range(2):
        next(run)[1][0].sum().backward()
        rows.step()
        rows.zero_grad()
        assert pushed(one) == 0 and gate.threads == []
    thread = gate.open_when_main_is_in(BackgroundPushes.wait.__code__)
    for _, vectors in run:
        vectors[0].sum().backward()
        rows.step()
        rows.zero_grad()
    thread.join()
    assert pushed(one) == STEPS
    assert gate.threads == ["geartrain-prefetch-push"] * STEPS
    assert all(part.row_update.background is None for part in one)


@pytest.mark.parametrize("drops", [False, True])
def test_an_error_is_raised_by_the_next_step_and_nothing_is_lost_or_pushed_twice(
    one: gt.Embedding, gate: Gate, drops: bool
) -> None:
    rows, run = gt.RowOptimizer(one), run_of(one, staleness=3)
    gate.fails = 1
    for _ in range(2):
        next(run)[1][0].sum().backward()
        rows.step()
        rows.zero_grad()
    next(run)[1][0].sum().backward()
    (part,) = one
    assert isinstance(part.row_update.background, BackgroundPushes)
    gate.open()
    thread = part.row_update.background._thread
    assert thread is not None
    thread.join()
    rows.zero_grad()  # nobody has heard of it: that is not what this drops
    next(run)[1][0].sum().backward()
    with pytest.raises(Broken) as caught:
        rows.step()
    assert any(frame.name == "_work" for frame in caught.traceback)
    assert pushed(one) == 0
    if drops:
        rows.zero_grad()
        next(run)[1][0].sum().backward()
    rows.step()
    for _, vectors in run:
        vectors[0].sum().backward()
        rows.step()
        rows.zero_grad()
    assert pushed(one) == (STEPS - 4 if drops else STEPS - 1)


@pytest.mark.parametrize("way", ["end", "break"])
def test_an_error_of_the_last_push_is_raised_at_the_end_or_by_the_next_step(
    one: gt.Embedding, gate: Gate, way: str
) -> None:
    rows, (part,) = gt.RowOptimizer(one), one
    gate.open()

    def train() -> None:
        for step, (_, vectors) in enumerate(run_of(one, staleness=STEPS)):
            vectors[0].sum().backward()
            if step == STEPS - 1:
                assert part.row_update.background is not None
                part.row_update.background.wait()
                gate.fails = 1
            rows.step()
            rows.zero_grad()
            if step == STEPS - 1 and way == "break":
                break

    if way == "end":
        with pytest.raises(Broken):
            train()
    else:
        train()
        with pytest.raises(Broken):
            rows.step()
    assert pushed(one) == STEPS - 1 and part.row_update.background is not None
    rows.step()
    assert pushed(one) == STEPS and part.row_update.background is None


def test_a_step_after_a_run_that_was_left_while_its_pushes_were_under_way(
    one: gt.Embedding, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_FORGOTTEN_SECONDS", 0.0)
    rows, (part,) = gt.RowOptimizer(one), one
    run = run_of(one, staleness=2)
    for _ in range(2):
        next(run)[1][0].sum().backward()
        rows.step()
        rows.zero_grad()
    next(run)[1][0].sum().backward()
    del run
    assert part.row_update.background is not None and part.row_update.background.is_closed
    assert pushed(one) == 0
    thread = gate.open_when_main_is_in(BackgroundPushes._send_rest.__code__)
    rows.step()
    thread.join()
    assert pushed(one) == 3
    rows.step()
    assert pushed(one) == 3 and part.row_update.background is None


def test_a_run_after_an_error_reads_again_what_is_pushed_late(one: gt.Embedding, gate: Gate) -> None:
    rows = gt.RowOptimizer(one)
    gate.fails, run = 1, run_of(one)
    gate.open()
    next(run)[1][0].sum().backward()
    rows.step()
    with pytest.raises(Broken):
        run.close()
    seen = []
    for _, vectors in gt.prefetch([{"t": torch.tensor([id])} for id in (8, 7)], one):
        seen.append(vectors.item())
        vectors.sum().backward()
        rows.step()  # the first one sends what was left, too
        rows.zero_grad()
    assert seen == [0, -1]


@pytest.mark.parametrize("way", ["look-up", "snapshot", "state", "evaluation", "close"])
def test_who_needs_all_pushes_waits_for_them(one: gt.Embedding, gate: Gate, way: str, tmp_path: Any) -> None:
    rows, run = gt.RowOptimizer(one), run_of(one)
    next(run)[1][0].sum().backward()
    rows.step()
    code = BackgroundPushes.close.__code__ if way == "close" else BackgroundPushes.wait.__code__
    thread = gate.open_when_main_is_in(code)
    calls: dict[str, Callable[[], object]] = {
        "look-up": lambda: one(torch.tensor([7])),
        "snapshot": lambda: one.cluster.snapshot(tmp_path, "s").result(),
        "state": one.state_dict,
        "evaluation": lambda: next(iter(gt.prefetch([{"t": torch.tensor([7])}], one))),
        "close": run.close,
    }
    assert pushed(one) == 0
    result = calls[way]()
    assert pushed(one) == 1
    if way == "look-up":
        assert result.item() == -1  # type: ignore[attr-defined]
    thread.join()
    run.close()


def test_a_cluster_that_is_closed_first_waits_and_an_error_that_ended_the_block_is_the_one_to_raise(
    gate: Gate,
) -> None:
    for error in (None, ValueError):
        gate.fails = 1
        with pytest.raises(error or Broken), gt.local() as cluster:
            one = gt.Embedding(cluster, "t", 1, optimizer=gt.SGD(1.0))
            rows, run = gt.RowOptimizer(one), run_of(one)
            next(run)[1][0].sum().backward()
            rows.step()
            gate.open(1)
            if error is not None:
                raise error
        run._stop()
