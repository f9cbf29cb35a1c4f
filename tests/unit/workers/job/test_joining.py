"""A worker that joins a job which goes back to its snapshot just then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from geartrain.ams.values.errors import ShardRestarted, TableBeingRestored
from geartrain.workers.job.job import _opened_trainer
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
