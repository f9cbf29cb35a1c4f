"""The vectors that a network takes: of which fields, how wide, and that a batch has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.embedding.levels import LevelPart, level_parts, linear_by_level
from geartrain.bridge.models.activations import ActivationName, activation_of


class FieldVectors:
    """Fields of width 1, whose numbers are first-order weights, and the others, whose vectors are embeddings."""

    def __init__(self, model: str, dims: Mapping[str, int], sequences: Iterable[str] = ()) -> None:
        """``model`` is named in errors; fields of ``sequences`` are left to it.

        Raises InvalidArgument unless some other field is wider than 1, and every sequence has a dim.
        """
        if not isinstance(dims, Mapping) or not all(isinstance(name, str) for name in dims):
            raise InvalidArgument(f"dims of {model} is {quoted(dims)}; it must map fields to widths: {{'user': 16}}")
        self._model = model
        given = {name: integer(f"the dim of field {name!r}", dim, 1, 2**31 - 1) for name, dim in dims.items()}
        for name in sequences:
            if name not in given:
                raise InvalidArgument(f"{model} has no dim of field {name!r}; dims are {given}")
        self._dims = {name: dim for name, dim in given.items() if name not in set(sequences)}
        self.first_order = [name for name, dim in self._dims.items() if dim == 1]
        self.embedded_dims = {name: dim for name, dim in self._dims.items() if dim > 1}
        self.embedded, self.widths = list(self.embedded_dims), list(self.embedded_dims.values())
        if not self.embedded:
            raise InvalidArgument(f"{model} has no field wider than 1 among {self._dims}; give one: {{'user': 16}}")

    def split(self, vectors: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the sum [B] of the first-order weights, and the embeddings [B, D] of each field.

        Raises InvalidArgument that names a field that is missing or has another shape; other fields are ignored.
        """
        self._require(vectors)
        embedded = [vectors[name] for name in self.embedded]
        if not self.first_order:
            return embedded[0].new_zeros(embedded[0].shape[0]), embedded
        return torch.stack([vectors[name].squeeze(1) for name in self.first_order]).sum(0), embedded

    def by_level(self, vectors: Mapping[str, Tensor], batch: Any) -> tuple[Tensor, list[LevelPart]]:
        """Split vectors [N, D] of the nodes of ``batch`` as :meth:`split`: the sum [B], and the embeddings by level."""
        self._require(vectors)
        embedded = level_parts(vectors, self.embedded, batch)
        first_order = (part.expand(part.vectors.sum(1)) for part in level_parts(vectors, self.first_order, batch))
        return sum(first_order, embedded[0].vectors.new_zeros(())), embedded

    def _require(self, vectors: Mapping[str, Tensor]) -> None:
        for name, dim in self._dims.items():
            if name not in vectors:
                raise InvalidArgument(
                    f"field {name!r} of {self._model} is not among the vectors, which are of "
                    f"{', '.join(map(repr, vectors)) or 'no field'}"
                )
            shape = vectors[name].shape
            if vectors[name].is_nested or len(shape) != 2 or shape[1] != dim:
                raise InvalidArgument(
                    f"the vectors of field {name!r} have shape {list(shape)}; {self._model} takes [B, {dim}]: give the "
                    "field that dim and a pooling"
                )


class LevelTower(nn.Sequential):
    """A :func:`tower` over fields of sample trees. Its first layer is computed once for each node."""

    def __init__(self, widths: Mapping[str, int], hidden: Sequence[int], dropout: float) -> None:
        """``widths`` of the fields, in the order of the first layer's columns. Raises InvalidArgument."""
        super().__init__(*tower(sum(widths.values()), hidden, dropout))
        self.widths = widths

    def forward(self, parts: Sequence[LevelPart]) -> Tensor:
        """Return [B, 1] of the fields' vectors by level."""
        first, *rest = self
        values = linear_by_level(parts, self.widths, first.weight, first.bias)  # type: ignore[arg-type]
        for layer in rest:
            values = layer(values)
        return values


def tower(
    width: int,
    hidden: Sequence[int],
    dropout: float,
    *,
    out: int | None = 1,
    activation: ActivationName = "relu",
) -> nn.Sequential:
    """Layers with an activation and dropout from ``width`` numbers to ``out``, without the bias of the last.

    [N, width] -> [N, out]; with ``out`` None the last hidden layer is the result. Raises InvalidArgument.
    """
    if isinstance(hidden, str) or not isinstance(hidden, Sequence):
        raise InvalidArgument(f"hidden is {quoted(hidden)}; it must be widths of layers, such as (64, 32)")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InvalidArgument(f"dropout is {quoted(dropout)}; it must lie in [0, 1)")
    activate = activation_of(activation)
    layers: list[nn.Module] = []
    for size in hidden:
        size = integer("a width of hidden", size, 1, 2**31 - 1)
        layers += [nn.Linear(width, size), activate(size), nn.Dropout(dropout)]
        width = size
    return nn.Sequential(*layers) if out is None else nn.Sequential(*layers, nn.Linear(width, out, bias=False))
