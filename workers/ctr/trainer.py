"""Training of models with embeddings: the network in this process, its rows in a cluster. Click models are here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from geartrain.ams.storage.snapshot.store import place
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.optimizers.registry import Adam
from geartrain.ams.values.scheduler_messages import RestoreOrder
from geartrain.ams.values.text import counted
from geartrain.bridge.dense.dense_table import DenseTable, attach
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.models.click_model import ClickModel
from geartrain.bridge.pipeline.prefetch import PrefetchRun, prefetch
from geartrain.bridge.rows.optimizer import RowOptimizer
from geartrain.bridge.rows.tables import counted_as
from geartrain.workers.ctr.batches import BatchesInMemory, ClickBatch, ClickBatches
from geartrain.workers.ctr.designs import Design, layout_of
from geartrain.workers.ctr.metrics import (
    LatestScores,
    Scores,
    draw_calibration,
    figures,
    in_words,
    measured,
    worse_than_guessing,
)
from geartrain.workers.ctr.recipe import CtrRecipe, EmbeddingRecipe, usual_for
from geartrain.workers.ctr.samples.click_samples import ClickSamples
from geartrain.workers.ctr.samples.examples import FILE, examples_file
from geartrain.workers.ctr.samples.kinds import FieldKind, kinds_from_json
from geartrain.workers.ctr.samples.sources import found_again, is_own, is_topic, load_samples, required
from geartrain.workers.job.best import BestValidation, evaluation_period
from geartrain.workers.job.folder import read_run
from geartrain.workers.job.options import ENDLESS, JobOptions
from geartrain.workers.job.state import JobState, best_snapshot
from geartrain.workers.job.trainer import Attempt, Trainer
from geartrain.workers.samples.files import require_arrow

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.workers.ctr.samples.topic import TopicSamples

_TRAINED_PER_LOOKED_AT = 8
"""Training samples for each validation sample, which costs less than 0.4 of one: 5 % in all."""

_SAVED_SECONDS = 60.0
"""Seconds between two snapshots by the scheduler, for which all workers wait."""


class EmbeddingTrainer(Trainer):
    """Trains a network and its embeddings on samples of users and items."""

    dense: DenseTable | None = None
    """Table with the network's parameters, if they are in the cluster; else None."""

    def __init__(
        self,
        attempt: Attempt,
        source: str,
        num_samples: int,
        network: ClickModel,
        fields: EmbeddingGroup,
        recipe: EmbeddingRecipe,
        some: ClickSamples,
    ) -> None:
        """``num_samples``: number of training samples, of which ``some`` are in memory."""
        self.attempt = attempt
        self.cluster = attempt.cluster
        self.source = source
        self.network = network
        self.fields = fields
        self._examples = examples_file(some, recipe.private)
        optimizer = self.dense or torch.optim.Adam(network.parameters(), lr=recipe.lr)
        super().__init__(recipe, num_samples, optimizer, RowOptimizer(fields), attempt.progress)

    @staticmethod
    def require(options: JobOptions) -> None:
        """Raise ConfigError unless the options name samples, or resume a run."""
        if options.data is not None or not options.resume:
            required(options.data)

    @staticmethod
    def load(options: JobOptions, state: JobState | None, console: Console) -> tuple[str, ClickSamples]:
        """Return the samples' name for ``--data``, and the samples."""
        source = options.data or (None if state is None else state.data["source"])
        kinds = None if state is None else _kinds_in_order(state.data)
        say = lambda line: console.print(line, highlight=False)  # noqa: E731
        samples = load_samples(source, options.cache, say, kinds, options.recipe.fold, options.recipe.files)
        return found_again(str(source)), samples

    def modules(self) -> dict[str, Any]:
        """Return network and embeddings."""
        return {"network": self.network, "fields": self.fields}

    def data(self) -> dict[str, Any]:
        """Return where the samples are."""
        return {"source": self.source}

    def files(self) -> dict[str, bytes]:
        """Return the examples that people see who try the model."""
        return {FILE: self._examples}

    def tables(self) -> list[str]:
        """Return the tables of the embeddings, and of the network if it has one."""
        placements = [part.row_placement for part in self.fields.trained]
        placements += [] if self.dense is None else [self.dense.row_placement]
        return [spec.name for placement in placements for spec in placement.specs()]

    def rates(self) -> dict[str, float]:
        """Return the learning rates of network and rows."""
        return {"lr": self.recipe.lr, "row_lr": self.recipe.row_lr}


