"""Whole training job, from data to a run folder, with recovery. ``run.py`` makes one attempt at it.

A job goes back to its last snapshot *as a whole* when a role of its cluster is lost: by itself if it is one process; if
it is several, torchrun restarts them and they find the snapshot.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect, local
from geartrain.ams.client.jobs.worker_steps import worker_name
from geartrain.ams.observe import failpoints
from geartrain.ams.programs.models import hosted_models
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.store import place
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import ConfigError, GeartrainError, TableNotFound
from geartrain.ams.values.text import counted
from geartrain.bridge.head.backends.registry import ROW_BACKENDS
from geartrain.workers.job.folder import (
    HERE,
    Run,
    cluster_of,
    find_run,
    has_run,
    has_snapshot,
    read_report,
    read_run,
    require_folder,
    require_new_run,
    require_new_snapshots,
    require_one_process,
    resume_hint,
    sole_trainer,
)
from geartrain.workers.job.interruption import Interruption, Stopped, interruption
from geartrain.workers.job.keys import gone_on_with
from geartrain.workers.job.metrics import serve_job_metrics
from geartrain.workers.job.options import JobOptions, JobResult
from geartrain.workers.job.ranks import JobRanks, joined_ranks
from geartrain.workers.job.run import TrainingRun, drop_tables
from geartrain.workers.job.snapshots import LOST, Loss, ResumeFromSnapshot
from geartrain.workers.job.state import JobProgress, JobState, newest_snapshot, snapshot_named
from geartrain.workers.job.trainer import Attempt, Trainer

_CLOCKS_DIFFER_SECONDS = 5.0
_POLL_SECONDS = 0.5
"""Between two looks of a joined worker at the record of its run."""
_TRIES = 5
"""To open the tables of a job that may go back to its snapshot meanwhile."""
CHANGEABLE = (
    *("snapshots.*", "kafka.*", "rows", "dtype", "prefetch"),
    *("features.*.admission", "features.*.expiry", "features.*.max_bytes"),
)
"""Patterns of the recipe keys that may change when a run is resumed."""


def run_job(trainer_class: type[Trainer], options: JobOptions, console: Console) -> JobResult:
    """Train, evaluate and save. Under torchrun all ranks call this; the first one writes and prints.

    Raises ConfigError, before anything is written, if ``options.out`` holds a run that was not meant to be replaced.
    """
    started = time.perf_counter()
    require_folder(options.cache, "--cache")
    is_first = os.environ.get("RANK", "0") == "0"

    def say(line: str) -> None:
        if is_first:
            console.print(line, highlight=False, soft_wrap=True)

    with interruption() as stop, serve_job_metrics(options.metrics if is_first else None, say):
        if options.joins:
            return _join(trainer_class, options, console, stop)
        options, ended = _with_its_run(trainer_class, options, say)
        if trainer_class.in_one_process and not (_shares(options) and options.scheduler):
            require_one_process(options.job)
        if ended is not None:
            with joined_ranks(options.device, alone=_shares(options)) as ranks:  # others may wait there
                return _agreed(options, ranks, ended) or ended
        if _shares(options) and not is_first:
            return _join_when_started(trainer_class, options, console, stop)
        trainer_class.require(options)
        return _run_to_the_end(trainer_class, options, console, started, stop)


def _shares(options: JobOptions) -> bool:
    """Return whether each process is a worker by itself, and takes samples from the run that one of them began."""
    return bool(getattr(options.recipe, "shares", False))


def _join_when_started(
    trainer_class: type[Trainer], options: JobOptions, console: Console, stop: Interruption
) -> JobResult:
    """Join the run that the first rank of this torchrun begins or resumes."""
    stop.doing = "waited for the first rank"
    if os.environ["TORCHELASTIC_RUN_ID"] == "none" and os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        raise ConfigError("torchrun has processes on several machines; give all the same --rdzv-id NAME")
    launch, since = launch_name(), psutil.Process().create_time() - _CLOCKS_DIFFER_SECONDS
    while True:
        if has_run(options.out):
            run = read_run(options.out)
            if run.launch == launch and run.began >= since and has_snapshot(run):
                return _join(trainer_class, options, console, stop)
        time.sleep(_POLL_SECONDS)


def _join(trainer_class: type[Trainer], options: JobOptions, console: Console, stop: Interruption) -> JobResult:
    """Train on a share of the samples of a run, in its cluster, until none are left, its first worker has ended its
    stage, or ``stop``.
    """
    run = read_run(options.out)
    snapshot = newest_snapshot(run.snapshots)
    state = _read_state(trainer_class, snapshot, run)
    scheduler = options.scheduler or run.scheduler
    if scheduler is None or not getattr(state.recipe, "shares", False):
        raise ConfigError(
            f"the run in {options.out} is of one worker; begin one that others join with --scheduler HOST:PORT --set "
            "mode=async"
        )
    # No ``stated``: the process that resumed the run has altered its tables already.
    options = replace(options, recipe=state.recipe, scheduler=scheduler, joins=True, stated=())
    attempt = Attempt(
        options=options,
        progress=replace(state.progress, step=0, stage_start=0, stage_steps=state.recipe.stage_steps(), best=None),
        snapshot=snapshot,
        state=state,
        cluster=None,
        ranks=JobRanks(),
        console=console,
    )
    is_over, has_ended = _watched_stage(options.out), JobResult(True, None, 0)
    if is_over():
        attempt.print_line(f"The run in {options.out} has ended")
        return has_ended
    stop.doing = "loaded its data"
    data = trainer_class.load(options, state, console)
    with connect(scheduler, config=ClientConfig()) as cluster:
        try:
            trainer = None if is_over() else _opened_trainer(trainer_class, replace(attempt, cluster=cluster), data)
        except GeartrainError:
            if not read_run(options.out).over:
                raise
            trainer = None
        if trainer is None:
            attempt.print_line(f"The run in {options.out} has ended meanwhile")
            return has_ended
        attempt.print_line(f"Joined {run.job}")
        with stop.in_order(cluster):
            try:
                finished = trainer.run(stop=lambda: stop() or is_over()) or is_over()
            finally:
                trainer.leave()
        attempt.print_line(
            f"{'Ended' if finished else 'Left'} after {counted(trainer.progress.step, 'step')} of this worker"
        )
    return JobResult(finished, None, trainer.progress.step)


def _watched_stage(out: Path) -> Callable[[], bool]:
    """Return a function that tells whether the first worker of the run has ended its stage, from the run's record."""
    polled_at, is_over = -math.inf, False

    def poll() -> bool:
        nonlocal polled_at, is_over
        if time.monotonic() - polled_at >= _POLL_SECONDS:
            is_over, polled_at = read_run(out).over, time.monotonic()
        return is_over

    return poll


