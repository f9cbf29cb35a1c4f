"""Tables whose rows expire: by their clock and on command, over every carrier."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.client.rows import table_plan
from geartrain.ams.client.table import Table
from geartrain.ams.server.freeze.dedup import held_dedup, restore_clocks
from geartrain.ams.server.shard import Shard
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values import errors
from geartrain.ams.values.expiry.rules import Expiry, RowBlock, Rule, SmallerThan, Unseen, expiry_rule
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.shard_messages import BatchFacts, CallContext, CreateTable
from geartrain.ams.values.specs import Constant, TableSpec
from geartrain.bridge.embedding import hosted_bags
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.cli.main import build_app
from tests.integration.conftest import ServedCluster, over_few_carriers

DIM = 4


def push(
    table: Table, ids: Sequence[int] | np.ndarray, *, step: int | None = None, seconds: float = 0.0, value: float = 1.0
) -> None:
    gradients = np.full((len(ids), DIM), value, np.float32)
    table.push(np.array(ids), gradients, step=step, unix_seconds=seconds)


def there(table: Table, ids: range) -> list[int]:
    present = table.present(np.array(ids))
    return [i for i, is_there in zip(ids, present.tolist(), strict=True) if is_there]


def expired(cluster: Cluster) -> int:
    return cluster.status().tables[0].expired


def wait_for(cluster: Cluster, number: int) -> None:
    """Shards look for rows between requests: until they have."""
    deadline = time.monotonic() + 30
    while expired(cluster) < number:
        assert time.monotonic() < deadline, f"{expired(cluster)} rows of {number} have gone"
        time.sleep(0.005)
    assert expired(cluster) == number


@pytest.mark.parametrize("num_rows", [None, 1000])
def test_rows_that_nobody_pushed_for_so_many_steps_go(cluster: Cluster, num_rows: int | None) -> None:
    table = cluster.create_table(
        "t", dim=DIM, optimizer=SGD(0.1), num_rows=num_rows, expiry=Unseen(steps=10, every=5), initializer=Constant(2.0)
    )
    every = range(200)
    push(table, every, step=0)
    for step in range(1, 10):
        push(table, range(step * 20, 200), step=step)  # shards' clocks go on by what they get
    assert expired(cluster) == 0
    for step in range(10, 16):
        push(table, range(100, 200), step=step)
    wait_for(cluster, 80 + 20)  # last seen at steps 0 to 4
    assert there(table, every) == list(range(100, 200))
    np.testing.assert_array_equal(table.pull(np.arange(100)), np.full((100, DIM), 2, np.float32))
    status = cluster.status().tables[0]
    assert (status.rows, status.expired, status.evicted) == (100, 100, 0)
    push(table, range(10), step=15)
    assert there(table, range(20)) == list(range(10)), "they come back"


def test_rows_go_by_the_time_that_pushes_say(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=Unseen(seconds=3600))
    push(table, range(100), seconds=1e9)
    push(table, range(50, 100), seconds=1e9 + 3000)
    push(table, range(90, 200), seconds=1e9 + 4000)
    wait_for(cluster, 50)
    assert there(table, range(200)) == list(range(50, 200))


def test_rows_of_a_worker_that_joined_later_are_as_new_as_those_of_the_first(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=Unseen(steps=500, every=100))
    for step in range(10_000, 10_700, 10):
        push(table, range(100), step=step)
        push(table, range(100, 200), step=step - 10_000)
    assert table.expire() == (200, 0)
    push(table, range(100), step=10_700)
    assert there(table, range(200)) == list(range(200))
    assert expired(cluster) == 0


HOUR = 3600
DAY = 24 * HOUR


@pytest.mark.parametrize("wrong", [lambda now: 1000 * now, lambda now: now + 40 * DAY], ids=["millis", "40 days"])
def test_a_time_that_has_not_come_yet_is_refused(cluster: Cluster, wrong: Callable[[float], float]) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=Unseen(seconds=30 * DAY))
    push(table, range(100), seconds=time.time() + 60)
    with pytest.raises(errors.InvalidArgument, match=r"unix_seconds is .*time\.time\(\)"):
        push(table, range(100), seconds=wrong(time.time()))
    push(table, range(100, 200), seconds=time.time() + 60)
    assert there(table, range(200)) == list(range(200))


def test_a_shard_refuses_a_time_that_its_own_clock_has_not_come_to(cluster: Cluster, monkeypatch: Any) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=Unseen(seconds=30 * DAY))
    fields = EmbeddingGroup(
        cluster, "m", [Field("item", dim=DIM, expiry=Unseen(seconds=30 * DAY), where="hosted")], optimizer=SGD(0.1)
    )
    rows = RowOptimizer(fields)
    now = time.time()
    monkeypatch.setattr(table_plan, "time", SimpleNamespace(time=lambda: now + 40 * DAY))
    monkeypatch.setattr(hosted_bags, "time", SimpleNamespace(time=lambda: now + 40 * DAY))
    with pytest.raises(errors.InvalidArgument, match=r"unix_seconds is .*clock of"):
        table.push(np.arange(100), np.ones((100, DIM), np.float32))
    fields({"item": torch.arange(10).reshape(2, 5)})["item"].sum().backward()
    with pytest.raises(errors.InvalidArgument, match=r"unix_seconds is .*clock of"):
        rows.step()
    monkeypatch.undo()
    rows.zero_grad()
    table.push(np.arange(100), np.ones((100, DIM), np.float32))
    assert [table.rows for table in cluster.status().tables] == [100, 0]


def test_a_leap_of_the_clock_takes_no_table(caplog: pytest.LogCaptureFixture) -> None:
    now = time.time()
    with local(2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=Unseen(seconds=DAY))
        push(table, range(1000), seconds=now - 60 * DAY)
        push(table, range(100), seconds=now)  # the job stood still for two months
        assert cluster.status().tables[0].rows == 1000
        assert "geartrain table expire t" in caplog.text
        for hours in range(1, 30):
            push(table, range(100, 300), seconds=now - 30 * HOUR + hours * HOUR)
        assert cluster.status().tables[0].rows == 1000
        assert table.expire(dry_run=True) == (1000, 700)
        for _ in range(3):
            assert cluster.status().tables[0].rows == 1000
        assert table.expire() == (1000, 700)
        assert there(table, range(1000)) == list(range(300))


def test_a_leap_of_the_clock_takes_rows_once_most_are_pushed_again() -> None:
    with local(1) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=Unseen(steps=10, every=10))
        push(table, range(1000), step=1)
        for step in range(1_000_001, 1_000_041):
            push(table, range(499), step=step)
        assert cluster.status().tables[0].rows == 1000
        for step in range(1_000_041, 1_000_061):
            push(table, range(500), step=step)
        wait_for(cluster, 500)
        for step in range(1_000_061, 1_000_081):  # and from then on as ever
            push(table, range(50), step=step)
        wait_for(cluster, 950)


def test_rows_go_from_a_table_that_is_pushed_at_few_steps_though_most_are_old() -> None:
    with local(1) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=Unseen(steps=100, every=10))
        push(table, range(1000), step=1)
        for step in range(20, 200, 20):
            push(table, range(1000, 1010), step=step)
        wait_for(cluster, 1000)


@pytest.mark.parametrize("rule", [Unseen(seconds=DAY), Rule(f"unseen_seconds > {DAY}", every=1)])
def test_an_old_snapshot_keeps_its_rows_when_training_goes_on(tmp_path: Path, rule: Expiry) -> None:
    now = time.time()
    with local(2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=rule)
        push(table, range(1000), seconds=now - 60 * DAY, step=3)
        path = cluster.snapshot(tmp_path, "s").result(60)
    with local(3) as cluster:
        cluster.restore(path)
        push(cluster.table("t"), range(100), seconds=now, step=4)
        for _ in range(3):
            assert cluster.status().tables[0].rows == 1000


def test_a_snapshot_of_a_time_that_has_not_come_yet_goes_on_at_the_present() -> None:
    table = RowTable(TableSpec(name="t", dim=1, optimizer=SGD(0.1), expiry=Unseen(seconds=DAY)), np.arange(4096))
    restore_clocks([{"clocks": {"t": (7, 2**32 - 1)}}], {"t": table})
    assert table.clock.step == 7
    assert abs(table.clock.seconds - time.time()) < 2 * HOUR


def test_rows_that_were_never_watched_are_as_new_as_the_latest_of_several_shards() -> None:
    table = RowTable(TableSpec(name="t", dim=1, optimizer=SGD(0.1)), np.arange(4096))
    table.assign(np.arange(3), np.ones((3, 1), np.float32))
    table.alter(replace(table.spec, expiry=Unseen(steps=1000), altered=1))
    clocks: list[dict[str, Any]] = [{"clocks": {"t": (step, 0)}} for step in (0, 10, 1_000_000)]
    restore_clocks([{**clocks[0], "undated": ["t"]}, *clocks[1:]], {"t": table})
    _, lives, _ = table.read_lives(0, 10)
    assert lives is not None and lives["step"].tolist() == [1_000_000] * 3


@expiry_rule
def even_ids(rows: RowBlock) -> np.ndarray:
    """A user's own rule."""
    return rows.ids % 2 == 0


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (Unseen(steps=3), range(30, 60)),
        (SmallerThan(0.5), range(10, 60)),
        (Rule("unseen_steps > 3 and count < 2"), [*range(20, 60)]),
        (Rule(f"{__name__}:even_ids"), range(1, 60, 2)),
    ],
)
def test_rows_go_on_command(rule: Expiry, left: range | list[int]) -> None:
    with local(2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(1.0), max_bytes=1 << 20, initializer=Constant(0.0))
        push(table, range(10), value=0.01, step=1)
        push(table, range(10, 30), step=1)
        push(table, range(20, 60), step=2)
        push(table, range(30, 60), step=6)
        versions = table.versions()
        gone = 60 - len(left)
        assert table.expire(rule, dry_run=True) == (60, gone)
        assert (table.versions(), expired(cluster)) == (versions, 0)
        heard: list[tuple[int, int]] = []
        assert table.expire(rule, progress=heard.append) == (60, gone)
        assert heard[-1] == (60, gone)
        assert there(table, range(60)) == list(left)
        assert expired(cluster) == gone
        assert table.versions() != versions
        assert table.expire(rule) == (60 - gone, 0)


