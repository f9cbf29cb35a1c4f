"""TensorBoard events, in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger:
    """Writes an event file for each process of a run; TensorBoard reads them as one."""

    def __init__(self, out: Path, job: str, step: int | None) -> None:
        """Write to ``out``/events/``job``. If a run resumes at ``step``, later events no longer count."""
        purge_step = None if step is None else step + 1
        self._writer = SummaryWriter(str(out / "events" / job), purge_step=purge_step)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
