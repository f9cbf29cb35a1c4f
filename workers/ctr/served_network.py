"""Dense part of a click model as ONNX: from all vectors of a sample to the log-odds of a click.

Inputs: ``vectors`` [N, W], the pooled features' vectors side by side; for each other feature an input [N, L, D] of its
name, 0 after the end of a sequence; and with these ``lengths`` [N] of the sequences.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.models.sequences import PaddedSequences
from geartrain.workers.ctr.samples.features import SampleFeature

TOLERANCE = 1e-4
"""Largest difference of two log-odds; relative where they are above 1."""
_COMPARED = (3, 1, 64)
"""Batch sizes of the comparison."""


class ServedNetwork(nn.Module):
    """Network with the inputs of :mod:`geartrain.serving.vectors`."""

    def __init__(self, network: ClickModel, features: Sequence[SampleFeature]) -> None:
        super().__init__()
        self.network = network
        self._pooled = [feature for feature in features if feature.pooling is not None]
        self._sequences = [feature for feature in features if feature.pooling is None]

    def forward(self, vectors: Tensor, *sequences: Tensor) -> Tensor:
        """Return logits [N]. The last of ``sequences``, if there are any, holds their lengths [N]."""
        parts = torch.split(vectors, [feature.dim for feature in self._pooled], 1)
        given: dict[str, Tensor] = {feature.name: part for feature, part in zip(self._pooled, parts, strict=True)}
        for feature, values in zip(self._sequences, sequences, strict=False):
            given[feature.name] = PaddedSequences.of(values, sequences[-1])  # type: ignore[assignment]
        logits: Tensor = self.network(given)
        return logits

    def example(self, num: int, longest: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return inputs of ``num`` samples, by name."""
        inputs = {"vectors": torch.randn(num, sum(part.dim for part in self._pooled), generator=generator) / 4}
        if self._sequences:
            lengths = torch.randint(0, longest + 1, (num,), generator=generator)
            counts = torch.arange(longest) < lengths.unsqueeze(1)
            for part in self._sequences:
                values = torch.randn(num, longest, part.dim, generator=generator) / 4
                inputs[part.name] = values * counts.unsqueeze(2)
            inputs["lengths"] = lengths
        return inputs


def write_network(
    network: ClickModel, features: Sequence[SampleFeature], path: Path, *, longest: int | None = None
) -> dict[str, float]:
    """Write the network to ``path`` if onnxruntime reproduces its logits; return the differences.

    ``longest``: length L of every sequence; None: any. Raises ConfigError without the libraries, InvalidArgument.
    """
    from geartrain.workers.models.onnx_backbone import needed

    for library in ("onnx", "onnxscript", "onnxruntime"):
        needed(library)
    was_training = network.training
    network.eval()
    try:
        served = ServedNetwork(network, features)
        generator = torch.Generator().manual_seed(0)
        _write(served, served.example(3, longest or 5, generator), path, any_length=longest is None)
        return _compared(served, path, [served.example(num, longest or 7, generator) for num in _COMPARED])
    finally:
        network.train(was_training)


def _write(served: ServedNetwork, example: dict[str, Tensor], path: Path, *, any_length: bool) -> None:
    samples = torch.export.Dim("samples", min=1)
    events = {1: torch.export.Dim("events", min=1)} if any_length else {}
    shapes = [{0: samples, **(events if tensor.ndim == 3 else {})} for tensor in example.values()]
    exporting = logging.getLogger("torch.onnx")
    level = exporting.level
    exporting.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporter warns about itself
            torch.onnx.export(
                served,
                tuple(example.values()),
                str(path),
                input_names=list(example),
                output_names=["logits"],
                dynamic_shapes=(shapes[0], *([tuple(shapes[1:])] if shapes[1:] else [])),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as exc:  # the exporter raises many unrelated kinds
        raise InvalidArgument(
            f"{type(served.network).__name__} cannot be exported to ONNX: {type(exc).__name__}: {exc}"
        ) from exc
    finally:
        exporting.setLevel(level)


@torch.no_grad()
def _compared(served: ServedNetwork, path: Path, examples: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    from geartrain.workers.models.onnx_backbone import needed

    session = needed("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    largest = 0.0
    for example in examples:
        mine = served(*example.values()).numpy()
        (theirs,) = session.run(["logits"], {name: tensor.numpy() for name, tensor in example.items()})
        largest = max(largest, float((np.abs(mine - theirs) / np.maximum(1, np.abs(mine))).max()))
    if not largest <= TOLERANCE:
        raise InvalidArgument(
            f"log-odds of onnxruntime are {largest:.2g} from the network's, more than {TOLERANCE:g}; nothing was "
            "written"
        )
    return {"samples": sum(_COMPARED), "max_error": largest}
