"""``geartrain worker ctr --data kafka:TOPIC@BROKERS``: each message is trained on once, whatever stops the run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import geartrain as gt
from geartrain.ams.storage.snapshot.folder import latest, list_snapshots
from geartrain.ams.values.errors import BrokerUnavailable, ConfigError, SourceDamaged, SourceNotFound
from geartrain.workers.ctr import topic
from geartrain.workers.ctr.recipe import recipe_for
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.job import job
from geartrain.workers.job.job import run_job
from geartrain.workers.job.options import JobOptions, JobResult, SnapshotSettings
from tests.integration.jobs.small_job import StopWhen
from tests.support.command_line import typed

kafka = pytest.importorskip("confluent_kafka", reason="needs pip install 'geartrain[kafka]'")
SMALL: dict[str, Any] = {"dim": 4, "hidden": (8,), "batch_size": 50, "row_lr": 0.05}
FEATURES = {"user": {"kind": "int64"}, "item": {"kind": "string"}, "is_new": {"kind": "bool"}}


class Mock:
    def __init__(self) -> None:
        self.producer = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0, "linger.ms": 0})
        (broker,) = self.producer.list_topics(timeout=20).brokers.values()
        self.address = f"{broker.host}:{broker.port}"
        self.source = f"kafka:clicks@{self.address}"
        self.producer.list_topics("clicks", timeout=20)

    def send(self, users: range, **fields: Any) -> None:
        for user in users:
            sample = {"user": user, "item": f"i{user % 7}", "is_new": user % 3 == 0, "click": user % 2, **fields}
            self.produce(user, **sample)
        assert self.producer.flush(20) == 0

    def produce(self, key: int, /, **sample: Any) -> None:
        self.producer.produce("clicks", value=json.dumps(sample).encode(), partition=key % 4)


@pytest.fixture
def mock() -> Iterator[Mock]:
    made = Mock()
    yield made
    made.producer.purge()


def train(mock: Mock, out: Path, *, source: str | None = None, resume: bool = False, **recipe: Any) -> JobResult:
    given = {**SMALL, "features": FEATURES, "kafka": {"until": "now", "timeout_seconds": 2}, **recipe}
    options = JobOptions(
        job="ctr",
        out=out,
        recipe=recipe_for(None, **given),
        data=source or mock.source,
        loggers=(),
        resume=resume,
        stated=("kafka.skip_damaged",) if resume else (),
    )
    return run_job(ClickTrainer, options, Console(quiet=True))


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The users of all batches."""
    users: list[int] = []
    make = topic.click_batch

    def note(design: Any, batch: Any, negatives: float) -> Any:
        users.extend(batch["user"].tolist())
        return make(design, batch, negatives)

    monkeypatch.setattr(topic, "click_batch", note)
    return users


def test_a_run_goes_on_in_the_topic_where_its_snapshot_was(mock: Mock, tmp_path: Path, trained_on: list[int]) -> None:
    mock.send(range(330))
    first = train(mock, tmp_path / "run", steps=3)
    assert first.finished and first.step == 3 and len(set(trained_on)) == 150
    mock.send(range(330, 400))
    ended = train(mock, tmp_path / "run", resume=True, steps=3)
    assert ended.step == 6 and len(set(trained_on)) == len(trained_on) == 300
    command = ["worker", "ctr", "--resume", str(tmp_path / "run"), "--logger=none", "--steps=100"]
    said = typed(*command).stdout
    assert sorted(trained_on) == list(range(400)), said
    assert "Trained in" in said


def test_occurrences_before_a_stop_count_after_it(mock: Mock, tmp_path: Path) -> None:
    given = {"features": {**FEATURES, "user": {"kind": "int64", "admission": 3}}, "steps": 1}
    for times, admitted in ((1, False), (2, False), (3, True)):
        mock.send(range(50))
        assert train(mock, tmp_path / "run", resume=times > 1, **given).step == times
        snapshot = latest(tmp_path / "run" / "snapshots")
        with gt.local() as cluster:
            cluster.restore(snapshot.path)
            (table,) = (name for name in cluster.table_incarnations() if name.endswith("/user"))
            assert (cluster.table(table).present(range(50)) == admitted).all()


