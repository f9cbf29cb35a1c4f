"""``gt.SlowGear``: dense features by id, as a module of the fast gear's model.

Legend: D width of a dense feature, K distinct ids, N ids of a call.
"""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.ams.kernels import ops
from geartrain.ams.values.arrays import FOLD
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, SpecMismatch
from geartrain.ams.values.gear_messages import Freshness, GearAccount, GearPort, first_error, without
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.bridge.dense.factory import BUFFERS_SUFFIX
from geartrain.bridge.gear.config import HERE, SlowGearConfig
from geartrain.bridge.gear.dense_cache import WorkerCache
from geartrain.bridge.gear.engine import DenseEngine
from geartrain.bridge.gear.factory import open_engine, open_pass
from geartrain.bridge.gear.gear_update import GearGradient, GearUpdate
from geartrain.bridge.gear.sample_source import Decode, DenseSamples
from geartrain.bridge.placements.placement import Placement
from geartrain.bridge.rows.eager import runs_eagerly
from geartrain.bridge.rows.pending import PendingUpdate
from geartrain.bridge.rows.row_identity import moved_rows
from geartrain.bridge.rows.stand_in import ModuleWithRows
from geartrain.bridge.rows.transfers import download, put, upload

logger = logging.getLogger(__name__)

_DEFAULTS = SlowGearConfig()
_NO_FEATURE = -1
"""Dense version of a missing feature."""


