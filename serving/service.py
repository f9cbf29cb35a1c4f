"""Requests to the models of a service, and changes of the models, for HTTP and gRPC."""

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
from geartrain.serving.index.distributed_index import parts_in_use
from geartrain.serving.metrics import ServingCounts, describe_process, following_metrics, serving_metrics

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
WorkerReply = dict[str, Any]
"""Answer of one process to a change: ``{"said": ...}``, or ``{"error": class, "message": ...}``.

With ``is_gone`` it has died; its replacement receives the state of the others."""


def all_or_none(
    tell: Callable[[Mapping[str, Any]], list[WorkerReply]], wish: Mapping[str, Any], before: Mapping[str, Any]
) -> list[WorkerReply]:
    """Have every process make a change, or none; return each last answer.

    Each first loads the versions that the change needs. If one of them fails, or they would come to different versions,
    all go back to ``before``, a process's ``state``. A process that has died is left out.
    """
    told: list[WorkerReply] = []
    for step in ({"wish": "prepare", "change": wish}, wish):
        told = tell(step)
        alive = [answer for answer in told if not answer.get("is_gone")]
        if any("error" in answer or answer != alive[0] for answer in alive):
            tell({"wish": "become", "models": before})
            break
    return told


class ModelService:
    """Models that answer requests. Thread-safe.

    :meth:`change` sends changes to every process of the service; requests stay in this one.
    """

    def __init__(self, catalog: Catalog, batcher: Batcher, counts: ServingCounts | None = None) -> None:
        """``counts`` also receives the batches of ``batcher``."""
        self.catalog, self.batcher, self.counts = catalog, batcher, counts or ServingCounts()
        self.everywhere: Callable[[Mapping[str, Any]], list[WorkerReply]] = lambda wish: [self.apply(wish)]
        """Sends a request for a change to :meth:`apply` of every process of the service, this one included."""
        self.following: dict[str, Mapping[str, Any]] = {}
        """Lag of each model that follows a training."""
        self._prepared: dict[str, Servable] = {}
        """Versions that a change will add, by their folders."""
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
        """Make a change in every process of the service; return each answer. Raises the first error."""
        told = self.everywhere({"wish": wish, **details})
        told = [answer for answer in told if not answer.get("is_gone")] or told
        for answer in told:
            if "error" in answer:
                raise error_named(answer["error"])(answer["message"])
        return [answer["said"] for answer in told]

    def unready_reason(self) -> str:
        """Return what is missing to answer requests, such as a service of ``--parts``; empty: nothing."""
        parts = parts_in_use()
        return self.catalog.unready_reason() or ("" if parts is None else parts.unready_reason())

    def rollback(self, model: str, to: int | None = None) -> int:
        """Make an older version current in every process, or in none, as :meth:`Catalog.rollback`."""
        found = set(self.change("rollback", model=model, to=to))
        if len(found) > 1:  # one process lacks a version that others have: nothing has changed
            found = set(self.change("rollback", model=model, to=min(found)))
        return int(found.pop())

    def apply(self, wish: Mapping[str, Any]) -> WorkerReply:
        """Make a change in this process."""
        details = dict(wish)
        try:
            return {"said": self._wishes[details.pop("wish")](**details)}
        except GeartrainError as exc:
            return {"error": type(exc).__name__, "message": str(exc)}
        except Exception as exc:
            return {"error": InternalError.__name__, "message": f"{type(exc).__name__}: {exc}"}

    def become(self, models: Mapping[str, Any]) -> None:
        """Serve the versions of a ``state``, of another process or before a change that is undone."""
        while self._prepared:
            self._prepared.popitem()[1].close()
        self.following |= {name: said["following"] for name, said in models.items() if said["following"] is not None}
        self.catalog.become(models)

    def metrics(self) -> Iterator[Metric]:
        """Yield the counters of all processes of the service."""
        told = self.everywhere({"wish": "counts"})
        counts = {number: answer["said"] for number, answer in enumerate(told) if "said" in answer}
        yield from serving_metrics(counts)
        yield from following_metrics(self.following)

    def close(self) -> None:
        """Answer the queued requests, then close the models."""
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
    """Load the models that ``config`` names, each in its newest undamaged version.

    Raises ConfigError, ModelDamaged: a folder is no model, or a name occurs twice.
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
    """Parse ``DIR`` or ``NAME=DIR`` each: name (by default the folder's own) -> folder. Raises ConfigError."""
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
