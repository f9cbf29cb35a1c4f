"""Dense table: the weights of an ``nn.Module``, held and trained by the shards.

Legend: P values of all trained parameters, B values beside them, D width of a row, R = ceil(P / D) rows, S shards.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.writes import RowWrite, Write
from geartrain.ams.values.arguments import boolean, real_number
from geartrain.ams.values.errors import InvalidArgument, NonFinite, SpecMismatch, SyncError, TableNotFound
from geartrain.ams.values.optimizers.registry import Adam, RowOptimizerSpec
from geartrain.ams.values.shard_messages import Done
from geartrain.ams.values.specs import DTypeName, checked_wire_dtype
from geartrain.ams.values.text import quoted
from geartrain.bridge.dense.factory import Store, open_stores, width_of
from geartrain.bridge.dense.host_values import HostValues
from geartrain.bridge.dense.layout import Layout
from geartrain.bridge.dense.module_buffers import ModuleBuffers
from geartrain.bridge.dense.tensors import ModuleTensors
from geartrain.bridge.placements.placement import ClusterPlacement, Placement
from geartrain.bridge.rows.ranks import SyncRanks

Mode = Literal["async", "sync"]
_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DenseTable]] = weakref.WeakKeyDictionary()
_DEFAULT_OPTIMIZER = Adam()
_PUSHES, _SKIPS, _FAILED = range(3)


class DenseTable(torch.optim.Optimizer):
    """The weights of a module, held and trained by the shards of a cluster; :func:`attach` makes it.

    The one param_group holds the trained parameters and ``lr``, so that LR schedulers, ``clip_grad_norm_``,
    ``torch.amp.GradScaler`` and ``zero_grad`` work as ever (with ranks a clipper sees the gradients of its own rank,
    not their mean); momentum, betas and weight decay belong to the table. Not thread-safe.
    """

    _step_supports_amp_scaling = True
    """Lets GradScaler pass its scale and found infinities to :meth:`step`, as ranks skip a step together."""

    def __init__(
        self, cluster: Cluster, tensors: ModuleTensors, weights: Store, buffers: Store | None, ranks: SyncRanks | None
    ) -> None:
        """Pull the values of the shards. Use :func:`attach`."""
        self.row_placement = _DenseRows(self, cluster, [weights] if buffers is None else [weights, buffers], ranks)
        """The tables, for :func:`geartrain.save` and :func:`geartrain.load`."""
        self._versions: tuple[int, ...] = (0,)
        """Writes applied to the parameters by shard, read before they were pulled."""
        self._incarnation = 0
        """Incarnation of the table at that time."""
        self._tensors = tensors
        self._weights = weights
        self._buffers = None if buffers is None else ModuleBuffers(buffers, tensors)
        self._ranks = ranks
        self._gradients = HostValues(weights.layout)
        self._values = HostValues(weights.layout)
        self._update: _Push | None = None
        self._has_pushed = False
        """Whether this process has trained the table."""
        self._pull_is_due = False
        """Whether a step was pushed but its new weights could not be pulled."""
        group = {"params": list(tensors.trained.values()), "lr": weights.table.optimizer.lr, "table": self.name}
        super().__init__([group], {})
        self._pull()

    @property
    def name(self) -> str:
        """Name of the table of the parameters; that of the buffers is ``NAME.buffers``."""
        return self._weights.table.spec.name

    @property
    def incarnation(self) -> int:
        """Incarnation of the table of the held weights; a restore changes it."""
        return self._incarnation

    @property
    def version(self) -> int:
        """Dense version of the held weights: the writes applied to the table, the first values included (the lowest
        over its shards, read before the weights were pulled)."""
        return min(self._versions)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise InvalidArgument for parameters other than the attached ones."""
        if self.param_groups:
            raise InvalidArgument(
                f"dense table {self.name!r} trains the parameters of the module it was attached to, with one lr; give "
                "others to an optimizer of their own"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None, *, samples: int = 1, pull_after: bool = True) -> Any:
        """Push the gradients of all parameters, exactly once, then pull the new weights (unless not ``pull_after``).

        A parameter without a gradient has gradient zero, to which momentum and weight decay apply as usual; if no
        parameter has one, nothing is pushed. With ranks every rank calls it, and the update is by the average of their
        gradients, as in DDP, FSDP2 and the rows of embeddings: beside those, leave ``samples`` out, and compute the
        loss by :func:`geartrain.mean_over_ranks`. For a module alone, ``samples`` may give the number of samples in
        each rank's mean loss (0: none), by which the average is weighted. A step that GradScaler skips on one rank is
        skipped on all, and pushes nothing.

        A step sends 4·P bytes up and 4·P down over S shards, in one request per shard; values beside the parameters add
        4·B each way in requests of their own; with ranks the weights are pulled separately, and a small request asks
        for the version.

        Raises NonFinite (nothing was pushed), TableNotFound (nothing was pushed: the table was restored since the
        weights were pulled; call :meth:`refresh`), SyncError, ShardUnavailable. After an error the module may have the
        new weights of some shards. Then call step() again, which resumes (no shard applies a push twice), or
        zero_grad(), which drops what is pending. With ranks a push that some shard has is not dropped, as the shards
        count the ranks' steps: the next step() completes it, and then makes its own.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lr = float(self.param_groups[0]["lr"])
        grad_scale = getattr(self, "grad_scale", None)
        scale = 1.0 if grad_scale is None else float(1.0 / torch.as_tensor(grad_scale))
        found_inf = getattr(self, "found_inf", None)
        skips = found_inf is not None and bool(found_inf)
        if not self._pull_is_due:
            completes = self._update is not None
            pulls = pull_after and self._ranks is None
            pushed = self._push(None, lr, scale, samples, skips=skips, pulls=pulls) is not None
            self._pull_is_due = pull_after and (not pulls if pushed else completes)
        if self._pull_is_due:
            self._pull()
            self._pull_is_due = False
        return loss

    def push(
        self, sequence: int | None = None, *, lr: float | None = None, scale: float = 1.0, samples: int = 1
    ) -> Done:
        """Push as :meth:`step`, without a pull: ``scale`` · gradients with ``lr`` (None: that of the param_group).

        ``sequence`` numbers it, as the only push of that number to this table. Sent again under the same number and
        stream name (``gt.connect(stream=)``), by this process or its successor, it changes nothing and answers
        ``duplicate``; see ``Cluster.acknowledge``. Errors are those of :meth:`step`; the same call resumes a pending
        push.
        """
        lr = float(self.param_groups[0]["lr"]) if lr is None else lr
        return self._push(sequence, lr, scale, samples, skips=False, pulls=False) or Done()

    def refresh(self) -> bool:
        """Pull weights and buffers if the dense version has changed on any shard; return whether it has.

        The module's changes of buffers since their last push stay on top of the server's values. If the table was
        restored, gradients and such changes are dropped, as they are older. Costs one small request per shard, and if
        the version has changed 4·(P + B) bytes down.
        """
        table = self._weights.table
        if (table.incarnation, table.versions()) == (self._incarnation, self._versions):
            return False
        if table.incarnation != self._incarnation:  # pending gradients are of weights before a restore
            self.zero_grad()
            if self._buffers is not None:
                self._buffers.drop_changes()
        self._pull()
        return True

    def require_same(self, state: Mapping[str, Any], prefix: str) -> None:
        """Raise SpecMismatch if a state_dict to be loaded has other parameters than this module, after steps of this
        process: the next pull would replace them by the table's."""
        if not self._has_pushed or self._weights.table.incarnation != self._incarnation:  # restored: pull decides
            return
        for name, mine in self._tensors.trained.items():
            given = state.get(prefix + name)
            if not isinstance(given, Tensor) or given.shape != mine.shape:
                continue  # torch reports it
            if not torch.equal(given.detach().to(mine), mine.detach()):
                raise SpecMismatch(
                    f"the state has another {name!r} than dense table {self.name!r}, whose values the next step would "
                    "put in its place. Save an attached model with geartrain.save(model, path) and go back by "
                    "geartrain.load(model, path, replace=True), or load the state before attach() makes a new table"
                )

    def clippable(self) -> list[Tensor]:
        """Return the trained parameters, for :func:`geartrain.clip_grad_norm_`.

        Raises InvalidArgument with ranks: the shards apply the mean of their gradients, which no rank has.
        """
        if self._ranks is not None:
            raise InvalidArgument(
                f"the gradients of dense table {self.name!r} are averaged over {self._ranks.world_size} ranks in the "
                "shards, so no rank knows their norm; keep it out of clip_grad_norm_, or train the module under DDP"
            )
        return list(self._tensors.trained.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and a push that is pending after an error; shards that have applied it keep it.

        With ranks the next :meth:`step` completes a push that some shard has.
        """
        super().zero_grad(set_to_none=set_to_none)
        self._pull_is_due = False
        if self._update is None:
            return
        if self._ranks is not None and self._update.is_on_a_shard and not self._update.is_refused:
            self._update.is_dropped = True
            return
        self._update.abandon()
        self._update = None
        if self._buffers is not None:
            self._buffers.pushed()  # dropped, too: some shards have it, and must not get it twice

    def _push(
        self, sequence: int | None, lr: float, scale: float, samples: int, *, skips: bool, pulls: bool
    ) -> Done | None:
        """Push, or resume the pending push; None if there was nothing to push. ``pulls``: with the
        weights after it.
        """
        if self._update is not None and self._update.is_dropped:
            self._send(self._update, pulls=False)
        update = self._update
        if update is not None and update.sequence != sequence:
            raise InvalidArgument(
                f"a push of dense table {self.name!r} (sequence {update.sequence}) is pending, this one has sequence "
                f"{sequence}; repeat that one first, or drop it with zero_grad()"
            )
        if update is None:
            update = self._update = self._agreed(sequence, lr, scale, samples, skips=skips)
        return None if update is None else self._send(update, pulls=pulls)

    def _send(self, update: _Push, *, pulls: bool) -> Done:
        try:
            if update.buffers is not None and self._buffers is not None:
                update.buffers.send()
                self._buffers.pushed()
            # The parameters last: once their version has changed, the whole step is there.
            done, came = self._send_and_pull(update.weights) if pulls else (update.weights.send(), None)
        except BaseException as exc:
            update.is_refused |= isinstance(exc, InvalidArgument)
            culprit = self._tensors.first_non_finite() if isinstance(exc, NonFinite) and not update.is_begun else None
            if culprit is not None and not update.is_on_a_shard:
                update.abandon()
                self._update = None
                raise self._non_finite(culprit) from exc
            update.copy_gradients()
            raise
        self._update, self._has_pushed = None, True
        if self._ranks is not None:
            self._ranks.sequence += 1
        if came is not None:
            self._pull_is_due = True
            if self._buffers is not None:
                rows_RD, pulled = self._buffers.pull()
                pulled.result()
                self._buffers.load(rows_RD)
            self._incarnation, self._versions = came
            self._pull_is_due = False
        return done

    def _send_and_pull(self, write: RowWrite) -> tuple[Done, tuple[int, tuple[int, ...]]]:
        """Send the parameters' push and pull the weights after it; return also their incarnation and versions."""
        table = self._weights.table
        incarnation = table.incarnation
        with self._values.coming(list(self._tensors.trained.values())) as rows_RD:
            done, versions = write.send_and_pull(rows_RD)
            if versions is None:
                versions = table.versions()
                table.pull_into(self._weights.ids, rows_RD)
        return done, (incarnation, versions)

    def _agreed(self, sequence: int | None, lr: float, scale: float, samples: int, *, skips: bool) -> _Push | None:
        """Return the prepared push; None if a rank skips the step. Raises if any rank cannot prepare its part."""
        if self._ranks is None:
            has_gradient = any(item.grad is not None for item in self._tensors.trained.values())
            return self._prepared(sequence, lr, scale, samples) if has_gradient and not skips else None
        update, failure = None, None
        try:
            update = None if skips else self._prepared(sequence, lr, scale, samples)
        except Exception as exc:  # of any kind: the other ranks wait for this one
            failure = exc
        mine = _FAILED if failure is not None else _SKIPS if skips else _PUSHES
        answers: list[int] = []
        try:
            answers = self._ranks.gather_labels(np.array([mine], np.int64)).tolist()
        finally:
            if set(answers) != {_PUSHES} and update is not None:
                update.abandon()
        if set(answers) == {_PUSHES}:
            return update
        if failure is not None:
            raise failure
        if _FAILED in answers:
            raise SyncError(
                f"nothing was pushed to {self.name!r}: rank {answers.index(_FAILED)} failed; its error tells why"
            )
        return None

    def _prepared(self, sequence: int | None, lr: float, scale: float, samples: int) -> _Push:
        """Check and number the push; send nothing yet."""
        if self._weights.table.incarnation != self._incarnation:
            raise TableNotFound(
                f"dense table {self.name!r} was restored since its weights were pulled, and the gradients are those "
                "of the weights before; nothing was pushed. Call refresh(), which takes the restored weights and drops "
                "the gradients, and go on with a new forward pass"
            )
        if not (math.isfinite(lr) and lr >= 0):
            raise InvalidArgument(f"lr of dense table {self.name!r} is {lr!r}; it must be finite and >= 0")
        if not isinstance(samples, int) or samples < 0:
            raise InvalidArgument(f"samples is {samples!r}; it must be the number of samples of the batch, 0 or more")
        self._tensors.check()
        self._tensors.require_all_trained(self.name)
        weights = self._weights
        group = None if self._ranks is None else self._ranks.sync_group(samples)
        gradients = self._gradients.now([item.grad for item in self._tensors.trained.values()])
        try:
            write = weights.table.prepare_push(
                weights.ids,
                gradients,
                lr=lr,
                scale=scale,
                group=group,
                sequence=sequence,
                checked_on_send=self._buffers is None,  # otherwise the buffers are sent before
            )
        except NonFinite as exc:
            culprit = self._tensors.first_non_finite()
            if culprit is None:
                raise
            raise self._non_finite(culprit) from exc
        try:
            buffers = None if self._buffers is None else self._buffers.prepare(group, sequence)
        except BaseException:
            write.abandon()
            raise
        return _Push(sequence, buffers, write)

    def _non_finite(self, culprit: str) -> NonFinite:
        return NonFinite(
            f"the gradient of {culprit!r} (dense table {self.name!r}) holds NaN or infinity; nothing was pushed. "
            "Call zero_grad() to skip this step, lower the learning rate, or use torch.amp.GradScaler"
        )

    def _pull(self) -> None:
        weights, buffers = self._weights, self._buffers
        incarnation, versions = weights.table.incarnation, weights.table.versions()
        ahead = None if buffers is None else buffers.pull()
        trained = list(self._tensors.trained.values())
        try:
            with self._values.coming(trained) as rows_RD:
                weights.table.pull_into(weights.ids, rows_RD)
        finally:
            if ahead is not None:
                ahead[1].result()
        if buffers is not None and ahead is not None:
            buffers.load(ahead[0])
        self._incarnation, self._versions = incarnation, versions


def attach(
    module: nn.Module,
    cluster: Cluster,
    *,
    name: str,
    optimizer: RowOptimizerSpec = _DEFAULT_OPTIMIZER,
    mode: Mode = "async",
    reuse: bool = False,
    dim: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    wait_seconds: float = 60.0,
    wire_dtype: DTypeName | None = None,
) -> DenseTable:
    """Move the weights of ``module`` to ``cluster`` and train them there; return their optimizer.

    The parameters, in the order of ``named_parameters()``, are one float32 vector cut into rows of ``dim``: a table
    ``name`` of dense ids, spread evenly over the shards, with pushes, snapshots and guarantees like any other. So
    modules in 16 bits have float32 master weights there; float64 values are rounded to float32. Tied parameters are in
    it once. Buffers (those in the ``state_dict``) and parameters that require no gradient now are in a second table,
    ``NAME.buffers``, if there are any. Frozen parameters are pulled but never pushed, and so do not change. Buffers
    change as the module changes them (integers travel as float32 and are rounded): with several workers by the sum of
    their changes, with ranks by the weighted mean.

    Memory on this host: none if parameters are on it in float32 and in order, else 4·P bytes for their values, and as
    much for their gradients; for traffic see :meth:`DenseTable.step`.

    Args:
        module: The module. Load its weights before: the next pull overwrites later changes.
        cluster: Holds the weights.
        name: Name of the table. The first worker creates it from its own values.
        optimizer: Optimizer that runs in the shards.
        mode: With ``"async"`` every push applies when it arrives, no worker waits for another. With ``"sync"`` the
            ranks step together: with a loss by :func:`geartrain.mean_over_ranks` that equals one worker with the joint
            batch up to rounding, but for batch statistics.
        reuse: Wait for the tables of another worker (also after ``Cluster.restore``), and use their values.
        dim: Width of a row of the table; None: that of the table that ``reuse`` finds, or 4,096.
        process_group: The ranks that step together; None: those of torch.distributed, if it is initialised, else this
            process alone.
        wait_seconds: How long ``reuse`` waits.
        wire_dtype: ``"bfloat16"`` or ``"float16"``: parameters and gradients travel in 16 bits, half the bytes. The
            shards keep float32, the module has what arrives. Buffers travel as they are.

    Raises:
        TableExists: The name is taken and ``reuse`` is False.
        SpecMismatch: The table is of a module of other names, shapes or requires_grad, or has another optimizer.
        InvalidArgument: A value outside its range.
        NonFinite: A weight is NaN or infinite.
        ClusterNotReady: No worker created the tables in time.
    """
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"module is {quoted(module)}; it must be a torch.nn.Module")
    if not hasattr(cluster, "create_table"):
        raise InvalidArgument(f"cluster is {quoted(cluster)}; give that of gt.local() or gt.connect(...)")
    if mode not in ("async", "sync"):
        raise InvalidArgument(f"mode is {mode!r}; it must be 'async' or 'sync'")
    reuse, wait_seconds = boolean("reuse", reuse), real_number("wait_seconds", wait_seconds)
    if process_group is not None and mode != "sync":
        raise InvalidArgument(f"mode is {mode!r} and a process_group was given; ranks step together in mode='sync'")
    checked_wire_dtype(wire_dtype, name, "float32")  # before there is a table
    tensors = ModuleTensors(module)
    width = width_of(cluster, name, dim, reuse=reuse)
    trained = Layout({key: item.shape for key, item in tensors.trained.items()}, width)
    others = Layout({key: other.shape for key, other in tensors.others().items()}, width)
    joined = process_group is not None or (mode == "sync" and dist.is_initialized())
    ranks = SyncRanks(name, process_group) if joined else None

    def values() -> tuple[Tensor, Tensor]:
        rows_RD, other_rows_RD = trained.empty(), others.empty()
        trained.pack(list(tensors.trained.values()), rows_RD)
        others.pack(list(tensors.others().values()), other_rows_RD)
        return rows_RD, other_rows_RD

    def opened(reuse: bool) -> tuple[Store, Store | None]:
        return open_stores(
            cluster, name, trained, others, optimizer, reuse=reuse, values=values, wait_seconds=wait_seconds
        )

    stores = opened(reuse) if ranks is None else ranks.first_then_others(lambda: opened(reuse), lambda: opened(True))
    weights, buffers = stores
    dense = DenseTable(
        cluster, tensors, weights if wire_dtype is None else weights.with_wire(wire_dtype), buffers, ranks
    )
    _attached[module] = known = weakref.ref(dense)  # while both are referenced
    module.register_load_state_dict_pre_hook(partial(_require_same, known))  # type: ignore[no-untyped-call]
    return dense


