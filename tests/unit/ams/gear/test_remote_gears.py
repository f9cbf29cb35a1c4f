"""How a fast gear finds its slow gears, and what it sends again, to whom and under which name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from geartrain.ams.gear.client.remote import RemoteGears
from geartrain.ams.gear.partitions import NUM_PARTITIONS, partitions_of
from geartrain.ams.rpc.carrier import AttemptFailed, NotSent
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import GearUnavailable, InvalidArgument, NonFinite, NotHolder
from geartrain.ams.values.gear_messages import (
    Delivery,
    DeliveryAck,
    FeatureReply,
    Freshness,
    GearAccount,
    GearState,
    family_of,
    process_at,
)
from geartrain.ams.values.scheduler_messages import StreamHolders
from geartrain.ams.values.specs import Ids

DIM = 2
IDS = np.arange(200)


class Gears:
    """Slow gears that live in this test: which partitions each holds, and what each was given."""

    def __init__(self, *addresses: str) -> None:
        self.holders: list[str | None] = [addresses[part % len(addresses)] for part in range(NUM_PARTITIONS)]
        self.given: dict[str, dict[tuple[str, int], list[int]]] = defaultdict(dict)
        self.calls: list[tuple[str, str, str]] = []
        self.dead: set[str] = set()
        self.leaves_unanswered: set[str] = set()
        self.heard_lost: dict[str, int] = {}
        self.incarnations = dict.fromkeys(addresses, 1)
        self.on_look: Callable[[], None] = lambda: None

    def look(self) -> StreamHolders:
        self.on_look()
        return StreamHolders(lease_seconds=0.01, holders=tuple(self.holders), incarnations=dict(self.incarnations))

    def move(self, address: str, *others: str) -> None:
        places = [part for part, holder in enumerate(self.holders) if holder == address]
        for nth, part in enumerate(places):
            self.holders[part] = others[nth % len(others)]

    def account(self, address: str) -> GearAccount:
        received = sum(len(ids) for ids in self.given[address].values())
        return GearAccount(received=received, waiting=received)

    def restart(self, address: str) -> None:
        """Another process at the same address: what was in memory is gone."""
        self.incarnations[address] += 1
        self.dead.discard(address)
        self.given[address].clear()

    def process(self, address: str) -> str:
        return process_at(address, self.incarnations.get(address, 1))

    def counts(self) -> list[int]:
        """How often each id was counted."""
        every = [number for given in self.given.values() for ids in given.values() for number in ids]
        return np.bincount(every, minlength=len(IDS)).tolist()

    def carrier(self, address: str, on_wait: Callable[[], None]) -> Any:  # noqa: ARG002
        return _Carrier(self, address)


class _Carrier:
    def __init__(self, gears: Gears, address: str) -> None:
        self._gears, self._address = gears, address

    def _answers(self) -> None:
        if self._address in self._gears.dead:
            raise NotSent(f"{self._address} does not answer")

    def _require(self, ids: Ids) -> None:
        for part in partitions_of(ids):
            if self._gears.holders[part] != self._address:
                raise NotHolder(f"partition {part} is not here")

    def features(self, name: str, ids: Ids, dim: int, freshness: Freshness, timeout: float) -> Any:  # noqa: ARG002
        def answer() -> FeatureReply:
            self._answers()
            self._require(ids)
            vectors = np.repeat(ids[:, None], dim, axis=1).astype(np.float32)
            stamps = np.ones(len(ids))
            return FeatureReply(
                vectors_KD=vectors, versions=stamps.astype(np.int64), times=stamps, failures={}, dense_version=7
            )

        return answer

    def deliver(self, name: str, delivery: Delivery, *, wait: bool, sent_to: str, timeout_seconds: float) -> Any:  # noqa: ARG002
        def answer() -> DeliveryAck:
            gears = self._gears
            gears.calls.append((self._address, delivery.source, sent_to))
            gears.heard_lost[self._address] = delivery.lost
            self._answers()
            if sent_to not in ("", gears.process(self._address)):
                raise NotHolder("another process")
            key = delivery.source, delivery.sequence
            is_repeat = key in gears.given[self._address]
            if not is_repeat:
                self._require(delivery.ids)
                gears.given[self._address][key] = delivery.ids.tolist()
            if self._address in gears.leaves_unanswered:
                gears.leaves_unanswered.discard(self._address)
                gears.dead.add(self._address)
                raise AttemptFailed(f"{self._address} died before it answered")
            account, told = gears.account(self._address), gears.process(self._address)
            return DeliveryAck(account=account, dense_version=8, process=told, is_repeat=is_repeat)

        return answer

    def flush(self, name: str, timeout_seconds: float) -> Any:  # noqa: ARG002
        def answer() -> int:
            self._answers()
            return 9

        return answer

    def describe(self, sources: Any, timeout_seconds: float) -> Any:  # noqa: ARG002
        def answer() -> GearState:
            self._answers()
            gears = self._gears
            return GearState(
                name="image",
                dim=DIM,
                address=self._address,
                process=gears.process(self._address),
                partitions=(),
                dense_version=5,
                cache_hits=0,
                cache_misses=0,
                queued_ids=0,
                account=gears.account(self._address),
                uptime_seconds=0.0,
            )

        return answer

    def close(self) -> None:
        pass


def remote(gears: Gears, *, dim: int = DIM, recovery: float = 20.0, **settings: Any) -> RemoteGears:
    config = ClientConfig(recovery_timeout_seconds=recovery, **settings)
    return RemoteGears("image", dim, gears.look, gears.carrier, config, wait=False, freshness=Freshness())


def delivery(sequence: int, ids: Ids = IDS) -> Delivery:
    return Delivery(
        source="fast",
        incarnation=1,
        sequence=sequence,
        ids=ids,
        gradients_KD=np.ones((len(ids), DIM), np.float32),
        versions=np.zeros(len(ids), np.int64),
        lr=None,
    )


def test_requests_go_to_the_holders_of_their_ids_and_come_back_in_order() -> None:
    gears = Gears("a", "b", "c")
    port = remote(gears)
    reply = port.features(IDS[::-1])
    assert reply.vectors_KD[:, 0].tolist() == IDS[::-1].tolist() and port.dense_version == 7
    port.deliver(delivery(1))
    assert gears.counts() == [1] * len(IDS)
    assert {source for _, source, _ in gears.calls} == {"fast"} and len(gears.calls) == 3
    port.flush()
    assert port.dense_version == 9


def test_a_process_that_repeats_the_steps_of_another_is_told(caplog: pytest.LogCaptureFixture) -> None:
    gears = Gears("a")
    remote(gears).deliver(delivery(1))
    assert "counted before" not in caplog.text
    remote(gears).deliver(delivery(1))
    assert "delivery 1 of 'fast' is a duplicate" in caplog.text


def test_a_large_delivery_travels_in_several_messages_with_names_of_their_own() -> None:
    gears = Gears("a")
    ids = np.arange(3 * 2048)
    port = remote(gears, part_bytes=64 << 10)
    port.deliver(delivery(1, ids))
    port.deliver(delivery(2, ids))
    sources = {source for _, source, _ in gears.calls}
    assert sources == {"fast", "fast\t+1", "fast\t+2"} and {family_of(source) for source in sources} == {"fast"}
    assert sum(map(len, gears.given["a"].values())) == 2 * len(ids)


def test_who_moved_is_found_again() -> None:
    gears = Gears("a", "b")
    port = remote(gears)
    gears.move("b", "a", "c")
    assert port.features(IDS).vectors_KD[:, 0].tolist() == IDS.tolist()
    gears.move("a", "b", "c")
    port.deliver(delivery(1))
    assert gears.counts() == [1] * len(IDS)


def test_what_nobody_held_is_not_mistaken_for_what_its_new_holder_has() -> None:
    gears = Gears("a", "b", "c")
    port = remote(gears)
    gears.holders = [None if holder in "bc" else holder for holder in gears.holders]
    port.account("fast")  # it has heard of that
    looks: list[int] = []

    def on_look() -> None:  # some are taken now, some later
        looks.append(1)
        for nth in range(10):
            if None in gears.holders:
                gears.holders[gears.holders.index(None)] = "ab"[nth % 2]

    gears.on_look = on_look
    port.deliver(delivery(1))
    port.deliver(delivery(2))
    assert gears.counts() == [2] * len(IDS) and len(looks) > 3


def test_one_that_lost_the_answer_but_lives_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    gears = Gears("a", "b")
    port = remote(gears)
    gears.leaves_unanswered.add("b")

    def on_look() -> None:  # the network is back, and a partition has moved
        gears.dead.clear()
        gears.holders[gears.holders.index("b")] = "a"

    gears.on_look = on_look
    port.deliver(delivery(1))
    assert "counted before" not in caplog.text
    assert gears.counts() == [1] * len(IDS)
    assert [call for call in gears.calls if call[0] == "b"] == [("b", "fast", ""), ("b", "fast", "b#1")]


def test_one_that_died_before_it_counted_is_replaced() -> None:
    gears = Gears("a", "b", "c")
    port = remote(gears)
    gears.dead.add("b")
    port.deliver(delivery(1, IDS[partitions_of(IDS) % 3 != 1]))
    gears.on_look = lambda: gears.move("b", "a", "c")
    account = port.deliver(delivery(2))
    second = [key for given in gears.given.values() for key in given if key[1] == 2]
    assert sorted(second) == [("fast", 2), ("fast", 2), ("fast\t@b", 2), ("fast\t@b", 2)]
    counts = np.array(gears.counts()) - (partitions_of(IDS) % 3 != 1)
    assert counts.tolist() == [1] * len(IDS) and account.adds_up


def test_after_an_error_the_same_delivery_goes_on_where_it_stopped() -> None:
    gears = Gears("a", "b")
    port = remote(gears, recovery=0.0)
    gears.dead.add("b")
    with pytest.raises(GearUnavailable, match=r"'image'.*b does not answer.*recovery_timeout_seconds"):
        port.deliver(delivery(1))
    gears.dead.clear()
    port.deliver(delivery(1))
    assert gears.counts() == [1] * len(IDS)
    assert [address for address, _, _ in gears.calls].count("a") == 1


def test_an_error_of_the_slow_gear_is_the_callers() -> None:
    gears = Gears("a")
    port = remote(gears)

    def refuse(*_: Any, **__: Any) -> Any:
        raise NonFinite("the gradients of 1 of 3 ids are not finite")

    port._carriers["a"].deliver = refuse  # type: ignore[method-assign]
    with pytest.raises(NonFinite):
        port.deliver(delivery(1))


def test_after_a_restore_the_dense_version_is_the_lower_one() -> None:
    gears = Gears("a", "b")
    port = remote(gears)
    port.features(IDS)
    assert port.dense_version == 7
    port.account("fast")  # they say 5 now
    assert port.dense_version == 5


def test_no_slow_gear_or_one_of_another_width_is_named() -> None:
    gears = Gears("a")
    gears.holders[3] = None
    with pytest.raises(GearUnavailable, match="geartrain slowgear"):
        remote(gears, recovery=0.0)
    with pytest.raises(InvalidArgument, match=r"dim is 3.*width 2"):
        remote(Gears("a"), dim=3)


def test_what_a_dead_one_held_is_lost_and_the_account_adds_up() -> None:
    gears = Gears("a", "b")
    port = remote(gears)
    port.deliver(delivery(1))
    held = len(gears.given["b"]["fast", 1])
    gears.dead.add("b")
    gears.move("b", "a")
    account = port.account("fast")
    assert account.lost == held and account.received == len(IDS) and account.adds_up


def test_what_died_in_memory_without_an_answer_is_given_up_and_not_counted_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gears = Gears("a", "b", "c")
    port = remote(gears)
    gears.leaves_unanswered.add("b")
    gears.on_look = lambda: gears.move("b", "a", "c") if "b" in gears.dead else None
    account = port.deliver(delivery(1))
    theirs = int((partitions_of(IDS) % 3 == 1).sum())
    assert gears.counts() == [1] * len(IDS)  # b had counted its part
    assert account.lost == theirs and account.received == len(IDS) and account.adds_up
    assert f"gone: {theirs} gradients of a delivery" in caplog.text
    port.deliver(delivery(2))
    assert gears.counts() == [2] * len(IDS) and port.account("fast").lost == theirs
    assert gears.heard_lost == {"a": theirs, "b": 0, "c": theirs}


def test_another_process_at_the_same_address_refuses_what_its_predecessor_may_have_counted() -> None:
    gears = Gears("a", "b")
    port = remote(gears)
    gears.leaves_unanswered.add("b")
    looks = [0]

    def on_look() -> None:
        looks[0] += 1
        if looks[0] == 1:  # the scheduler is slower than the new process
            gears.dead.clear()
        else:
            gears.incarnations["b"] = 2

    plain = gears.process
    gears.process = lambda number: "b#2" if number == "b" else plain(number)  # type: ignore[method-assign]
    gears.on_look = on_look
    account = port.deliver(delivery(1))
    assert [sent_to for address, _, sent_to in gears.calls if address == "b"] == ["", "b#1"]
    assert account.lost == int((partitions_of(IDS) % 2 == 1).sum())
