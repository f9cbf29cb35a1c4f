"""Slow gears of the role, over gRPC: they train as one process would, share ids out, and leave in good order."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.gear.held_partitions import HeldPartitions
from geartrain.ams.rpc.client.gear import GrpcGearCarrier
from geartrain.ams.values.errors import (
    ConfigError,
    GearUnavailable,
    InvalidArgument,
    SampleDamaged,
    SampleNotFound,
    SpecMismatch,
    StaleClient,
    StoreUnavailable,
    TableNotFound,
)
from geartrain.ams.values.gear_messages import Delivery, GearState
from geartrain.bridge.gear.batch_state import BatchState
from geartrain.cli.main import build_app
from geartrain.launch.slowgear_role import SlowGearRole
from geartrain.workers.gear.handler import SlowGearHandler
from tests.integration.gear.gear_cluster import CLIENT, GearCluster, gear_cluster, gear_config
from tests.integration.gear.gear_part import DAMAGED, DIM, IDS, SAMPLES, build

NOW: dict[str, Any] = {"gradients_per_id": 1, "expire_seconds": 0.0}


@pytest.fixture
def gears() -> Iterator[GearCluster]:
    with gear_cluster() as cluster:
        yield cluster


def connected(gears: GearCluster, **settings: Any) -> Cluster:
    return gt.connect(gears.address, config=CLIENT.model_copy(update=settings))


def state_of(address: str, *sources: str) -> GearState:
    carrier = GrpcGearCarrier(address)
    try:
        return carrier.describe(sources, 10.0)()
    finally:
        carrier.close()


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(11)
    for _ in range(steps):
        yield torch.randint(IDS, (16,), generator=random), torch.randn(16, generator=random)


def fast_part() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(DIM, 1)


def test_two_slow_gears_in_sync_mode_train_as_one_process_would(gears: GearCluster) -> None:
    dense, fast = build().double(), fast_part().double()
    rule = torch.optim.SGD([*dense.parameters(), *fast.parameters()], 0.05)
    expected = []
    for ids, targets in batches(12):
        rule.zero_grad()
        loss = ((fast(dense(SAMPLES.double()[ids])).squeeze(-1) - targets) ** 2).mean()
        loss.backward()
        rule.step()
        expected.append(loss.item())
    for _ in range(2):
        gears.start_gear(**NOW)
    with connected(gears) as cluster:
        image = gt.SlowGear(cluster, "image", dim=DIM, mode="sync", **NOW)
        mine = fast_part()
        fast_rule, rows = torch.optim.SGD(mine.parameters(), 0.05), gt.RowOptimizer(image, lr=0.05)
        losses = []
        for ids, targets in batches(12):
            fast_rule.zero_grad()
            loss = ((mine(image(ids)).squeeze(-1) - targets) ** 2).mean()
            loss.backward()
            fast_rule.step()
            rows.step()
            losses.append(loss.item())
        account = image.account()
        image.close()
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert account.adds_up and account.applied == account.received > 0


def test_ids_are_shared_out_and_go_back_when_one_leaves(gears: GearCluster, capsys: Any) -> None:
    first, address_of_first = gears.start_gear()
    assert len(state_of(address_of_first).partitions) == 64
    second, two = gears.start_gear()
    with connected(gears) as cluster:
        image = gt.SlowGear(cluster, "image", dim=DIM, gradients_per_id=2)
        rows = gt.RowOptimizer(image)
        held = [set(state_of(address).partitions) for address in (address_of_first, two)]
        assert len(held[0]) == len(held[1]) == 32 and not held[0] & held[1]
        features = image(torch.arange(IDS))
        torch.testing.assert_close(features.detach(), build()(SAMPLES).detach())
        features.sum().backward()
        rows.step()
        account = image.account()
        assert (account.received, account.waiting, account.lost) == (IDS, IDS, 0)
        build_app(["status"])(["status", "--scheduler", gears.address], standalone_mode=False)
        shown = capsys.readouterr().out
        assert "slow gears of image" in shown and address_of_first in shown and two in shown
        build_app(["status"])(["status", "--scheduler", gears.address, "--json"], standalone_mode=False)
        told = json.loads(capsys.readouterr().out)["slow_gears"]
        assert [gear["account"]["waiting"] for gear in told] == [
            state_of(gear["address"]).account.waiting for gear in told
        ]
        first.stop(0)  # applies what waits there, and says so to the other
        image(torch.arange(IDS)).sum().backward()
        rows.step()
        account = image.account()
        assert account.adds_up and account.lost == 0 and account.received == 2 * IDS
        assert account.waiting + account.due + account.applied == 2 * IDS and account.applied >= IDS // 4
        assert len(state_of(two).partitions) == 64
        image.flush()
        assert image.account().applied == 2 * IDS
    second.stop(0)


def test_an_id_without_a_feature_is_named_over_the_wire(gears: GearCluster) -> None:
    gears.start_gear()
    with connected(gears) as cluster:
        image = gt.SlowGear(cluster, "image", dim=DIM)
        with pytest.raises(SampleNotFound, match=f"id {IDS} has no sample") as caught:
            image(torch.tensor([1, IDS, 2]))
        assert caught.value.ids == (IDS,)
        with pytest.raises(SampleDamaged, match="1000 cannot be read: OSError: no such file"):
            image(torch.tensor([DAMAGED]))
        image.on_missing = "zeros"
        features = image(torch.tensor([1, IDS, 2]))
        assert features[0].any() and not features[1].any() and features[2].any()


def test_a_fast_gear_that_comes_back_is_no_double(gears: GearCluster) -> None:
    _, address = gears.start_gear(gradients_per_id=100)
    ids = torch.arange(10)

    def one_step(cluster: Cluster, step: int) -> gt.SlowGear:
        image = gt.SlowGear(cluster, "image", dim=DIM)
        image.row_update.step = step
        rows = gt.RowOptimizer(image)
        image(ids).sum().backward()
        rows.step()
        return image

    with gt.connect(gears.address, config=CLIENT, stream="job/fast0", incarnation=1) as cluster:
        before = one_step(cluster, 4)
        with gt.connect(gears.address, config=CLIENT, stream="job/fast0", incarnation=2) as again:
            image = one_step(again, 4)  # it does not know whether its last step arrived
            assert image.account().received == 10
            assert one_step(again, 5).account().received == 20
            rows = gt.RowOptimizer(before)
            before(ids).sum().backward()
            with pytest.raises(StaleClient, match="superseded by 2"):
                rows.step()
    assert state_of(address).account.received == 20


def test_the_cache_of_the_slow_gears_serves_what_is_fresh_enough(gears: GearCluster) -> None:
    _, address = gears.start_gear(expire_seconds=3600.0)
    with connected(gears) as cluster:
        gt.SlowGear(cluster, "image", dim=DIM, expire_seconds=3600.0)(torch.arange(8))
        gt.SlowGear(cluster, "image", dim=DIM, expire_seconds=3600.0)(torch.arange(8))
        assert state_of(address).cache_hits == 8
        fresh = gt.SlowGear(cluster, "image", dim=DIM, expire_seconds=0.0)
        times = fresh._port.features(np.arange(8)).times
        again = fresh._port.features(np.arange(8)).times
        assert (again > times).all()  # whoever wants it new gets it new


def test_what_does_not_fit_is_refused(gears: GearCluster) -> None:
    with connected(gears, recovery_timeout_seconds=0.0) as cluster:
        with pytest.raises(GearUnavailable, match="geartrain slowgear"):
            gt.SlowGear(cluster, "image", dim=DIM)
        _, address = gears.start_gear()
        with pytest.raises(InvalidArgument, match=r"dim is 5.* width 4"):
            gt.SlowGear(cluster, "image", dim=5)
        with pytest.raises(SpecMismatch):
            gears.start_gear(optimizer="adam:0.1")
        with pytest.raises(SpecMismatch, match=r"dim is 5.* width 4: .*--dim 4"):
            gears.start_gear(dim=5)
        assert set(cluster.streams("gear/image", worker="test").holders().holders) <= {address, None}
    for settings, complaint in (
        ({"name": None}, "which name"),
        ({"module": "tests.integration.gear.gear_part:DIM"}, "must be a function"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            SlowGearRole(gear_config(gears.address, **settings), CLIENT)


def test_a_port_that_changes_would_lose_gradients_on_a_shared_server(
    gears: GearCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StoreUnavailable):  # there is no server
        gears.start_gear(store="redis://127.0.0.1:1/0")
    [said] = [line for line in caplog.messages if "give --listen or --advertise a port that stays" in line]
    assert "listen is '127.0.0.1:0'" in said and "redis://127.0.0.1:1/0" in said
    caplog.clear()
    with pytest.raises(StoreUnavailable):
        gears.start_gear(store="redis://127.0.0.1:1/0", advertise="127.0.0.1:7171")
    assert not any("a port that stays" in line for line in caplog.messages)


def test_flush_before_a_snapshot_puts_all_gradients_into_it(
    gears: GearCluster, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    role, _ = gears.start_gear(gradients_per_id=8)
    with connected(gears) as cluster:
        image = gt.SlowGear(cluster, "image", dim=DIM, expire_seconds=0.0)
        rows = gt.RowOptimizer(image)
        first = image(torch.arange(IDS)).detach()
        image(torch.arange(IDS)).sum().backward()
        rows.step()
        assert torch.equal(image(torch.arange(IDS)).detach(), first)
        image.flush()
        trained = image(torch.arange(IDS)).detach()
        assert not torch.equal(trained, first)
        taken = cluster.snapshot(tmp_path).result()
        image(torch.arange(IDS)).sum().backward()
        rows.step()
        image.flush()
        cluster.restore(taken, replace=True)
        torch.testing.assert_close(image(torch.arange(IDS)).detach(), trained)  # the slow gear went back by itself
        assert "dense table 'image' was restored: its slow gear goes on from there" in caplog.text
        late = Delivery(
            source="late",
            incarnation=1,
            sequence=1,
            ids=np.arange(1),
            gradients_KD=np.ones((1, DIM), np.float32),
            versions=np.zeros(1, np.int64),
            lr=None,
            table_incarnation=1,
        )
        assert role._handler is not None
        with pytest.raises(TableNotFound, match=r"'image' from before a restore; compute them anew"):
            role._handler.deliver(late, wait=False, sent_to="")
        image(torch.arange(IDS)).sum().backward()
        rows.step()
        image.flush()
        assert not torch.equal(image(torch.arange(IDS)).detach(), trained)
        assert image.account().applied == image.account().received == IDS


def test_one_that_lost_count_leaves_its_ids_to_others(gears: GearCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    torn, _ = gears.start_gear(**NOW)
    with connected(gears) as cluster:
        image = gt.SlowGear(cluster, "image", dim=DIM, gradients_per_id=1, expire_seconds=0.0, mode="sync")
        rows = gt.RowOptimizer(image)
        with monkeypatch.context() as patch:
            patch.setattr(BatchState, "waiting_ids", lambda *_: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                torn._flush()
        assert torn.wait(20) and "no longer knows its counts of gradients" in str(torn.stop_reason)
        gears.start_gear(**NOW)
        torn.stop(0)
        image(torch.tensor([1, 2])).sum().backward()
        rows.step()
        assert image.account().applied == 2


def test_its_lease_goes_on_while_it_goes_back(gears: GearCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    going_back, go_on, ticks = threading.Event(), threading.Event(), threading.Semaphore(0)
    tick = HeldPartitions.tick

    def go_back(_: SlowGearHandler) -> None:
        going_back.set()
        assert go_on.wait(30)

    def counted(partitions: HeldPartitions) -> None:
        tick(partitions)
        if going_back.is_set():
            ticks.release()

    monkeypatch.setattr(SlowGearHandler, "follow_restore", go_back)
    monkeypatch.setattr(HeldPartitions, "tick", counted)
    gears.start_gear()
    try:
        assert going_back.wait(20)
        assert all(ticks.acquire(timeout=10) for _ in range(3))
    finally:
        go_on.set()
