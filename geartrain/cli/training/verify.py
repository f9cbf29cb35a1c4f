"""``geartrain verify``: how well a saved model tells pairs of pictures apart."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from geartrain.cli.shared.options import Json, OwnBackbone


def verify(
    model: Annotated[Path, typer.Argument(help="A run, such as runs/classify, or its model folder.")],
    pairs: Annotated[list[Path], typer.Argument(help="Files of pairs as InsightFace packs them, such as lfw.bin.")],
    mirror: Annotated[
        bool | None,
        typer.Option(
            "--mirror/--no-mirror",
            help="Add the features of the mirror image.",
            show_default="only if --look was photo",
        ),
    ] = None,
    backbone: OwnBackbone = None,
    as_json: Json = False,
) -> None:
    """Print the accuracy by 10 folds and the true accept rates (TAR) at false accept rates (FAR) of pairs.

    The files are pickles; they are read without running any of what they hold.
    """
    from geartrain.workers.models.saved_model import (
        load_model,  # torch is loaded only after the arguments are known to be right
    )
    from geartrain.workers.models.verify import verify_file

    loaded = load_model(model, backbone=backbone)
    wanted = loaded.preprocessing.kind == "photo" if mirror is None else mirror
    results = []
    for path in pairs:
        result = verify_file(loaded, path, mirror=wanted)
        results.append({"pairs_file": str(path), "mirror": wanted, **asdict(result)})
        if not as_json:
            rates = "  ".join(f"TAR@FAR={rate:g} {value:.4f}" for rate, value in result.true_accepts.items())
            print(f"{path}  accuracy {result.accuracy:.4f} ± {result.accuracy_std:.4f}  {rates}")
    if as_json:
        print(json.dumps(results))
