"""The models of a service and how they are asked and changed: what HTTP and gRPC share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from geartrain.ams.observe.metrics import Metric
from geartrain.ams.values.config import ServeConfig
from geartrain.ams.values.errors import ConfigError, GeartrainError, InternalError, error_named
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.folder import load_folder, load_newest, versions_in
from geartrain.serving.metrics import ServingCounts, following_metrics, serving_metrics, told_by

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
Told = dict[str, Any]
"""What one process says of a change: ``{"said": ...}``, or ``{"error": class, "message": ...}``.

With ``is_gone`` it has died; its successor is told what others serve."""


class ModelService:
    """Models that answer. Thread-safe.

    What changes them goes to every process of the service by :meth:`change`; what asks them stays in this one.
    """

    def __init__(self, catalog: Catalog, batcher: Batcher, counts: ServingCounts | None = None) -> None:
        """``counts``: which ``batcher`` tells of its batches, too."""
        self.catalog, self.batcher, self.counts = catalog, batcher, counts or ServingCounts()
        self.everywhere: Callable[[Mapping[str, Any]], list[Told]] = lambda wish: [self.apply(wish)]
        """Gives a wish to :meth:`apply` of every process of the service, this one included."""
        self.following: dict[str, Mapping[str, Any]] = {}
        """Of models that follow a training: how far they are behind it."""
        self._wishes: dict[str, Callable[..., Any]] = {
            "add": self._add,
            "know": self._know,
            "expect": self._expect,
            "open": self._open,
            "forget": self._forget,
            "following": self._note_following,
            "rollback": self._rollback,
            "canary": self._set_canary,
            "state": lambda: self.catalog.remembered(),
            "become": lambda models: self.catalog.become(models),
            "counts": lambda: told_by(self.counts, self.batcher.queued, self.catalog),
        }

    def change(self, wish: str, **details: Any) -> list[Any]:
        """Do what a wish says in every process of the service; return what each said. Raises the first error."""
        told = self.everywhere({"wish": wish, **details})
        told = [answer for answer in told if not answer.get("is_gone")] or told
        for answer in told:
            if "error" in answer:
                raise error_named(answer["error"])(answer["message"])
        return [answer["said"] for answer in told]

    def rollback(self, model: str, to: int | None = None) -> int:
        """Make an older version current in every process, or in none: see :meth:`Catalog.rollback`."""
        before = self.change("state")[0]
        try:
            found = set(self.change("rollback", model=model, to=to))
            if len(found) > 1:  # one of them cannot serve what others can
                found = set(self.change("rollback", model=model, to=min(found)))
        except GeartrainError:
            self.change("become", models={name: said for name, said in before.items() if name == model})
            raise
        return int(found.pop())

    def apply(self, wish: Mapping[str, Any]) -> Told:
        """Do what a wish says in this process."""
        details = dict(wish)
        try:
            return {"said": self._wishes[details.pop("wish")](**details)}
        except GeartrainError as exc:
            return {"error": type(exc).__name__, "message": str(exc)}
        except Exception as exc:
            return {"error": InternalError.__name__, "message": f"{type(exc).__name__}: {exc}"}

    def metrics(self) -> Iterator[Metric]:
        """What all processes of the service have counted."""
        told = self.everywhere({"wish": "counts"})
        counts = {number: answer["said"] for number, answer in enumerate(told) if "said" in answer}
        yield from serving_metrics(counts)
        yield from following_metrics(self.following)

    def close(self) -> None:
        """Answer what waits, then close the models."""
        self.batcher.close()
        self.catalog.close()

    def _add(self, model: str, folder: str, share: float | None = None) -> bool:
        path = Path(folder)
        return self.catalog.add(model, load_folder(path), path, share=share)

    def _know(self, model: str, version: int, folder: str) -> None:
        self.catalog.know(model, version, Path(folder))

    def _expect(self, model: str) -> None:
        self.catalog.expect(model)

    def _open(self, model: str) -> None:
        self.catalog.open(model)

    def _note_following(self, model: str, facts: Mapping[str, Any]) -> None:
        self.following[model] = facts

    def _forget(self, model: str, version: int) -> None:
        self.catalog.forget(model, version)

    def _rollback(self, model: str | None = None, to: int | None = None) -> int:
        return self.catalog.rollback(model, to)

    def _set_canary(self, model: str | None, version: int | None, share: float) -> None:
        self.catalog.set_canary(model, version, share)


def open_models(catalog: Catalog, config: ServeConfig) -> None:
    """Load what ``config`` names, each model in its newest whole version.

    Raises ConfigError, ModelDamaged: what is no model, or is named twice.
    """
    for name, folder in named_folders(config.models).items():
        servable = load_newest(folder)
        versions = versions_in(folder)
        for version, path in versions.items():
            if version < servable.version:  # newer ones are damaged
                catalog.know(name, version, path)
        catalog.add(name, servable, versions.get(servable.version, folder))
    if config.canary is not None:
        if not catalog.names:
            raise ConfigError("canary is a folder, and there is no model beside which it would answer; name one")
        catalog.add(catalog.names[0], load_newest(Path(config.canary)), Path(config.canary), share=config.share)


def named_folders(models: Sequence[str]) -> dict[str, Path]:
    """``DIR`` or ``NAME=DIR`` each -> name (by default the folder's own) and folder. Raises ConfigError."""
    found: dict[str, Path] = {}
    for said in models:
        name, sign, folder = said.partition("=")
        path = Path(folder if sign else said)
        name = name if sign else path.resolve().name
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"models names {said!r}: a name has letters, digits and ._- alone; give NAME=DIR, as faces={path}"
            )
        if name in found:
            raise ConfigError(f"models names {name!r} twice: {found[name]}, {path}; give one another name, as b={path}")
        found[name] = path
    return found
