"""Calls to the hosted models in a table's shards.

Cost: one request per shard and call, all shards at once; the inputs travel to every shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from geartrain.ams.client.retries import Outcome
from geartrain.ams.client.rows.row_calls import WriteOutcome
from geartrain.ams.client.rows.table_plan import TablePlan
from geartrain.ams.client.shard_calls import ShardCalls, all_of
from geartrain.ams.client.writes import ClientStream, MessageWrite, Write
from geartrain.ams.values.errors import InternalError
from geartrain.ams.values.optimizers.spec import NO_SCALARS
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import (
    Arrays,
    CallContext,
    Computed,
    ComputeHosted,
    HostedInputs,
    Request,
    SyncGroup,
    UpdateHosted,
)

InputsOfShard = Callable[[int], tuple[HostedInputs, ...]]
"""Function that returns the inputs for a shard, by its number."""


class HostedCalls:
    """Calls to one hosted model beside the rows of one table. Thread-safe.

    A call may take ``hosted_timeout_seconds`` of the client's settings, as it computes. Other requests to the shards
    wait meanwhile.
    """

    def __init__(self, plan: Callable[[], TablePlan], model: str, calls: ShardCalls, stream: ClientStream) -> None:
        """``plan`` returns the table's present plan."""
        self._plan = plan
        self._model = model
        self._calls = calls
        self._stream = stream

    @property
    def part_bytes(self) -> int:
        """Byte limit of the inputs of one call, and of its answer. Larger updates are split."""
        return self._calls.config.part_bytes

    @property
    def view(self) -> ClusterView:
        """Shards of the cluster and the owners of its buckets."""
        return self._calls.view

    def compute(self, operation: str, inputs: InputsOfShard, *, required_sync: SyncGroup | None = None) -> list[Arrays]:
        """Return the model's results on each shard, in the order of the shards.

        Raises errors of the model, StepMismatch as ``Table.pull_into``, ShardUnavailable, ShardRestarted.
        """
        plan = self._plan()
        calls: list[tuple[int, Request]] = [
            (
                shard,
                ComputeHosted(
                    table=plan.spec.name,
                    model=self._model,
                    operation=operation,
                    inputs=inputs(shard),
                    required_sync=required_sync,
                ),
            )
            for shard in range(self.view.num_shards)
        ]
        answers = []
        for outcome in all_of(self._outcomes(calls, CallContext(table_incarnation=plan.incarnation))):
            if not isinstance(outcome, Computed):
                raise InternalError(f"a shard answered {type(outcome).__name__} to a hosted model's computation")
            answers.append(outcome.arrays)
        return answers

    def prepare_update(
        self,
        inputs: InputsOfShard,
        *,
        lr: float | None = None,
        scale: float = 1.0,
        optimizer_scalars: Mapping[str, float] = NO_SCALARS,
        group: SyncGroup | None = None,
    ) -> Write:
        """Number an update without sending it: it can be sent again after an error, and each shard applies it once.

        Raises InvalidArgument for invalid numbers of the optimizer. Sending it raises errors of the model, NonFinite
        (that shard changed nothing, others may have applied their part), StaleClient, SyncError, ShardUnavailable,
        ShardRestarted.
        """
        plan = self._plan()
        plan.spec.optimizer.for_push(optimizer_scalars)
        requests = [
            UpdateHosted(
                table=plan.spec.name,
                model=self._model,
                inputs=inputs(shard),
                lr=lr,
                scale=scale,
                optimizer_scalars=dict(optimizer_scalars),
                group=group,
            )
            for shard in range(self.view.num_shards)
        ]

        def deliver(shards: Sequence[int], context: CallContext) -> list[WriteOutcome]:
            return cast("list[WriteOutcome]", self._outcomes([(shard, requests[shard]) for shard in shards], context))

        numbers = self._stream.numbers(plan.spec.name, None)
        return MessageWrite(numbers, range(self.view.num_shards), deliver, plan, group, is_held=True)

    def _outcomes(self, calls: Sequence[tuple[int, Request]], context: CallContext) -> list[Outcome]:
        return self._calls.deliver(calls, context, self._calls.config.hosted_timeout_seconds)