class ClickTrainer(EmbeddingTrainer):
    """Trains a click model."""

    job = "ctr"
    recipe_class = CtrRecipe

    def __init__(self, attempt: Attempt, data: tuple[str, Any]) -> None:
        source, samples = data
        recipe: CtrRecipe = attempt.options.recipe
        if not isinstance(samples, ClickSamples) and not is_topic(source):
            private = tuple({**dict.fromkeys(recipe.private), **recipe.history_columns})
            recipe = replace(recipe, features=samples.features(recipe.features), private=private)
        self.design = design = Design(recipe, layout_of(samples))
        assert attempt.cluster is not None
        goes_on, job = attempt.state is not None, attempt.progress.table
        torch.manual_seed(recipe.seed)
        network = design.network()
        altered = attempt.options.stated
        fields = design.fields(attempt.cluster, job, reuse=goes_on, per_node=network.per_node, altered=altered)
        if recipe.shares:
            self.dense = attach(
                network, attempt.cluster, name=f"{job}/network", optimizer=Adam(recipe.lr), reuse=goes_on
            )
        self.fields = fields
        self.is_restored = recipe.shares and attempt.options.scheduler is not None
        self._stage_steps = attempt.progress.stage_steps
        self.samples = self._batches(source, samples, recipe, attempt)
        self._validation = list(self.samples.validated())
        super().__init__(attempt, source, self.samples.num_trained, network, fields, recipe, self.samples.some())
        least = math.ceil(_TRAINED_PER_LOOKED_AT * self.samples.num_validated / recipe.batch_size)
        steps = self.progress.stage_steps
        if steps >= ENDLESS:
            steps = math.ceil(recipe.epochs * self.samples.num_trained / recipe.batch_size)
        self._period = max(evaluation_period(steps), least)
        if not self.samples.num_tested:  # measure by windows of the latest samples
            self._period = math.ceil(max(recipe.progressive, 1) / recipe.batch_size)
        clicked = sum(int(batch.clicks.sum()) for batch in self._validation)
        self._latest = LatestScores(recipe.progressive)
        # AUC needs clicked and other samples.
        self._is_validated = 0 < clicked < self.samples.num_validated and not attempt.options.joins
        self._best = BestValidation[dict[str, Any]](itemgetter("auc"), best=self.progress.best)
        self._was_complete = self.progress.is_complete
        self._looked_at = -1
        self._ahead: PrefetchRun | None = None
        self._read: deque[ClickBatch] = deque()
        """Batches that were read ahead."""
        self._progressive: dict[str, Any] | None = None
        """Measures of the latest samples, scored before they were trained on."""

    def _batches(self, source: str, samples: Any, recipe: CtrRecipe, attempt: Attempt) -> ClickBatches:
        design, options, cluster = self.design, attempt.options, attempt.cluster
        assert cluster is not None
        if isinstance(samples, ClickSamples) and not recipe.shares:
            return BatchesInMemory(samples, recipe, design)
        if not recipe.shares and is_topic(source):
            from geartrain.workers.ctr.topic import TopicBatches  # needs confluent-kafka

            return TopicBatches(samples, recipe, design)
        require_arrow()
        from geartrain.workers.ctr import shared, streamed

        if not recipe.shares:
            return streamed.StreamedBatches(samples, recipe, design)
        restore = None
        if options.scheduler is not None:
            root = str(place(options.snapshot_root)) if attempt.state is None else read_run(options.out).snapshots
            seconds = _SAVED_SECONDS if recipe.snapshots.minutes is None else 60 * recipe.snapshots.minutes
            restore = RestoreOrder(root=f"{root}.shared", tables=tuple(self.tables()), every_seconds=seconds)
        of_files = shared.SharedInMemory if isinstance(samples, ClickSamples) else shared.SharedFiles
        batches = shared.SharedTopic if is_topic(source) else of_files
        return batches(samples, recipe, design, cluster, attempt.progress.table, restore)

    @classmethod
    def usual_recipe(cls, data: str | None, stated: Mapping[str, Any]) -> dict[str, Any]:
        return usual_for(data, stated)

    @staticmethod
    def load(options: JobOptions, state: JobState | None, console: Console) -> tuple[str, Any]:
        """Return the samples; one's own stay in their files, unless a model builds histories from all of them."""
        source, recipe = options.data or (None if state is None else state.data["source"]), options.recipe
        if is_topic(source):
            return str(source), _topic_samples(str(source), recipe, state, joins=options.joins)
        is_streamed = is_own(source) and not recipe.reads_events
        if recipe.features and not is_streamed:
            raise ConfigError(
                "features are for your own samples whose histories are columns; leave features out, say which column "
                "is the history (features.NAME.history_of=item), or take history=0 and a model without one: deepfm, "
                "wide_deep or dssm"
            )
        if not is_streamed:
            return EmbeddingTrainer.load(options, state, console)
        from geartrain.workers.ctr.samples.own import OwnSamples

        kinds = None if state is None else _kinds_in_order(state.data)
        samples = OwnSamples(
            str(source), times=False, kinds=kinds, fold=recipe.fold, features=recipe.features, files=recipe.files
        )
        return found_again(str(source)), samples

    def data(self) -> dict[str, Any]:
        """Return where the samples are, the identity of their files, and their ``SampleLayout``."""
        cursors = {str(stream): list(at) for stream, at in self.samples.where().items()}
        ends = self.samples.ends
        return {
            **super().data(),
            "files": self.samples.identity,
            "cursors": cursors,
            "ends": None if ends is None else {str(partition): offset for partition, offset in ends.items()},
            **self.design.layout.to_json(),
        }

    def restore(self, state: JobState) -> None:
        if self.attempt.is_kept:
            self.phases.seconds = {**state.phases}  # all else is in the cluster
        else:
            if self.recipe.shares:  # other workers pushed between the state and the rows of its snapshot
                for part in state.tensors["fields"].values():
                    part["tables"] = {name: {**known, "rows": None} for name, known in part["tables"].items()}
            super().restore(state)
        if self.samples.identity and "files" not in state.data:
            raise ConfigError(
                "an earlier version of Geartrain began the run, and held out other samples of files: go on with that "
                "version, or start a new run"
            )
        if state.data.get("files", "") != self.samples.identity:
            raise ConfigError(
                "the samples are not those that the run was begun with, or window_rows and held_out are others: bring "
                "the old ones back, or start a new run"
            )
        if not self.attempt.is_kept:
            self.samples.go_on({int(stream): tuple(at) for stream, at in state.data.get("cursors", {}).items()})

    def start(self, stop: Callable[[], bool]) -> None:
        """Print what is about to be trained."""
        del stop
        if not self.samples.num_tested:
            self.attempt.print_line(f"Training {self.recipe.model} on the samples of {self.source} as they come")
            return
        what = "of the training part are kept to choose by" if self.recipe.validation else "are held out"
        counts = f"{counted(self.samples.num_trained, 'sample')}; {self.samples.num_tested:,} {what}"
        self.attempt.print_line(f"Training {self.recipe.model} on {counts} ({self.recipe.split})")
        looks = "No validation: its samples lack clicks, or others"
        if self._is_validated:
            looks = (
                f"Validation on {counted(self.samples.num_validated, 'more sample')} every "
                f"{counted(self._period, 'step')}"
            )
        self.attempt.print_line(looks)

    def epochs(self, steps: int) -> str:
        """Return the epochs as text, if the number of samples is known: not of a topic, nor of a shared run."""
        if self.samples.num_tested and steps < ENDLESS:
            return super().epochs(steps)
        batch = counted(self.recipe.batch_size, "sample")
        return f"Batches of {batch}, as they come" if steps >= ENDLESS else f"{counted(steps, 'step')} of up to {batch}"

    def has_samples(self) -> bool:
        if self.samples.is_ready():
            return True
        self._release_steps()
        if self.samples.has_ended():
            self.progress = replace(self.progress, stage_steps=self.progress.part[0])
        return False

    def step(self, step: int) -> Tensor | None:
        losses: list[Tensor | None] = []

        def train() -> None:
            if self.dense is not None:
                self.optimizer.zero_grad()  # after a lost step, gradients are those of other rows,
                self.rows.zero_grad()
                self.dense.refresh()  # and the weights are outdated
            losses.append(super(ClickTrainer, self).step(step))

        return losses[0] if self.samples.apply(train) else None

    @staticmethod
    def is_kept(options: JobOptions, cluster: Cluster, job: str) -> bool:
        if not options.recipe.shares or options.scheduler is None:
            return False
        from geartrain.workers.ctr.shared import is_kept  # needs pyarrow

        return is_kept(cluster, job)

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._release_steps()
        with self.samples.alone():
            self._refresh_network()
            yield

    def require_alone(self) -> None:
        self.samples.require_alone()
        self._refresh_network()  # raises TableNotFound if the scheduler has restored the tables

    @property
    def has_others(self) -> bool:
        return self.samples.has_others

    def goes_on_restored(self) -> bool:
        if not (self.is_restored and self.samples.reopen()):
            return False
        self._looked_at = -1
        if not self.recipe.steps:
            self.progress = replace(self.progress, stage_steps=self._stage_steps)
        return True

    def keep_lease(self) -> None:
        self._release_steps()
        self.samples.keep_lease()

    def leave(self) -> None:
        self.samples.close()

    def _refresh_network(self) -> None:
        """Pull the weights that other workers have trained."""
        if self.dense is not None:
            self.dense.refresh()

    def _release_steps(self) -> None:
        if self.fields.worker_steps is not None:
            self.fields.worker_steps.leave()  # so that no worker waits for steps that do not come

    def between(self) -> None:
        """Validate at intervals, and end the stage if validation has not improved for ``patience`` of them."""
        if self.progress.part[0] % self._period:
            return
        self._validate()
        self._report_progressive()
        (done, steps), best, patience = self.progress.part, self.progress.best, self.recipe.patience
        if best is None or not patience:
            return
        since = self.progress.step - max(best["step"], self.progress.stage_start)
        if since >= patience * self._period:
            self.attempt.print_line(
                f"Ended early, at step {self.progress.step} of {self.progress.stage_start + steps}: no look since step "
                f"{best['step']} was better (patience={patience})"
            )
            self.progress = replace(self.progress, stage_steps=done)

    def trained(self) -> None:
        """Validate at the end."""
        self._release_steps()
        self.samples.wait_alone()
        self.samples.settle()
        if not self._was_complete:
            self._validate()
            self._report_progressive()

    def _validate(self) -> None:
        """Validate the current model and compare it with the best one so far."""
        step = self.progress.step
        if not self._is_validated or step == self._looked_at:
            return
        self._looked_at = step
        self._release_steps()
        self._refresh_network()
        with self.phases.measured("looks"):
            found = measured(self._scored(self._validation))
        numbers = figures(found)
        self.events.scalars("validation", numbers, step)
        self.metric, self.metrics = ("AUC", found["auc"]), numbers
        look = {"step": step, **numbers, "samples": found["samples"]}
        is_best = self._best.compare(look)
        if is_best:
            self.progress, self.wants_snapshot = replace(self.progress, best=look), True
        self.attempt.print_line(f"step {step}: validation {in_words(found)}{', the best so far' if is_best else ''}")

    def _report_progressive(self) -> None:
        """Print how good the model was on the latest samples, scored before it was trained on them."""
        scores, step = self._latest.joined(), self.progress.step
        if scores is None:
            return
        found = measured(scores, self.recipe.negatives)
        numbers = figures(found)
        self.events.scalars("progressive", numbers, step)
        self.metrics = {**self.metrics, **{f"progressive_{name}": value for name, value in numbers.items()}}
        if not self._is_validated:
            self.metric = "progressive AUC", found["auc"]
        self._progressive = {**found, "step": step}
        self.attempt.print_line(
            f"step {step}: {in_words(found)} on the latest {counted(found['samples'], 'sample')} before they were "
            "learned from"
        )

    def run(self, **settings: Any) -> bool:
        self.network.train()
        try:
            return super().run(**settings)
        finally:
            if self._ahead is not None:
                self._ahead.close()
                self._ahead = None

    def _batch(self, step: int) -> tuple[ClickBatch, Mapping[str, Tensor]]:
        """Return the batch of ``step`` and its vectors, perhaps read and pulled ahead."""
        if not self.recipe.prefetch:
            batch = self.samples.trained(step)
            with counted_as("pull"):
                return batch, self.fields(batch.ids)
        if self._ahead is None:
            self._read.clear()
            self._ahead = iter(prefetch(self._ids_from(step), self.fields, depth=self.recipe.prefetch))
        with counted_as("pull"):
            _, vectors = next(self._ahead)
        return self._read.popleft(), vectors

    def _ids_from(self, step: int) -> Iterator[Mapping[str, Any]]:
        """Yield the ids of the stage's batches from ``step`` on; the batches wait in ``_read``."""
        for number in range(step, self.progress.last_step):
            batch = self.samples.trained(number)
            self._read.append(batch)
            yield batch.ids

    def loss(self, step: int) -> Tensor:
        """Return the loss of the batch of ``step``."""
        batch, vectors = self._batch(step)
        loss: Tensor = self.network(
            {**vectors, **batch.images}, batch.clicks, batch.ids if self.network.per_node else None
        )
        if self.recipe.progressive and step * self.recipe.batch_size < self.samples.num_trained:
            logits = self.network.learned_logits
            assert logits is not None
            self._latest.add(batch.scores(logits + self.network.log_odds_shift, self.design.user))
        return loss

    def predict(self) -> Scores:
        """Return the scores of the test samples."""
        return self._scored(self.samples.tested())

    def _scored(self, batches: Iterable[ClickBatch]) -> Scores:
        return scored(self.network, self.fields, self.samples.kept(batches), self.design.user)

    def _restore_best(self) -> int:
        """Restore network and rows of the best step; return that step."""
        snapshot = best_snapshot(read_run(self.attempt.options.out).snapshots)
        if self.is_restored or snapshot.manifest.step != self.progress.step:  # the scheduler may have restored others
            assert self.cluster is not None
            while self.is_restored:  # the scheduler must not take it for a loss: it restores dropped tables no more
                for name in self.tables():
                    self.cluster.drop_table(name)
                if not self.samples.settle():
                    break
            self.cluster.restore(snapshot.path, replace=True)
            state = JobState.read(snapshot, self.job, self.recipe_class)
            self.network.load_state_dict(state.tensors["network"])
        return snapshot.manifest.step

    def report(self) -> dict[str, Any]:
        """Return AUC, log loss and calibration of the best model on the samples held out."""
        recipe, out, best = self.recipe, self.attempt.options.out, self.progress.best
        step = self._restore_best()
        why = ""
        if best is not None:
            self.metric = "best AUC", best["auc"]
            why = f", the best: validation AUC {best['auc']:.4f}"
            if step != best["step"]:
                why = f"; that of the best step, {best['step']}, could not be saved"
        self.attempt.print_line(f"The model is that of step {step}{why}")
        progressive = {} if self._progressive is None else {"progressive": self._progressive}
        if not self.samples.num_tested:
            return {**progressive, **self.samples.told(), "model": {"step": step, "best": best}}
        found = measured(self.predict())
        self.events.scalars("held_out", figures(found), self.progress.step)
        title = f"{recipe.model}, {recipe.split} split: AUC {found['auc']:.4f}, log loss {found['log_loss']:.4f}"
        draw_calibration(out / "calibration.png", found["calibration"], title)
        what = "Validation" if recipe.validation else "Held out"
        self.attempt.print_line(
            f"{what}: {in_words(found)} ({found['log_loss_of_the_mean']:.4f} log loss for the mean click rate), "
            f"{counted(found['samples'], 'sample')}"
        )
        if (worse := worse_than_guessing(found)) is not None:
            self.attempt.print_line(Text(worse, "yellow"))
        return {"held_out": found, **progressive, "model": {"step": step, "best": best}}

    def conclude(self) -> str:
        """Return the description of the run folder's files."""
        return "Snapshots, report and calibration.png" if self.samples.num_tested else super().conclude()