def _require_same(
    known: weakref.ref[DenseTable], module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    dense = known()
    if dense is not None and _attached.get(module) is known:
        dense.require_same(state, prefix)


def placement_of(module: nn.Module) -> Placement | None:
    """Return the placement of the weights of ``module``; None: it is not attached."""
    noted = _attached.get(module)
    dense = None if noted is None else noted()
    return None if dense is None else dense.row_placement


class _DenseRows(ClusterPlacement):
    """Placement of a module's tables: of parameters, and of the other tensors."""

    first_writes = 1  # the first values

    def __init__(self, dense: DenseTable, cluster: Cluster, stores: list[Store], ranks: SyncRanks | None) -> None:
        super().__init__(cluster, [store.table for store in stores], ranks)
        self._dense = dense

    def resume(self) -> None:
        """Pull the values; drop earlier changes of the module."""
        super().resume()
        self._dense.refresh()


@dataclass
class _Push:
    """Push in progress: a retry after an error reaches only the shards that have not answered."""

    sequence: int | None
    buffers: Write | None
    weights: RowWrite
    is_refused: bool = False
    """Whether a shard refused it, as it will refuse a retry."""
    is_dropped: bool = False
    """Whether its gradients were dropped although some shards have applied it."""
    is_begun: bool = False
    """Whether it was sent before, and has its own copy of the gradients since."""

    @property
    def is_on_a_shard(self) -> bool:
        return self.weights.is_on_a_shard or (self.buffers is not None and self.buffers.is_on_a_shard)

    def abandon(self) -> None:
        for write in (self.buffers, self.weights):
            if write is not None:
                write.abandon()

    def copy_gradients(self) -> None:
        """Copy the gradients, so that a retry sends the same values if they are changed."""
        self.weights.copy_rows()
        self.is_begun = True