def _opened_trainer(trainer_class: type[Trainer], attempt: Attempt, data: Any) -> Trainer:
    """Make the trainer. Tables that the scheduler keeps, and that are lost or restored meanwhile, are waited for."""
    for tries_left in reversed(range(_TRIES)):
        try:
            return trainer_class(attempt, data)  # type: ignore[call-arg]
        except (*LOST, TableNotFound):
            cluster, job = attempt.cluster, attempt.progress.table
            if cluster is None or not (tries_left and trainer_class.is_kept(attempt.options, cluster, job)):
                raise
    raise AssertionError("the last try has returned or raised")


def _with_its_run(
    trainer_class: type[Trainer], options: JobOptions, say: Callable[[str], None]
) -> tuple[JobOptions, JobResult | None]:
    """Return the options completed from the run: whether it resumes (``continues``), its cluster and recipe; and its
    result if it has ended and no more is asked for. Ranks that see one folder get the same (:func:`_agreed`).
    """
    run = read_run(options.out) if options.resume else None
    if options.continues:
        run = find_run(options.out, options.snapshots, allow_fallback=options.allow_fallback)
        options = replace(options, resume=run is not None, resume_steps=None)
    if run is not None:
        snapshot = newest_snapshot(run.snapshots, allow_fallback=options.allow_fallback)
        options = _with_saved_recipe(options, _read_state(trainer_class, snapshot, run))
        is_done = run.ended and snapshot.manifest.step >= run.stage_end
    given = HERE if options.scheduler is None and _on_ranks(options) else options.scheduler
    options = replace(options, scheduler=cluster_of(given, run, say))
    if run is None:
        return options, None
    report = read_report(options.out) if options.continues and is_done else None
    if report is None:
        return options, None
    say(f"The run in {options.out} has ended at step {run.stage_end} (to train on: --resume {options.out} --steps N)")
    return options, JobResult(True, report, run.stage_end)


