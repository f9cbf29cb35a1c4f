"""A whole training job: data in, a run folder out, whatever dies on the way. One attempt at it: ``training_run.py``.

A job goes back to its last snapshot *as a whole* when a role of its cluster is lost: by itself if it is one process;
if it is several, torchrun starts them again and they find the snapshot.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect, local
from geartrain.ams.programs.models import hosted_models
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import ConfigError
from geartrain.bridge.head.backends.registry import ROW_BACKENDS
from geartrain.workers.devices import choose_device
from geartrain.workers.job.folder import has_snapshot, read_run, require_new_run, sole_trainer
from geartrain.workers.job.interruption import Interruption, Stopped, interruption
from geartrain.workers.job.options import JobData, JobOptions, JobResult
from geartrain.workers.job.ranks import JobRanks, joined_ranks
from geartrain.workers.job.rows.cluster_rows import JobRowsInCluster
from geartrain.workers.job.rows.job_rows import JobRows
from geartrain.workers.job.rows.rank_rows import JobRowsOnRanks
from geartrain.workers.job.snapshots import LOST, GoBack, Loss
from geartrain.workers.job.training_run import TrainingRun

_CLOCKS_DIFFER_SECONDS = 5.0


def run_job(options: JobOptions, load: Callable[[Console], JobData], console: Console) -> JobResult:
    """Train, evaluate and save. Under torchrun all ranks call this; the first one writes and speaks.

    Raises ConfigError, before anything is written, if ``options.out`` holds a run that was not meant to be replaced.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        # Of ranks only the steps end in good order: torchrun ends those that wait for each other.
        stop = stack.enter_context(interruption()) if "WORLD_SIZE" not in os.environ else None
        return _run_to_the_end(options, load, console, started, stop)


def _run_to_the_end(
    options: JobOptions,
    load: Callable[[Console], JobData],
    console: Console,
    started: float,
    stop: Interruption | None,
) -> JobResult:
    """Attempt it until it has ended, or cannot go on."""
    recoveries = 0
    loss: Loss | None = None
    while True:
        try:
            return _run_once(options, load, console, started, loss, stop)
        except Stopped:
            if not options.resume:
                raise
            return _stopped(options, console, loss)
        except FileNotFoundError as exc:
            if exc.filename is None or not _is_gone(options.out, Path(os.fsdecode(exc.filename))):
                raise
            said = f"{exc.strerror}: {options.out} was removed while the run trained there; start it again"
            raise FileNotFoundError(exc.errno, said, exc.filename) from exc
        except (GoBack, *LOST) as exc:
            # Once there is something to go back to, a role that is not back yet is worth another attempt too. Under
            # torchrun the ranks come back together: torchrun starts them again.
            if isinstance(exc, GoBack) and stop is not None:
                loss = exc.loss
            if loss is not None and stop is not None and stop():
                return _stopped(options, console, loss)
            is_planned = isinstance(exc, GoBack) and exc.is_planned
            if loss is None or (recoveries == options.max_recoveries and not is_planned):
                raise (exc.__cause__ if isinstance(exc, GoBack) and exc.__cause__ else exc) from None
            recoveries += not is_planned
            options = replace(options, resume=True, overwrite=False)


def _stopped(options: JobOptions, console: Console, loss: Loss | None) -> JobResult:
    """A signal came between two attempts: what is saved is what the earlier one has saved."""
    said = f"Stopped before it went on from its newest snapshot. Go on with: {options.go_on()}"
    console.print(said, highlight=False, soft_wrap=True)
    return JobResult(False, None, 0 if loss is None else loss.step)


def _run_once(
    options: JobOptions,
    load: Callable[[Console], JobData],
    console: Console,
    started: float,
    loss: Loss | None,
    stop: Interruption | None,
) -> JobResult:
    with joined_ranks(options.device) as ranks:
        return _run_on(ranks, options, load, console, started, loss, stop)  # its model is gone with its frame


def _run_on(
    ranks: JobRanks,
    options: JobOptions,
    load: Callable[[Console], JobData],
    console: Console,
    started: float,
    loss: Loss | None,
    stop: Interruption | None,
) -> JobResult:
    with ExitStack() as stack:
        console = console if ranks.is_first else Console(quiet=True)
        _require_place(options, ranks)
        is_restart = ranks.any(_is_restart())  # of a machine that took another's place it is the first start
        options = _after_restart(options, ranks, is_restart=is_restart)
        if options.scheduler is None and ranks.is_first:
            stack.enter_context(sole_trainer(options.out))  # with a cluster, fences do this
        data = _load_in_turn(load, ranks, console)
        job = _job_name(options, ranks)
        again = loss is not None or is_restart
        rows = stack.enter_context(_opened_rows(options, ranks, job, goes_on=again))
        run = TrainingRun(job, options, data, rows, ranks, console, launch=launch_name(), again=again, loss=loss)
        stop = stop or stack.enter_context(interruption())
        with stop.in_order(rows.cluster):
            return run.execute(stop, {"data": time.perf_counter() - started})


