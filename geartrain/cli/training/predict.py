"""``geartrain predict``: name images with a saved model, or score samples with a click model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import counted
from geartrain.cli.shared.options import CacheFolder, Json, OwnBackbone

DEFAULT_K = 5


def predict(
    model: Annotated[
        Path, typer.Argument(help="A run, such as runs/quickstart or runs/ctr, its model folder, or an ONNX export.")
    ],
    images: Annotated[
        list[Path], typer.Argument(help="Image files, or folders of images; of a model of clicks Parquet or CSV.")
    ],
    k: Annotated[
        int | None,
        typer.Option(
            "--k", "-k", min=1, help="Answers for each image.", show_default=f"{DEFAULT_K}, or all classes if fewer"
        ),
    ] = None,
    backbone: OwnBackbone = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Of a model of clicks: Parquet file to write, with a column score.", show_default="printed"
        ),
    ] = None,
    cache: CacheFolder = Path(".cache"),
    as_json: Json = False,
) -> None:
    """Name images with a saved model; no cluster is needed. Scores are cosines, at most 1.

    A click model (a run of 'geartrain worker ctr') gives the probability of a click for each sample of a file or
    folder of Parquet or CSV with the columns of its training, a line each, or as the column score of --out.

    Exits with 1 if an image could not be read (the others are still named), with 2 if one does not exist.
    """
    from geartrain.workers.ctr.predict import is_click_run

    if is_click_run(model):
        _score_clicks(model, images, out, cache, as_json)
        return
    if out is not None:
        raise ConfigError(f"--out is for scores of clicks, and {model} names images; leave it out, and use --json")
    from geartrain.workers.job.folder import warn_if_unended
    from geartrain.workers.models.predict import image_files
    from geartrain.workers.models.predict import predict as predictions
    from geartrain.workers.models.saved_model import step_of
    from geartrain.workers.models.trained_model import picture_model  # torch is loaded after the arguments are checked

    files = image_files(images)
    loaded = picture_model(model, backbone)
    warn_if_unended(model, step_of(loaded.training), lambda line: print(line, file=sys.stderr))
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


def _score_clicks(run: Path, samples: list[Path], out: Path | None, cache: Path, as_json: bool) -> None:
    from geartrain.cli.shared.consoles import plain_console
    from geartrain.workers.ctr.predict import predict_clicks, write_scores

    if len(samples) != 1:
        raise ConfigError(f"{len(samples)} files are given; a model of clicks scores one file, or one folder")
    if out is not None and out.suffix not in ("", ".parquet"):
        raise ConfigError(
            f"--out is {str(out)!r}, and scores are written as Parquet; give {out.with_suffix('.parquet')}"
        )
    if out is not None and samples[0].resolve() in (out.resolve(), *out.resolve().parents):
        raise ConfigError(f"--out is {str(out)!r}, which is one of the samples or lies among them; give another file")
    console = plain_console(stderr=True)  # stdout is for scores
    scores = predict_clicks(run, str(samples[0]), cache=cache, say=lambda line: console.print(line, soft_wrap=True))
    if out is not None:
        write_scores(out, scores)
        console.print(f"{counted(len(scores), 'score')} in {out}")
    elif as_json:
        print(json.dumps(scores.tolist()))
    else:
        sys.stdout.writelines(f"{score:.6f}\n" for score in scores)


def _shown(name: str) -> str:
    """Return a character together with its code point: not every terminal has a font for it."""
    return f"{name} (U+{ord(name):04X})" if len(name) == 1 and not name.isascii() else name