def _agreed(options: JobOptions, ranks: JobRanks, ended: JobResult | None) -> JobResult | None:
    """Return the run's result, if a rank knows that it has ended. Raises ConfigError if only some ranks found a run:
    each looks in the folder of that name on its own machine.
    """
    found = ranks.gather_json([options.resume, None if ended is None else ended.step])
    if steps := [step for _, step in found if step is not None]:
        return ended or JobResult(True, None, steps[0])
    without = [rank for rank, (goes_on, _) in enumerate(found) if not goes_on]
    if options.continues and 0 < len(without) < len(found):
        raise ConfigError(
            f"rank {', '.join(map(str, without))} finds no run in {options.out}, and others do; give a --snapshots, or "
            "an --out, that all machines see alike"
        )
    return None


def _read_state(trainer_class: type[Trainer], snapshot: Snapshot, run: Run) -> JobState:
    """Read a snapshot's state. Raises ConfigError if it is another job's, whose rows must not be used."""
    state = JobState.read(snapshot, trainer_class.job, trainer_class.recipe_class)
    if state.progress.table != run.job:
        raise ConfigError(
            f"{snapshot.path} is of job {state.progress.table!r}, not of {run.job!r}, whose folder this is; move it "
            "away"
        )
    return state


def _with_saved_recipe(options: JobOptions, state: JobState) -> JobOptions:
    recipe = gone_on_with(state.recipe, options.recipe, options.stated, CHANGEABLE, options.out)
    return replace(options, recipe=recipe)


def _run_to_the_end(
    trainer_class: type[Trainer],
    options: JobOptions,
    console: Console,
    started: float,
    stop: Interruption,
) -> JobResult:
    """Run attempts until the job has ended, or cannot continue."""
    recoveries = 0
    loss: Loss | None = None
    is_alone = "WORLD_SIZE" not in os.environ or _shares(options)
    while True:
        if options.resume:
            stop.saved = partial(resume_hint, options.out, go_on=options.continue_command())
        try:
            return _run_once(trainer_class, options, console, started, loss, stop)
        except Stopped:
            if stop.saved() is None:
                raise
            return _stopped(stop, console, loss)
        except FileNotFoundError as exc:
            gone = None if exc.filename is None else Path(os.fsdecode(exc.filename))
            if gone is None or not gone.is_relative_to(options.out) or options.out.exists():
                raise
            said = f"{exc.strerror}: {options.out} was removed while the run trained there; start it again"
            raise FileNotFoundError(exc.errno, said, exc.filename) from exc
        except (ResumeFromSnapshot, *LOST) as exc:
            # Once there is a snapshot, a role that is not back yet is worth another attempt, too. Under torchrun the
            # ranks come back together: torchrun restarts them.
            if isinstance(exc, ResumeFromSnapshot) and is_alone:
                loss = exc.loss
            if loss is not None and stop():
                return _stopped(stop, console, loss)
            is_planned = isinstance(exc, ResumeFromSnapshot) and exc.is_planned
            if loss is None or (recoveries == options.max_recoveries and not is_planned):
                raise (exc.__cause__ if isinstance(exc, ResumeFromSnapshot) and exc.__cause__ else exc) from None
            recoveries += not is_planned
            options = replace(options, resume=True, overwrite=False, resume_steps=None)


def _stopped(stop: Interruption, console: Console, loss: Loss | None) -> JobResult:
    """Return the result after a signal where nothing more could be saved: an earlier attempt's snapshot counts."""
    console.print(stop.why, highlight=False, soft_wrap=True)
    return JobResult(False, None, 0 if loss is None else loss.step)


def _run_once(
    trainer_class: type[Trainer],
    options: JobOptions,
    console: Console,
    started: float,
    loss: Loss | None,
    stop: Interruption,
) -> JobResult:
    stop.doing = "waited for the other ranks"
    with joined_ranks(options.device, alone=_shares(options)) as ranks:
        return _run_on(ranks, trainer_class, options, console, started, loss, stop)  # its model is freed with its frame