def test_a_table_is_asked_only_for_what_it_knows(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1))
    push(table, range(10))
    with pytest.raises(errors.InvalidArgument, match=r"'t' has no expiry rule.*--unseen-steps"):
        table.expire()
    with pytest.raises(errors.InvalidArgument, match="does not record when and how often its rows are pushed"):
        table.expire(Unseen(steps=3))
    with pytest.raises(errors.InvalidArgument, match=r"rule no.such:rule is not known here.*server\.rule_modules"):
        table.expire(Rule("no.such:rule"))
    with pytest.raises(errors.InvalidArgument, match=r"rule no.such:rule is not known here.*server\.rule_modules"):
        cluster.create_table("u", dim=DIM, optimizer=SGD(0.1), expiry=Rule("no.such:rule"))
    assert table.expire(SmallerThan(1e-9)).expired == 0


def test_nobody_waits_for_more_than_a_block() -> None:
    shard = Shard(0, np.arange(4096), incarnation=1)
    try:
        spec = TableSpec(name="t", dim=1, optimizer=SGD(0.1), expiry=Unseen(steps=1, every=2))
        shard.run(CallContext(), CreateTable(spec=spec)).result()
        with shard.engine.turn:  # what the shard's own thread would do meanwhile waits
            table = shard._tables.find("t")
            for step in (0, 2):
                ids = np.arange(20_000) + 20_000 * step
                table.rows.push(ids, np.ones((20_000, 1), np.float32), batch=BatchFacts(step=step))
            assert shard._expiry.next_deadline() == 0, "it is due, and at once"
            left = [table.rows.num_present]
            while shard._expiry.next_deadline() is not None:
                shard._expiry.scan()
                left.append(table.rows.num_present)
        assert left == [40_000, 40_000 - 8_192, 40_000 - 2 * 8_192, 20_000, 20_000, 20_000]
    finally:
        shard.close()


