"""A worker that joins a job, which may go back to its snapshot, or end, just then."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from geartrain.ams.values.errors import ConfigError, ShardRestarted, TableBeingRestored, TableNotFound
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.job import job
from geartrain.workers.job.job import _join, _join_when_started, _opened_trainer
from geartrain.workers.job.options import JobOptions, JobResult
from geartrain.workers.job.state import JobProgress
from geartrain.workers.job.trainer import Trainer

ATTEMPT: Any = SimpleNamespace(options=None, cluster="cluster", progress=SimpleNamespace(table="run"))


def trainer_class(*failures: Exception, is_kept: bool) -> Any:
    """A trainer whose tables are there once it has failed so often."""
    left = list(failures)

    class Opening(Trainer):
        def __init__(self, *_: Any) -> None:
            if left:
                raise left.pop(0)

        @staticmethod
        def is_kept(_: Any, cluster: Any, job: str) -> bool:
            assert (cluster, job) == ("cluster", "run")
            return is_kept

        report = update = loss = None  # type: ignore[assignment]

    Opening.__abstractmethods__ = frozenset()
    return Opening


def test_tables_that_are_lost_or_restored_are_waited_for_while_the_scheduler_keeps_the_job() -> None:
    failures = ShardRestarted("a shard was lost"), TableBeingRestored("not yet")
    kept = trainer_class(*failures, is_kept=True)
    assert isinstance(_opened_trainer(kept, ATTEMPT, None), kept)
    with pytest.raises(ShardRestarted, match="a shard was lost"):
        _opened_trainer(trainer_class(*failures, is_kept=False), ATTEMPT, None)


def test_what_does_not_come_back_is_not_waited_for_without_end() -> None:
    with pytest.raises(TableBeingRestored):
        _opened_trainer(trainer_class(*[TableBeingRestored("never")] * 9, is_kept=True), ATTEMPT, None)


STOP: Any = SimpleNamespace(in_order=lambda _: nullcontext())
SHARED = CtrRecipe(mode="async")


def options(out: Path) -> JobOptions:
    return JobOptions(job="ctr", out=out, recipe=SHARED, stated=("rows",))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The record of a run that may be joined."""
    run = SimpleNamespace(job="run", snapshots="", scheduler="there:1", over=False)
    progress = JobProgress(step=5, stage_start=0, stage_steps=10, table="run")
    state = SimpleNamespace(recipe=SHARED, progress=progress)
    for name, found in (("read_run", run), ("newest_snapshot", None), ("_read_state", state)):
        monkeypatch.setattr(job, name, lambda *_, found=found: found)
    monkeypatch.setattr(job, "connect", lambda *_, **__: nullcontext("cluster"))
    return run


class Joining:
    """A trainer that tells of its attempt."""

    stated: tuple[str, ...] | None = None

    def __init__(self, attempt: Any, _: Any) -> None:
        type(self).stated, self.progress = attempt.options.stated, attempt.progress

    load = is_kept = staticmethod(lambda *_: None)

    def run(self, **_: Any) -> bool:
        return True

    def leave(self) -> None:
        pass


@pytest.mark.usefixtures("run")
def test_a_worker_that_joins_leaves_altered_settings_to_the_one_that_resumed_the_run(tmp_path: Path) -> None:
    trainer: Any = Joining
    assert _join(trainer, options(tmp_path), Console(quiet=True), STOP) == JobResult(True, None, 0)
    assert Joining.stated == ()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_worker_ends_well_where_the_run_ends_while_it_loads_its_data(
    tmp_path: Path, run: Any, has_ended: bool
) -> None:
    class Late(Joining):
        def __init__(self, *_: Any) -> None:
            raise TableNotFound("run/user")

        @staticmethod
        def load(*_: Any) -> None:
            run.over = has_ended

    trainer: Any = Late
    with nullcontext() if has_ended else pytest.raises(TableNotFound):
        assert _join(trainer, options(tmp_path), Console(quiet=True), STOP) == JobResult(True, None, 0)


def test_ranks_on_several_machines_need_a_name_of_their_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job, "has_run", lambda _: pytest.fail("it waits for a run"))
    with pytest.raises(ConfigError, match="on several machines; give all the same --rdzv-id NAME"):
        _join_when_started(Trainer, options(tmp_path), Console(quiet=True), STOP)
