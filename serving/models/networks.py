"""Networks run by onnxruntime, and the number of threads for one batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from geartrain.ams.values.errors import ConfigError, InvalidArgument

_wished: int | None = None


def use_threads(threads: int | None) -> None:
    """Set the number of threads for models loaded from now on; None: the number of CPUs."""
    global _wished
    _wished = threads


def threads_of_batch() -> int:
    """Return the number of threads for one batch."""
    return _wished or len(os.sched_getaffinity(0))


def open_network(path: Path, threads: int) -> Any:
    """Return the network of a file, ready to run. Raises ConfigError without onnxruntime, InvalidArgument."""
    try:
        import onnxruntime
    except ImportError as exc:
        raise ConfigError(
            f"serving needs onnxruntime, which cannot be imported: {exc}; pip install 'geartrain[serve]'"
        ) from exc
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other work needs these cores
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as exc:  # its errors share no other base
        raise InvalidArgument(f"onnxruntime cannot run {path}: {exc}") from exc
