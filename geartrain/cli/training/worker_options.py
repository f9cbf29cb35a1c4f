"""The options of ``geartrain worker``, each written once.

What is not given is decided by the recipe, which loads torch: so the help's defaults are written here, and a test
compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def out(default: str) -> Any:
    help_text = "Run folder to write; with --resume it is the one gone on with."
    return typer.Option("--out", help=help_text, show_default=default)


def steps(default: int | str) -> Any:
    text = "Updates to train for; of a finished run that is resumed, further ones."
    return typer.Option("--steps", help=text, show_default=f"{default}")


def batch_size(default: int) -> Any:
    return typer.Option("--batch-size", help="Images of a step, over all ranks.", show_default=f"{default}")


def sample_rate(default: float) -> Any:
    text = "Part of the classes active in a step; 1 is the full softmax."
    return typer.Option("--sample-rate", "--active", help=text, show_default=f"{default}")


Select = Annotated[
    str | None,
    typer.Option(
        "--select",
        help="Active classes: knn (the labels and their neighbours), partial (the labels and random ones) or full.",
        show_default="partial",
    ),
]
Neighbours = Annotated[
    int | None, typer.Option("--k", min=1, help="With --select knn: neighbours kept of each class.", show_default="32")
]
Rebuild = Annotated[
    str | None,
    typer.Option(
        "--rebuild",
        help="With --select knn: when to look for the neighbours anew: epoch, background (the same, beside the "
        "training), auto (for a tenth of the training, and at epochs) or a number of steps.",
        show_default="epoch",
    ),
]
Rows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        help="Where the work on the class centers is done: pull (here, they travel), hosted (on the shards, beside "
        "them; features travel) or ranks (the processes of torchrun hold them on their devices, without a cluster). A "
        "resumed run may change it.",
        show_default="pull",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        help="Run folder to go on with: to its end or, if it had ended, for as many steps again (or --steps more).",
        show_default="a new run",
    ),
]
Continue = Annotated[
    bool,
    typer.Option(
        "--continue",
        help="Go on with the run in --out, or with the snapshots in --snapshots where --out is lost; begin it if there "
        "is none. The same command may be given again and again: it trains to the run's end, and then does nothing.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start over in --out; the run there is put aside as OUT.previous.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Decides everything random.", show_default="0")]
Lr = Annotated[
    float | None, typer.Option("--lr", help="Peak learning rate of backbone and class centers.", show_default="0.2")
]
SweptLr = Annotated[
    float | None,
    typer.Option(
        "--lr", help="Peak learning rate of backbone and class centers.", show_default="found by a few short trials"
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        help="host:port of the scheduler of a cluster for the rows; none: in this process, also those of a resumed run "
        "that had them in a cluster.",
        show_default="that of the resumed run; rows in this process",
    ),
]
Graph = Annotated[
    str | None,
    typer.Option(
        "--graph",
        help="With --select knn: host:port of the cluster's graph service.",
        show_default="built in this process",
    ),
]
Increments = Annotated[
    int, typer.Option("--increments", min=0, help="Snapshots of only the rows written since, between two of all rows.")
]
AllowFallback = Annotated[
    bool,
    typer.Option(
        "--allow-fallback", help="With --resume or --continue: if the newest snapshot is damaged, take one before it."
    ),
]
RowMomentum = Annotated[
    float | None, typer.Option("--row-momentum", help="Momentum of the class centers.", show_default="0.0")
]
RowMomentumUntouched = Annotated[
    str | None,
    typer.Option(
        "--row-momentum-untouched",
        help="With --row-momentum: what a step does to class centers that are not active in it: freeze (nothing), or "
        "elapsed (they move on, as under dense momentum).",
        show_default="freeze",
    ),
]
Sparsity = Annotated[
    float | None,
    typer.Option(
        "--sparsity",
        help="Under torchrun, over a slow network: the part of the backbone's gradient that a rank keeps back in a "
        "step and sends later, such as 0.999; 0: all of it travels.",
        show_default="0.0",
    ),
]
Snapshots = Annotated[
    str | None,
    typer.Option(
        "--snapshots", help="Folder or URL for snapshots; the shards must see it, too.", show_default="OUT/snapshots"
    ),
]
SnapshotSteps = Annotated[
    int | None, typer.Option("--snapshot-steps", min=1, help="Steps between snapshots.", show_default="200")
]
SnapshotMinutes = Annotated[
    float | None,
    typer.Option("--snapshot-minutes", help="Take one at least so often, too.", show_default="by steps alone"),
]
Keep = Annotated[int, typer.Option("--keep", min=1, help="Snapshots that stay.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 ...")]
Cache = Annotated[
    Path, typer.Option("--cache", envvar="GEARTRAIN_CACHE", help="Folder for downloaded fonts and drawn characters.")
]


Backbone = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        help="stroke_net, iresnet18, iresnet50, iresnet100, timm:NAME, or package.module:function of your own: called "
        "with (num_channels, dim, size) it returns a torch module from images in [0, 1] to features.",
        show_default="stroke_net",
    ),
]
Dim = Annotated[int | None, typer.Option("--dim", help="Width of a feature.", show_default="128")]
Optimizer = Annotated[
    str | None,
    typer.Option("--optimizer", help="Of backbone and class centers: sgd or adamw.", show_default="sgd"),
]
Imprint = Annotated[
    bool | None,
    typer.Option(
        "--imprint/--no-imprint",
        help="Let each class center begin as the mean feature of its images, and end as it if that is better.",
        show_default="unless the backbone is iresnet or timm, whose weights are random",
    ),
]
DType = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Of the backbone's products: float32, bfloat16 (autocast) or auto: what is faster.",
    ),
]
Logger = Annotated[
    list[str] | None,
    typer.Option(
        "--logger",
        help="Where the numbers of the training go: tensorboard (files in OUT/events), wandb, mlflow or none. May be "
        "given several times.",
        show_default="tensorboard",
    ),
]
Margin = Annotated[
    str | None,
    typer.Option(
        "--margin",
        help="The loss: none (plain softmax), arcface, cosface, sphereface, combined, adaface, magface, "
        "elasticarcface, elasticcosface or curricularface; with numbers of your own as NAME:SCALE,MARGIN.",
        show_default="cosface:24,0.15",
    ),
]
SubCenters = Annotated[
    int | None,
    typer.Option(
        "--sub-centers",
        help="Centers of each class, of which the one nearest to an image counts and learns: room for wrong labels. "
        "With a margin only; the class centers take so many times the memory.",
        show_default="1",
    ),
]
Augment = Annotated[
    str | None,
    typer.Option(
        "--augment",
        help="Random changes of the training images: none, or NAME=SIZE,...: affine (scale and slant), shift, elastic, "
        "colour (brightness and contrast), flip (part of the images mirrored). Those not named stay as they are; "
        "behind none they are off.",
        show_default="affine=0.04,shift=0.03,elastic=0.06",
    ),
]
HeldOut = Annotated[
    float | None,
    typer.Option(
        "--held-out",
        help="Part of each class kept for the validation, which chooses the model.",
        show_default="0.2",
    ),
]
Look = Annotated[
    str | None,
    typer.Option(
        "--look", help="photo: the whole picture; ink: characters and signs, cut to their ink.", show_default="photo"
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        "--image-size", help="Side in pixels that pictures are scaled to, a multiple of 8.", show_default="64"
    ),
]
Fit = Annotated[
    str | None,
    typer.Option(
        "--fit",
        help="With --look photo: how a picture becomes square: stretch, crop (its middle) or pad (black beside it).",
        show_default="stretch",
    ),
]
Grey = Annotated[bool | None, typer.Option("--grey", help="Ignore colours.")]
SkipUnreadable = Annotated[
    bool | None,
    typer.Option("--skip-unreadable", help="Leave out images that cannot be read; they are counted and named."),
]
ImageMemory = Annotated[
    int | None,
    typer.Option(
        "--image-memory",
        min=0,
        help="MiB of decoded images that are kept in memory; of more, every batch is read when it is wanted.",
        show_default="2048",
    ),
]