def _is_gone(out: Path, file: Path) -> bool:
    return file.is_relative_to(out) and not out.exists()


def _on_ranks(options: JobOptions) -> bool:
    return not ROW_BACKENDS[options.rows or options.recipe.rows].needs_cluster


def _require_place(options: JobOptions, ranks: JobRanks) -> None:
    """Raise ConfigError, with the remedy, unless the flags say where the rows of the job are."""
    if _on_ranks(options):
        clusters = {"--scheduler": options.scheduler, "--graph": options.graph, "--increments": options.increments}
        given = [flag for flag, value in clusters.items() if value]
        if given:
            raise ConfigError(
                f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} for rows in a cluster, but these are on the "
                "ranks; leave it out, or give --rows pull"
            )
    elif ranks.world_size > 1 and options.scheduler is None:
        raise ConfigError(
            f"{ranks.world_size} ranks train the same rows: give --rows ranks, and they hold them, or "
            f"--scheduler HOST:PORT of a cluster ('geartrain up' starts one)"
        )


@contextmanager
def _opened_rows(options: JobOptions, ranks: JobRanks, job: str, *, goes_on: bool) -> Iterator[JobRows]:
    """The place of the job's rows."""
    if _on_ranks(options):
        yield JobRowsOnRanks(choose_device(options.device, ranks.local_rank))
        return
    with _open_cluster(options, ranks, job, goes_on=goes_on) as cluster:
        if options.resume and ranks.is_first:
            # A process of this job that was only stopped must not go on beside it.
            cluster.fence(job, cluster.write_stream.incarnation)
        yield JobRowsInCluster(cluster, ranks, cluster.watch_leaves(job) if ranks.is_first else None)


def _open_cluster(options: JobOptions, ranks: JobRanks, job: str, *, goes_on: bool) -> Cluster:
    """The cluster of the job, or one in this process; all ranks have the incarnation that the first one was given."""
    if options.scheduler is None:
        return local(num_shards=1, models=hosted_models())
    config = _client_config(options, goes_on=goes_on)
    open_as = partial(connect, options.scheduler, config=config, stream=f"{job}/rank{ranks.rank}")
    if not ranks.is_first:
        return open_as(incarnation=ranks.share(0))
    cluster = open_as()
    try:
        ranks.share(cluster.write_stream.incarnation)
    except BaseException:
        cluster.close()
        raise
    return cluster


def _client_config(options: JobOptions, *, goes_on: bool) -> ClientConfig:
    """A job that goes on after a loss waits for the scheduler, which may be what was lost, as for a shard."""
    config = ClientConfig(graph=options.graph)
    if not goes_on:
        return config
    seconds = config.recovery_timeout_seconds
    return config.model_copy(update={"connect_timeout_seconds": seconds, "refused_timeout_seconds": seconds})


def _job_name(options: JobOptions, ranks: JobRanks) -> str:
    """The job of the run that is gone on with, or a name that no other job has."""
    if options.resume:
        return read_run(options.out).job
    return f"{options.out.name or 'run'}-{ranks.new_job_id()}"


def _load_in_turn(load: Callable[[Console], JobData], ranks: JobRanks, console: Console) -> JobData:
    """The data; the first rank fills the caches, the others find them filled."""
    if not ranks.is_first:
        ranks.barrier("data loaded")
    data = load(console)
    if ranks.is_first:
        ranks.barrier("data loaded")
    return data


def launch_name() -> str | None:
    """Name the torchrun that started this process, the same after it started it again; None without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    name = os.environ["TORCHELASTIC_RUN_ID"]
    # Agents of several nodes share the name alone. It may be that of yesterday's torchrun, too, and torchrun gives none
    # unless told ("none"): so an agent whose processes are the whole job goes by its process.
    if name != "none" and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return name
    agent = psutil.Process(os.getppid())
    return f"{platform.node()}:{agent.pid}:{agent.create_time():.2f}"


def _agent_began() -> float:
    """Unix time at which what started this process began, less what clocks of several nodes may differ by."""
    return psutil.Process(os.getppid()).create_time() - _CLOCKS_DIFFER_SECONDS


def _is_restart() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _after_restart(options: JobOptions, ranks: JobRanks, *, is_restart: bool) -> JobOptions:
    """Go on with what this very torchrun began, if it started us again. Any other run stays as it is."""
    if options.resume:
        return options
    if not is_restart:
        if not options.overwrite and not options.continues:
            require_new_run(options.out)
        return options
    is_ours = can_go_on = False
    began = min(ranks.gather_json(_agent_began()))
    if ranks.is_first:
        try:
            run = read_run(options.out)
            is_ours = run.launch is not None and run.launch == launch_name() and run.began >= began
            can_go_on = is_ours and has_snapshot(run)
        except ConfigError:
            pass  # it died before it had written anything
    if ranks.any(can_go_on):
        return replace(options, resume=True, overwrite=False)
    if ranks.any(is_ours):
        return replace(options, overwrite=False)  # what little is there is our own
    if not options.overwrite and not options.continues:
        require_new_run(options.out)
    return options
