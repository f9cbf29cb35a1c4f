"""What a slow gear of the role does with deliveries that are repeated, and with its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.values.errors import GearUnavailable, MessageTooLarge, NotHolder, StaleClient, TableNotFound
from geartrain.ams.values.gear_messages import AskFeatures, Delivery, GearAccount, HandOver
from geartrain.ams.values.scheduler_messages import StreamHolders
from geartrain.ams.values.specs import Ids
from geartrain.bridge.gear.batch_state import BatchState
from geartrain.bridge.gear.engine import DenseEngine
from geartrain.bridge.gear.factory import open_engine, open_pass
from geartrain.workers.gear.handler import SlowGearHandler

DIM, IDS = 2, 8
CONFIG = gt.SlowGearConfig(reduction="sum", clock=lambda: 0.0)


def build() -> nn.Module:
    module = nn.Linear(IDS, DIM, bias=False)
    nn.init.zeros_(module.weight)
    return module


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with gt.local() as made:
        yield made


def engine_on(cluster: Cluster) -> DenseEngine:
    dense_pass = open_pass(build, torch.eye(IDS), None, DIM, CONFIG)
    settings: dict[str, Any] = {"gradients_per_id": 2, "optimizer": gt.SGD(1.0), "reuse": True, "mode": "async"}
    return open_engine(cluster, "image", dense_pass, CONFIG, **settings)


def applied(cluster: Cluster) -> list[int]:
    """Gradients of ones that are in the weights, by id."""
    weights = cluster.table("image").pull(np.arange(1)).reshape(-1)[: DIM * IDS].reshape(DIM, IDS)
    return (-weights[0]).astype(int).tolist()


def delivery(sequence: int, source: str = "fast", lost: int = 0) -> Delivery:
    chosen = np.arange(IDS)
    return Delivery(
        source=source,
        incarnation=1,
        sequence=sequence,
        ids=chosen,
        gradients_KD=np.ones((len(chosen), DIM), np.float32),
        versions=np.zeros(len(chosen), np.int64),
        lr=None,
        lost=lost,
    )


class Held:
    """Partitions that the test gives and takes."""

    def __init__(self) -> None:
        self.holds = True
        self.left = False

    @property
    def now(self) -> frozenset[int]:
        return frozenset(range(64)) if self.holds else frozenset()

    def require(self, ids: Ids) -> None:  # noqa: ARG002
        if not self.holds:
            raise NotHolder("not here")

    def refuse(self) -> None:
        self.holds = False

    def release_all(self) -> None:
        self.left = True


class Peer:
    """Takes accounts, unless it is dead."""

    def __init__(self, taken: dict[str, Mapping[str, GearAccount]], is_dead: bool) -> None:
        self._taken, self._is_dead = taken, is_dead

    def hand_over(self, name: str, process: str, accounts: Mapping[str, GearAccount], timeout_seconds: float) -> None:  # noqa: ARG002
        if self._is_dead:
            raise AttemptFailed("no answer")
        self._taken[process] = accounts

    def close(self) -> None:
        pass


class Handlers:
    """Makes handlers, and ends them."""

    def __init__(self) -> None:
        self.made: list[SlowGearHandler] = []
        self.taken: dict[str, Mapping[str, GearAccount]] = {}
        self.holders: tuple[str | None, ...] = ("me", "dead", "other")

    def make(
        self, engine: DenseEngine, held: Held, open_engine: Callable[[], DenseEngine] | None = None
    ) -> SlowGearHandler:
        handler = SlowGearHandler(
            "image",
            "me",
            engine,
            held,  # type: ignore[arg-type]
            incarnation=7,
            gradients_per_id=2,
            max_message_bytes=4096,
            holders=lambda: StreamHolders(lease_seconds=1.0, holders=self.holders, incarnations={}),
            open_peer=lambda address: Peer(self.taken, address == "dead"),
            open_engine=open_engine,
        )
        self.made.append(handler)
        return handler


@pytest.fixture
def handlers() -> Iterator[Handlers]:
    handlers = Handlers()
    yield handlers
    for handler in handlers.made:
        handler.drain()


def test_a_delivery_whose_answer_was_lost_is_acknowledged_though_its_partition_has_moved(
    cluster: Cluster, handlers: Handlers
) -> None:
    held = Held()
    handler = handlers.make(engine_on(cluster), held)
    assert handler.deliver(delivery(1), wait=True, sent_to="").account.received == IDS
    held.holds = False
    taken = handler.deliver(delivery(1), wait=True, sent_to="")
    assert taken.account.received == IDS and taken.process == "me#7"
    with pytest.raises(NotHolder):
        handler.deliver(delivery(2), wait=True, sent_to="")


def test_it_leaves_when_all_is_applied_and_another_has_its_account(cluster: Cluster, handlers: Handlers) -> None:
    held = Held()
    handler = handlers.make(engine_on(cluster), held)
    handler.deliver(delivery(1), wait=True, sent_to="")
    left = HandOver(name="image", process="gone#3", accounts={"fast": GearAccount(received=5, applied=5)})
    handler.by_request[HandOver](left, None)  # type: ignore[arg-type]
    state = handler.describe(["fast"])
    assert state.account == GearAccount(received=IDS + 5, waiting=IDS, applied=5) and state.taken_over == ("gone#3",)
    assert handler.describe(["slow"]).account == GearAccount()
    handler.drain()
    assert held.left and applied(cluster) == [1] * IDS
    done = GearAccount(received=IDS, applied=IDS)
    assert handlers.taken == {"me#7": {"fast": done}, "gone#3": {"fast": GearAccount(received=5, applied=5)}}


def test_a_delivery_under_way_is_applied_before_it_leaves(cluster: Cluster, handlers: Handlers) -> None:
    handlers.holders = ("me", "dead", None)  # in peace, though nobody takes its account
    engine, held = engine_on(cluster), Held()
    handler = handlers.make(engine, held)
    entered, go, add = threading.Event(), threading.Event(), engine.add

    def slow(given: Delivery) -> Any:
        entered.set()
        assert go.wait(30)
        return add(given)

    engine.add = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        delivering = pool.submit(handler.deliver, delivery(1), wait=False, sent_to="")
        assert entered.wait(30)
        draining = pool.submit(handler.drain)
        while held.holds:
            threading.Event().wait(0.001)
        go.set()
        delivering.result(30)
        draining.result(30)
    assert applied(cluster) == [1] * IDS and not handlers.taken


def test_it_leaves_although_its_module_fails(cluster: Cluster, handlers: Handlers) -> None:
    engine, held = engine_on(cluster), Held()
    handler = handlers.make(engine, held)
    handler.deliver(delivery(1), wait=False, sent_to="")

    def fail() -> None:
        raise RuntimeError("device lost")

    engine.flush = fail  # type: ignore[method-assign]
    handler.drain()
    assert held.left and not handlers.taken  # whoever took over its account would say forever that they wait


def test_what_is_refused_shuts_nobody_out(cluster: Cluster, handlers: Handlers) -> None:
    handler = handlers.make(engine_on(cluster), Held())
    with pytest.raises(NotHolder, match="this slow gear is me#7"):  # its predecessor may have counted it
        handler.deliver(delivery(1), wait=True, sent_to="me#6")
    assert handler.deliver(delivery(1), wait=True, sent_to="me#7").account.received == IDS


def test_it_tells_what_fast_gears_have_lost_with_others(cluster: Cluster, handlers: Handlers) -> None:
    handler = handlers.make(engine_on(cluster), Held())
    handler.deliver(delivery(1, lost=3), wait=False, sent_to="")
    handler.deliver(delivery(1, source="fast\t+1", lost=5), wait=False, sent_to="")
    handler.deliver(delivery(1, source="other"), wait=False, sent_to="")
    assert handler.describe([]).lost == {"fast": 5, "other": 0}


def test_one_that_lost_count_sends_fast_gears_elsewhere(
    cluster: Cluster, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = handlers.make(engine_on(cluster), Held())
    handler.require_whole()
    with monkeypatch.context() as patch:
        patch.setattr(BatchState, "_gather", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            handler.deliver(delivery(1), wait=False, sent_to="")
    for number in (1, 2):
        with pytest.raises(GearUnavailable, match="me#7 accepts no more gradients"):
            handler.deliver(delivery(number), wait=False, sent_to="")
    with pytest.raises(StaleClient, match="me#7 no longer knows its counts of gradients"):
        handler.require_whole()


def test_more_features_than_a_message_holds_are_refused_before_they_are_computed(
    cluster: Cluster, handlers: Handlers
) -> None:
    handler = handlers.make(engine_on(cluster), Held())
    with pytest.raises(MessageTooLarge, match="features of 200 ids"):
        handler.features(AskFeatures(name="image", ids=np.arange(200)))


def test_calls_that_meet_a_restore_together_go_back_once(cluster: Cluster, handlers: Handlers) -> None:
    first, opened = engine_on(cluster), []

    def open_another() -> DenseEngine:
        opened.append(engine_on(cluster))
        return opened[-1]

    handler = handlers.make(first, Held(), open_another)

    def fail(*_: Any) -> Any:
        handler._follow_restore(first)  # another call was faster
        raise TableNotFound("restored")

    first.features = fail  # type: ignore[method-assign]
    assert len(handler.features(AskFeatures(name="image", ids=np.arange(IDS))).vectors_KD) == IDS
    assert len(opened) == 1