def scored(
    network: ClickModel, fields: EmbeddingGroup, batches: Iterable[ClickBatch], user: str | None = None
) -> Scores:
    """Return the network's scores of the samples; ``user`` is their field of users. The network's mode is kept."""
    was_training = network.training
    network.eval()
    found = [Scores(np.empty(0), np.empty(0), None if user is None else np.empty(0, np.int64))]
    try:
        with torch.no_grad():
            for batch in batches:
                logits = network({**fields(batch.ids), **batch.images}, batch=batch.ids if network.per_node else None)
                found.append(batch.scores(logits, user))
    finally:
        network.train(was_training)
    return Scores.joined(found)


def _topic_samples(source: str, recipe: CtrRecipe, state: JobState | None, *, joins: bool) -> TopicSamples:
    require_arrow()
    from geartrain.workers.ctr.samples.topic import TopicSamples

    if recipe.reads_events:
        raise ConfigError(
            f"history is {recipe.history}, made of all samples, and those of a topic come one by one: say which field "
            "is the history (features.NAME.history_of=item), or history=0"
        )
    if recipe.prefetch:
        raise ConfigError(f"prefetch is {recipe.prefetch}, and a topic is read as its messages come; leave it out")
    if recipe.validation:
        raise ConfigError("validation is true, and no samples of a topic are held out for it; leave it out")
    if recipe.fold:
        raise ConfigError(f"fold names {recipe.fold[0]!r}; of a topic give --set features.{recipe.fold[0]}.hash=fold")
    features, ends = recipe.features, None
    if state is not None:
        features = {name: features[name] for name in _kinds_in_order(state.data)}
        if joins and (kept := state.data["ends"]) is not None:  # all workers of a run end at the same offsets
            ends = {int(partition): offset for partition, offset in kept.items()}
    return TopicSamples(source, recipe.batch_size, features, recipe.kafka, ends)


def _kinds_in_order(data: Mapping[str, Any]) -> dict[str, FieldKind]:
    """Return the kinds of a run's training fields, in the order of its network's inputs; JSON has them sorted."""
    kinds = kinds_from_json(data["schema"]["kinds"])
    return {name: kinds[name] for name in (*data["fields"], *data["schema"]["item"]) if name in kinds}
