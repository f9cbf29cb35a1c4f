"""Margin of one head: its settings, its learned state, and its form in each forward pass.

Legend: B samples, D width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument, SpecMismatch
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.loss.margins.margin import NORM_FLOOR, AnyMargin, Margin, MarginBatch, changes_negatives
from geartrain.bridge.rows.transfers import upload


@dataclass(frozen=True, kw_only=True)
class JointBatch:
    """Samples of all ranks, and the places of this process's among them."""

    labels: Any
    """Labels int64 [B]: an array, or a tensor where only the device knows them."""
    first: int
    sum: Callable[[Tensor], Tensor]
    """Sum over the ranks; collective."""


class HeadMargin:
    """A head's margin with its learned state. Not thread-safe."""

    def __init__(self, margin: AnyMargin | None, *, negatives: bool = True) -> None:
        """``negatives``: whether the logits of other classes can be changed. Raises InvalidArgument."""
        self._takes_negatives = negatives
        self._learned: dict[str, Tensor] = {}
        self.set(margin)

    def set(self, margin: AnyMargin | None) -> None:
        """Set the margin for the next forward pass; learned state is kept. Raises InvalidArgument."""
        if changes_negatives(margin) and not self._takes_negatives:
            raise InvalidArgument(
                f"{margin!r} changes the logits of other classes than the target's, which shards make by themselves; "
                "use rows='pull' or rows='ranks', or another margin"
            )
        self.margin = margin

    def of_pass(
        self,
        features: Tensor,
        labels_B: Ids | Tensor,
        joint: JointBatch,
        *,
        step: int,
        training: bool,
        target_cos: Callable[[Tensor], Tensor],
        counts_B: Tensor | None = None,
    ) -> Margin | None:
        """Return the margin of the pass over ``features`` [B, D]; ``target_cos`` computes cosines of unit features.

        ``counts_B`` is :attr:`Batch.counts_B`.
        """
        margin: Any = self.margin
        if not hasattr(margin, "for_batch"):
            return margin  # type: ignore[no-any-return]
        values_BD = features.detach().to(torch.promote_types(features.dtype, torch.float32))
        norms_B = torch.linalg.vector_norm(values_BD, dim=1).clamp_(min=NORM_FLOOR)
        batch = MarginBatch(
            step=step,
            training=training,
            norms_B=norms_B,
            labels_B=upload(labels_B, features.device),
            first_sample=joint.first,
            joint_size=len(joint.labels),
            target_cos=lambda: target_cos(values_BD / norms_B.unsqueeze(1)),
            joint_sum=joint.sum,
            known=self._learned,
            counts_B=counts_B,
        )
        made: Margin = margin.for_batch(batch)
        if changes_negatives(made) and not self._takes_negatives:
            raise InvalidArgument(f"{margin!r} began as {made!r}, whose negatives() no shard knows; use rows='pull'")
        self._learned |= batch.learned
        return made

    def state(self) -> dict[str, Any]:
        """Return, for a state_dict, the margin's repr, its settings if they are plain values, and its learned state."""
        settings = _settings(self.margin)
        return {
            "margin": repr(self.margin),
            **({} if settings is None else {"margin_settings": settings}),
            "margin_learned": {name: float(value) for name, value in sorted(self._learned.items())},
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue with the margin of :meth:`state` and its learned state.

        Other settings of the same kind are adopted, with a warning. Raises SpecMismatch, and changes nothing, for a
        margin of another kind or one whose settings are more than numbers.
        """
        self.set(self._resumed(state))
        self._learned = {
            name: torch.tensor(value, dtype=torch.float64, device="cpu")
            for name, value in state["margin_learned"].items()
        }

    def require_resumable(self, state: Mapping[str, Any]) -> None:
        """Raise as :meth:`resume` would, and change nothing."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._resumed(state)

    def _resumed(self, state: Mapping[str, Any]) -> AnyMargin | None:
        mine, saved = self.margin, state["margin"]
        if saved == repr(mine) or type(mine).__repr__ is object.__repr__:
            return mine
        settings, here = state.get("margin_settings"), _settings(mine)
        if settings is None or here is None or settings["kind"] != here["kind"] or settings.keys() != here.keys():
            raise SpecMismatch(
                f"the saved head has margin {saved}, this one {mine!r}; make the head with the saved margin, or set "
                "head.margin to it, before you load the state. head.margin may be set to another afterwards"
            )
        values = {name: value for name, value in settings.items() if name != "kind"}
        warnings.warn(
            f"the head goes on with the margin that it was saved with, {saved}, not with {mine!r}; set head.margin "
            "after loading for another",
            stacklevel=2,
        )
        return replace(mine, **values)  # type: ignore[type-var]


def _settings(margin: object) -> dict[str, Any] | None:
    """Return kind and fields of a dataclass of numbers and texts; None for anything else."""
    if margin is None or isinstance(margin, type) or not is_dataclass(margin):
        return None
    values = {field.name: getattr(margin, field.name) for field in fields(margin)}
    if not all(isinstance(value, bool | int | float | str | None) for value in values.values()):
        return None
    return {"kind": type(margin).__name__, **values}