def _run_on(
    ranks: JobRanks,
    trainer_class: type[Trainer],
    options: JobOptions,
    console: Console,
    started: float,
    loss: Loss | None,
    stop: Interruption,
) -> JobResult:
    with ExitStack() as stack:
        console = console if ranks.is_first else Console(quiet=True)
        if loss is None and (ended := _agreed(options, ranks, None)) is not None:
            return ended
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        is_restart = ranks.any(restarts > 0)  # a machine that replaced another one has its first start
        options = _after_restart(options, ranks, is_restart=is_restart)
        _require_place(options, ranks)
        if ranks.is_first and loss is None and not is_restart:
            stop.doing = "looked where its snapshots go"
            _require_snapshot_root(options)
        if ranks.is_first:
            stack.enter_context(sole_trainer(options.out))  # processes of other machines are fenced in the cluster
        snapshot, state = None, None
        if options.resume:
            stop.saved = partial(resume_hint, options.out, go_on=options.continue_command(ranks.launcher))
            run = read_run(options.out)
            # One rank looks for the newest: a snapshot that appears meanwhile must not divide them.
            first = newest_snapshot(run.snapshots, allow_fallback=options.allow_fallback) if ranks.is_first else None
            name = ranks.gather_json(first.name if first else "")[0]
            snapshot = first or snapshot_named(run.snapshots, name)
            state = _read_state(trainer_class, snapshot, run)
            options = _with_saved_recipe(options, state)
        stop.doing = "loaded its data"
        data = _load_in_turn(trainer_class, options, state, ranks, console)
        stop.doing = "opened its cluster"
        failpoints.reach("job.connect.before")
        job = f"{options.out.name or 'run'}~{ranks.new_job_id()}" if state is None else state.progress.table
        again = loss is not None or is_restart
        cluster = (
            stack.enter_context(_open_cluster(options, ranks, job, goes_on=again)) if not _on_ranks(options) else None
        )
        if cluster is not None and state is None and ranks.is_first:
            stack.push(partial(_drop_unsaved, cluster, job, options.out))
        is_kept = cluster is not None and snapshot is not None and trainer_class.is_kept(options, cluster, job)
        if cluster is not None and is_kept and ranks.is_first:
            # A paused process of this worker must not continue beside it; others go on.
            cluster.fence(cluster.write_stream.name, cluster.write_stream.incarnation, forget=False)
        elif cluster is not None and snapshot is not None and ranks.is_first:
            # A paused process of this job must not continue beside it.
            stop.doing = "restored its rows"
            cluster.fence(job, cluster.write_stream.incarnation)
            failpoints.reach("job.restore.before")
            cluster.restore(snapshot.path, replace=True)
        stop.doing = "waited for the other ranks"
        ranks.barrier("rows restored")  # no rank may look for the tables before they exist
        stop.doing = "set up its model"
        attempt = Attempt(
            options=options,
            progress=_progress(options, state, job, again=again),
            snapshot=snapshot,
            state=state,
            is_kept=is_kept,
            cluster=cluster,
            ranks=ranks,
            console=console,
        )
        trainer = _opened_trainer(trainer_class, attempt, data)
        seconds = {"data": time.perf_counter() - started}
        training = TrainingRun(attempt, trainer, launch=launch_name(), loss=loss, seconds=seconds)
        with stop.in_order(cluster):
            return training.execute(stop)


def _drop_unsaved(cluster: Cluster, job: str, out: Path, kind: type[BaseException] | None, *_: Any) -> None:
    """Drop the tables of a new job that ends with an error before its first snapshot, unless other workers train on
    them: nothing resumes with them.
    """
    if kind is None or issubclass(kind, LOST):
        return
    with suppress(GeartrainError):
        run = read_run(out) if has_run(out) else None
        is_saved = run is not None and run.job == job and has_snapshot(run)
        if not (is_saved or cluster.streams(job, worker=worker_name(job, None), num_streams=1).has_others()):
            drop_tables(cluster, job)


