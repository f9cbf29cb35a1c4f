"""Recall of a graph of nearest classes."""

from __future__ import annotations

import torch

from geartrain.bridge.kernels.triton.nearest import EXACT, tiles
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
            "thresholds": "*fp32",
            "counts": "*i32",
            "hits": "*i64",
            **dict.fromkeys(("num_rows", "num_others", "own", "first", "width"), "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        options=options,
        odd=("num_rows", "num_others", "own", "first"),
    )


def _exact(dim: int) -> Case:
    constants = {"dim": dim, "candidates": EXACT["candidates"]}
    return Case(
        name=f"nearest exact scores D{dim}",
        module="nearest",
        kernel="exact_scores",
        signature={
            **dict.fromkeys(("rows", "others"), "*fp32"),
            **dict.fromkeys(("ids", "counts"), "*i32"),
            "scores": "*fp64",
            **dict.fromkeys(("width", "first", "num_others"), "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        options={"num_warps": EXACT["num_warps"]},
        odd=("width", "first", "num_others"),
    )


CASES = [_case(512), _case(200), _exact(512), _exact(200)]
