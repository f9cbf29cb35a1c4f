"""Sequences of vectors, one for each sample, kept in a row: nothing is computed for padding.

Legend: B samples, N vectors of all sequences, L vectors of the longest, D their width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument


@dataclass(frozen=True)
class Sequences:
    """B sequences of any length >= 0."""

    values_ND: Tensor
    lengths_B: Tensor
    """int64."""
    rows_N: Tensor
    """int64: which sample a vector is of, rising."""

    def expand(self, of_samples_BD: Tensor) -> Tensor:
        """For every vector that of its sample: [N, D]."""
        return of_samples_BD[self.rows_N]

    def sum(self, values_ND: Tensor) -> Tensor:
        """By sample, 0 where the sequence is empty: [B, D]."""
        return values_ND.new_zeros(len(self.lengths_B), values_ND.shape[1]).index_add(0, self.rows_N, values_ND)

    def softmax(self, scores_N: Tensor) -> Tensor:
        """Numbers >= 0 that add up to 1 over each sequence: [N]."""
        max_B = scores_N.new_full((len(self.lengths_B),), -torch.inf)
        max_B = max_B.scatter_reduce(0, self.rows_N, scores_N.detach(), "amax")
        exp_N = (scores_N - max_B[self.rows_N]).exp()
        sums_B = exp_N.new_zeros(len(self.lengths_B)).index_add(0, self.rows_N, exp_N)
        return exp_N / sums_B[self.rows_N]

    def positions(self) -> Tensor:
        """The place of each vector in its sequence, from 0: int64 [N]."""
        starts_B = self.lengths_B.cumsum(0) - self.lengths_B
        return torch.arange(len(self.rows_N), device=self.rows_N.device) - starts_B[self.rows_N]

    def padded(self, values: Tensor) -> Tensor:
        """[N, …] as [B, L, …], 0 behind the end of a sequence."""
        longest = int(self.lengths_B.max()) if len(self.lengths_B) else 0
        out = values.new_zeros(len(self.lengths_B), longest, *values.shape[1:])
        return out.index_put((self.rows_N, self.positions()), values)

    def packed(self, values: Tensor) -> Tensor:
        """Return the vectors [N, …] of :meth:`padded` values [B, L, …]."""
        return values[self.rows_N, self.positions()]


@dataclass(frozen=True)
class PaddedSequences(Sequences):
    """B sequences in B·L places, with what lies behind the end of each: no size depends on a value, as ONNX needs it.

    What lies there counts in no softmax, and in a sum unless it is 0 or weighted by one; it must be finite.
    """

    longest: int
    """L."""

    @classmethod
    def of(cls, values_BLD: Tensor, lengths_B: Tensor) -> PaddedSequences:
        """Sequences of so many vectors each; those behind them are 0."""
        num, longest = values_BLD.shape[:2]
        rows_N = torch.arange(num, device=values_BLD.device).repeat_interleave(longest)
        return cls(values_BLD.flatten(0, 1), lengths_B, rows_N, longest)

    def expand(self, of_samples_BD: Tensor) -> Tensor:
        return of_samples_BD.unsqueeze(1).expand(-1, self.longest, -1).flatten(0, 1)

    def sum(self, values_ND: Tensor) -> Tensor:
        return self.padded(values_ND).sum(1)

    def softmax(self, scores_N: Tensor) -> Tensor:
        places_L = torch.arange(self.longest, device=scores_N.device)
        counts_BL = places_L.unsqueeze(0) < self.lengths_B.unsqueeze(1)
        scores_BL = self.padded(scores_N).masked_fill(~counts_BL, torch.finfo(scores_N.dtype).min)
        return (scores_BL.softmax(1) * counts_BL).flatten()

    def padded(self, values: Tensor) -> Tensor:
        return values.view(-1, self.longest, *values.shape[1:])

    def packed(self, values: Tensor) -> Tensor:
        return values.flatten(0, 1)


def sequences_of(model: str, vectors: Mapping[str, Any], dims: Mapping[str, int]) -> Sequences:
    """The sequences of the fields ``dims``, their vectors side by side in the order given.

    Each is [B, L, dim], or a nested tensor of layout torch.jagged [B, ?, dim]; or all are :class:`Sequences` already,
    of the same events. Raises InvalidArgument that names the field that is missing, has another shape, or sequences of
    other lengths than the first.
    """
    given = [one for name in dims if isinstance(one := vectors.get(name), Sequences)]
    if len(given) == len(dims):
        return given[0] if len(given) == 1 else replace(given[0], values_ND=torch.cat([x.values_ND for x in given], 1))
    parts: list[Tensor] = []
    lengths_B: Tensor | None = None
    for name, dim in dims.items():
        values, own_B = _taken(model, vectors, name, dim)
        if lengths_B is not None and not torch.equal(own_B, lengths_B):
            raise InvalidArgument(
                f"the sequences of field {name!r} of {model} have other lengths than those of {next(iter(dims))!r}; "
                "both must list the same events"
            )
        lengths_B = own_B
        parts.append(values)
    assert lengths_B is not None
    rows_N = torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)
    return Sequences(parts[0] if len(parts) == 1 else torch.cat(parts, 1), lengths_B, rows_N)


def _taken(model: str, vectors: Mapping[str, Tensor], name: str, dim: int) -> tuple[Tensor, Tensor]:
    if name not in vectors:
        raise InvalidArgument(
            f"field {name!r} of {model} is not among the vectors, which are of "
            f"{', '.join(map(repr, vectors)) or 'no field'}"
        )
    given = vectors[name]
    if given.dim() != 3 or given.shape[2] != dim or (given.is_nested and given.layout is not torch.jagged):
        raise InvalidArgument(
            f"the vectors of field {name!r} have shape {list(given.shape)}; {model} takes sequences, [B, L, {dim}] or "
            f"jagged [B, ?, {dim}]: give the field that dim and pooling=None"
        )
    if given.is_nested:
        return given.values(), given.offsets().diff()  # type: ignore[attr-defined]
    return given.flatten(0, 1), torch.full((given.shape[0],), given.shape[1], device=given.device)


def concatenated(vectors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The vectors [B, dim] of the fields ``names`` side by side."""
    return torch.cat([vectors[name] for name in names], 1)
