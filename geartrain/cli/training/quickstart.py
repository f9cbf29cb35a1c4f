"""``geartrain quickstart``: trains a model from nothing, as a test of the installation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from geartrain.cli.shared.options import CacheFolder, Json
from geartrain.cli.training.worker import train

SMALL_STEPS = 200
_SMALL_SIDE = 32


def quickstart(
    small: Annotated[
        bool, typer.Option("--small", help="200 signs drawn here, in under a minute; nothing is downloaded.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder to write; the run there is put aside as OUT.previous.",
            show_default="runs/quickstart, or runs/small",
        ),
    ] = None,
    cache: CacheFolder = Path(".cache"),
    as_json: Json = False,
) -> None:
    """Train a classifier of 40,992 characters from downloaded fonts, and test it on fonts it never saw; with --small a
    classifier of 200 drawn signs.
    """
    if not small:
        train("glyphs", out=out or Path("runs/quickstart"), overwrite=True, cache=cache, as_json=as_json)
        return
    out = out or Path("runs/small")
    pictures = out.with_name(f"{out.name}-pictures")
    from geartrain.workers.job.folder import create_folder  # loaded only for --small
    from geartrain.workers.recipes.signs import IMAGES_OF_EACH, NUM_SIGNS, drawn_signs

    create_folder(pictures.parent, "folder")
    _say(f"Drawing {NUM_SIGNS} signs, {IMAGES_OF_EACH} times each, into {pictures}")
    drawn_signs(pictures)
    # Centers that start at the class means would name three of four before the first step.
    settings = ["look.kind=ink", f"look.size={_SMALL_SIDE}", "imprint=false"]
    train("classify", str(pictures), out=out, overwrite=True, steps=SMALL_STEPS, settings=settings, as_json=as_json)
    model = json.loads((out / "report.json").read_text(encoding="utf-8"))["model"]
    images = model["best"]["images"]
    before, after = (round(images * model[moment]["validation_top1"]) for moment in ("start", "best"))
    _say(
        f"\nOf {images} pictures that it never saw it named {before} before training, and {after} after it: "
        f"{100 * after / images:.0f} % ({NUM_SIGNS} classes: guessing names {images // NUM_SIGNS}).\n",
        style="bold",
    )
    _say(
        "Next:\n"
        f"  geartrain predict {out} {pictures}/sign-007/14.png   name a picture\n"
        f"  geartrain export {out} --to MODEL; geartrain serve MODEL    draw signs in a browser, and ask it by curl\n"
        "  geartrain worker classify --data FOLDER --out RUN    train on pictures of yours: a folder for each class\n"
        "  geartrain quickstart                                 40,992 characters; fetches 134 MB of fonts\n"
        "  geartrain up                                         a cluster; then add --scheduler 127.0.0.1:7000"
    )


def _say(line: str, style: str | None = None) -> None:
    from geartrain.cli.shared.consoles import plain_console

    plain_console(stderr=True).print(line, style=style, soft_wrap=True)
