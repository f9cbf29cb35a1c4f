"""The three products of a class head, 512 wide: rows in bfloat16, all or picked ones; float32 under bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from geartrain.bridge.kernels.triton import head
from scripts.kernels.compile import Case

_DIM = 512
_TYPES = {"numbers": "*i64", "positions": "*i64", "owners": "*i32", "count": "*i64", "refused": "*i64", "steps": "*i64"}
_INTEGERS = ("start", "stop", "num_samples", "num_parts")
_NUMBERS = ("log2_weight", "middle", "lift", "logit_limit", "lr", "momentum", "weight_decay", "calm")
_NARROW, _WIDE = "*bf16", "*fp32"


def _case(name: str, kernel: str, options: Mapping[str, Any], types: Mapping[str, str], **constants: Any) -> Case:
    """Pointers of float32 and those of ``_TYPES`` are not named; what a constant of None stands for is not there."""
    options = dict(options)
    launched = {key: options.pop(key) for key in ("num_warps", "num_stages") if key in options}
    constants |= {"DIM": _DIM} | options
    signature = {}
    for argument in getattr(head, kernel).arg_names:
        kind = "i32" if argument in _INTEGERS else "fp32" if argument in _NUMBERS else "*fp32"
        signature[argument] = "constexpr" if argument in constants else types.get(argument, _TYPES.get(argument, kind))
    return Case(
        name=f"head {name}",
        module="head",
        kernel=kernel,
        signature=signature,
        constants=constants,
        options=launched,
        odd=("stop", "num_parts"),
    )


_ALL = {"numbers": None, "count": None}
_NO_SHIFT = {"highest": None, "SHIFTED": False}


def _exponentials(name: str, rows: str, products: str, *, plain: bool, **constants: Any) -> Case:
    dtype = torch.float32 if products == _WIDE else torch.bfloat16
    types = {"rows": rows, "queries": products, "out": products}
    options = head.exponentials_options(dtype, plain=plain)
    return _case(f"exponentials {name}", "exponentials", options, types, PRECISION="ieee", **constants)


def _gradient(name: str, rows: str, products: str, *, plain: bool, **constants: Any) -> Case:
    dtype = torch.float32 if products == _WIDE else torch.bfloat16
    types = {"rows": rows, "exponentials": products}
    options = head.feature_gradient_options(dtype, plain=plain)
    constants |= {"SUM_TILE": 128, "PRECISION": "ieee"}
    return _case(f"feature gradient {name}", "feature_gradient", options, types, **constants)


CASES = [
    _exponentials("bf16", _NARROW, _NARROW, plain=True, owners=None, **_ALL, **_NO_SHIFT),
    _exponentials("bf16, picked", _NARROW, _NARROW, plain=True, **_NO_SHIFT),
    _exponentials("bf16, picked, no margin", _NARROW, _NARROW, plain=False, inverse=None, SHIFTED=True),
    _exponentials("fp32 under bf16", _WIDE, _NARROW, plain=False, owners=None, **_ALL, **_NO_SHIFT),
    _exponentials("fp32", _WIDE, _WIDE, plain=True, owners=None, **_ALL, **_NO_SHIFT),
    _gradient("bf16", _NARROW, _NARROW, plain=True, highest=None, shifts=None, **_ALL),
    _gradient("bf16, picked", _NARROW, _NARROW, plain=False, highest=None, shifts=None),
    _gradient("bf16, picked, no margin", _NARROW, _NARROW, plain=False),
    _gradient("fp32 under bf16", _WIDE, _NARROW, plain=False, highest=None, shifts=None, **_ALL),
    _gradient("fp32", _WIDE, _WIDE, plain=True, highest=None, shifts=None, **_ALL),
    _case(
        "terms of samples",
        "sample_terms",
        head.sample_terms_options(_DIM),
        {"rows": "*bf16", "keys": "*bf16"},
        SHIFTED=False,
    ),
]
