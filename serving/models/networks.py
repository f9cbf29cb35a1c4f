"""Networks, run by onnxruntime, and how many threads of this process work on one batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from geartrain.ams.values.errors import ConfigError, InvalidArgument

_wished: int | None = None


def use_threads(threads: int | None) -> None:
    """Say how many, for models that are loaded from now on; None: as many as there are CPUs."""
    global _wished
    _wished = threads


def threads_of_batch() -> int:
    """How many."""
    return _wished or len(os.sched_getaffinity(0))


def open_network(path: Path, threads: int) -> Any:
    """The network of a file, ready to run. Raises ConfigError without onnxruntime, InvalidArgument."""
    try:
        import onnxruntime
    except ImportError as exc:
        raise ConfigError(
            f"serving needs onnxruntime, which cannot be imported: {exc}; pip install 'geartrain[serve]'"
        ) from exc
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other work waits for these cores
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as exc:  # its errors have no base but this
        raise InvalidArgument(f"onnxruntime cannot run {path}: {exc}") from exc