class SlowGear(ModuleWithRows):
    """Dense features by id; ``features = image(image_ids)`` has a gradient, which goes back to the slow gears.

    Its parameter has no elements and stands for the dense part, which is in the slow gears and in the cluster's dense
    table ``name``. :class:`geartrain.RowOptimizer` delivers the gradients at ``step()``, once for each distinct id,
    with its learning rate; GradScaler, clipping and LR schedulers work as for heads. In ``eval()`` features have no
    gradient. Not thread-safe (its slow gear is).

    Cost of a call with K distinct ids: hits of the worker's cache need no network; for the others one request to each
    slow gear that holds some of them, 8 bytes an id there and 4·D + 16 bytes back. Cost of a step: one request to each
    slow gear, 4·D + 16 bytes an id.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        dim: int,
        expire_seconds: float = 20.0,
        gradients_per_id: int = 16,
        max_version_lag: int | None = None,
        on_missing: Literal["error", "zeros"] = "error",
        mode: Literal["async", "sync"] = "async",
        build: Callable[[], nn.Module] | None = None,
        samples: DenseSamples | None = None,
        decode: Decode | None = None,
        optimizer: RowOptimizerSpec | None = None,
        reuse: bool = False,
        device: torch.device | str | None = None,
        config: SlowGearConfig = _DEFAULTS,
    ) -> None:
        """Find the slow gears of the dense part ``name``, or create one in this process.

        With ``build`` and ``samples`` the slow gear runs in this process. Without, slow gears are found through the
        cluster's scheduler; ``geartrain slowgear`` starts them, with their own values of the settings marked (*).
        ``expire_seconds=0, gradients_per_id=1, mode="sync"`` is ordinary back-propagation; with several slow gears,
        each of which makes an update, only for SGD.

        Args:
            cluster: Holds the dense table, and finds slow gears.
            name: Name of the dense part and of its dense table.
            dim: D, width of a dense feature.
            expire_seconds: Age above which a feature is computed again.
            gradients_per_id: M (*), gradients of an id that make a backward pass of the dense part for it.
            max_version_lag: Dense updates of lag above which a feature is computed again; None: no limit.
            on_missing: ``"error"``: ids without a sample raise (features of the others are kept for the next call);
                ``"zeros"``: they are zeros without a gradient.
            mode: With ``"sync"``, ``step()`` returns after the dense updates that it made due.
            build: Returns the module, [B, …] samples -> [B, dim].
            samples: See :class:`~geartrain.bridge.gear.sample_source.Samples`.
            decode: Makes a tensor of a sample's bytes.
            optimizer: Optimizer of the dense table (*); None: ``gt.SGD(0.01)``.
            reuse: Open the dense table if it exists; otherwise it must not exist.
            device: Device of the module (*).
            config: Further settings (*): :class:`geartrain.SlowGearConfig`.

        Raises:
            InvalidArgument: A value is outside its range.
            TableExists: The dense table exists, without ``reuse``.
            GearUnavailable: No slow gear held a partition in time.
        """
        super().__init__()
        if on_missing not in ("error", "zeros") or mode not in ("async", "sync"):
            raise InvalidArgument(
                f"on_missing is {on_missing!r}, mode {mode!r}; they are 'error' or 'zeros', and 'async' or 'sync'"
            )
        if (build is None) != (samples is None):
            raise InvalidArgument(
                "a slow gear in this process needs both build= and samples=; one elsewhere (geartrain slowgear) neither"
            )
        self.name = name
        self.dim = dim
        self.on_missing = on_missing
        self._clock = config.clock
        self._is_on_device = config.device_cache_bytes > 0
        cache_ids = max(1, config.device_cache_bytes // (4 * dim)) if self._is_on_device else config.cache_ids
        self._cache = WorkerCache(
            cache_ids, dim, expire_seconds=expire_seconds, max_version_lag=max_version_lag, name=name
        )
        self._open: Callable[[bool], DenseEngine] | None = None
        """Opens the slow gear of this process; None: slow gears are in other processes."""
        self._cluster = cluster
        self._port: GearPort
        self.table: Table
        engine: DenseEngine | None = None
        if build is not None:
            dense_pass = open_pass(build, samples, decode, dim, config, device)

            def open_here(reuse: bool) -> DenseEngine:
                return open_engine(
                    cluster,
                    name,
                    dense_pass,
                    config,
                    gradients_per_id=gradients_per_id,
                    optimizer=optimizer,
                    reuse=reuse,
                    mode=mode,
                    worker_cache=self._cache,
                )

            self._open = open_here
            engine = self._open(reuse)
            self._port, self.table = engine, cluster.table(name)
        else:
            _refuse_settings(config, {"optimizer": optimizer, "decode": decode, "device": device})
            fresh = Freshness(expire_seconds, max_version_lag)
            remote = cluster.slow_gears(name, dim=dim, wait=mode == "sync", freshness=fresh)
            if remote.gradients_per_id != gradients_per_id:
                logger.warning(
                    "gradients_per_id is %d, but the slow gears of %r make a backward pass of every %d gradients of an "
                    "id: start them with 'geartrain slowgear --gradients-per-id %d', or say here what they do",
                    *(gradients_per_id, name, remote.gradients_per_id, gradients_per_id),
                )
            self._port, self.table = remote, cluster.table(name)
        stream = cluster.write_stream
        self._source = f"{stream.name}/gear/{name}"
        if not stream.is_named:  # a name of its own: no process, and no second SlowGear here, continues its stream
            self._source += f"/{uuid.uuid4().hex[:8]}"
        self.row_update = GearUpdate(
            self.table, self._port, self._source, stream.incarnation, trains_here=engine is not None
        )
        self.register_stand_in(self.row_update)
        if engine is not None:
            weakref.finalize(self.row_update, engine.abandon)

    @runs_eagerly
    def forward(self, ids: Tensor) -> Tensor:
        """Return dense features of ``ids`` int64 [...] (any shape, any device): [..., D] float32 on their device.

        A repeated id costs once, and its gradients are summed. Raises InvalidIds; unless ``on_missing="zeros"`` also
        SampleNotFound, SampleDamaged, NonFinite (naming the first id without a feature; ``.ids`` of a SampleError are
        all); GearUnavailable.
        """
        self.row_update.require_present()
        distinct, places, _ = ops.merge_duplicates(_checked(ids))
        vectors_KD, versions = self._features(distinct, ids.device if self._is_on_device else torch.device("cpu"))
        vectors_KD = upload(vectors_KD, ids.device)
        update = self.row_update
        if self.training and torch.is_grad_enabled() and update.is_trained:
            stand_in = update.stand_in_on(vectors_KD.device)
            vectors_KD = _Delivered.apply(stand_in, vectors_KD, _Call(update, distinct, versions))  # type: ignore[no-untyped-call]
        return vectors_KD.index_select(0, upload(places, ids.device)).reshape(*ids.shape, self.dim)

    @property
    def step(self) -> int:
        """Number of deliveries made."""
        return self.row_update.step

    def flush(self) -> None:
        """Apply every waiting gradient in the slow gears, of all fast gears; partial batches with their true count.

        Call it before a snapshot of the cluster, which contains no waiting gradients.
        """
        self._port.flush()

    def account(self) -> GearAccount:
        """Return the outcomes of the gradients that this fast gear has delivered."""
        return self._port.account(self._source)

    @property
    def cache(self) -> WorkerCache:
        """The worker's cache, with hits, misses, histograms of age and lag."""
        return self._cache

    @property
    def row_placement(self) -> Placement:
        """Placement of the dense table, for :func:`geartrain.save` and :func:`geartrain.load`."""
        return _GearRows(self, self._cluster)

    def close(self) -> None:
        """Flush a slow gear of this process, or close the connections to others. Idempotent."""
        self._port.close()

    def get_extra_state(self) -> dict[str, Any]:
        """Return name, width, step and table; the weights are in snapshots of the cluster."""
        return {"gear": self.name, "dim": self.dim, "step": self.step, "incarnation": self.table.incarnation}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Raises SpecMismatch if the dense part has had deliveries since the state was saved."""
        state = state_dict.get(f"{prefix}_extra_state")
        is_live = isinstance(state, Mapping) and state.get("incarnation") == self.table.incarnation
        if is_live and state["step"] < self.step:
            raise moved_rows(self.name)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the saved step. Raises SpecMismatch for another name or width."""
        for key, mine in (("gear", self.name), ("dim", self.dim)):
            if state[key] != mine:
                raise SpecMismatch(f"the saved slow gear has {key} {state[key]!r}, this one {mine!r}; make it as saved")
        self.row_update.discard()
        self.row_update.step = int(state["step"])

    def _require_here(self) -> None:
        """Raise InvalidArgument unless the slow gear is in this process."""
        if self._open is None:
            raise InvalidArgument(
                f"the slow gears of {self.name!r} are other processes, which keep features and gradients of the rows "
                "they have: end them, bring the rows back with 'geartrain snapshot restore' (the rows-* folder of the "
                "saved model), start them, and load the rest with load_state_dict"
            )

    def _rebuild(self) -> None:
        """Create the slow gear of this process again, over the current table."""
        assert self._open is not None
        self._port.close()
        self._cache.clear()
        engine = self._open(True)
        self._port, self.table = engine, self._cluster.table(self.name)
        self.row_update.switch_table(self.table, engine)
        weakref.finalize(self.row_update, engine.abandon)

    def _features(self, ids: Ids, device: torch.device) -> tuple[Tensor, npt.NDArray[np.int64]]:
        """Return vectors [K, D] of distinct ids, and their dense versions; :data:`_NO_FEATURE` for a missing one."""
        version = self._port.dense_version
        vectors_KD, judged = self._cache.vectors(ids, device, now=self._clock(), dense_version=version)
        if not judged.hits.all():
            missing = ids[~judged.hits]
            reply = self._port.features(missing)
            good = without(missing, reply.failures)
            self._cache.insert(missing[good], reply.at(good))  # also when some ids have failed
            if reply.failures and self.on_missing == "error":
                raise first_error(reply.failures, "that")
            put(vectors_KD, np.flatnonzero(~judged.hits), reply.vectors_KD)
            judged.versions[~judged.hits] = np.where(good, reply.versions, _NO_FEATURE)
        return vectors_KD, judged.versions


