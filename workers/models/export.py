"""Export of a trained model to a folder to serve: its backbone as ONNX, unit class centers, names, and measurements.

:mod:`.saved_model` describes the folder. Legend: N images, C classes, K centers of a class, D width.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.ams.values.errors import ConfigError, InvalidArgument, ModelDamaged
from geartrain.bridge.head.imprinting.backbone import Inputs, run
from geartrain.workers.atomic import complete_folder, replacing_folder
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.data.images import Images
from geartrain.workers.models import onnx_backbone
from geartrain.workers.models.precision import CALIBRATION_IMAGES, Precision, lower_precision
from geartrain.workers.models.saved_model import (
    CENTERS,
    ONNX,
    read_config,
    seal_model,
    sealed_files,
    write_arrays,
)

PICTURES, TENSORS = "pictures", "tensors"
"""Kinds of inputs of an export."""
_AT_ONCE = 256
Arrays = Mapping[str, npt.NDArray[np.float32]]
Finish = Callable[[Path, Arrays, npt.NDArray[np.float32] | None], Mapping[str, Any]]
"""Function of the folder, its centers and biases, and features [N, D] of held-out images (None: there are none).

It adds files, and returns their entries in config.json."""
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Function of an iterable, its purpose and its length, which yields the items and shows the progress."""
SURE, _SURE_IMAGES = 0.95, 50
"""Share of right answers above a service's "sure" score, and the least number of images to measure it on."""
_FEATURES_KEPT = 4096
"""Largest number of held-out images whose features are kept to measure an index's recall."""


@dataclass(frozen=True, kw_only=True)
class RunImages:
    """Training and test images of a run."""

    held_out: Sequence[Images]
    """Sets that training never saw."""
    train: Images


