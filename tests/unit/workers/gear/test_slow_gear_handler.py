"""What a slow gear of the role does with deliveries that are repeated, with its end, and with what others have left."""

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
from geartrain.ams.gear.client.remote import heir_partition
from geartrain.ams.rpc.carrier import AttemptFailed, StreamHolders
from geartrain.ams.storage.kv.store import MemoryStore
from geartrain.ams.values.errors import GearUnavailable, NotHolder, ShardUnavailable, StaleClient, StoreUnavailable
from geartrain.ams.values.gear_messages import Delivery, GearAccount
from geartrain.ams.values.specs import Ids
from geartrain.bridge.gear.dense_pass import DensePass
from geartrain.bridge.gear.engine import DenseEngine
from geartrain.bridge.gear.factory import EngineSettings, open_engine, open_pass
from geartrain.bridge.gear.gradient_batcher import GradientBatcher
from geartrain.workers.gear.heirs import Heirs
from geartrain.workers.gear.slow_gear import SlowGearHandler

DIM, IDS = 2, 8
SETTINGS = EngineSettings(dim=DIM, optimizer=gt.SGD(1.0), reuse=True, gradients_per_id=2, reduction="sum")


def build() -> nn.Module:
    module = nn.Linear(IDS, DIM, bias=False)
    nn.init.zeros_(module.weight)
    return module


def dense_pass() -> DensePass:
    return open_pass(build, torch.eye(IDS), None, SETTINGS)


@pytest.fixture
def cluster() -> Iterator[gt.Cluster]:
    with gt.local() as made:
        yield made


def engine_on(cluster: gt.Cluster, store: MemoryStore | None = None) -> DenseEngine:
    if store is None:
        batcher = GradientBatcher(DIM, gradients_per_id=2, reduction="sum")
    else:
        batcher = GradientBatcher.restored(store, DIM, gradients_per_id=2, reduction="sum")
    return open_engine(cluster, "image", dense_pass(), batcher, SETTINGS, lambda: 0.0)


def applied(cluster: gt.Cluster) -> list[int]:
    """Gradients of ones that are in the weights, by id."""
    weights = cluster.table("image").pull(np.arange(1)).reshape(-1)[: DIM * IDS].reshape(DIM, IDS)
    return (-weights[0]).astype(int).tolist()


