"""``geartrain worker ctr``: samples in, a run folder out, whatever dies on the way. One attempt at it: ``run.py``."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import replace

from rich.console import Console

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect, local
from geartrain.ams.values.config import ClientConfig
from geartrain.workers.continuing import result_of_ended, with_its_run
from geartrain.workers.ctr.options import CtrOptions
from geartrain.workers.ctr.run import CtrRun
from geartrain.workers.ctr.samples.sources import load_samples
from geartrain.workers.ctr.state import CtrState, newest_state
from geartrain.workers.job.folder import (
    read_run,
    require_new_run,
    require_new_snapshots,
    require_one_process,
    require_same,
    sole_trainer,
)
from geartrain.workers.job.interruption import Interruption, Stopped, interruption
from geartrain.workers.job.options import JobResult
from geartrain.workers.job.snapshots import LOST, GoBack, Loss


def train_clicks(options: CtrOptions, console: Console) -> JobResult:
    """Train, evaluate on what is held out, and save. Raises ConfigError before anything is written.

    A run that loses a role of its cluster goes back to its newest snapshot and on from there.
    """
    require_one_process("ctr")
    options = with_its_run(options, console)
    if (ended := result_of_ended(options, console)) is not None:
        _require_stated(options, newest_state(read_run(options.out).snapshots)[1])
        return ended
    if not options.resume:
        if not options.overwrite and not options.continues:
            require_new_run(options.out)
        if options.snapshots is not None:
            require_new_snapshots(options.snapshots)
    with interruption() as stop:
        return _run_to_the_end(options, console, stop)


def _run_to_the_end(options: CtrOptions, console: Console, stop: Interruption) -> JobResult:
    """Attempt it until it has ended, or cannot go on."""
    recoveries, loss = 0, None
    while True:
        try:
            return _attempt(options, console, loss, stop)
        except Stopped:
            if not options.resume:
                raise
            return _stopped(options, console, loss)
        except (GoBack, *LOST) as exc:
            # Once there is something to go back to, a role that is not back yet is worth another attempt, too.
            if isinstance(exc, GoBack):
                loss = exc.loss
            if loss is not None and stop():
                return _stopped(options, console, loss)
            is_planned = isinstance(exc, GoBack) and exc.is_planned
            if loss is None or (recoveries == options.max_recoveries and not is_planned):
                raise (exc.__cause__ if isinstance(exc, GoBack) and exc.__cause__ else exc) from None
            recoveries += not is_planned
            options = replace(options, resume=True, overwrite=False, resume_steps=None)


def _stopped(options: CtrOptions, console: Console, loss: Loss | None) -> JobResult:
    """A signal came between two attempts: what is saved is what the earlier one has saved."""
    said = f"Stopped before it went on from its newest snapshot. Go on with: {options.go_on()}"
    console.print(said, highlight=False, soft_wrap=True)
    return JobResult(False, None, 0 if loss is None else loss.step)


def _attempt(options: CtrOptions, console: Console, loss: Loss | None, stop: Interruption) -> JobResult:
    with ExitStack() as stack:
        stack.enter_context(sole_trainer(options.out))
        saved = None
        if options.resume:
            saved = newest_state(read_run(options.out).snapshots, allow_fallback=options.allow_fallback)
            _require_stated(options, saved[1])
        source = options.data if saved is None else saved[1].data["source"]
        samples = load_samples(source, options.cache, lambda line: console.print(line, highlight=False))
        job = f"{options.out.name or 'run'}-{secrets.randbits(32):08x}" if saved is None else saved[1].progress.table
        cluster = stack.enter_context(_opened(options, job, goes_on=loss is not None))
        if saved is not None:
            # A process of this run that was only stopped must not go on beside it.
            cluster.fence(job, cluster.write_stream.incarnation)
            cluster.restore(saved[0].path, replace=True)
        run = CtrRun(options, str(source), samples, cluster, job, saved, console, loss)
        with stop.in_order(cluster):
            return run.execute(stop)


def _require_stated(options: CtrOptions, saved: CtrState) -> None:
    """Raise ConfigError if a run that continues was begun otherwise than the person says."""
    if options.continues:
        require_same(options.stated, options.recipe, saved.recipe, options.out)


def _opened(options: CtrOptions, job: str, *, goes_on: bool) -> Cluster:
    """A run that goes on after a loss waits for the scheduler, which may be what was lost, as for a shard."""
    if options.scheduler is None:
        return local(num_shards=1)
    config = ClientConfig()
    if goes_on:
        seconds = config.recovery_timeout_seconds
        config = config.model_copy(update={"connect_timeout_seconds": seconds, "refused_timeout_seconds": seconds})
    return connect(options.scheduler, config=config, stream=f"{job}/rank0")
