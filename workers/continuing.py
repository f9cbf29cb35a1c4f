"""What there is of a run already: whether it begins, goes on or has ended, and where its rows are."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from geartrain.workers.job.folder import HERE, cluster_of, find_run, read_report, read_run
from geartrain.workers.job.options import JobOptions, JobResult

if TYPE_CHECKING:
    from geartrain.workers.ctr.options import CtrOptions

Options = TypeVar("Options", "JobOptions", "CtrOptions")


def with_its_run(options: Options, console: Console) -> Options:
    """The options with what is known of the run: whether it goes on (``continues``), and its cluster. Of ranks each
    comes to the same.
    """
    say = console.print if int(os.environ.get("RANK", "0")) == 0 else lambda *_, **__: None
    run = read_run(options.out) if options.resume else None
    if options.continues:
        run = find_run(options.out, options.snapshots, allow_fallback=options.allow_fallback)
        options = replace(options, resume=run is not None, resume_steps=None)
    given = options.scheduler
    if isinstance(options, JobOptions) and options.rows == "ranks" and given is None:
        given = HERE
    scheduler = cluster_of(given, run, lambda line: say(line, highlight=False, soft_wrap=True))
    return replace(options, scheduler=scheduler)


def result_of_ended(options: JobOptions | CtrOptions, console: Console) -> JobResult | None:
    """How the run ended; None: it has not, or was asked for more."""
    if not (options.continues and options.resume):
        return None
    run, report = read_run(options.out), read_report(options.out)
    if not run.ended or report is None:
        return None
    if int(os.environ.get("RANK", "0")) == 0:
        more = f"to train on: --resume {options.out} --steps N"
        console.print(
            f"The run in {options.out} has ended at step {run.stage_end} ({more})", highlight=False, soft_wrap=True
        )
    return JobResult(True, report, run.stage_end)
