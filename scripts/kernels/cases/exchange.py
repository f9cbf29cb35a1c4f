"""What travels between ranks: ids of 32 bits with weights, and numbers of pairs with factors."""

from __future__ import annotations

from scripts.kernels.compile import Case


def _ids(kernel: str, signature: dict[str, str], integers: list[str], *, has_weights: bool = True) -> Case:
    chosen = {"WEIGHTED": True} if has_weights else {}
    return Case(
        name=kernel,
        module="exchange",
        kernel=kernel,
        signature={
            "numbers": "*i64",
            **signature,
            **dict.fromkeys(integers, "i32"),
            **dict.fromkeys([*chosen, "BLOCK"], "constexpr"),
        },
        constants={**chosen, "BLOCK": 512},
        options={"num_warps": 4},
        odd=tuple(integers),
    )


def _pairs(kernel: str) -> Case:
    return Case(
        name=kernel,
        module="exchange",
        kernel=kernel,
        signature={
            "fields": "*i64",
            "flat": "*fp32",
            "pairs_RV": "*i32",
            "factor_V": "*fp32",
            "num_vectors": "i32",
            "num_ranks": "i32",
            "FACTORED": "constexpr",
            "BLOCK": "constexpr",
        },
        constants={"FACTORED": True, "BLOCK": 512},
        options={"num_warps": 4},
        odd=("num_vectors", "num_ranks"),
    )


CASES = [
    _ids(
        "find_ranks",
        {"key_N": "*i32", "place_N": "*i64", "rank_N": "*i16", "has_RV": "*i32"},
        ["num_ids", "num_tables", "num_vectors", "num_ranks", "bits", "none"],
        has_weights=False,
    ),
    _ids(
        "pack_ids",
        {
            "rank_N": "*i16",
            "order_N": "*i64",
            "key_N": "*i32",
            "place_N": "*i64",
            "weights_N": "*fp32",
            "pairs_RV": "*i32",
            "words": "*i64",
            "starts_Q": "*i64",
        },
        ["num_ids", "num_tables", "num_fields", "num_vectors", "num_ranks"],
    ),
    _ids(
        "group_ids",
        {"words": "*i64", "key_N": "*i32", "place_N": "*i64", "bounds_V": "*i64", "weights_N": "*fp32"},
        ["num_ids", "num_pieces", "num_vectors"],
    ),
    _pairs("combine_pairs"),
    _pairs("spread_pairs"),
]