class _GearRows(Placement):
    def __init__(self, gear: SlowGear, cluster: Cluster) -> None:
        self._gear = gear
        self.cluster: Cluster = cluster

    def specs(self) -> list[TableSpec]:
        names = [self._gear.name, self._gear.name + BUFFERS_SUFFIX]
        there = self.cluster.table_incarnations()
        return [self.cluster.table(name).spec for name in names if name in there]

    def is_trained(self) -> bool:
        return max(self._gear.table.versions()) > 1  # the first write is the first values'

    def require_loadable(self) -> None:
        self._gear._require_here()

    def flush(self) -> None:
        self._gear.flush()

    def resume(self) -> None:
        self._gear._rebuild()


@dataclass(eq=False)
class _Call:
    """Forward pass: features of ids [K] and their dense versions [K]."""

    update: GearUpdate
    ids: Ids
    versions: npt.NDArray[np.int64]

    def queue_row_gradients(self, upstream: Tensor, update: PendingUpdate[Any]) -> None:
        """Add the gradients [K, D] of the features that exist."""
        gradients_KD = download(upstream.to(torch.float32, copy=True))
        there = self.versions != _NO_FEATURE
        ids, versions = self.ids[there], self.versions[there]
        if not there.all():
            gradients_KD = gradients_KD[torch.from_numpy(there)]
        update.add(GearGradient(ids, gradients_KD, versions), gradients_KD.sum(), len(ids))


class _Delivered(torch.autograd.Function):
    """Identity on the features, whose gradient is queued for the step."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, vectors_KD: Tensor, call: _Call) -> Tensor:  # noqa: ARG004
        ctx.call = call
        return vectors_KD.view_as(vectors_KD)

    @staticmethod
    def backward(ctx: Any, gradients_KD: Tensor) -> Any:
        return ctx.call.update.defer(ctx.call, gradients_KD.detach()), None, None


def _refuse_settings(config: SlowGearConfig, given: Mapping[str, object]) -> None:
    """Raise InvalidArgument for settings that slow gears of other processes get when they are started."""
    names = [name for name, value in given.items() if value is not None]
    names += [
        setting.name
        for setting in fields(config)
        if setting.name not in HERE and getattr(config, setting.name) != setting.default
    ]
    if names:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in names)
        raise InvalidArgument(
            f"{', '.join(names)}: without build= the slow gears are other processes; start them with 'geartrain "
            f"slowgear {flags}' instead"
        )


def _checked(ids: Tensor) -> Ids:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise InvalidIds(f"ids are {kind}; they must be a tensor of int64, of any shape")
    flat: Ids = download(ids.detach().reshape(-1).to(torch.int64)).numpy()
    if flat.size and flat.min() < 0:
        raise InvalidIds(f"id {flat.min()} is negative; ids lie in [0, 2**63){FOLD}")
    return flat
