"""Rarely changed settings of a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch.distributed as dist

from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import DTypeName
from geartrain.ams.values.text import quoted

Reduction = Literal["mean", "sum", "none"]


def checked_reduction(reduction: object) -> Reduction:
    """Return the reduction. Raises InvalidArgument."""
    if reduction not in get_args(Reduction):
        raise InvalidArgument(f"reduction is {quoted(reduction)}; it must be one of {', '.join(get_args(Reduction))}")
    return cast(Reduction, reduction)


def checked_label_smoothing(label_smoothing: object) -> float:
    """Return the label smoothing. Raises InvalidArgument."""
    smoothing = real_number("label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise InvalidArgument(f"label_smoothing is {label_smoothing!r}; it must lie in [0, 1]")
    return smoothing


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Rarely changed settings of :class:`ClassHead`: ``gt.ClassHead(..., config=gt.HeadConfig(dtype="float16"))``."""

    reduction: Reduction = "mean"
    """``"mean"`` over the samples (by their weights, if they have any), ``"sum"``, both over those of all ranks that
    train together, or ``"none"``: the losses [B]."""
    ignore_index: int | None = -100
    """Label of samples to ignore: their loss is 0, they activate no class, and no mean counts them. None: no such
    label."""
    label_smoothing: float = 0.0
    """Part of a sample's target, in [0, 1], that is spread evenly over the classes, as
    ``torch.nn.functional.cross_entropy`` does: over the active ones or, where the selection corrects its logits, over
    all live ones (of which the active ones are an estimate). With a margin this part is over the logits without it.
    """
    dtype: DTypeName = "float32"
    """Storage type of the rows: float32, float16 or bfloat16; with ``rows="ranks"`` also float8_e4m3fn, with a scale a
    row."""
    slot_dtype: DTypeName = "float32"
    """Storage type of the slots; with ``rows="ranks"`` also int8, with a scale for every 128 numbers."""
    seed: int = 0
    """Seed of the initializer."""
    process_group: dist.ProcessGroup | None = None
    """Ranks that train together; None: all of them, if ``sync`` or ``rows="ranks"`` is given."""
    rows_cache_bytes: int = 64 << 20
    """With ``rows="pull"`` active rows of up to this size are pulled once and held until the step; more are streamed
    twice."""
    logits_cache_bytes: int | None = None
    """Bytes of logits that are kept instead of recomputed; None: 26 MiB, on ranks 64 MiB, on a GPU 2 GiB (and as many
    more for each pass)."""
    wire_dtype: DTypeName | None = None
    """With ``rows="pull"`` and float32 rows: the type in which rows and gradients of a step are sent, ``"bfloat16"`` or
    ``"float16"``, half the bytes. Predictions, graphs and exports read float32."""

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a value out of range."""
        checked_reduction(self.reduction)
        checked_label_smoothing(self.label_smoothing)
        if self.ignore_index is not None:
            integer("ignore_index", self.ignore_index, -(2**63), 2**63 - 1)
        integer("rows_cache_bytes", self.rows_cache_bytes, 0)
        if self.logits_cache_bytes is not None:
            integer("logits_cache_bytes", self.logits_cache_bytes, 0)

    @property
    def loss(self) -> dict[str, object]:
        """Settings that determine the loss, as JSON values."""
        return {name: getattr(self, name) for name in ("reduction", "ignore_index", "label_smoothing")}


def checked_config(config: HeadConfig | None) -> HeadConfig:
    """Return the settings; for None the defaults. Raises InvalidArgument for another type."""
    if config is None:
        return HeadConfig()
    if not isinstance(config, HeadConfig):
        raise InvalidArgument(f"config is {quoted(config)}; it must be a gt.HeadConfig")
    return config