class Exportable(Protocol):
    """Model that can be exported: a :class:`.TrainedModel`."""

    @property
    def backbone(self) -> nn.Module:
        """Backbone from images to features [N, D]."""

    @property
    def centers(self) -> Tensor:
        """Centers [C, D], or [C, K, D]."""

    @property
    def biases(self) -> Tensor | None:
        """Biases [C]."""

    @property
    def class_names(self) -> Sequence[str]:
        """Names of the C classes."""

    @property
    def is_cosine(self) -> bool:
        """Whether scores are cosines."""

    @property
    def preprocessing(self) -> Preprocessing | None:
        """Settings from pictures to bitmaps."""

    @property
    def training(self) -> Mapping[str, Any]:
        """Entry of the run about its training."""

    def embed(self, images: Any) -> Tensor:
        """Return features [N, D]."""

    def best(self, features_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and classes [N, k]."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export."""

    parity: onnx_backbone.Parity
    """Parity of the network before its precision was lowered."""
    config: Mapping[str, Any]
    """Content of config.json, without checksums."""


def export_model(
    model: Exportable,
    folder: Path,
    example: Inputs | None = None,
    *,
    version: int | None = None,
    precision: Precision = "fp32",
    images: RunImages | None = None,
    preprocessing: str | None = None,
    finish: Finish | None = None,
    track: Track = lambda items, what, count: items,  # noqa: ARG005
) -> Exported:
    """Replace ``folder`` atomically by the model, if onnxruntime computes the same features as its backbone.

    Args:
        model: Model to export; it is not changed.
        folder: Target folder.
        example: Batch of two or more images, also compared if there are no held-out ones; None: random images, for a
            model of pictures only.
        version: Version number; None: one more than that in ``folder``, or 1.
        precision: Precision of the network; its accuracy on held-out images is written to config.json.
        images: Images of the run, by which features and accuracy are compared; int8 needs them.
        preprocessing: ``package.module:function`` that makes the tensors of a model of tensors; a service must be told
            it.
        finish: Function that adds files beside the model, such as an index.
        track: Function that shows the progress.

    Raises:
        ConfigError: A library is not installed, or int8 has no images.
        InvalidArgument: The backbone cannot be exported, or ``folder`` holds other files than an export.
        OSError: The disk is full, for example; the old folder stays.
    """
    following = next_version(folder)  # also where a version is given: it checks the existing folder
    version = following if version is None else version
    if preprocessing is not None and (model.preprocessing is not None or ":" not in preprocessing):
        raise InvalidArgument(
            f"preprocessing is {preprocessing!r}; it is package.module:function of a model that takes tensors"
        )
    if precision == "int8" and images is None:
        raise ConfigError("int8 needs images of the run, by which the ranges of its numbers are measured: see --data")
    if example is None:
        example = _random_images(model.preprocessing)
    arrays = _class_rows(model)
    with replacing_folder(folder) as staging:
        parity = onnx_backbone.write_onnx(model.backbone, example, staging / ONNX)
        networks: dict[str, nn.Module] = {"fp32": onnx_backbone.OnnxBackbone(staging / ONNX)}
        if precision != "fp32":
            lower_precision(staging / ONNX, precision, () if images is None else _calibration(images.train))
            networks[precision] = onnx_backbone.OnnxBackbone(staging / ONNX)
        measured, features = _compared(model, networks, example, images, track)
        if precision == "fp32":
            _require_parity(measured["parity"])
        elif not math.isfinite(measured["parity"]["largest_distance"]):
            raise InvalidArgument(
                f"the network in {precision} gives features that are not finite; export it with --precision fp32"
            )
        write_arrays(staging / CENTERS, arrays)
        config = {
            "kind": TENSORS if model.preprocessing is None else PICTURES,
            "version": version,
            "created": time.time(),
            "is_cosine": model.is_cosine,
            "preprocessing": preprocessing if model.preprocessing is None else model.preprocessing.to_json(),
            "num_classes": len(model.class_names),
            "dim": arrays["centers"].shape[-1],
            "precision": precision,
            **measured,
            "training": dict(model.training),
            **({} if finish is None else finish(staging, arrays, features)),
        }
        seal_model(staging, model.class_names, config)
    return Exported(parity=parity, config=config)


def _class_rows(model: Exportable) -> dict[str, npt.NDArray[np.float32]]:
    """Return the centers, of unit length if scores are cosines, and biases."""
    centers = model.centers.detach().float().cpu()
    rows = functional.normalize(centers, dim=-1) if model.is_cosine else centers
    biases = {} if model.biases is None else {"biases": model.biases.detach().cpu().numpy()}
    return {"centers": rows.contiguous().numpy(), **biases}


def _calibration(train: Images) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield batches of images spread evenly over the training images."""
    step = max(1, len(train) // CALIBRATION_IMAGES)
    for bitmaps, _ in train.subset(slice(None, None, step)).batches(_AT_ONCE, torch.device("cpu")):
        yield {onnx_backbone.INPUT: bitmaps.numpy()}


def _compared(
    model: Exportable,
    networks: Mapping[str, nn.Module],
    example: Inputs,
    images: RunImages | None,
    track: Track,
) -> tuple[dict[str, Any], npt.NDArray[np.float32] | None]:
    """Return entries of config.json, and features of some held-out images.

    The entries are the parity of the last of ``networks`` with the backbone, and the accuracy of all on those images.
    """
    stats = {name: _ParityStats() for name in ("pytorch", *networks)}
    batches: Iterable[tuple[Any, Tensor | None]] = [(example, None)]
    kept: list[Tensor] = []
    top1_results: list[tuple[Tensor, Tensor]] = []
    """Scores of the best classes of the last network, and whether they are right."""
    num_images = 0 if images is None else sum(map(len, images.held_out))
    if images is not None and num_images:
        sets = (one.batches(_AT_ONCE, torch.device("cpu")) for one in images.held_out)
        num_batches = sum(-(-len(one) // _AT_ONCE) for one in images.held_out)
        batches = track(itertools.chain.from_iterable(sets), "Comparing on held-out images", num_batches)
    for inputs, labels in batches:
        torch_features = model.embed(inputs)
        best = model.best(torch_features, 1)[1][:, 0]
        stats["pytorch"].add(torch_features, best, torch_features, best, labels)
        for name, network in networks.items():
            onnx_features = run(network, inputs).float()
            scores, classes = model.best(onnx_features, 1)
            stats[name].add(onnx_features, classes[:, 0], torch_features, best, labels)
        if labels is not None:
            top1_results.append((scores[:, 0], classes[:, 0] == labels))
        if len(kept) * _AT_ONCE < _FEATURES_KEPT:
            kept.append(onnx_features)
    last = stats[list(networks)[-1]]
    measured: dict[str, Any] = {
        "parity": {
            "images": last.images,
            "held_out": bool(num_images),
            "max_error": last.max_error,
            "largest_distance": last.largest_distance,
            "same_top1": last.same / last.images,
        }
    }
    if not num_images:
        return measured, None
    accuracy = {name: each.right / each.images for name, each in stats.items()}
    measured |= {"accuracy": {"images": num_images, **accuracy}}
    if top1_results:
        scores_N, is_right_N = (torch.cat(batch).cpu().numpy() for batch in zip(*top1_results, strict=True))
        if sure := sure_from(scores_N, is_right_N):
            measured["sure_from"] = sure
    return measured, torch.cat(kept).numpy()


def sure_from(scores_N: npt.NDArray[np.float32], right_N: npt.NDArray[np.bool_]) -> dict[str, Any] | None:
    """Return the lowest score at or above which :data:`SURE` of the images get the right class, and their share.

    None: there is no such score, or fewer than :data:`_SURE_IMAGES` images reach it.
    """
    order = np.argsort(-scores_N, kind="stable")
    scores, precision = scores_N[order], right_N[order].cumsum() / np.arange(1, len(order) + 1)
    is_last = np.append(scores[1:] != scores[:-1], True)  # of equal scores all count
    places = np.flatnonzero(is_last & (precision >= SURE))
    if not len(places) or places[-1] + 1 < _SURE_IMAGES:
        return None
    last = int(places[-1])
    share = (last + 1) / len(order)
    return {"score": float(scores[last]), "precision": float(precision[last]), "share": share, "images": len(order)}


def _require_parity(parity: Mapping[str, Any]) -> None:
    """Raise InvalidArgument unless onnxruntime's features are those of the backbone on each image."""
    if not parity["largest_distance"] <= onnx_backbone.TOLERANCE:
        raise InvalidArgument(
            f"of {parity['images']:,} images, features of onnxruntime are up to {parity['largest_distance']:.2g} of "
            f"their length from the backbone's, more than {onnx_backbone.TOLERANCE:g}, and the best class is the same "
            f"for {parity['same_top1']:.2%}; nothing was written. Does the backbone round, or branch on its inputs?"
        )


@dataclass
class _ParityStats:
    """Comparison with the backbone: distances of features, and numbers of images with the same and the right class."""

    images: int = 0
    same: int = 0
    right: int = 0
    max_error: float = 0.0
    largest_distance: float = 0.0

    def add(
        self, features: Tensor, classes: Tensor, torch_features: Tensor, torch_classes: Tensor, labels: Tensor | None
    ) -> None:
        """Add a batch: features [N, D] and best classes [N], the same of the backbone, and labels [N] if known."""
        self.images += len(features)
        self.same += int((classes == torch_classes).sum())
        self.right += 0 if labels is None else int((classes == labels).sum())
        distance = onnx_backbone.largest_distance(features, torch_features)
        self.max_error = float(np.maximum(self.max_error, float((features - torch_features).abs().max())))
        self.largest_distance = float(np.maximum(self.largest_distance, distance))  # NaN stays NaN


def next_version(folder: Path) -> int:
    """Return the version in the folder plus one; 1 if there is none.

    Raises InvalidArgument for a folder with other files, which an export would remove.
    """
    folder = complete_folder(folder)
    if not folder.exists():
        return 1
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; a model is exported to a folder")
    if folder.samefile(Path()):
        raise InvalidArgument("you are in the folder that would be replaced as a whole; give a new name, as ./model")
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    try:
        config = read_config(folder) if there else {}
    except (ConfigError, ModelDamaged):
        config = {}
    foreign = there if "kind" not in config else [name for name in there if name not in sealed_files(config)]
    if foreign:
        raise InvalidArgument(f"{folder} holds other files ({foreign[0]}); give a folder of its own, or a new name")
    return int(config.get("version", 0)) + 1


def _random_images(look: Preprocessing | None) -> Tensor:
    if look is None:
        raise InvalidArgument("example is None; give a batch of images, a tensor [N, ...] with N of 2 or more")
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (4, look.channels, look.size, look.size), generator=generator, dtype=torch.uint8)