def test_what_is_wrong_with_a_topic_is_named(mock: Mock, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for source in ("kafka:clicks", "kafka:@b:9092", "kafka:clicks@", "kafka:clicks@b:9092,"):
        with pytest.raises(ConfigError, match=f"--data is '{source}'; a topic is kafka:TOPIC@BROKERS"):
            train(mock, out, source=source)
    with pytest.raises(SourceNotFound, match=r"have no topic 'clics'.*did you mean 'clicks'"):
        train(mock, out, source=f"kafka:clics@{mock.address}")
    with pytest.raises(BrokerUnavailable, match=r"no broker of topic 'clicks' \(localhost:1\) answered for 0.1 s"):
        train(mock, out, source="kafka:clicks@localhost:1", kafka={"timeout_seconds": 0.1})
    with pytest.raises(ConfigError, match="has no schema: name the fields"):
        train(mock, out, features={})
    with pytest.raises(ConfigError, match=r"kind of 'user' is not known.*--set features.user.kind=int64"):
        train(mock, out, features={"user": {}})
    with pytest.raises(ConfigError, match="history is 5"):
        train(mock, out, history=5)
    with pytest.raises(ConfigError, match=r"kafka.max_wait_seconds is 0.0; it must be > 0"):
        train(mock, out, kafka={"max_wait_seconds": 0.0})
    with pytest.raises(ConfigError, match="prefetch is 2, and a topic is read as its messages come; leave it out"):
        train(mock, out, prefetch=2)
    with pytest.raises(ConfigError, match="validation is true, and no samples of a topic are held out"):
        train(mock, out, validation=True)
    assert not (out / "snapshots").exists()


@pytest.mark.parametrize(
    ("fields", "what"), [({"click": 2}, "click is 2.0; it must be 0 or 1"), ({"user": -7}, "user is -7")]
)
def test_a_damaged_message_ends_the_run_or_is_passed_over(
    mock: Mock, tmp_path: Path, trained_on: list[int], fields: dict[str, int], what: str
) -> None:
    mock.send(range(60))
    mock.send(range(60, 61), **fields)
    mock.send(range(61, 130))
    with pytest.raises(SourceDamaged, match=f"topic 'clicks', partition 0, offset 15: {what}"):
        train(mock, tmp_path / "run")
    done = len(trained_on)
    kafka_settings = {"until": "now", "skip_damaged": True}
    assert train(mock, tmp_path / "run", resume=True, kafka=kafka_settings).finished
    assert sorted(trained_on[done:]) == [user for user in range(130) if user != 60]


def test_impressions_wait_for_their_clicks_across_a_stop(mock: Mock, tmp_path: Path, trained_on: list[int]) -> None:
    for user in range(400):
        mock.produce(user, impression=user, time=user, click=0, item=f"i{user % 7}", is_new=True, user=user)
        if user % 8 > 3 and user >= 40:
            mock.produce(user - 40, impression=user - 40, time=user, click=1)
    assert mock.producer.flush(20) == 0
    given = {
        "kafka": {"until": "now", "label_window_seconds": 44, "max_wait_seconds": 30},
        "progressive": 100,
        "negatives": 0.5,
        "dropout": 0.0,
    }
    assert train(mock, tmp_path / "run", steps=3, **given).step == 3
    assert train(mock, tmp_path / "run", resume=True, **given).step == 6  # as many again
    ended = train(mock, tmp_path / "run", resume=True, **given)
    assert sorted(trained_on) == list(range(400))
    assert ended.report is not None and 0 < ended.report["progressive"]["samples"] <= 100
    assert ended.report["late_labels"]["forced_impressions"] == 0
    with pytest.raises(ConfigError, match=r"kafka.label_window_seconds is 0.0; it must be > 0, or left out"):
        train(mock, tmp_path / "other", kafka={"label_window_seconds": 0.0})


def test_what_was_trained_is_saved_though_no_more_samples_come(
    mock: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock.send(range(150))
    until = time.monotonic() + 60

    def is_saved() -> bool:
        root = tmp_path / "run" / "snapshots"
        assert time.monotonic() < until, "no snapshot of the last step"
        return any(listed.snapshot and listed.snapshot.manifest.step == 3 for listed in list_snapshots(str(root)))

    monkeypatch.setattr(job, "interruption", lambda: nullcontext(StopWhen(is_saved)))
    often = SnapshotSettings(minutes=0.002)
    stopped = train(mock, tmp_path / "run", kafka={"timeout_seconds": 20}, snapshots=often)
    assert (stopped.finished, stopped.step) == (False, 3)