def test_a_table_that_is_always_due_keeps_no_other_from_expiring() -> None:
    shard = Shard(0, np.arange(4096), incarnation=1)
    try:
        for name in ("large", "small"):
            spec = TableSpec(name=name, dim=1, optimizer=SGD(0.1), expiry=Unseen(steps=2, every=1))
            shard.run(CallContext(), CreateTable(spec=spec)).result()
        with shard.engine.turn:
            large, small = (shard._tables.find(name).rows for name in ("large", "small"))
            for table, ids in ((large, np.arange(30_000)), (small, np.arange(10))):
                table.push(ids, np.zeros((len(ids), 1), np.float32), batch=BatchFacts(step=0))
            for step in range(1, 9):
                for table in (large, small):
                    table.push(np.array([0]), np.zeros((1, 1), np.float32), batch=BatchFacts(step=step))
                shard._expiry.scan()
        assert small.num_present == 1
    finally:
        shard.close()


def test_a_rule_that_fails_is_given_up_and_the_shard_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with local(1) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=Rule(f"{__name__}:failing", every=1))
        push(table, range(10), step=1)
        assert cluster.status().tables[0].rows == 10
        assert "expiry of table 't' failed; retrying when it is next due" in caplog.text
        with pytest.raises(errors.InvalidArgument, match=r"expiry of table 't' failed: ZeroDivisionError"):
            table.expire()


