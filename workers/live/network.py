"""Backbone as a graph without its parameters, into which any later state of the same training fits. Without torch.

The graph is ONNX with parameters in a file beside it, each at a fixed place. :mod:`.graph` makes it once for a
training, of some 50 to 500 KB; a version then costs a file of parameters, not an export.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import InvalidArgument

PARAMETERS = "backbone.parameters"
"""Name of the file of parameters beside the graph."""
NETWORK, LAYOUT = "network.onnx", "layout.json"
"""Files beside the state in a snapshot: the graph, and its layout."""
_ALIGNED = 64


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a network, as in its module's ``state_dict``."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    """Offset in the file of parameters."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return np.dtype(self.dtype).itemsize * prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class LiveNetwork:
    """A graph with the layout of its parameters."""

    graph: bytes
    parameters: tuple[Parameter, ...]

    def write(self, graph: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the file ``graph`` and that of its parameters beside it. Raises InvalidArgument, OSError."""
        with graph.with_name(PARAMETERS).open("wb") as file:
            for parameter in self.parameters:
                found = arrays.get(parameter.name)
                if found is None or list(found.shape) != parameter.shape:
                    shape = None if found is None else list(found.shape)
                    raise InvalidArgument(
                        f"parameter {parameter.name!r} of the training is {shape}, not {parameter.shape} as when its "
                        "graph was made; start the service again"
                    )
                file.write(b"\0" * (parameter.offset - file.tell()))
                file.write(np.ascontiguousarray(found, parameter.dtype).reshape(-1).view(np.uint8).data)
        graph.write_bytes(self.graph)

    def layout_to_json(self) -> str:
        """Return the layout as JSON, without the graph."""
        return json.dumps([asdict(parameter) for parameter in self.parameters])

    @classmethod
    def from_json(cls, graph: bytes, layout: str) -> LiveNetwork:
        """Return ``graph`` with the layout from :meth:`layout_to_json`. Raises InvalidArgument."""
        try:
            return cls(graph=graph, parameters=tuple(Parameter(**said) for said in json.loads(layout)))
        except (ValueError, TypeError) as exc:
            raise InvalidArgument(f"the layout of the network is {layout[:80]!r}: {exc}") from exc


def laid_out(shapes: Mapping[str, tuple[str, list[int]]]) -> tuple[Parameter, ...]:
    """Assign each parameter a place in one file: name -> dtype and shape."""
    parameters, end = [], 0
    for name, (dtype, shape) in shapes.items():
        parameters.append(Parameter(name=name, dtype=dtype, shape=shape, offset=end))
        end += parameters[-1].num_bytes + -parameters[-1].num_bytes % _ALIGNED
    return tuple(parameters)
