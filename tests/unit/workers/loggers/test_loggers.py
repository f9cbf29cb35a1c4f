"""Every logger has each step of a run once, whatever dies and goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.loggers.protocol import Loggers
from geartrain.workers.loggers.registry import open_loggers, require_libraries, require_loggers

KILLED_AT, SAVED_AT, END = 40, 20, 60


def log(logger: Loggers, steps: range) -> None:
    for step in steps:
        logger.scalars("train", {"loss": 1000.0 / step}, step)
        if step % 20 == 0:
            logger.scalars("held_out", {"top1": step / 100}, step)


def run_with_a_kill(name: str, out: Path) -> None:
    """Logs to step 40, goes back to the snapshot of step 20 and on to step 60."""
    first = open_loggers([name], out, "job-1", None)
    log(first, range(10, SAVED_AT + 1, 10))
    first.flush()
    log(first, range(SAVED_AT + 10, KILLED_AT + 1, 10))
    first.close()
    again = open_loggers([name], out, "job-1", SAVED_AT)
    log(again, range(SAVED_AT + 10, END + 1, 10))
    again.close()


EXPECTED = {
    "train/loss": [(step, 1000.0 / step) for step in range(10, 61, 10)],
    "held_out/top1": [(step, step / 100) for step in (20, 40, 60)],
}


def assert_each_step_once(found: dict[str, list[tuple[int, float]]]) -> None:
    assert found.keys() == EXPECTED.keys()
    for name, values in EXPECTED.items():
        assert [step for step, _ in found[name]] == [step for step, _ in values]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in values])


def test_tensorboard_shows_each_step_once_over_a_kill(tmp_path: Path) -> None:
    run_with_a_kill("tensorboard", tmp_path)
    read = EventAccumulator(str(tmp_path / "events" / "job-1")).Reload()
    assert_each_step_once({name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]})


def test_what_is_flushed_is_on_the_disk(tmp_path: Path) -> None:
    logger = open_loggers(["tensorboard"], tmp_path, "job-1", None)
    try:
        log(logger, range(10, 21, 10))
        logger.flush()
        read = EventAccumulator(str(tmp_path / "events" / "job-1")).Reload()
        assert [event.step for event in read.Scalars("train/loss")] == [10, 20]
    finally:
        logger.close()


def test_mlflow_has_each_step_once_over_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow-skinny is not installed")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    run_with_a_kill("mlflow", tmp_path)
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("geartrain").experiment_id])
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert_each_step_once({name: [(m.step, m.value) for m in history] for name, history in histories.items()})


def test_wandb_runs_offline_and_is_the_same_run_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_with_a_kill("wandb", tmp_path)
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert runs and all(run.name.endswith("-job-1") for run in runs)


def test_an_unknown_logger_or_one_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the logger is 'paper'; it must be one of tensorboard, wandb, mlflow"):
        require_loggers(["tensorboard", "paper"])
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"--logger {name} needs .*pip install 'geartrain\[{name}\]'"):
            require_libraries(["tensorboard", name])