def _progress(options: JobOptions, state: JobState | None, job: str, *, again: bool) -> JobProgress:
    """Return the progress at the start of the attempt. ``again``: this job itself starts once more."""
    if state is None:
        return JobProgress(step=0, stage_start=0, stage_steps=options.recipe.stage_steps(), table=job)
    run, progress, asked = read_run(options.out), state.progress, options.resume_steps
    steps = None if asked is None else replace(state.recipe, steps=asked).stage_steps()
    if not progress.is_complete:
        if steps not in (None, progress.stage_steps) and not again:
            raise ConfigError(
                f"--steps {asked} is for a run that has ended; {options.out} stands at step {progress.step} of "
                f"{progress.stage_start + progress.stage_steps}. Leave --steps out to train it to its end, and give "
                "it after"
            )
        return progress
    if run.stage_end > progress.step:  # another stage had begun, and saved nothing yet
        return replace(progress, stage_start=progress.step, stage_steps=run.stage_end - progress.step)
    if again or not run.ended:
        return progress  # the training is done, and only the rest is left
    return replace(progress, stage_start=progress.step, stage_steps=steps or state.recipe.stage_steps())


def _on_ranks(options: JobOptions) -> bool:
    return not ROW_BACKENDS[getattr(options.recipe, "rows", "pull")].needs_cluster


def _require_place(options: JobOptions, ranks: JobRanks) -> None:
    """Raise ConfigError, with the remedy, unless the flags say where the rows of the job are."""
    if _on_ranks(options):
        clusters = {
            "--scheduler": options.scheduler,
            "--graph": options.graph,
            "snapshots.increments": options.recipe.snapshots.increments,
        }
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


def _require_snapshot_root(options: JobOptions) -> None:
    """Raise SnapshotRefused, InvalidArgument or ConfigError before anything is fetched or made, if snapshots of the job
    cannot be written at their place."""
    root = read_run(options.out).snapshots if options.resume else str(place(options.snapshot_root))
    goes_aside = options.overwrite and root == str((options.out / "snapshots").absolute())
    if options.snapshots is not None and not options.resume and not goes_aside:
        require_new_snapshots(root)
    if options.scheduler is not None:
        with connect(options.scheduler, config=_client_config(options, goes_on=False)) as cluster:
            cluster.require_snapshot_root(root)


def _open_cluster(options: JobOptions, ranks: JobRanks, job: str, *, goes_on: bool) -> Cluster:
    """Return the job's cluster, or one in this process; all ranks have the incarnation assigned to the first one."""
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
    """Return the client's settings. A job that resumes after a loss waits as long for the scheduler as for a shard: it
    may be the lost role."""
    config = ClientConfig(graph=options.graph)
    if not goes_on:
        return config
    seconds = config.recovery_timeout_seconds
    return config.model_copy(update={"connect_timeout_seconds": seconds, "refused_timeout_seconds": seconds})


def _load_in_turn(
    trainer_class: type[Trainer], options: JobOptions, state: JobState | None, ranks: JobRanks, console: Console
) -> Any:
    """Load the data; the first rank fills the caches, the others find them filled."""
    if not ranks.is_first:
        ranks.barrier("data loaded")
    failpoints.reach("job.data.before")
    data = trainer_class.load(options, state, console)
    if ranks.is_first:
        ranks.barrier("data loaded")
    return data


def launch_name() -> str | None:
    """Return the name of the torchrun that started this process, the same after a restart; None without one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    name = os.environ["TORCHELASTIC_RUN_ID"]
    # Agents of several nodes share the name alone. It may also be that of an earlier torchrun, and is "none" by
    # default: so an agent whose processes are the whole job is identified by its process.
    if name != "none" and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return name
    agent = psutil.Process(os.getppid())
    return f"{platform.node()}:{agent.pid}:{agent.create_time():.2f}"


def _after_restart(options: JobOptions, ranks: JobRanks, *, is_restart: bool) -> JobOptions:
    """Continue the run that this very torchrun started, if it restarted us. Any other run stays as it is."""
    if options.resume:
        return options
    if not is_restart:
        if not options.overwrite and not options.continues:
            require_new_run(options.out)
        return options
    is_ours = can_go_on = False
    # The start of this process's launcher, less the clock difference of several nodes.
    began = min(ranks.gather_json(psutil.Process(os.getppid()).create_time())) - _CLOCKS_DIFFER_SECONDS
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
        return replace(options, overwrite=False)  # the little that exists is our own
    if not options.overwrite and not options.continues:
        require_new_run(options.out)
    return options
