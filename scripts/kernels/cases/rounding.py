"""Rounding of rows of several tables, 64 wide."""

from __future__ import annotations

from geartrain.bridge.kernels.triton.rounding import tile
from scripts.kernels.compile import Case

_OPTIONS = tile(64)

CASES = [
    Case(
        name=f"rounding {dtype}",
        module="rounding",
        kernel="round_rows",
        signature={
            "values": "*fp32",
            "out": f"*{dtype}",
            **dict.fromkeys(("ids", "numbers", "keys"), "*i64"),
            "num": "i32",
            **dict.fromkeys(("D", "PART", "N", "C"), "constexpr"),
        },
        constants={"D": 64, "PART": 0, "N": _OPTIONS["N"], "C": _OPTIONS["C"]},
        options={"num_warps": _OPTIONS["num_warps"], "enable_fp_fusion": False},
        odd=("num",),
    )
    for dtype in ("bf16", "fp16")
]
