"""``geartrain verify``: accuracy of a saved model on pairs of pictures."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from geartrain.ams.values.errors import ConfigError
from geartrain.cli.shared.options import Json, OwnBackbone


def verify(
    model: Annotated[Path, typer.Argument(help="A run, such as runs/classify, or its model folder.")],
    pairs: Annotated[
        list[Path] | None, typer.Argument(help="Files of pairs as InsightFace packs them, such as lfw.bin.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option("--images", help="For templates (IJB): the folder of the pictures, cut to the face.")
    ] = None,
    media: Annotated[
        Path | None, typer.Option("--media", help="For templates: lines of 'picture template media'.")
    ] = None,
    template_pairs: Annotated[
        Path | None, typer.Option("--template-pairs", help="For templates: lines of 'template template 1-or-0'.")
    ] = None,
    mirror: Annotated[
        bool | None,
        typer.Option(
            "--mirror/--no-mirror",
            help="Add the features of the mirror image.",
            show_default="only if look.kind was photo",
        ),
    ] = None,
    backbone: OwnBackbone = None,
    as_json: Json = False,
) -> None:
    """Print the accuracy (10-fold) and the true accept rates (TAR) at false accept rates (FAR) of pairs.

    The files are pickles; none of their code is run. With --images, --media and --template-pairs, templates are
    verified, too: the features of a template's pictures are pooled. Nothing is interpolated: TAR@FAR is at the loosest
    threshold that accepts at most that share of the different pairs. A FAR below one in the number of different pairs
    is left out.
    """
    of_templates = (images, media, template_pairs)
    if any(of_templates) and not all(of_templates):
        raise ConfigError("templates need all of --images, --media and --template-pairs")
    if not pairs and not any(of_templates):
        raise ConfigError("which pairs? Give .bin files, or --images, --media and --template-pairs")
    # torch is loaded only after the arguments are checked
    from geartrain.workers.job.folder import warn_if_unended
    from geartrain.workers.models.saved_model import step_of
    from geartrain.workers.models.templates import verify_templates
    from geartrain.workers.models.trained_model import picture_model
    from geartrain.workers.models.verify import verify_file

    loaded = picture_model(model, backbone)
    warn_if_unended(model, step_of(loaded.training), lambda line: print(line, file=sys.stderr))
    assert loaded.preprocessing is not None
    wanted = loaded.preprocessing.kind == "photo" if mirror is None else mirror
    results: list[dict[str, Any]] = []
    for path in pairs or []:
        result = verify_file(loaded, path, mirror=wanted)
        results.append({"pairs_file": str(path), "mirror": wanted, **asdict(result)})
        if not as_json:
            accuracy = f"{result.accuracy:.4f} ± {result.accuracy_std:.4f}"
            print(f"{path}  accuracy {accuracy}  {_rates(result.true_accepts)}")
    if images is not None and media is not None and template_pairs is not None:
        judged = verify_templates(loaded, images, media, template_pairs, mirror=wanted)
        results.append({"pairs_file": str(template_pairs), "mirror": wanted, **asdict(judged)})
        if not as_json:
            print(f"{template_pairs}  {judged.templates:,} templates  {_rates(judged.true_accepts)}")
    if as_json:
        print(json.dumps(results))


def _rates(true_accepts: dict[float, float]) -> str:
    return "  ".join(f"TAR@FAR={rate:g} {value:.4f}" for rate, value in true_accepts.items())
