"""Model in pipeline stages: the first has the samples; each later one takes the output of the stage before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument, SyncError
from geartrain.ams.values.text import quoted
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.mesh import Mesh
from geartrain.bridge.parallel.overlap.inputs import micro_batch
from geartrain.bridge.parallel.parallel_model import ParallelModel, num_samples
from geartrain.bridge.parallel.replicated import Replicas
from geartrain.bridge.parallel.scopes import ScopedModel
from geartrain.bridge.parallel.split.agreement import END, StepAgreement
from geartrain.bridge.parallel.split.logits import check_labels
from geartrain.bridge.parallel.staged.distant import DistantOutput, rows_to_send
from geartrain.bridge.parallel.staged.stage_link import KIND, StagedBatch, StageLink, kind_from, kind_of
from geartrain.bridge.parallel.staged.travel import arrived, departed
from geartrain.bridge.rows.eager import runs_eagerly


@dataclass(frozen=True)
class Neighbours:
    """Links of a rank to the stages before and after its own."""

    previous: StageLink | None
    """Link to the stage before; None in the first one."""
    next: StageLink | None
    """Link to the next stage; None in the last one."""
    later: Mapping[str, nn.Module]
    """Original layers of all stages but the first, in the order of their calls."""

    def num_classes(self, loss: LossFunction | None) -> int | None:
        """Number of classes that labels of ``loss`` name; None if it is unknown."""
        last = list(self.later.values())[-1]
        names_classes = type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss)
        return last.out_features if names_classes and isinstance(last, nn.Linear) else None


@dataclass(frozen=True)
class StageInput:
    """A micro-batch before a stage's layers."""

    inputs: Any
    options: Mapping[str, Any]
    labels: Tensor | None
    """Labels; None: the step computes outputs, not a loss."""
    is_last: bool
    batch: StagedBatch | None
    """Agreement with the stage before; None in the first one."""


