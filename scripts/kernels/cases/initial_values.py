"""First values of rows, 512 wide."""

from __future__ import annotations

from geartrain.bridge.kernels.triton.initial_values import tile
from scripts.kernels.compile import Case

_OPTIONS = tile(512)

CASES = [
    Case(
        name=f"initial_values {'normal' if is_normal else 'uniform'}{' by number' if by_number else ''}",
        module="initial_values",
        kernel="write_rows",
        signature={
            "rows": "*bf16",
            **dict.fromkeys(("ids", "numbers"), "*i64" if by_number else "constexpr"),
            **dict.fromkeys(("low_bits", "high_bits"), "i64"),
            "below": "fp32",
            "num": "i32",
            "first": "i64",
            "seed": "i64",
            "table_hash": "i64",
            **dict.fromkeys(("D", "IS_NORMAL", "N", "C"), "constexpr"),
        },
        constants={"D": 512, "IS_NORMAL": is_normal, "N": _OPTIONS["N"], "C": _OPTIONS["C"]}
        | ({} if by_number else {"ids": None, "numbers": None}),
        options={"num_warps": _OPTIONS["num_warps"], "enable_fp_fusion": False},
        odd=("low_bits", "high_bits", "num", "first", "seed", "table_hash"),
    )
    for is_normal, by_number in ((True, False), (True, True), (False, False))
]
