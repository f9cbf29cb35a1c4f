"""Weights & Biases logger: one W&B run for each run of a job, by the job's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from geartrain.ams.values.errors import ConfigError


class WandbLogger:
    """Logs to the project that ``WANDB_PROJECT`` names (``geartrain``), offline if ``WANDB_MODE`` is ``offline``.

    A resumed run continues the same W&B run, whose id is the job's. Steps that it has already are not sent again.
    """

    def __init__(self, out: Path, job: str, step: int | None) -> None:
        """Write files to ``out``/wandb. Raises ConfigError if wandb refuses the run."""
        import wandb

        settings = wandb.Settings(silent=True)
        try:
            run = wandb.init(id=job, name=job, dir=str(out), resume="allow", settings=settings)
        except (wandb.errors.Error, ValueError) as exc:
            raise ConfigError(f"wandb begins no run: {exc}; WANDB_MODE=offline needs no account") from exc
        self._run = run
        self._first = max(run.step, 0 if step is None else step + 1)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        if step >= self._first:
            self._run.log({f"{group}/{name}": value for name, value in values.items()}, step=step)

    def flush(self) -> None:
        """Do nothing: it writes by itself."""

    def close(self) -> None:
        self._run.finish()
