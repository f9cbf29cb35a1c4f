"""MLflow logger: one MLflow run for each run of a job, found by a tag with the job's name."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import shown_url

TAG = "geartrain.job"
EXPERIMENT = "geartrain"


class MlflowLogger:
    """Logs to ``MLFLOW_TRACKING_URI``, by default to files in the run's folder, as the experiment
    ``MLFLOW_EXPERIMENT_NAME`` (``geartrain``).

    A resumed run continues the same MLflow run. Steps that it has already are not sent again.
    """

    def __init__(self, out: Path, job: str, step: int | None) -> None:
        """Open the run. Raises ConfigError if there is no store."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if address is None:  # files need no server and no database, but MLflow must be told to use them
            address = (out / "mlruns").absolute().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            self._client = MlflowClient(tracking_uri=address)
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            runs = [] if step is None else self._client.search_runs([experiment], f"tags.`{TAG}` = '{job}'")
            run = runs[0] if runs else self._client.create_run(experiment, tags={TAG: job}, run_name=job)
            self._run_id = run.info.run_id
            histories = [self._client.get_metric_history(self._run_id, metric) for metric in run.data.metrics]
        except MlflowException as exc:
            shown = shown_url(address)
            said = str(exc).replace(address, shown)
            raise ConfigError(f"MLflow takes no run at {shown}: {said}; MLFLOW_TRACKING_URI names another") from exc
        self._there = {(metric.key, metric.step) for history in histories for metric in history}

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        named = {f"{group}/{name}": value for name, value in values.items()}
        fresh = [self._metric(key, value, now, step) for key, value in named.items() if (key, step) not in self._there]
        self._client.log_batch(self._run_id, metrics=fresh)

    def flush(self) -> None:
        """Do nothing: it writes at once."""

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
