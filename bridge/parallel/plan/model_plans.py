"""The plan of a model that was parallelized: of its shapes before that, and of the first batch it saw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from geartrain.ams.values.errors import GeartrainError, InvalidArgument
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.plan.build import OptimizerMaker, PlanRequest
from geartrain.bridge.parallel.plan.costs.skeleton import skeleton_of, without_values
from geartrain.bridge.parallel.plan.hardware.hardware import Hardware
from geartrain.bridge.parallel.plan.plan import Plan
from geartrain.bridge.parallel.scopes import Scope


class ModelPlans:
    """Makes plans of one model; ``saw`` notes what it is called with."""

    def __init__(self, model: nn.Module) -> None:
        """``model`` before anything of it is replaced or sharded; a copy without values is kept."""
        self._failure: Exception | None = None
        self._skeleton = model
        self._inputs: Any = None
        try:
            self._skeleton = skeleton_of(model)
        except Exception as exc:  # whatever a user's module raises when copied: it trains, and has no plan
            self._failure, self._skeleton = exc, nn.Module()

    def saw(self, inputs: Any, labels: Any) -> None:
        """The model is called with them: a rank's batch. The first one counts, unless it is empty."""
        if self._inputs is None and self._failure is None:
            try:
                self._inputs = without_values((inputs, labels), None)
            except InvalidArgument:
                return

    def plan(
        self,
        scopes: Mapping[str, Scope],
        loss: LossFunction | None,
        ranks: int,
        *,
        device: torch.device,
        hardware: Hardware | None,
        optimizer: OptimizerMaker | None,
        micro_batches: int,
    ) -> Plan:
        """Of the batch that was seen. Raises InvalidArgument before one was, and for a model that has none."""
        if self._failure is not None:
            reason = str(self._failure) or type(self._failure).__name__
            kind = type(self._failure) if isinstance(self._failure, GeartrainError) else InvalidArgument
            raise kind(f"the model has no plan, for it cannot be copied without its values: {reason}")
        if self._inputs is None:
            raise InvalidArgument(
                "the model has no plan before its first batch in training; call it once, or ask gt.auto_plan with an "
                "example"
            )
        (inputs, labels), samples = self._inputs
        return PlanRequest(
            model=self._skeleton,
            scopes=scopes,
            ranks=ranks,
            hardware=hardware or Hardware.measure(alone=True, device=device),
            inputs=inputs,
            labels=labels,
            batch=samples,
            loss=loss,
            optimizer=optimizer or torch.optim.AdamW,
            micro_batches=micro_batches,
        ).plan()