@expiry_rule
def failing(rows: RowBlock) -> np.ndarray:
    """A rule with a defect."""
    return rows.ids > 1 / 0


@pytest.mark.parametrize("rule", [Unseen(steps=10), Unseen(seconds=60.0)])
def test_the_last_step_that_there_can_be_ends_no_shard(cluster: Cluster, rule: Expiry) -> None:
    table = cluster.create_table("t", dim=2, optimizer=SGD(1.0), expiry=rule)
    for _ in range(2):
        table.push(np.arange(20), np.ones((20, 2), np.float32), step=2**62, unix_seconds=1e9)
        with pytest.raises(errors.InvalidArgument, match=r"step is 4611686018427387905; it must lie in \[0, 2\^62\]"):
            table.push(np.arange(20), np.ones((20, 2), np.float32), step=2**62 + 1)
        assert cluster.status().tables[0].rows == 20


def test_expiry_goes_on_after_a_restore(tmp_path: Path) -> None:
    with local(2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=Unseen(steps=100, every=10))
        push(table, range(100), step=5)
        push(table, range(50, 100), step=80)
        path = cluster.snapshot(tmp_path, "s").result(60)
    with local(3) as cluster:
        cluster.restore(path)
        table = cluster.table("t")
        push(table, range(200, 300), step=110)
        wait_for(cluster, 50)
        assert there(table, range(100)) == list(range(50, 100))


def rows_left(cluster: Cluster) -> int:
    """Rows there, once shards have looked: each call lets them look at a block before it is answered."""
    return [cluster.status().tables[0].rows for _ in range(4)][-1]


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize(
    "rule",
    [Unseen(seconds=DAY), Unseen(steps=1000, every=100), Rule(f"unseen_seconds > {DAY}", every=100)],
    ids=["seconds", "steps", "expression"],
)
def test_an_expiry_that_is_held_is_held_after_a_restore(tmp_path: Path, shards: int, rule: Expiry) -> None:
    now, hours = time.time() - 100 * HOUR, iter(range(1, 59))
    with local(2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=rule)
        push(table, range(1000), seconds=now - 8 * DAY, step=1)
        push(table, range(10), seconds=now, step=100_000)
        assert rows_left(cluster) == 1000
        path = cluster.snapshot(tmp_path, "first").result(60)
    for name in ("second", "third"):  # a snapshot of a restored table says it, too
        with local(shards) as cluster:
            cluster.restore(path)
            table = cluster.table("t")
            for hour in islice(hours, 29):
                push(table, range(10), seconds=now + hour * 0.9 * HOUR, step=100_000 + 50 * hour)
            assert rows_left(cluster) == 1000
            path = cluster.snapshot(tmp_path, name, parent=path).result(60)
            assert table.expire() == (1000, 990)


def test_a_leap_that_no_look_has_met_yet_is_in_a_snapshot(tmp_path: Path) -> None:
    now = time.time() - HOUR
    with local(2) as cluster:
        rule = Rule(f"unseen_seconds > {DAY}", every=1000)
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=rule)
        push(table, range(1000), seconds=now - 8 * DAY, step=1)
        push(table, range(10), seconds=now, step=2)
        paths = [cluster.snapshot(tmp_path, name).result(60) for name in ("s", "s2")]  # the first forgets nothing
    for path in paths:
        with local(2) as cluster:
            cluster.restore(path)
            for step in (3, 1000, 2000):
                push(cluster.table("t"), range(10), seconds=now + step, step=step)
                assert rows_left(cluster) == 1000


def test_rows_of_a_shard_that_pushes_have_left_behind_are_held_where_another_takes_them(tmp_path: Path) -> None:
    with local(2) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=Unseen(steps=100, every=10))
        ((_, ahead), (_, behind)) = table.shards_of(np.arange(2000))
        assert ahead is not None and behind is not None
        push(table, behind[:600], step=1)
        for step in range(1, 1000, 10):
            push(table, ahead[:400], step=step)
        assert rows_left(cluster) == 1000
        path = cluster.snapshot(tmp_path, "s").result(60)
        push(table, behind[:10], step=1000)  # what the shard does that goes on
        assert rows_left(cluster) == 1000
    with local(1) as cluster:
        cluster.restore(path)
        for step in range(1000, 1100, 10):
            push(cluster.table("t"), ahead[:400], step=step)
        assert rows_left(cluster) == 1000


