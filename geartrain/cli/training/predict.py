"""``geartrain predict``: name images with a saved model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from geartrain.ams.values.errors import ConfigError
from geartrain.cli.shared.options import Json, OwnBackbone

DEFAULT_K = 5


def predict(
    model: Annotated[Path, typer.Argument(help="A run, such as runs/quickstart, its model folder, or an ONNX export.")],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of images.")],
    k: Annotated[
        int | None,
        typer.Option(
            "--k", "-k", min=1, help="Answers for each image.", show_default=f"{DEFAULT_K}, or all classes if fewer"
        ),
    ] = None,
    backbone: OwnBackbone = None,
    as_json: Json = False,
) -> None:
    """Name images with a saved model; no cluster is needed. Scores are cosines, 1 at best.

    Exits with 1 if an image could not be read (the others are named all the same), with 2 if one does not exist.
    """
    from geartrain.workers.models.predict import image_files
    from geartrain.workers.models.predict import predict as predictions
    from geartrain.workers.models.trained_model import picture_model  # torch is loaded after the arguments are known

    files = image_files(images)
    loaded = picture_model(model, backbone)
    if missing := [str(path) for path in files if not path.exists()]:
        raise ConfigError(f"{', '.join(missing)}: no such file or folder; give images, or folders of images")
    results = list(predictions(loaded, files, min(DEFAULT_K, len(loaded.class_names)) if k is None else k))
    if as_json:
        print(
            json.dumps(
                [
                    {"image": str(result.path), "error": result.error}
                    if result.error
                    else {
                        "image": str(result.path),
                        "best": [{"class": name, "score": score} for name, score in result.best],
                    }
                    for result in results
                ],
                ensure_ascii=False,
            )
        )
    for result in results:
        if result.error:
            print(f"error: {result.error}", file=sys.stderr)
        elif not as_json:
            print(f"{result.path}  " + "  ".join(f"{_shown(name)} {score:.3f}" for name, score in result.best))
    if any(result.error for result in results):
        raise typer.Exit(1)


def _shown(name: str) -> str:
    """A character together with its code point: not every terminal has a font for it."""
    return f"{name} (U+{ord(name):04X})" if len(name) == 1 and not name.isascii() else name