def delivery(sequence: int, ids: list[int] | None = None, source: str = "fast") -> Delivery:
    chosen = np.arange(IDS) if ids is None else np.array(ids)
    return Delivery(
        source=source,
        incarnation=1,
        sequence=sequence,
        ids=chosen,
        gradients_KD=np.ones((len(chosen), DIM), np.float32),
        versions=np.zeros(len(chosen), np.int64),
        lr=None,
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

    def leave(self) -> None:
        self.left = True


class Peer:
    """Takes accounts, unless it is dead."""

    def __init__(self, taken: dict[str, Mapping[str, GearAccount]], is_dead: bool) -> None:
        self._taken, self._is_dead = taken, is_dead

    def hand_over(self, name: str, former: str, accounts: Mapping[str, GearAccount], timeout_seconds: float) -> None:  # noqa: ARG002
        if self._is_dead:
            raise AttemptFailed("no answer")
        self._taken[former] = accounts

    def close(self) -> None:
        pass


class Handlers:
    """Makes handlers, and ends them."""

    def __init__(self) -> None:
        self.made: list[SlowGearHandler] = []
        self.taken: dict[str, Mapping[str, GearAccount]] = {}
        self.holders: tuple[str | None, ...] = ("me", "dead", "other")
        self.known: tuple[str, ...] = ()

    def make(self, engine: DenseEngine, held: Held, heirs: Heirs | None = None) -> SlowGearHandler:
        handler = SlowGearHandler(
            "image",
            "me",
            engine,
            held,  # type: ignore[arg-type]
            incarnation=7,
            gradients_per_id=2,
            holders=lambda: holders_of(*self.holders, known=self.known),
            open_peer=lambda address: Peer(self.taken, address == "dead"),
            heirs=heirs,
            survives=heirs is not None,
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
    cluster: gt.Cluster, handlers: Handlers
) -> None:
    held = Held()
    handler = handlers.make(engine_on(cluster), held)
    assert handler.deliver(delivery(1), wait=True, former="").account.received == IDS
    held.holds = False
    taken = handler.deliver(delivery(1), wait=True, former="")
    assert taken.account.received == IDS and taken.journal == "me#7"
    with pytest.raises(NotHolder):
        handler.deliver(delivery(2), wait=True, former="")


def test_it_leaves_when_all_is_applied_and_another_has_its_account(cluster: gt.Cluster, handlers: Handlers) -> None:
    held = Held()
    handler = handlers.make(engine_on(cluster), held)
    handler.deliver(delivery(1), wait=True, former="")
    handler.take_over("gone#3", {"fast": GearAccount(received=5, applied=5)})
    state = handler.describe(["fast"])
    assert state.account == GearAccount(received=IDS + 5, waiting=IDS, applied=5) and state.former == ("gone#3",)
    assert handler.describe(["slow"]).account == GearAccount()
    handler.drain()
    assert held.left and applied(cluster) == [1] * IDS
    done = GearAccount(received=IDS, applied=IDS)
    assert handlers.taken == {"me#7": {"fast": done}, "gone#3": {"fast": GearAccount(received=5, applied=5)}}


def test_it_leaves_in_peace_if_nobody_takes_its_account(cluster: gt.Cluster, handlers: Handlers) -> None:
    handlers.holders = ("me", "dead", None)
    held = Held()
    handler = handlers.make(engine_on(cluster), held)
    handler.deliver(delivery(1), wait=False, former="")
    handler.drain()
    assert held.left and applied(cluster) == [1] * IDS and not handlers.taken


def test_a_delivery_under_way_is_applied_before_it_leaves(cluster: gt.Cluster, handlers: Handlers) -> None:
    engine, held = engine_on(cluster), Held()
    handler = handlers.make(engine, held)
    entered, go, add = threading.Event(), threading.Event(), engine.add

    def slow(given: Delivery) -> Any:
        entered.set()
        assert go.wait(30)
        return add(given)

    engine.add = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        delivering = pool.submit(handler.deliver, delivery(1), wait=False, former="")
        assert entered.wait(30)
        draining = pool.submit(handler.drain)
        while held.holds:
            threading.Event().wait(0.001)
        go.set()
        delivering.result(30)
        draining.result(30)
    assert applied(cluster) == [1] * IDS


def test_it_leaves_although_its_module_fails(cluster: gt.Cluster, handlers: Handlers) -> None:
    engine, held = engine_on(cluster), Held()
    handler = handlers.make(engine, held)
    handler.deliver(delivery(1), wait=False, former="")

    def fail() -> None:
        raise RuntimeError("device lost")

    engine.flush = fail  # type: ignore[method-assign]
    handler.drain()
    assert held.left and not handlers.taken  # whoever took over its account would say forever that they wait


def test_another_process_refuses_what_its_predecessor_may_have_counted(cluster: gt.Cluster, handlers: Handlers) -> None:
    handler = handlers.make(engine_on(cluster), Held())
    with pytest.raises(NotHolder, match="this slow gear is me#7"):
        handler.deliver(delivery(1), wait=True, former="me#6")
    assert handler.deliver(delivery(1), wait=True, former="me#7").account.received == IDS


class Left:
    """Journals of slow gears that are gone."""

    def __init__(self, cluster: gt.Cluster) -> None:
        self.cluster = cluster
        self.stores: dict[str, MemoryStore] = {}
        self.opened: list[str] = []
        self.fails = self.used = 0

    def leave(self, address: str, sequence: int) -> None:
        """A slow gear takes a delivery, and dies."""
        engine = engine_on(self.cluster, self.stores.setdefault(address, MemoryStore()))
        engine.add(delivery(sequence))

    def open(self, address: str) -> tuple[MemoryStore, GradientBatcher]:
        self.opened.append(address)
        if self.fails:
            self.fails -= 1
            raise StoreUnavailable("no redis")
        store = self.stores[address]
        return store, GradientBatcher.restored(store, DIM, gradients_per_id=2, reduction="sum")

    def use(self, _: str, batcher: GradientBatcher, use: Callable[[DenseEngine], None]) -> None:
        self.used += 1
        use(open_engine(self.cluster, "image", dense_pass(), batcher, SETTINGS, lambda: 0.0))

    def heirs(self) -> Heirs:
        return Heirs("me", self.open, self.use)


def holders_of(*addresses: str | None, known: tuple[str, ...]) -> StreamHolders:
    return StreamHolders(lease_seconds=1.0, holders=addresses, incarnations=dict.fromkeys(known, 1))


ALL = frozenset(range(64))
SOME = {"known": ("me", "a", "b")}


@pytest.fixture
def left(cluster: gt.Cluster) -> Left:
    left = Left(cluster)
    for address in "ab":
        left.leave(address, 1)
    return left


def test_an_heir_applies_what_was_left_once_and_answers_for_it(cluster: gt.Cluster, left: Left) -> None:
    heirs = left.heirs()
    heirs.look(holders_of("me", "b", **SOME), ALL)
    assert heirs.former == ("a",) and applied(cluster) == [1] * IDS
    heirs.look(holders_of("me", "b", **SOME), ALL)
    assert left.opened == ["a"]
    assert heirs.account("fast") == GearAccount(received=IDS, applied=IDS) == heirs.account(None)
    heirs.deliver("a", delivery(1))  # what its owner had counted, but not acknowledged
    assert applied(cluster) == [1] * IDS and left.used == 1
    heirs.deliver("a", delivery(2))
    assert applied(cluster) == [2] * IDS and heirs.account("fast").received == 2 * IDS
    again = left.heirs()  # another heir, when nothing waits any more
    again.look(holders_of("me", "b", **SOME), ALL)
    assert left.used == 2 and again.account("fast") == heirs.account("fast")
    with pytest.raises(NotHolder, match="slow gear b left is not here"):
        heirs.deliver("b", delivery(2))


def test_an_heir_leaves_alone_who_is_back(cluster: gt.Cluster, handlers: Handlers, left: Left) -> None:
    handler = handlers.make(engine_on(cluster, MemoryStore()), Held(), left.heirs())
    handlers.holders = ("me", "a")
    with pytest.raises(NotHolder, match="a is back"):
        handler.deliver(delivery(1), wait=False, former="a")
    assert left.opened == []
    handlers.holders, handlers.known = ("me",), ("a",)
    handler.look_for_heritage()
    assert handler.deliver(delivery(2), wait=False, former="a").account.received == 2 * IDS
    state = handler.describe([])
    assert state.former == ("a",) and state.is_durable and state.journal == "me"


def test_only_the_holder_of_its_place_is_the_heir(left: Left) -> None:
    heirs = left.heirs()
    place = heir_partition("a")
    heirs.look(holders_of("me", **SOME), ALL - {place, heir_partition("b")})
    assert left.opened == []
    heirs.look(holders_of("me", **SOME), frozenset({place}))
    assert left.opened == ["a"]
    heirs.look(holders_of("me", **SOME), ALL - {place})
    assert "a" not in heirs.former  # another one has the place now


def test_it_gives_up_what_has_its_owner_again(left: Left) -> None:
    heirs = left.heirs()
    heirs.look(holders_of("me", **SOME), ALL)
    assert heirs.former == ("a", "b")
    heirs.look(holders_of("me", "a", **SOME), ALL)
    assert heirs.former == ("b",)
    with pytest.raises(NotHolder):
        heirs.deliver("a", delivery(2))


def test_an_heir_whose_predecessor_is_back_says_so(left: Left) -> None:
    heirs = left.heirs()
    heirs.look(holders_of("me", **SOME), ALL)

    def refuse(*_: Any) -> None:
        raise GearUnavailable("held by another process now")

    heirs._use_engine = refuse
    with pytest.raises(NotHolder, match="not here any more"):
        heirs.deliver("a", delivery(2))
    assert heirs.former == ("b",)


def test_what_cannot_be_taken_over_yet_is_tried_again(left: Left) -> None:
    heirs, left.fails = left.heirs(), 2
    heirs.look(holders_of("me", **SOME), ALL)
    assert heirs.former == ()
    heirs.look(holders_of("me", **SOME), ALL)
    assert heirs.former == ("a", "b")


def test_what_an_heir_could_not_apply_is_taken_over_again(cluster: gt.Cluster, left: Left) -> None:
    fails = [ShardUnavailable("shard 0 does not answer")]

    def use(address: str, batcher: GradientBatcher, work: Callable[[DenseEngine], None]) -> None:
        def and_fail(engine: DenseEngine) -> None:
            engine.flush = lambda: (_ for _ in ()).throw(fails.pop())  # type: ignore[method-assign]
            work(engine)

        left.use(address, batcher, and_fail if fails and applied(cluster) == [1] * IDS else work)

    heirs = Heirs("me", left.open, use)
    heirs.look(holders_of("me", "b", **SOME), ALL)
    with pytest.raises(ShardUnavailable):
        heirs.deliver("a", delivery(2))
    assert heirs.former == ()
    heirs.look(holders_of("me", "b", **SOME), ALL)
    assert heirs.account("fast") == GearAccount(received=2 * IDS, applied=2 * IDS)
    heirs.deliver("a", delivery(2))
    assert applied(cluster) == [2] * IDS


class Shut(MemoryStore):
    """A store that another process takes over."""

    is_shut = False

    def write(self, changes: Any) -> None:
        if self.is_shut:
            raise StaleClient("held by another process now")
        super().write(changes)


@pytest.mark.parametrize("then", [lambda e: e.add(delivery(2)), DenseEngine.flush], ids=["a delivery", "an update"])
def test_one_that_was_taken_over_knows_that_it_is_lost(cluster: gt.Cluster, then: Callable[[Any], Any]) -> None:
    store = Shut()
    engine = engine_on(cluster, store)
    engine._acknowledge = lambda _: None
    engine.add(delivery(1))
    store.is_shut = True
    with pytest.raises((NotHolder, GearUnavailable), match="held by another process"):
        then(engine)
    assert engine.lost == "held by another process now"
