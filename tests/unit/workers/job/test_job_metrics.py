"""What a worker tells Prometheus of its job."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from torch import Tensor

from geartrain.ams.observe.metrics import Buckets
from geartrain.ams.values.errors import ConfigError
from geartrain.workers.job.metrics import BOUNDS, PHASES, JobCounters, RecentSteps, StepTimer, serve_job_metrics
from geartrain.workers.job.options import SnapshotSettings
from geartrain.workers.recipes.recipe import ClassifyRecipe
from tests.integration.jobs.small_job import GREY, classify, draw_images


def test_steps_are_counted_by_their_parts() -> None:
    counters = JobCounters()
    assert list(counters.metrics()) == []
    counters.job = "j"
    counters.step_done({"pull": 0.25, "push": 0.004, "forward": 1.0, "backward": 0.5}, 16)
    counters.step_done({"pull": 0.0, "push": 0.0, "forward": 100.0}, 16)
    counters.figures = {"auc": 0.75}
    found = {metric.name: {tuple(labels): value for labels, value in metric.samples} for metric in counters.metrics()}
    assert found["job_steps_total"] == {("j",): 2}
    assert found["job_samples_total"] == {("j",): 32}
    assert found["job_metric"] == {("j", "auc"): 0.75}
    pull, forward = found["job_step_seconds"]["j", "pull"], found["job_step_seconds"]["j", "forward"]
    assert isinstance(pull, Buckets) and isinstance(forward, Buckets)
    assert (pull.total, pull.counts[BOUNDS.index(0.25)], sum(pull.counts)) == (0.25, 1, 2)
    assert (forward.counts[BOUNDS.index(1.0)], forward.counts[-1]) == (1, 1)  # the last is of what is above all bounds


def test_waits_for_rows_are_no_part_of_the_phase_that_they_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("geartrain.workers.job.metrics.time.perf_counter", lambda: now)
    monkeypatch.setattr("geartrain.workers.job.metrics.ROW_SECONDS", waited := {"pull": 1.0, "push": 2.0})
    timer = StepTimer()
    now, waited["pull"] = 5.0, 3.0
    timer.ended("forward")
    now, waited["push"], waited["pull"] = 9.0, 2.5, 3.5
    timer.ended("backward")
    assert timer.seconds == {"pull": 2.5, "push": 0.5, "forward": 3.0, "backward": 3.0, "update": 0.0}


def test_a_rate_is_of_ten_seconds_and_does_not_leap(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("geartrain.workers.job.metrics.time.perf_counter", lambda: now)
    monkeypatch.setattr("geartrain.workers.job.metrics.ROW_SECONDS", waited := {"pull": 0.0, "push": 0.0})
    recent = RecentSteps(batch_size=4)
    assert recent.rates(1, 2) == {}
    told = []
    for step in range(11, 2_001, 10):  # 20 steps a second, but for a look of two seconds behind every thousandth
        now += 0.5 + (2.0 if step % 1_000 == 1 else 0.0)
        waited["pull"] += 0.01
        told.append(recent.rates(step, 2 * step))
    speeds = [rates["steps_per_second"] for rates in told]
    assert 15.0 < min(speeds) < 17.0 and max(speeds) == pytest.approx(20.0)
    assert speeds[-1] == pytest.approx(20.0)  # the look is forgotten
    assert told[-1] == pytest.approx(
        {"steps_per_second": 20.0, "samples_per_second": 160.0, "pull_ms": 1.0, "push_ms": 0.0}
    )


def test_a_port_that_strangers_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEARTRAIN_SECURITY__FOLDER", "none")
    with (
        pytest.raises(ConfigError, match=r"--metrics '0.0.0.0:0' can be reached"),
        serve_job_metrics("0.0.0.0:0", print),
    ):
        pass


def test_a_job_tells_its_steps_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    from geartrain.workers.classify.trainer import ImageTrainer
    from tests.support.scrapes import scrape

    said = io.StringIO()
    told, whole = [], ImageTrainer.step

    def step(self: ImageTrainer, number: int) -> Tensor:
        if number == 19:
            (address,) = re.findall(r"for Prometheus: (\S+)", said.getvalue())
            told.append((self.progress.table, scrape(address)))
        return whole(self, number)

    monkeypatch.setattr(ImageTrainer, "step", step)
    recipe = ClassifyRecipe(steps=20, batch_size=4, lr=0.1, look=GREY, snapshots=SnapshotSettings(steps=5))
    classify(tmp_path / "run", draw_images(tmp_path / "images", 3), recipe, said, metrics="127.0.0.1:0")
    ((job, found),) = told
    assert found.value("geartrain_job_steps_total", job=job) >= 19
    assert found.values("geartrain_job_loss", job=job)
    for phase in PHASES:
        assert found.value("geartrain_job_step_seconds_sum", job=job, phase=phase) > 0
