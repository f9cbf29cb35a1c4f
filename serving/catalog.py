"""Catalog of the served models and versions; a version is closed only after its last request.

A request leases one version and is answered by it alone. After a swap the former version stays for a rollback until the
next swap, and is closed when its last request is answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from geartrain.ams.values.errors import Busy, ConfigError, GeartrainError, InvalidArgument, ModelDamaged, NotServed
from geartrain.ams.values.text import quoted
from geartrain.serving.answers import Operation, Servable

logger = logging.getLogger(__name__)

Load = Callable[[Path], Servable]


@dataclass(eq=False)
class _Loaded:
    servable: Servable
    since: float
    asking: int = 0
    asked: int = 0
    is_over: bool = False
    """Closed once its last lease is released."""


@dataclass(eq=False, slots=True)
class Lease:
    """Hold of one request on a version. A context manager; a second release has no effect."""

    _catalog: Catalog
    _loaded: _Loaded
    model: str
    """Name of the model."""
    servable: Servable
    """The version; stays open until the release."""
    is_canary: bool
    _is_held: bool = True

    def operation(self, name: str) -> Operation:
        """Return the operation of this name. Raises NotServed, which lists the others."""
        operation = self.servable.operations.get(name)
        if operation is None:
            known = ", ".join(self.servable.operations)
            raise NotServed(f"{self.model!r} has no operation {quoted(name)}; it has {known}")
        return operation

    def again(self) -> Lease:
        """Return another lease of the same version, for a caller that may need it longer."""
        with self._catalog._lock:
            self._loaded.asking += 1
        return Lease(self._catalog, self._loaded, self.model, self.servable, self.is_canary)

    def release(self, *_: object) -> None:
        """Release the version: the request is answered, or its client has left."""
        if not self._is_held:
            return
        self._is_held = False
        with self._catalog._lock:
            self._loaded.asking -= 1
            is_last = self._loaded.is_over and not self._loaded.asking
        if is_last:
            _close([self.servable])

    def __enter__(self) -> Self:
        return self

    __exit__ = release


@dataclass(eq=False)
class _Model:
    name: str
    loaded: dict[int, _Loaded] = field(default_factory=dict)
    folders: dict[int, Path] = field(default_factory=dict)
    """Folders of known versions, loaded or not."""
    current: int | None = None
    previous: int | None = None
    """Former current version, which stays loaded."""
    canary: int | None = None
    share: float = 0.0
    asked: int = 0
    is_held: bool = False
    """Rolled back: newer versions do not become current by themselves."""
    is_expected: bool = False
    changing: Any = field(default_factory=threading.RLock)
    """Held during a change: one at a time."""

    @property
    def known(self) -> list[int]:
        return sorted({*self.loaded, *self.folders})


class Catalog:
    """The models of a service by name. Thread-safe; no request waits for a version that is loading."""

    def __init__(self, load: Load | None = None) -> None:
        """``load`` opens the folder of a version registered by :meth:`know`; None: nothing is loaded here."""
        self._load = load
        self._lock = threading.Lock()
        self._models: dict[str, _Model] = {}
        self._is_closed = False

    @property
    def names(self) -> list[str]:
        """Names of all models, in the order of their arrival."""
        return list(self._models)

    def expect(self, name: str) -> None:
        """Announce a model: the service is not ready until :meth:`open`."""
        with self._lock:
            self._model(name, makes=True).is_expected = True

    def open(self, name: str) -> None:
        """Report that every process of the service has a version of an expected model."""
        with self._lock:
            self._model(name).is_expected = False

    def know(self, name: str, version: int, folder: Path) -> None:
        """Register the folder of a version, to be loaded on a rollback to it."""
        with self._lock:
            self._model(name, makes=True).folders[version] = folder

    def forget(self, name: str, version: int) -> None:
        """Unregister the folder of a version. If loaded, it stays served."""
        with self._lock:
            self._model(name).folders.pop(version, None)

    def add(self, name: str, servable: Servable, folder: Path | None = None, *, share: float | None = None) -> bool:
        """Add a version, served from the next request on; return whether it became current (with ``share``: canary).

        A number higher than all before becomes current, unless the model was rolled back; other versions wait for a
        rollback to them. With ``share`` the version gets that share of the requests, beside the current one. A version
        that becomes neither is closed, and remembered if it has a folder.

        Raises InvalidArgument: the version is served already, is of another kind, or ``share`` is not in 0 … 1.
        """
        if share is not None:
            _require_share(share)
        version = servable.version
        with self._lock:
            model = self._model(name, makes=True)
        with model.changing, self._lock:
            if version in model.loaded:
                raise InvalidArgument(
                    f"version {version} of {name!r} is served already; versions differ in their numbers, the steps of "
                    "their trainings; two of one step are served as two models: NAME=DIR each"
                )
            self._require_alike(model, servable)
            newest = max(model.known, default=version)
            if folder is not None:
                model.folders[version] = folder
            taken = share is not None or model.current is None or (version >= newest and not model.is_held)
            if taken:
                model.loaded[version] = _Loaded(servable, time.time())
                if share is not None and model.current is not None:
                    model.canary, model.share = version, share
                else:
                    self._activate(model, version)
            over = self._remove_unused(model) if taken else [servable]
        _close(over)
        return taken

    def rollback(self, name: str | None = None, to: int | None = None) -> int:
        """Make another version current and return its number. The former one stays loaded.

        From then on higher numbers do not become current, until a rollback ``to`` the highest.

        Args:
            name: name of the model; None: the only one.
            to: the version; None: the next lower one that can be served.

        Raises NotServed (no such model or version), and errors of loading; then nothing has changed.
        """
        model = self._find(name)
        with model.changing:
            to = self.prepare(name, to)
            with self._lock:
                self._activate(model, to)
                model.is_held = to != model.known[-1]
                over = self._remove_unused(model)
        _close(over)
        logger.info("%s: version %d is current%s", model.name, to, "; higher numbers wait" if model.is_held else "")
        return to

    def prepare(self, name: str | None = None, version: int | None = None) -> int:
        """Load the version for a later rollback or canary, and return its number; None: as in :meth:`rollback`.

        The change itself then loads nothing. Raises the errors of :meth:`rollback`.
        """
        model = self._find(name)
        with model.changing:
            version, loaded = self._before(model) if version is None else (version, self._loaded(model, version))
            with self._lock:
                model.loaded[version] = loaded
        return version

    def set_canary(self, name: str | None, version: int | None, share: float) -> None:
        """Send a version ``share`` of the requests, beside the current one; 0: end the canary.

        Raises NotServed, InvalidArgument (``share`` is not in 0 … 1, the version is the current one).
        """
        _require_share(share)
        model = self._find(name)
        with model.changing:
            if share > 0:
                if model.current is None:
                    raise self._none_yet(model)
                if version is None:
                    raise InvalidArgument(
                        f"version is missing; name the one that gets a share of {share}: {_listed(model.known)}"
                    )
                if version == model.current:
                    raise InvalidArgument(f"version {version} is current in {model.name!r}; name another as the canary")
                self.prepare(name, version)
            with self._lock:
                model.canary, model.share = (version, share) if share > 0 else (None, 0.0)
                over = self._remove_unused(model)
        _close(over)

    def lease(self, name: str | None = None, version: int | None = None) -> Lease:
        """Lease the version for a request: the current one, the canary (by its share), or ``version``.

        ``name`` None: the only model. Raises NotServed, and Busy while the model has no version.
        """
        with self._lock:
            model = self._model(name)
            chosen = version
            if chosen is None:
                chosen = model.current
                model.asked += 1
                # Evenly: with a share of 0.1 every tenth request.
                if model.canary is not None and int(model.asked * model.share) > int((model.asked - 1) * model.share):
                    chosen = model.canary
            loaded = None if chosen is None else model.loaded.get(chosen)
            if loaded is None:
                served = _listed(sorted(model.loaded))
                what = f"version {quoted(version)} of {model.name!r} is not served"
                if not served:
                    raise self._none_yet(model)
                raise NotServed(f"{what}; served are {served}")
            loaded.asking += 1
            loaded.asked += 1
            return Lease(self, loaded, model.name, loaded.servable, chosen == model.canary)

    def find(self, name: str | None = None) -> str:
        """Return the model's name; None: that of the only model. Raises NotServed."""
        return self._find(name).name

    def state(self, name: str | None = None) -> dict[str, Any]:
        """Return a model's versions, the current one and the canary as plain values. Raises NotServed."""
        with self._lock:
            model = self._model(name)
            loaded = [
                {
                    "version": version,
                    "created": found.servable.created,
                    "since": found.since,
                    "asked": found.asked,
                    "asking": found.asking,
                }
                for version, found in sorted(model.loaded.items())
            ]
            return {
                "name": model.name,
                "current": model.current,
                "canary": None if model.canary is None else {"version": model.canary, "share": model.share},
                "held": model.is_held,
                "loaded": loaded,
                "versions": model.known,
            }

    def remembered(self) -> dict[str, Any]:
        """Return the state of versions in folders, for :meth:`become` in another process."""
        with self._lock:
            return {
                name: {
                    "folders": {str(version): str(folder) for version, folder in model.folders.items()},
                    "current": model.current,
                    "canary": [model.canary, model.share],
                    "is_held": model.is_held,
                    "loaded": [*model.loaded],
                }
                for name, model in self._models.items()
            }

    def become(self, models: Mapping[str, Any]) -> None:
        """Serve the same versions as another process, or as this one before a change that is undone."""
        for name, said in models.items():
            self.expect(name)
            model, folders = self._find(name), {int(version): Path(at) for version, at in said["folders"].items()}
            for version, folder in folders.items():
                self.know(name, version, folder)
            if said["current"] not in (None, model.current):
                self.rollback(name, said["current"])
            self.set_canary(name, *said["canary"])
            with model.changing, self._lock:
                model.current, model.folders, model.is_held = said["current"], folders, said["is_held"]
                model.previous = model.previous if model.previous in said["loaded"] else None
                model.is_expected = said["current"] is None
                over = self._remove_unused(model)
            _close(over)

    def unready_reason(self) -> str:
        """Return why requests cannot be answered yet; empty: they can."""
        with self._lock:
            if self._is_closed:
                return "it is ending"
            if not self._models:
                return "there is no model yet"
            waits = [name for name, model in self._models.items() if model.current is None or model.is_expected]
            return f"there is no version of {', '.join(waits)} yet" if waits else ""

    def close(self) -> None:
        """Close every version after its last lease; grant no more leases."""
        with self._lock:
            self._is_closed = True
            over = []
            for model in self._models.values():
                model.current = model.previous = model.canary = None
                over += self._remove_unused(model)
        _close(over)

    def _find(self, name: str | None) -> _Model:
        with self._lock:
            return self._model(name)

    def _model(self, name: str | None, *, makes: bool = False) -> _Model:
        if name is None:
            if len(self._models) != 1:
                raise NotServed(f"name a model: {', '.join(self._models) or 'there is none yet'}")
            return next(iter(self._models.values()))
        if (model := self._models.get(name)) is None:
            if not makes:
                raise NotServed(f"there is no model {quoted(name)}; there is {', '.join(self._models) or 'none yet'}")
            model = self._models[name] = _Model(name)
        return model

    def _before(self, model: _Model) -> tuple[int, _Loaded]:
        """Return the newest version before the current one that loads; skip others."""
        with self._lock:
            current, known = model.current, model.known
        older = [version for version in known if current is None or version < current]
        if not older and current is None:
            raise self._none_yet(model)
        wrong: GeartrainError | None = None
        for version in reversed(older):
            try:
                return version, self._loaded(model, version)
            except (NotServed, InvalidArgument) as exc:
                logger.warning("skipping a version: %s", exc)
                wrong = wrong or exc
        raise wrong or NotServed(
            f"there is no version of {model.name!r} before {current}: one goes to lower numbers, which are steps of a "
            f"training; name another of {_listed(known)}"
        )

    def _loaded(self, model: _Model, version: int) -> _Loaded:
        """Return the version, loaded now if needed; no request waits for that."""
        if (loaded := model.loaded.get(version)) is not None:
            return loaded
        folder = model.folders.get(version)
        if folder is None or self._load is None:
            raise NotServed(f"there is no version {quoted(version)} of {model.name!r}; there is {_listed(model.known)}")
        try:
            servable = self._load(folder)
        except (ConfigError, ModelDamaged, InvalidArgument) as exc:
            why = str(exc) if folder.exists() else f"{folder} is gone; bring it back from a copy"
            raise NotServed(f"version {version} of {model.name!r} cannot be served: {why}") from exc
        if servable.version != version:
            servable.close()
            raise NotServed(
                f"version {version} of {model.name!r} cannot be served: {folder} holds {servable.version} now"
            )
        try:
            self._require_alike(model, servable)
        except InvalidArgument:
            servable.close()
            raise
        return _Loaded(servable, time.time())

    @staticmethod
    def _require_alike(model: _Model, servable: Servable) -> None:
        if model.current is not None and (kind := model.loaded[model.current].servable.kind) != servable.kind:
            raise InvalidArgument(
                f"version {servable.version} of {model.name!r} would be of kind {servable.kind}, and the current one "
                f"is of kind {kind}; serve it as a model of its own"
            )

    @staticmethod
    def _none_yet(model: _Model) -> Busy:
        return Busy(f"{model.name!r} has no version yet; ask again, or see /readyz")

    @staticmethod
    def _activate(model: _Model, version: int) -> None:
        if model.current != version:
            model.current, model.previous = version, model.current
        if model.canary == version:
            model.canary, model.share = None, 0.0

    @staticmethod
    def _remove_unused(model: _Model) -> list[Servable]:
        """Remove versions that are neither current, canary nor previous; return those without a lease."""
        over = []
        for version in [*model.loaded]:
            if version not in (model.current, model.canary, model.previous):
                gone = model.loaded.pop(version)
                gone.is_over = True
                if not gone.asking:
                    over.append(gone.servable)
        return over


def _close(over: Iterable[Servable]) -> None:
    for servable in over:
        try:
            servable.close()
        except (GeartrainError, OSError):  # other versions are still served
            logger.exception("version %d could not be closed", servable.version)


def _require_share(share: float) -> None:
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise InvalidArgument(f"share is {quoted(share)}; it must be a part of the requests, 0 ... 1, as 0.1")


def _listed(versions: Iterable[int]) -> str:
    return ", ".join(map(str, versions))
