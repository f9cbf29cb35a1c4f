"""Registry of the loggers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
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
"""Logger by name; called with the run's folder, the job's name, and the step of a resumed run (None: new)."""

_LIBRARIES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
"""What pip calls the library of a logger that needs one of its own name."""


def require_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError if one of ``names`` is unknown."""
    if unknown := [name for name in names if name not in LOGGERS]:
        raise ConfigError(f"the logger is {unknown[0]!r}; it must be one of {', '.join(LOGGERS)}")


def require_libraries(names: Sequence[str]) -> None:
    """Raise ConfigError if a logger's library is not installed; opens nothing."""
    for name in names:
        if name in _LIBRARIES and find_spec(name) is None:
            raise ConfigError(f"--logger {name} needs {_LIBRARIES[name]}; pip install 'geartrain[{name}]'")


def open_loggers(names: Sequence[str], out: Path, job: str, step: int | None) -> Loggers:
    """Open the loggers of ``names``, as one. Raises ConfigError."""
    return Loggers([LOGGERS[name](out, job, step) for name in names])
