"""ONNX backbone: export, comparison with onnxruntime, and inference.

``backbone.onnx`` in a folder of :mod:`.saved_model`: images [N, …] -> features [N, D], any N; a backbone that takes
several tensors has an input for each, with the name of forward's argument.

Legend: N images, D width of a feature.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.head.imprinting.backbone import Inputs, bound, run
from geartrain.workers.models.saved_model import TYPES

TOLERANCE = 1e-4
"""Largest distance of features, relative to their length; other orders of summation differ by some 1e-6."""
INPUT, _OUTPUT = "images", "features"
_IDS = (torch.int32, torch.int64)
"""Dtypes of inputs, such as words or letters, of which also sizes other than N differ from batch to batch."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Difference between the features of onnxruntime and of the module."""

    images: int
    """Number of compared images, in batches of several sizes."""
    largest_distance: float
    """Largest distance between the two features of an image, relative to their length."""
    max_error: float = 0.0
    """Largest difference between two elements of features."""
    takes: str = ""
    """Inputs of the network; a service without preprocessing takes the same."""


class OnnxBackbone(nn.Module):
    """Exported backbone run by onnxruntime, on the CPU; without gradients."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        """Path of the file, in the folder of its model."""
        runtime = needed("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as exc:  # its errors share no other base
            raise InvalidArgument(f"onnxruntime cannot run {path}: {exc}") from exc

    @property
    def takes(self) -> str:
        """Description of the inputs: ``words int64 [N, any], weight float32 [N]``."""
        found = []
        for tensor in self._session.get_inputs():
            kind = str(tensor.type).removeprefix("tensor(").removesuffix(")")
            sizes = [str(size) if isinstance(size, int) else "any" for size in tensor.shape[1:]]
            found.append(f"{tensor.name} {TYPES.get(kind, kind)} [{', '.join(['N', *sizes])}]")
        return ", ".join(found)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Return features [N, D] of images [N, …]. Raises InvalidArgument for images of another shape or type."""
        names = [tensor.name for tensor in self._session.get_inputs()]
        given = {**dict(zip(names, inputs, strict=False)), **named}
        try:
            arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in given.items()}
            (features,) = self._session.run([_OUTPUT], arrays)
        except Exception as exc:
            found = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in given.items())
            raise InvalidArgument(f"onnxruntime refuses {found}; it takes {', '.join(names)}: {exc}") from exc
        return torch.from_numpy(features)


def write_onnx(backbone: nn.Module, example: Inputs, path: Path) -> Parity:
    """Write the backbone to ``path`` and compare onnxruntime's features of ``example`` with the backbone's.

    Raises ConfigError without the libraries; InvalidArgument if it cannot be exported, or features differ.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        needed(library)
    batch = _batch(backbone, example)
    was_training = backbone.training
    backbone.eval()
    try:
        exported_program(backbone, batch).save(str(path), external_data=False)
        return _compared(backbone, OnnxBackbone(path), batch)
    finally:
        backbone.train(was_training)


def _batch(backbone: nn.Module, example: Inputs) -> Tensor | dict[str, Tensor]:
    """Return the only input, or all by forward's argument names. Raises InvalidArgument unless each is [N, …]."""
    several = isinstance(example, tuple | Mapping)
    tensors: dict[str, Any] = {INPUT: example}
    if isinstance(example, tuple | Mapping):
        tensors = dict(bound(backbone, example).arguments)
    sizes = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.ndim < 1 or len(tensor) < 2:
            found = list(tensor.shape) if isinstance(tensor, Tensor) else quoted(tensor)
            raise InvalidArgument(
                f"example{f'[{name!r}]' if several else ''} is {found}; it must be a tensor of 2 or more images "
                "[N, ...], or a tuple or dict of such, as the backbone takes them. Texts of several lengths in one "
                "batch are padded to one: [N, L]"
            )
        sizes.add(len(tensor))
    if len(sizes) != 1:
        raise InvalidArgument(f"example has tensors of {sorted(sizes)} images; each must be [N, ...] of one N")
    return tensors if several else tensors[INPUT]


