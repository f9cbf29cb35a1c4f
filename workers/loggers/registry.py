"""The loggers there are, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.loggers.mlflow import MlflowLogger
from geartrain.workers.loggers.protocol import Loggers, RunLogger
from geartrain.workers.loggers.tensorboard import TensorBoardLogger
from geartrain.workers.loggers.wandb import WandbLogger

LOGGERS: dict[str, Callable[[Path, str, int | None], RunLogger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}
"""Called with the run's folder, the job's name, and the step at which it goes on: None for a new one."""


def require_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError if one of ``names`` is none."""
    if unknown := [name for name in names if name not in LOGGERS]:
        raise ConfigError(f"the logger is {unknown[0]!r}; it must be one of {', '.join(LOGGERS)}")


def open_loggers(names: Sequence[str], out: Path, job: str, step: int | None) -> Loggers:
    """Those of ``names``, as one. Raises ConfigError."""
    return Loggers([LOGGERS[name](out, job, step) for name in names])