def test_a_snapshot_that_does_not_say_whether_an_expiry_was_held_is_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = Unseen(steps=100, every=10)
    with local(2) as cluster, monkeypatch.context() as before:
        before.setattr("geartrain.ams.server.shard.held_dedup", lambda *arguments: held_dedup(*arguments[:4]))
        for name, last_pushed in (("held", range(10)), ("usual", range(400))):
            table = cluster.create_table(name, dim=DIM, optimizer=SGD(0.1), expiry=rule)
            push(table, range(1000), step=1)
            push(table, last_pushed, step=1000)
            assert {table.rows for table in cluster.status().tables} == {1000}
        push(table, range(400, 700), step=1001)
        path = cluster.snapshot(tmp_path, "s").result(60)
    with local(2) as cluster:
        cluster.restore(path)
        deadline = time.monotonic() + 30
        while (rows := {table.name: table.rows for table in cluster.status().tables})["usual"] > 700:
            assert time.monotonic() < deadline
        assert rows == {"held": 1000, "usual": 700}


@pytest.mark.parametrize("seed", range(4))
def test_a_restored_table_loses_the_rows_that_the_living_one_loses(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    now, step = time.time() - 50 * DAY, 0
    rule = [Unseen(steps=60, every=20), Unseen(seconds=2 * DAY, every=1000)][seed % 2]
    with local(2) as live, local(2) as restored:
        table = live.create_table("t", dim=DIM, optimizer=SGD(0.1), expiry=rule)
        twin, differ = table, 0
        for turn in range(120):
            leaps = random.random() < 0.03
            step += int(random.integers(1, 8)) + 500 * leaps
            now += float(random.random()) * HOUR * 6 + 4 * DAY * leaps
            ids = np.unique(random.integers(0, 400, random.integers(1, 60)) + turn // 2)
            for one in {id(table): table, id(twin): twin}.values():
                one.push(ids, np.ones((len(ids), DIM), np.float32), step=step, unix_seconds=now)
            if random.random() < 0.2:
                path = live.snapshot(tmp_path, f"s{turn}").result(60)
                restored.restore(path, replace=True)
                twin = restored.table("t")
            rows_left(live)
            if twin is not table:
                rows_left(restored)
                every = range(600)
                assert there(twin, every) == there(table, every), turn
                differ += 600 - len(there(table, every))
        assert differ


def test_a_field_has_a_rule() -> None:
    with local(2) as cluster:
        fields = EmbeddingGroup(
            cluster, "m", [Field("item", dim=DIM, expiry=Unseen(steps=5, every=1))], optimizer=SGD(0.1)
        )
        rows = RowOptimizer(fields)
        for step in range(20):
            ids = torch.arange(step * 10, step * 10 + 10).reshape(2, 5)
            fields({"item": ids})["item"].sum().backward()
            rows.step()
        for _ in range(3):
            assert cluster.status().tables[0].rows <= 200
        assert cluster.status().tables[0].expired > 100


def daily_group(cluster: Cluster, where: Any = "pull", *, reuse: bool = True) -> EmbeddingGroup:
    """Two tables of one optimizer, one of another, and one that keeps its rows."""
    rule = Unseen(steps=20, every=5)
    fields = [
        Field("item", dim=DIM, expiry=rule, where=where),
        Field("user", dim=DIM),
        Field("page", dim=DIM, expiry=rule),
    ]
    fields.append(Field("old", dim=DIM, expiry=rule, optimizer=SGD(0.2)))
    return EmbeddingGroup(cluster, "m", fields, optimizer=SGD(0.1), reuse=reuse)


def train_days(fields: EmbeddingGroup, batches: range, names: Sequence[str] = ("item", "user", "page", "old")) -> None:
    """Each batch has 10 ids of its own."""
    rows = RowOptimizer(fields)
    for batch in batches:
        ids, other = (torch.arange(batch * 10, batch * 10 + 10).reshape(2, 5), torch.zeros(2, 1, dtype=torch.int64))
        vectors = fields({field.name: ids if field.name in names else other for field in fields.fields})
        sum(vectors[field.name].sum() for field in fields.fields).backward()
        rows.step()
        rows.zero_grad()


def steps_of(fields: EmbeddingGroup) -> list[int]:
    return [part.row_update.step for part in fields.trained]


@pytest.mark.parametrize("where", ["pull", "hosted"])
def test_a_group_made_anew_goes_on_at_the_step_of_its_tables(cluster: Cluster, where: str) -> None:
    fields = daily_group(cluster, where, reuse=False)
    assert steps_of(fields) == [0, 0]
    train_days(fields, range(30))
    for day in (1, 2):  # of a job that is new each day: nothing but the tables is left
        fields = daily_group(cluster, where)
        assert steps_of(fields) == [30 * day] * 2
        train_days(fields, range(30 * day, 30 * day + 30))
        for name in ("item", "page", "old"):
            last = 10 * (30 * day + 30)
            wait_for_rows(cluster, f"m/{name}", most=260)
            assert there(fields.table(name), range(last - 200, last)) == list(range(last - 200, last))
            assert not there(fields.table(name), range(300 * day - 300, 300 * day))
    assert cluster.table("m/user").present(np.arange(900)).all()


def wait_for_rows(cluster: Cluster, name: str, most: int) -> None:
    deadline = time.monotonic() + 30
    while next(table.rows for table in cluster.status().tables if table.name == name) > most:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@over_few_carriers
def test_a_group_made_anew_beside_a_worker_that_is_far_ahead_begins_where_that_one_is(cluster: Cluster) -> None:
    ahead = daily_group(cluster, reuse=False)
    ahead.trained[0].row_update.step = 5_000
    train_days(ahead, range(3))
    assert steps_of(daily_group(cluster)) == [5_003, 3]  # by optimizer


def test_a_wrong_step_that_is_the_last_there_can_be_stops_no_group_that_is_made_anew(cluster: Cluster) -> None:
    fields = daily_group(cluster, reuse=False)
    push(fields.table("item"), range(10), step=2**62)
    train_days(daily_group(cluster), range(3))
    assert there(fields.table("item"), range(30)) == list(range(30))


def test_rows_that_were_restored_go_on_at_the_step_of_their_state_or_of_their_table(tmp_path: Path) -> None:
    with local(2) as cluster:
        fields = daily_group(cluster, reuse=False)
        train_days(fields, range(30))
        fields.trained[0].row_update.step = 12  # as of a worker that another one is ahead of
        state = fields.state_dict()
        path = cluster.snapshot(tmp_path, "s").result(60)
        train_days(fields, range(30, 40))
    with local(3) as cluster:
        cluster.restore(path)
        fields = daily_group(cluster)
        assert steps_of(fields) == [30, 30]
        fields.load_state_dict(state)
        assert steps_of(fields) == [12, 30]


@pytest.mark.parametrize("where", ["pull", "hosted"])
@pytest.mark.parametrize("cluster", ["local-1", "tcp-1"], indirect=True)
def test_expiry_begins_without_a_call_that_queues(cluster: Cluster, where: str) -> None:
    rule = Unseen(steps=5, every=10)
    names = ["item", "user"]  # two, which an embedded cluster pushes side by side
    fields = EmbeddingGroup(
        cluster, "m", [Field(name, dim=DIM, expiry=rule, where=where) for name in names], optimizer=SGD(0.1)
    )
    rows = RowOptimizer(fields)

    def train() -> None:
        for step in range(31):
            ids = torch.arange(step * 10, step * 10 + 10).reshape(2, 5)
            vectors = fields(dict.fromkeys(names, ids))
            sum(vectors[name].sum() for name in names).backward()
            rows.step()

    with ThreadPoolExecutor(1) as beside:  # calls of the main thread queue
        beside.submit(train).result()
        deadline = time.monotonic() + 30
        while any(table.expired < 240 for table in beside.submit(cluster.status).result().tables):
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_the_command_line_says_how_many(served: Callable[..., ServedCluster]) -> None:
    address = served(2).address
    with gt.connect(address) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=SGD(1.0), expiry=Unseen(steps=1000))
        push(table, range(100), step=1)
        push(table, range(50, 100), step=20)

    def run(*arguments: str) -> str:
        words = ["table", "expire", "t", "--scheduler", address, *arguments]
        result = CliRunner().invoke(build_app(words), words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0
        return result.stdout

    assert run("--unseen-steps", "10", "--dry-run") == "t: 50 of 100 rows would go\n"
    assert json.loads(run("--rule", "unseen_steps > 10", "--json")) == {"table": "t", "looked_at": 100, "expired": 50}
    assert run() == "t: 0 of 50 rows went\n"
    with pytest.raises(errors.ConfigError, match="give one of --unseen-steps"):
        run("--unseen-steps", "10", "--rule", "count < 3")