class StagedModel(ParallelModel):
    """A model in stages on one of its ranks; :func:`geartrain.parallelize` makes it on a mesh with stages.

    ``parameters()`` and ``state_dict()`` are those of this rank's stage, under the names of the whole model: the norm
    of their gradients is not that of the whole model. Otherwise, values and gradients included, it behaves like a model
    without stages.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        found: ScopedModel,
        loss: LossFunction,
        replicas: Replicas,
        agreement: StepAgreement,
        neighbours: Neighbours,
        micro_batches: int,
    ) -> None:
        super().__init__(module, mesh, found.scopes, loss, replicas, agreement)
        self.micro_batches = micro_batches
        self._at = neighbours
        self._links = [link for link in (neighbours.next, neighbours.previous) if link is not None]
        self._has_exchanged_result = False

    @property
    def saving_ranks(self) -> NoReturn:
        """Raise InvalidArgument: no rank has all parts of the model."""
        raise InvalidArgument(
            "geartrain.save and load do not take a model in stages, for each rank has only the parts of its own: "
            "save model.state_dict() of every rank with torch.distributed.checkpoint"
        )

    @runs_eagerly
    def forward(self, inputs: Any = None, labels: Tensor | None = None, **options: Any) -> Any:
        """Return the loss (0-dim) over the samples of all ranks, the same number on every rank; every rank calls it.

        Ranks of the first stage pass their samples and labels [S]; ranks of other stages call ``model(None, None)``.
        All then call ``backward()`` on the loss, with the same factor. Without labels, in ``eval()`` or
        ``torch.no_grad()``, a rank of the first stage gets the last stage's output [S, …] for its samples, all others
        None.

        With ``micro_batches``, neighbouring stages work on successive micro-batches at the same time. The last stage
        processes all of them at once, so that loss and gradients are those of the whole batch.

        Cost of a training step: for each micro-batch, an exchange of ten integers between the hosts of neighbouring
        stages; one of five integers between all ranks; samples, labels and gradients are sent once between neighbouring
        stages. Within a stage, ranks communicate as in a model without stages.

        Raises InvalidArgument, InvalidRows, InvalidIds, SpecMismatch where ranks differ, SyncError where another rank
        failed, RankLost where one is gone.
        """
        for link in self._links:
            link.open()
        self._has_exchanged_result = False
        try:
            self._share_buffers()
            if self._at.previous is not None and (inputs is not None or labels is not None or options):
                raise InvalidArgument(
                    f"rank {self.mesh.rank} is of stage {self.mesh.own_stage} and takes no samples of its own; call "
                    "model(None, None) there. Those with samples are the ranks of the first stage, mesh.stages[0]"
                )
            if self._at.previous is not None and self._at.next is None:
                return self._last_stage(self._at.previous)
            return self.replicas.run(lambda: self._send_on(inputs, labels, options))
        except Exception:  # of any kind: the other ranks wait for this one
            self._report_failure()
            raise

    def _send_on(self, inputs: Any, labels: Tensor | None, options: Mapping[str, Any]) -> Tensor | None:
        """Send this stage's output to the next one; return the loss, or the output of the last stage."""
        before, behind = self._at.previous, self._at.next
        assert behind is not None
        tokens = []
        for samples in self._own_batches(inputs, labels, options) if before is None else self._received_batches(before):
            rows_SD, labels_S = self._run_stage(samples), samples.labels
            batch = behind.agree(rows_SD, asks_for_loss=labels_S is not None, is_last=samples.is_last)
            behind.send(batch.spans, rows_SD.detach(), *([] if labels_S is None else [labels_S.to(rows_SD.device)]))
            tokens.append(departed(rows_SD, behind, batch))
        dtype, shape = kind_from(self._exchange_result_kind(0, []))
        if labels_S is None:
            output_SC = rows_SD.new_empty(len(rows_SD), *shape, dtype=dtype)
            behind.receive(batch.spans, output_SC)
            if before is None:
                return output_SC
            assert samples.batch is not None
            before.send(samples.batch.spans, output_SC)
            return None
        loss = torch.empty((), dtype=dtype, device=rows_SD.device)
        self.mesh.whole.link.start_transfers([], [(loss, self._loss_source_of(self.mesh.rank))]).result()
        return loss + torch.stack(tokens).sum().to(dtype) if torch.is_grad_enabled() else loss

    def _last_stage(self, before: StageLink) -> Tensor | None:
        """Compute the loss over the samples of all ranks, or the output, and send it back."""
        parts = list(self._received_batches(before))
        rows_TD = torch.cat([part.inputs for part in parts])
        labels = [part.labels for part in parts if part.labels is not None]
        if not labels:
            with torch.no_grad():
                output_TC = rows_to_send(super().forward(rows_TD), "the output of the last stage")
            self._exchange_result_kind(0, kind_of(output_TC))
            assert parts[0].batch is not None
            before.send(parts[0].batch.spans, output_TC)
            return None
        loss: Tensor = super().forward(rows_TD, torch.cat(labels))
        self._exchange_result_kind(0, kind_of(loss.detach()[None, None]))
        receivers = [rank for stage in self.mesh.stages[:-1] for rank in stage]
        sent = [(loss.detach(), rank) for rank in receivers if self._loss_source_of(rank) == self.mesh.rank]
        self.mesh.whole.link.start_transfers(sent, []).result()
        return loss

    def _loss_source_of(self, rank: int) -> int:
        """Return the rank, in the last stage, from which ``rank`` receives the loss."""
        return self.mesh.stages[-1][rank % len(self.mesh.stages[-1])]

    def _own_batches(self, inputs: Any, labels: Tensor | None, options: Mapping[str, Any]) -> Iterator[StageInput]:
        """Yield the micro-batches of a rank of the first stage."""
        if labels is None and self.training and torch.is_grad_enabled():
            raise InvalidArgument(
                "no labels were given, and the output of another stage has no gradients here; give labels, or call "
                "model.eval() first"
            )
        if labels is None or self.micro_batches == 1:
            yield StageInput(inputs, options, labels, is_last=True, batch=None)
            return
        count, size = self.micro_batches, num_samples(inputs)
        for part in range(count):
            batch = [inputs, dict(options), labels]
            mine, settings, own_labels = micro_batch(batch, part, count, size, with_settings=True)
            yield StageInput(mine, settings, own_labels, is_last=part == count - 1, batch=None)

    def _received_batches(self, before: StageLink) -> Iterator[StageInput]:
        """Yield the micro-batches from the stage before."""
        is_last = False
        while not is_last:
            batch = before.agree(None)
            is_last = batch.is_last
            rows_TD = torch.empty(batch.num_taken, *batch.shape, dtype=batch.dtype, device=self.mesh.device)
            labels_T = torch.empty(batch.num_taken, dtype=torch.int64, device=rows_TD.device)
            before.receive(batch.spans, rows_TD, *([labels_T] if batch.asks_for_loss else []))
            if batch.wants_gradient:
                rows_TD = arrived(rows_TD, before, batch)
            yield StageInput(rows_TD, {}, labels_T if batch.asks_for_loss else None, is_last, batch)

    def _run_stage(self, samples: StageInput) -> Tensor:
        """Return the rows [S, …] for the next stage. If the stage has split layers, its ranks agree at the end."""
        if not self._agreement.has_layers:
            return self._checked_rows(samples)
        self._agreement.start_forward(has_labels=samples.labels is not None, trains=self.training)
        try:
            rows_SD = self._checked_rows(samples)
            self._agreement.agree(END)
        except Exception as exc:  # of any kind: the other ranks of the stage wait for this one
            self._agreement.announce_failure(exc)
            raise
        finally:
            self._agreement.finish_forward()
        return rows_SD

    def _checked_rows(self, samples: StageInput) -> Tensor:
        output = self.output(samples.inputs, samples.options)
        if samples.batch is not None:
            rows_TD = rows_to_send(output, f"the output of stage {self.mesh.own_stage}")
            if len(rows_TD) != samples.batch.num_taken:
                raise InvalidArgument(
                    f"stage {self.mesh.own_stage} made {len(rows_TD)} rows of {samples.batch.num_taken} samples; a "
                    "stage gives one row for each, so put layers that change their number into the first stage"
                )
            return rows_TD
        names = tuple(self._at.later)
        if not isinstance(output, DistantOutput):
            raise InvalidArgument(
                f"the model returned {quoted(output)}; with stages it returns what its last layer {names[-1]!r} gave, "
                "and loss= does the rest"
            )
        if output.passed != names:
            raise InvalidArgument(
                f"the model calls the layers of its later stages as {list(output.passed)}, and their scopes are "
                f"{list(names)}; name each once, in the order of the calls"
            )
        if samples.labels is not None:
            ignored = getattr(self.loss, "ignore_index", -100)
            check_labels(samples.labels, len(output.rows_SD), self._at.num_classes(self.loss), ignored)
        return output.rows_SD

    def _exchange_result_kind(self, failed: int, kind: list[int]) -> list[int]:
        """Wait until the last stage has the result; return its dtype and shape as integers. One exchange.

        ``failed`` is 0, or the number of a failed rank plus 1. Raises SyncError if any rank reports a failure.
        """
        self._has_exchanged_result = True
        reports = self.mesh.whole.link.exchange([failed, *(kind or [0] * KIND)])
        culprits = [failed - 1 for failed, *_ in reports if failed]
        if culprits:
            raise SyncError(f"the step did not end: rank {culprits[0]} failed; its error tells why")
        return reports[self.mesh.stages[-1][0]][1:]

    def _report_failure(self) -> None:
        """Report the failure to the ranks that wait for this one: to the next stage first, to avoid a deadlock."""
        heard = [link.culprit for link in self._links if link.culprit is not None]
        culprit = heard[0] if heard else self.mesh.rank
        for link in self._links:
            link.report(culprit)
        if not self._has_exchanged_result:
            with contextlib.suppress(SyncError):  # the caller raises the reported error
                self._exchange_result_kind(culprit + 1, [])
