"""A model in two stages: the first ranks send features, the last ones hold the split layer and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.parallel.global_mean import LossFunction
from geartrain.bridge.parallel.mesh import Mesh
from geartrain.bridge.parallel.parallel_model import ParallelModel
from geartrain.bridge.parallel.replicated import Replicas
from geartrain.bridge.parallel.scopes import ScopedModel
from geartrain.bridge.parallel.split.agreement import StepAgreement
from geartrain.bridge.parallel.split.linear import SplitLinear
from geartrain.bridge.parallel.split.logits import check_labels
from geartrain.bridge.parallel.staged.owner import answer
from geartrain.bridge.parallel.staged.sender import DistantLinear, DistantLogits, ask_for_logits, ask_for_loss
from geartrain.bridge.parallel.staged.stage_link import StageLink
from geartrain.bridge.rows.eager import runs_eagerly


class StagedModel(ParallelModel):
    """What :func:`geartrain.parallelize` returns on a mesh with stages.

    Senders hold the replicated parts, owners the split layer: ``parameters()`` and ``state_dict()`` are those of this
    rank's stage. All else is as of a model without stages, and so are values and gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        layer: DistantLinear | SplitLinear,
        mesh: Mesh,
        found: ScopedModel,
        loss: LossFunction,
        replicas: Replicas,
        agreement: StepAgreement,
    ) -> None:
        super().__init__(module, mesh, found.scopes, loss, replicas, agreement)
        self._layer = [layer]  # in a list, for it is part of the module, whose names are those of the state
        self._stages = StageLink(mesh)

    @property
    def saving_ranks(self) -> NoReturn:
        """Raise InvalidArgument: no rank knows all parts."""
        raise InvalidArgument(
            "geartrain.save and load do not take a model in two stages, for each rank has only the parts of its own: "
            "save model.state_dict() of every rank with torch.distributed.checkpoint"
        )

    @runs_eagerly
    def forward(self, inputs: Any = None, labels: Tensor | None = None, **options: Any) -> Any:
        """Loss (0-dim) over the samples of all senders, the same number on every rank; every rank calls it.

        A sender gives its samples and labels, an owner neither: ``model(None, None)``. Every rank goes backward from
        the loss, with the same factor. Where senders give no labels, in ``eval()`` or ``torch.no_grad()``, each gets
        all logits [S, C] of its samples, and owners get None.

        Per training step: two exchanges of five and two integers between all hosts; features, labels and the features'
        gradients travel once between their sender and an owner; the owners do among themselves what the ranks of a
        model without stages do.

        Raises InvalidArgument, InvalidRows, InvalidIds, SpecMismatch where ranks differ, SyncError where another rank
        failed, RankLost where one is gone.
        """
        if self._stages.is_sender:
            return self.replicas.run(lambda: self._ask(inputs, labels, options))
        failure = None
        if inputs is not None or labels is not None or options:
            failure = InvalidArgument(
                f"rank {self.mesh.rank} holds a part of the split layer and takes no samples of its own; call "
                "model(None, None) there. Those with samples are the ranks of the first stage, mesh.stages[0]"
            )
        layer = self._layer[0]
        assert isinstance(layer, SplitLinear)
        return answer(self._stages, layer, self._loss_of_taken, self.mesh.stage.device, failure)

    def _ask(self, inputs: Any, labels: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        try:
            features_SD = self._features(inputs, labels, options)
        except Exception as exc:  # of any kind: the other ranks wait for this one
            self._stages.tell(exc)
            raise
        if labels is None:
            return ask_for_logits(self._stages, features_SD, self._layer[0].out_features)
        return ask_for_loss(self._stages, features_SD, labels)

    def _features(self, inputs: Any, labels: Tensor | None, options: Mapping[str, Any]) -> Tensor:
        name = self._layer[0].layer_name
        if labels is None and self.training and torch.is_grad_enabled():
            raise InvalidArgument(
                "no labels were given, and the logits of another stage have no gradients here; give labels, or call "
                "model.eval() first"
            )
        output = self.output(inputs, options)
        if not isinstance(output, DistantLogits):
            raise InvalidArgument(
                f"the model returned {quoted(output)}; with stages it returns what its split layer {name!r} gave, and "
                "loss= does the rest"
            )
        if labels is not None:
            ignored = getattr(self.loss, "ignore_index", -100)
            check_labels(labels, len(output.features_SD), self._layer[0].out_features, ignored)
        return output.features_SD

    def _loss_of_taken(self, features_TD: Tensor, labels_T: Tensor) -> Tensor:
        """That of what this owner was given, and the others."""
        layer = self._layer[0]
        self._agreement.begin()
        try:
            return self.loss_of_split(layer(features_TD), labels_T)
        except Exception as exc:  # of any kind: the other owners wait for this one
            self._agreement.tell(exc)
            raise
        finally:
            self._agreement.end()
