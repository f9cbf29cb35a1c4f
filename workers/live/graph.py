"""Graph of a backbone without its parameters, for a server that follows the training (:mod:`.network`).

``python -m geartrain.workers.live.graph SNAPSHOT OUT [BACKBONE]`` writes it for a job of ``geartrain worker``:
a server has no torch, so it starts this once.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.values.errors import ConfigError, GeartrainError, InvalidArgument
from geartrain.workers.atomic import replacing, write_json
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.live.network import LAYOUT, PARAMETERS, LiveNetwork, laid_out
from geartrain.workers.live.state_arrays import state_dict_arrays
from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.models.onnx_backbone import TOLERANCE, OnnxBackbone, exported_program, needed
from geartrain.workers.models.saved_model import ONNX


def live_graph(backbone: nn.Module, example: Tensor) -> LiveNetwork:
    """Return the graph of ``backbone`` for images like ``example`` [N, …], N of 2 or more, without its parameters.

    It is tested with the present parameters and with others. Raises InvalidArgument if onnxruntime then gives other
    features than the module, ConfigError without ``pip install 'geartrain[onnx]'``.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        needed(library)
    own = copy.deepcopy(backbone).cpu().float().eval()
    program = exported_program(own, example.cpu(), optimize=False)
    network = _without_parameters(program, set(own.state_dict()))
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            _require_parity(own, network, example.cpu(), Path(folder))
            _shake(own, generator)
    return network


def _without_parameters(program: Any, keys: set[str]) -> LiveNetwork:
    """Return the graph, simplified without constant folding of ``keys``."""
    import onnx
    import onnx_ir
    from onnxscript import optimizer

    graph = program.model.graph
    kept = {name: value for name, value in graph.initializers.items() if name in keys}
    values = {name: value.const_value for name, value in kept.items()}
    for name, value in kept.items():  # parameters become inputs
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
    with _quiet("onnxscript", "onnx_ir"):
        optimizer.optimize(program.model)
    for name, value in kept.items():
        graph.inputs.remove(value)
        value.const_value = values[name]
        graph.initializers[name] = value
    model = onnx_ir.to_proto(program.model)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in kept}
    dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).name for name, tensor in tensors.items()}
    parameters = laid_out({name: (dtypes[name], list(tensor.dims)) for name, tensor in tensors.items()})
    for parameter in parameters:
        tensor = tensors[parameter.name]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        said = {"location": PARAMETERS, "offset": parameter.offset, "length": parameter.num_bytes}
        for key, value in said.items():
            tensor.external_data.add(key=key, value=str(value))
    return LiveNetwork(graph=bytes(model.SerializeToString()), parameters=parameters)


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """Silence the log messages of these libraries."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@torch.no_grad()
def _require_parity(backbone: nn.Module, network: LiveNetwork, example: Tensor, folder: Path) -> None:
    network.write(folder / ONNX, {name: tensor.numpy() for name, tensor in backbone.state_dict().items()})
    exported = OnnxBackbone(folder / ONNX)
    for images in (example, example[:1]):
        mine, theirs = backbone(images), exported(images)
        lengths = mine.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        distance = float(((mine - theirs).norm(dim=1) / lengths).max())
        if not distance <= TOLERANCE:
            raise InvalidArgument(
                f"{type(backbone).__name__} cannot be followed: with other parameters onnxruntime's features are "
                f"{distance:.2g} of their length from PyTorch's, more than {TOLERANCE:g}. Does it compute with a "
                "tensor that is neither a parameter nor a buffer?"
            )


@torch.no_grad()
def _shake(backbone: nn.Module, generator: torch.Generator) -> None:
    """Change all saved parameters and buffers slightly."""
    for tensor in {value.data_ptr(): value for value in backbone.state_dict().values()}.values():
        if tensor.is_floating_point():
            tensor.mul_(1 + 0.1 * torch.rand(tensor.shape, generator=generator))
            tensor.add_(0.01 * torch.rand(tensor.shape, generator=generator))


def example_of(look: Preprocessing) -> Tensor:
    """Return two bitmaps of noise as inputs of a picture backbone."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, look.channels, look.size, look.size), generator=generator, dtype=torch.uint8)


def write_live_graph(snapshot: str, out: Path, own: str | None) -> None:
    """Write ``backbone.onnx`` and ``layout.json`` for the job that took ``snapshot``. Raises ConfigError."""
    found = open_snapshot(snapshot)
    values: Mapping[str, Any] = found.manifest.job
    try:
        recipe, settings = values["recipe"], values["data"]["backbone_settings"]
        name, look = recipe["backbone"], Preprocessing(**recipe["look"])
    except (KeyError, TypeError) as exc:
        raise ConfigError(f"{snapshot} was not taken by a job that trains a classifier of pictures ({exc!r})") from exc
    backbone = build_backbone(name, settings, own=own)
    arrays = state_dict_arrays(found.job_files()["training.safetensors"], "backbone")
    backbone.load_state_dict({key: torch.from_numpy(array.copy()) for key, array in arrays.items()})
    network = live_graph(backbone, example_of(look))
    write_json(out / LAYOUT, {"parameters": network.layout_to_json(), "preprocessing": look.to_json()})
    with replacing(out / ONNX) as temporary:  # last: then both exist
        temporary.write_bytes(network.graph)


def main(arguments: list[str]) -> int:
    """Run as a child process; an error is one line."""
    warnings.simplefilter("ignore")
    snapshot, out, *own = arguments
    try:
        write_live_graph(snapshot, Path(out), own[0] if own else None)
    except GeartrainError as exc:
        print(exc, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
