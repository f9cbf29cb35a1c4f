"""Recall of a graph of nearest classes."""

from __future__ import annotations

import torch

from geartrain.bridge.kernels.triton.nearest import tiles
from scripts.kernels.compile import Case


def _case(dim: int) -> Case:
    chosen = tiles(torch.float16, dim)
    options = {name: chosen.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"dim": dim, **chosen}
    return Case(
        name=f"nearest hits fp16 D{dim}",
        module="nearest",
        kernel="nearest_hits",
        signature={
            **dict.fromkeys(("rows", "others"), "*fp16"),
            "floors": "*fp32",
            "counts": "*i32",
            "hits": "*i64",
            **dict.fromkeys(("num_rows", "num_others", "own", "first", "width"), "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        options=options,
        odd=("num_rows", "num_others", "own", "first"),
    )


CASES = [_case(512), _case(200)]