def _each(batch: Tensor | dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> Tensor | dict[str, Tensor]:
    return change(batch) if isinstance(batch, Tensor) else {name: change(tensor) for name, tensor in batch.items()}


def exported_program(backbone: nn.Module, example: Tensor | dict[str, Tensor], *, optimize: bool = True) -> Any:
    """Return the ``ONNXProgram`` of a backbone in eval(); ``optimize``: fold constants, parameters included.

    Raises InvalidArgument.
    """
    size = torch.export.Dim(INPUT, min=1)

    def sizes(tensor: Tensor) -> dict[int, Any]:
        lengths = range(1, tensor.ndim) if tensor.dtype in _IDS else ()
        return {0: size, **dict.fromkeys(lengths, torch.export.Dim.AUTO)}

    exporting = logging.getLogger("torch.onnx")
    level = exporting.level
    exporting.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of the exporter about itself
            return torch.onnx.export(
                backbone,
                (example,) if isinstance(example, Tensor) else (),
                kwargs=None if isinstance(example, Tensor) else example,
                input_names=[INPUT] if isinstance(example, Tensor) else list(example),
                output_names=[_OUTPUT],
                dynamic_shapes=(sizes(example),)
                if isinstance(example, Tensor)
                else {name: sizes(tensor) for name, tensor in example.items()},
                dynamo=True,
                optimize=optimize,
                verbose=False,
            )
    except Exception as exc:  # of many unrelated kinds
        reason = str(exc).strip().partition("\n")[0]
        raise InvalidArgument(
            f"{type(backbone).__name__} cannot be exported to ONNX: {type(exc).__name__}: {reason}. Its "
            "forward must take tensors [N, ...] of any N, without branches that look at values"
        ) from exc
    finally:
        exporting.setLevel(level)


@torch.no_grad()
def _compared(backbone: nn.Module, exported: OnnxBackbone, example: Tensor | dict[str, Tensor]) -> Parity:
    """Compare features of the example, its first image, and the example doubled. Raises InvalidArgument."""
    largest, error, num_images = 0.0, 0.0, 0
    first, doubled = (
        _each(example, lambda tensor: tensor[:1]),
        _each(example, lambda tensor: torch.cat([tensor, tensor.flip(0)])),
    )
    for images in (example, first, doubled):
        torch_features, onnx_features = run(backbone, images).float().cpu(), run(exported, images).float()
        if torch_features.shape != onnx_features.shape:
            raise InvalidArgument(
                f"onnxruntime gives {list(onnx_features.shape)}, the backbone {list(torch_features.shape)}"
            )
        largest = float(np.maximum(largest, largest_distance(onnx_features, torch_features)))  # NaN stays NaN
        error = float(np.maximum(error, float((torch_features - onnx_features).abs().max())))
        num_images += len(torch_features)
    if not largest <= TOLERANCE:
        raise InvalidArgument(
            f"features of onnxruntime differ from the backbone's by {largest:.2g} of their length, more than "
            f"{TOLERANCE:g}; nothing was written. Does the backbone draw random numbers, or round?"
        )
    return Parity(images=num_images, largest_distance=largest, max_error=error, takes=exported.takes)


def largest_distance(found_ND: Tensor, expected_ND: Tensor) -> float:
    """Return the largest distance between two features of an image, relative to the length of the expected one."""
    lengths = expected_ND.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((found_ND - expected_ND).norm(dim=1) / lengths).max())


def needed(library: str) -> Any:
    """Import a library of exports. Raises ConfigError."""
    try:
        return importlib.import_module(library)
    except ImportError as exc:
        raise ConfigError(
            f"ONNX needs {library}, which cannot be imported: {exc}; pip install 'geartrain[onnx]'"
        ) from exc
