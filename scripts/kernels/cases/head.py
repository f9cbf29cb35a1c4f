"""The three products of a class head, 512 wide: rows of 16 and of 8 bits, all or picked; float32 under bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from geartrain.bridge.kernels.triton import head, row_step
from scripts.kernels.compile import CAPABILITIES, Case

_DIM = 512
_TYPES = {
    **dict.fromkeys(("numbers", "positions", "count", "refused", "updates", "clock"), "*i64"),
    **dict.fromkeys(("scales", "row_scales", "slot_scales"), "*bf16"),
    **dict.fromkeys(("start", "stop", "num_samples", "num_parts"), "i32"),
    **dict.fromkeys(("middle", "logit_limit", "limit", "loss", "decay", "a", "b", "eps"), "fp32"),
    "owners": "*i32",
    "first_id": "i64",
    "seed": "u64",
}
_LAUNCHED = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
_NARROW, _WIDE, _BITS = "*bf16", "*fp32", "*u8"
_SCALED = {"scales", "row_scales", "slot_scales", "clock"}


def _case(
    name: str,
    kernel: str,
    options: Mapping[str, Any],
    types: Mapping[str, str],
    *,
    capabilities: tuple[int, ...] = CAPABILITIES,
    **constants: Any,
) -> Case:
    """Pointers of float32 and those of ``_TYPES`` are not named; what a constant of None stands for is not there."""
    options = dict(options)
    if types.get("rows") != _BITS:
        constants = dict.fromkeys(_SCALED & set(getattr(head, kernel).arg_names)) | constants
    launched = {key: options.pop(key) for key in _LAUNCHED if key in options}
    constants |= {"DIM": _DIM} | options
    signature = {}
    for argument in getattr(head, kernel).arg_names:
        kind = types.get(argument, _TYPES.get(argument, "*fp32"))
        signature[argument] = "constexpr" if argument in constants else kind
    return Case(
        name=f"head {name}",
        module="head",
        kernel=kernel,
        signature=signature,
        constants=constants,
        options=launched,
        odd=("stop", "num_parts", "first_id", "seed"),
        capabilities=capabilities,
    )


_ALL = {"numbers": None, "count": None}
_NO_SHIFT = {"highest": None, "SHIFTED": False}
_EIGHT = {**_NO_SHIFT, "updates": None}


def _exponentials(name: str, rows: str, products: str, *, plain: bool, **constants: Any) -> Case:
    dtype = torch.float32 if products == _WIDE else torch.bfloat16
    types = {"rows": rows, "queries": products, "out": products}
    options = head.exponentials_options(dtype, wide=plain, codes=rows == _BITS and constants["SHIFTED"])
    return _case(f"exponentials {name}", "exponentials", options, types, PRECISION="ieee", **constants)


def _gradient(name: str, rows: str, products: str, *, plain: bool, **constants: Any) -> Case:
    dtype = torch.float32 if products == _WIDE else torch.bfloat16
    types = {"rows": rows, "exponentials": products}
    options = head.feature_gradient_options(dtype, plain=plain, picked="numbers" not in constants)
    constants |= {"SUM_TILE": 128, "PRECISION": "ieee", "ADDS": not plain or "numbers" not in constants}
    return _case(f"feature gradient {name}", "feature_gradient", options, types, **constants)


def _update(
    name: str, rows: str, slots: str, products: str, kind: str, num_slots: int = 1, **constants: Any
) -> list[Case]:
    dtype = torch.float32 if products == _WIDE else torch.bfloat16
    types = {"rows": rows, "slots": slots, "exponentials": products, "keys": products}
    constants |= {
        "KIND": getattr(row_step, kind).value,
        "SLOTS": num_slots,
        "LR_ON_DEVICE": True,
        "KEEPS": rows == _BITS,
        "SUM_TILE": 128,
        "TILE_N": 64,
    }
    constants |= {} if num_slots else {"slots": None, "slot_scales": None}
    constants |= {"squares": None, "out": None, "PRECISION": "ieee"}
    is_light = rows == slots == _NARROW and not constants["SHIFTED"]
    return [
        _case(
            f"update {name}",
            "update_rows",
            head.update_options(dtype, light=is_light and capability >= 90, by_block=slots == "*i8"),
            types,
            capabilities=(capability,),
            **constants,
        )
        for capability in CAPABILITIES
    ]


CASES = [
    _exponentials("bf16", _NARROW, _NARROW, plain=True, log2_weight=None, **_ALL, **_NO_SHIFT),
    _exponentials("bf16, picked", _NARROW, _NARROW, plain=True, **_NO_SHIFT),
    _exponentials("bf16, picked, no margin", _NARROW, _NARROW, plain=False, inverse=None, SHIFTED=True),
    _exponentials("8 bits, picked", _BITS, _NARROW, plain=False, **_NO_SHIFT),
    _exponentials("8 bits, picked, no margin", _BITS, _NARROW, plain=False, inverse=None, SHIFTED=True),
    _exponentials("fp32 under bf16", _WIDE, _NARROW, plain=False, log2_weight=None, **_ALL, **_NO_SHIFT),
    _exponentials("fp32", _WIDE, _WIDE, plain=True, log2_weight=None, **_ALL, **_NO_SHIFT),
    _gradient("bf16", _NARROW, _NARROW, plain=True, highest=None, shifts=None, **_ALL),
    _gradient("bf16, picked", _NARROW, _NARROW, plain=True, highest=None, shifts=None),
    _gradient("bf16, picked, no margin", _NARROW, _NARROW, plain=False),
    _gradient("8 bits, picked", _BITS, _NARROW, plain=False, highest=None, shifts=None),
    _gradient("fp32 under bf16", _WIDE, _NARROW, plain=False, highest=None, shifts=None, **_ALL),
    _gradient("fp32", _WIDE, _WIDE, plain=True, highest=None, shifts=None, **_ALL),
    _case(
        "terms of samples",
        "sample_terms",
        head.sample_terms_options(_DIM),
        {"rows": "*bf16", "keys": "*bf16"},
        SHIFTED=False,
    ),
    *_update("bf16 momentum", _NARROW, _NARROW, _NARROW, "MOMENTUM", log2_weight=None, **_ALL, **_NO_SHIFT),
    *_update("bf16 momentum, picked", _NARROW, _NARROW, _NARROW, "MOMENTUM", **_NO_SHIFT),
    *_update("bf16 momentum, picked, no margin", _NARROW, _NARROW, _NARROW, "MOMENTUM", inverse=None, SHIFTED=True),
    *_update("8 bits SGD, picked", _BITS, _NARROW, _NARROW, "SGD", 0, **_EIGHT),
    *_update("8 bits momentum, picked", _BITS, "*i8", _NARROW, "MOMENTUM", **_EIGHT),
    *_update(
        "8 bits momentum, picked, no margin",
        *(_BITS, "*i8", _NARROW, "MOMENTUM"),
        inverse=None,
        SHIFTED=True,
        updates=None,
    ),
    *_update("bf16 AdamW, picked", _NARROW, _WIDE, _NARROW, "ADAMW", 2, **_NO_SHIFT),
    *_update("fp32 momentum", _WIDE, _WIDE, _WIDE, "MOMENTUM", log2_weight=None, **_ALL, **_NO_SHIFT),
    *_update("fp32 under bf16, Adagrad", _WIDE, _WIDE, _NARROW, "ADAGRAD", log2_weight=None, **_ALL, **_NO_SHIFT),
]
