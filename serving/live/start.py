"""Start of a model that follows a training, from the configuration."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from geartrain.ams.values.config import ClientConfig, ServeConfig
from geartrain.ams.values.errors import GeartrainError, InvalidArgument
from geartrain.serving.live.follow import Follower
from geartrain.serving.live.training import training_of
from geartrain.serving.live.versions import LiveVersion, LiveVersions
from geartrain.serving.service import ModelService
from geartrain.workers.atomic import sole_user

logger = logging.getLogger(__name__)

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,99})=(?P<training>.+)")


def follow(service: ModelService, told: ServeConfig, client: ClientConfig, cleanup: ExitStack) -> Follower:
    """Start to follow ``told.follow``; ``cleanup`` stops it.

    Versions in ``told.versions`` are served at once. Raises InvalidArgument, OSError (the folder cannot be made).
    """
    assert told.follow is not None
    match = _NAMED.fullmatch(told.follow)
    training = told.follow if match is None else match["training"]
    name = _name_of(training) if match is None else match["name"]
    if told.versions is None:
        out = Path(tempfile.mkdtemp(prefix="geartrain-versions-"))
        cleanup.callback(shutil.rmtree, out, ignore_errors=True)
    else:
        out = Path(told.versions).absolute()
        if out.resolve() == Path(training).resolve():
            raise InvalidArgument(
                f"versions is {told.versions}, the folder that is followed; give another one for copies"
            )
        out.mkdir(parents=True, exist_ok=True)
        try:
            cleanup.enter_context(sole_user(out))
        except BlockingIOError as exc:
            raise InvalidArgument(
                f"versions is {told.versions}, which another service writes to; give each a folder of its own"
            ) from exc
    versions = LiveVersions(
        out, keep=told.keep, backbone=told.backbone, recall=told.recall, part=told.part, has_rows=not told.parts
    )

    def serve(version: LiveVersion) -> bool:
        is_current: bool = service.change("add", model=name, folder=str(version.folder))[0]
        try:
            service.change("open", model=name)
            loaded = {number for state in service.change("state") for number in state[name]["loaded"]}
            for gone in versions.prune(loaded):
                service.change("forget", model=name, version=gone)
        except GeartrainError as exc:  # the version is served all the same
            logger.warning("%s: %s", name, exc)
        return is_current

    def held_at() -> int | None:
        state = service.change("state")[0].get(name, {})
        return state.get("current") if state.get("is_held") else None

    def report(facts: Mapping[str, Any]) -> None:
        service.change("following", model=name, facts=dict(facts))

    cleanup.callback(versions.close)
    service.following[name] = {}
    service.change("expect", model=name)
    served = _serve_newest_intact(service, name, versions)
    follower = Follower(training_of(training, client), versions, serve, served=served, held_at=held_at, tell=report)
    report(follower.facts)
    cleanup.callback(follower.close)
    follower.start()
    logger.info("%s follows %s; its versions are in %s", name, training, out)
    return follower


def _serve_newest_intact(service: ModelService, name: str, versions: LiveVersions) -> LiveVersion | None:
    """Serve the newest undamaged version; register older ones for a rollback, not loaded."""
    served = None
    for version in versions.written():
        details = {"model": name, "folder": str(version.folder)}
        try:
            if served is None:
                service.change("add", **details)
                service.change("open", model=name)
                served = version
            else:
                service.change("know", version=version.version, **details)
        except GeartrainError as exc:
            logger.warning("skipping a version: %s", exc)
    return served


def _name_of(training: str) -> str:
    """Return a model name: of a run's folder, a scheduler's job, or the folder in a URL."""
    last = training.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._")[:100] or "model"
