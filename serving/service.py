"""Requests to the models of a service, and their changes, shared by HTTP and gRPC."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from geartrain.ams.observe.metrics import Metric
from geartrain.ams.values.config import ServeConfig
from geartrain.ams.values.errors import ConfigError, GeartrainError, InternalError, error_named
from geartrain.serving.answers import Servable
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.folder import load_folder, load_newest, versions_in
from geartrain.serving.index.parts import parts_in_use
from geartrain.serving.metrics import ServingCounts, describe_process, following_metrics, serving_metrics

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
Told = dict[str, Any]
"""What one process says of a change: ``{"said": ...}``, or ``{"error": class, "message": ...}``.

With ``is_gone`` it has died; its successor is told what others serve."""


def all_or_none(
    tell: Callable[[Mapping[str, Any]], list[Told]], wish: Mapping[str, Any], before: Mapping[str, Any]
) -> list[Told]:
    """Have every process make a change, or none; return what each said last.

    Each first loads what the change needs. If one of them cannot, or they would come to different versions, all go back
    to ``before``, which one said of its ``state``. One that has died counts for nothing.
    """
    told: list[Told] = []
    for step in ({"wish": "prepare", "change": wish}, wish):
        told = tell(step)
        alive = [answer for answer in told if not answer.get("is_gone")]
        if any("error" in answer or answer != alive[0] for answer in alive):
            tell({"wish": "become", "models": before})
            break
    return told


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
        self._prepared: dict[str, Servable] = {}
        """Versions that a change is to add, by their folders."""
        self._wishes: dict[str, Callable[..., Any]] = {
            "add": self._add,
            "know": self._know,
            "expect": lambda model: self.catalog.expect(model),
            "open": lambda model: self.catalog.open(model),
            "forget": lambda model, version: self.catalog.forget(model, version),
            "following": lambda model, facts: self.following.update({model: facts}),
            "prepare": self._prepare,
            "rollback": lambda model, to: self.catalog.rollback(model, to),
            "canary": lambda model, version, share: self.catalog.set_canary(model, version, share),
            "state": self._state,
            "become": self.become,
            "counts": lambda: describe_process(self.counts, self.batcher.queued, self.catalog),
        }

    def change(self, wish: str, **details: Any) -> list[Any]:
        """Do what a wish says in every process of the service; return what each said. Raises the first error."""
        told = self.everywhere({"wish": wish, **details})
        told = [answer for answer in told if not answer.get("is_gone")] or told
        for answer in told:
            if "error" in answer:
                raise error_named(answer["error"])(answer["message"])
        return [answer["said"] for answer in told]

    def why_not_ready(self) -> str:
        """What is missing until questions can be answered, such as a service of ``--parts``; empty: nothing."""
        parts = parts_in_use()
        return self.catalog.why_not_ready() or ("" if parts is None else parts.why_not_ready())

    def rollback(self, model: str, to: int | None = None) -> int:
        """Make an older version current in every process, or in none: see :meth:`Catalog.rollback`."""
        found = set(self.change("rollback", model=model, to=to))
        if len(found) > 1:  # one of them cannot serve what others can: none has changed
            found = set(self.change("rollback", model=model, to=min(found)))
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

    def become(self, models: Mapping[str, Any]) -> None:
        """Serve what the wish ``state`` said, of another process or before a change that is undone."""
        while self._prepared:
            self._prepared.popitem()[1].close()
        self.following |= {name: said["following"] for name, said in models.items() if said["following"] is not None}
        self.catalog.become(models)

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
        servable = self._prepared.pop(folder) if folder in self._prepared else load_folder(path)
        return self.catalog.add(model, servable, path, share=share)

    def _prepare(self, change: Mapping[str, Any]) -> int | None:
        if change["wish"] == "add":
            self._prepared[change["folder"]] = load_folder(Path(change["folder"]))
        elif change["wish"] == "rollback":
            return self.catalog.prepare(change["model"], change["to"])
        elif change["wish"] == "canary" and change["share"] and change["version"] is not None:
            self.catalog.prepare(change["model"], change["version"])
        return None

    def _state(self) -> dict[str, Any]:
        models = self.catalog.remembered()
        return {name: {**said, "following": self.following.get(name)} for name, said in models.items()}

    def _know(self, model: str, version: int, folder: str) -> None:
        self.catalog.know(model, version, Path(folder))


def open_models(catalog: Catalog, config: ServeConfig) -> None:
    """Load what ``config`` names, each model in its newest whole version.

    Raises ConfigError, ModelDamaged: what is no model, or is named twice.
    """
    for name, folder in named_folders(config.models).items():
        found, servable = load_newest(folder)
        for version, path in versions_in(folder).items():
            if version < servable.version:  # newer ones are damaged
                catalog.know(name, version, path)
        catalog.add(name, servable, found)
    if config.canary is not None:
        if not catalog.names:
            raise ConfigError("canary is a folder, and there is no model beside which it would answer; name one")
        found, servable = load_newest(Path(config.canary))
        catalog.add(catalog.names[0], servable, found, share=config.share)


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
