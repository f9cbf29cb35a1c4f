"""Checks of a head's arguments: features, labels and ids, margin, selection, and attributes set later."""

from __future__ import annotations

import inspect
import math

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.programs.selection import Selection
from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, NonFinite
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted
from geartrain.bridge.head.loss.margins.margin import AnyMargin
from geartrain.bridge.head.loss.margins.scale import with_scale

_FEATURE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_ANEW = "make the head anew, with reuse=True on the same table"
FIXED_SETTINGS = {
    "select": _ANEW,
    "num_classes": "the table has so many rows; give a new head more, and let fewer live (num_live_classes)",
    "num_live_classes": "use add_classes() and retire_classes()",
    "dim": "the rows of the table have this width",
    "bias": "the rows of the table have a column for it, or none",
    "sub_centers": "the rows of the table hold so many centers",
    "name": "it is the table's",
    "table": _ANEW,
    "retired": "use add_classes() and retire_classes()",
    "step": "it counts the updates; load_state_dict() sets it",
    "scale": "it is the margin's; set margin, as in head.margin = ArcFace(scale=32)",
    "sample_rate": f"it is the selection's; {_ANEW}",
    **dict.fromkeys(("reduction", "ignore_index", "label_smoothing"), _ANEW),
    "optimizer": "it belongs to the table",
    "lr": "it is RowOptimizer's: rows.param_groups[0]['lr']",
    "rows": _ANEW,
    **dict.fromkeys(("process_group", "reuse", "rows_cache_bytes", "logits_cache_bytes", "sync", "wire_dtype"), _ANEW),
    **dict.fromkeys(("dtype", "initializer", "seed", "slot_dtype"), "it belongs to the table"),
}
"""Attributes of a head that cannot be set once it is made, and what to do instead."""


def check_features(features: Tensor, dim: int) -> None:
    """Raise InvalidRows unless the features are floating point [B, ``dim``]."""
    if not isinstance(features, Tensor) or features.ndim != 2 or features.shape[1] != dim:
        found = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise InvalidRows(f"features are {found}; they must be a tensor [B, {dim}], {dim} being the head's dim")
    if features.dtype not in _FEATURE_DTYPES:
        raise InvalidRows(f"features are {features.dtype}; they must be floating point, such as torch.float32")


def check_finite(features: Tensor) -> None:
    """Raise NonFinite naming the first sample with NaN or infinity; on the CPU only, elsewhere it would stall."""
    if features.device.type != "cpu":
        return
    wrong = torch.nonzero(~torch.isfinite(features).all(dim=1))
    if len(wrong):
        raise NonFinite(
            f"the features of {len(wrong)} of {len(features)} samples hold NaN or infinity, first at index "
            f"{int(wrong[0])}; lower the learning rate, or look for such values in the input"
        )


def checked_labels(labels: Tensor, batch: int, num_classes: int, ignore_index: int | None = None) -> Ids:
    """Return the labels as a private int64 array [B] on the host; raise InvalidIds naming the first bad one.

    ``ignore_index`` is a label of no class that may occur.
    """
    check_label_type(labels, batch)
    host: Ids = np.array(labels.detach().cpu().numpy(), dtype=np.int64)
    return checked_class_ids(host, num_classes, "label", ignore_index)


def check_label_type(labels: Tensor, batch: int) -> None:
    """Raise InvalidIds unless the labels are int64 [B]."""
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise InvalidIds(f"labels are {found}; they must be a torch.int64 tensor [B] (labels.long())")
    if labels.shape != (batch,):
        raise InvalidIds(f"labels are {list(labels.shape)}; they must be [{batch}], one per row of the features")


def checked_class_ids(ids: Ids, num_classes: int, what: str, but: int | None = None) -> Ids:
    """Return ``ids``; raise InvalidIds naming the first outside [0, ``num_classes``) that is not ``but``."""
    is_wrong = (ids < 0) | (ids >= num_classes)
    wrong = np.flatnonzero(is_wrong if but is None else is_wrong & (ids != but))
    if len(wrong):
        index, found = int(wrong[0]), int(ids[wrong[0]])
        remedy = "raise num_classes or map your classes to 0 … num_classes − 1"
        if found < 0 and but is not None:
            remedy = f"if it means no class, give ignore_index={found}; else map your classes to 0 … num_classes − 1"
        raise InvalidIds(f"{what} {found} at index {index} is outside [0, {num_classes}); {remedy}")
    return ids


def checked_wanted_ids(ids: Tensor | None, num_classes: int) -> tuple[Ids, Ids | None]:
    """Return the classes to read [n], ascending, and the place of each of ``ids`` [N] among them; for None all, None.

    Raises InvalidIds.
    """
    if ids is None:
        return np.arange(num_classes, dtype=np.int64), None
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.ndim != 1:
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else quoted(ids)
        raise InvalidIds(f"ids are {found}; they must be a torch.int64 tensor [N], or None for all classes")
    wanted, inverse = np.unique(checked_class_ids(ids.cpu().numpy(), num_classes, "class id"), return_inverse=True)
    return wanted, inverse


def checked_margin(margin: AnyMargin | None, num_classes: int) -> AnyMargin | None:
    """Return the margin with its scale for ``num_classes``. Raises InvalidArgument that names what it lacks of a
    :class:`Margin`."""
    if margin is None:
        return None
    works = _takes(getattr(margin, "target", None), 3) or _takes(getattr(margin, "for_batch", None), 1)
    if isinstance(margin, type) or not hasattr(margin, "scale") or not works:
        raise InvalidArgument(
            f"margin is {margin!r}; it must be ArcFace or another margin of geartrain, None (plain linear), or an "
            "object that has scale and target(cos_B, norms_B, labels_B) as they have, or for_batch(batch)"
        )
    scaled: AnyMargin = with_scale(margin, num_classes)
    if not 0 < real_number("scale", scaled.scale) < math.inf:
        raise InvalidArgument(f"scale of the margin {margin!r} is {margin.scale!r}; it must be finite and > 0")
    return scaled


def require_no_margin(margin: AnyMargin | None) -> None:
    """Raise InvalidArgument for a margin: it is about directions, to which a bias does not belong."""
    if margin is not None:
        raise InvalidArgument(f"margin is {margin!r} and bias is True; a margin has no biases: leave one of them out")


def _takes(method: object, arguments: int) -> bool:
    """Return whether ``method`` can be called with so many arguments."""
    try:
        inspect.signature(method).bind(*range(arguments))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def checked_selection(select: Selection) -> Selection:
    """Return the selection. Raises InvalidArgument."""
    if not isinstance(select, Selection):
        raise InvalidArgument(
            f"select is {select!r}; it must be FullSoftmax(), PartialFC(sample_rate=...) or KNNSoftmax(active=...), or "
            "an object of a class derived from Selection"
        )
    return select
