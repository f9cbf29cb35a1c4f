"""Clusters of published figures, as data. Rates are peaks of data sheets; latencies are typical ones of their links.

V100, A100 and H200: NVIDIA's data sheets (SXM forms; NVLink's bandwidth halved, for it counts both directions).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_GBIT = 1e9 / 8
_NVLINK_SECONDS, _ETHERNET_SECONDS, _INFINIBAND_SECONDS, _LAUNCH_SECONDS = 5e-6, 3e-5, 5e-6, 5e-6

Fields = Mapping[str, Any]
"""Of a ``Hardware``, but for its name."""

_V100: Fields = {
    "flops": {"float32": 15.7e12, "float64": 7.8e12, "float16": 125e12},
    "memory_bandwidth": 900e9,
    "memory_bytes": 32 * 10**9,
    "ranks_per_node": 8,
    "intra_node_bandwidth": 150e9,
    "intra_node_latency_seconds": _NVLINK_SECONDS,
    "inter_node_latency_seconds": _ETHERNET_SECONDS,
    "operation_seconds": _LAUNCH_SECONDS,
}
_A100: Fields = {
    **_V100,
    "flops": {"float32": 19.5e12, "float64": 9.7e12, "float16": 312e12, "bfloat16": 312e12},
    "memory_bandwidth": 1555e9,
    "memory_bytes": 40 * 10**9,
    "intra_node_bandwidth": 300e9,
}
_H200: Fields = {
    **_V100,
    "flops": {"float32": 67e12, "float64": 34e12, "float16": 989e12, "bfloat16": 989e12},
    "memory_bandwidth": 4.8e12,
    "memory_bytes": 141 * 10**9,
    "intra_node_bandwidth": 450e9,
    "inter_node_bandwidth": 3200 * _GBIT,
    "inter_node_latency_seconds": _INFINIBAND_SECONDS,
}

CLUSTERS: Final[Mapping[str, Fields]] = {
    "v100-25gbit": {**_V100, "inter_node_bandwidth": 25 * _GBIT},
    "v100-35gbit": {**_V100, "memory_bytes": 16 * 10**9, "inter_node_bandwidth": 35 * _GBIT},
    "v100": _V100,
    "a100": _A100,
    "h200": _H200,
}
