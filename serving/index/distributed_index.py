"""Index of a model whose class rows are spread over several services, each with a part of the classes.

A query goes to all of them at once, and the best of their answers are returned. They equal those of a single index, as
the score of a class does not depend on the others. Cost: a request to each part per batch, 4 · N · D bytes there,
12 · N · k back.

Legend: C classes, D width, N features, k answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPMessage
from typing import Any, NamedTuple

import numpy as np

from geartrain.ams.values.errors import Busy, ConfigError, GeartrainError, NotServed
from geartrain.ams.values.specs import Ids
from geartrain.serving.http.client import connection_to, send_request
from geartrain.serving.index.exact import Answers, Floats, best_of
from geartrain.serving.kserve.datatypes import from_raw, to_raw

_ANSWER_SECONDS = 10.0
_LENGTH = "inference-header-content-length"
_DTYPES: dict[str, np.dtype[Any]] = {"ids": np.dtype(np.int64), "scores": np.dtype(np.float32)}
_parts: Parts | None = None


def use_parts(addresses: Sequence[str]) -> None:
    """Set the services that hold the class rows of models loaded from now on; none: the models hold them."""
    global _parts
    _parts = Parts(addresses) if addresses else None


def parts_in_use() -> Parts | None:
    """Return the services set by :func:`use_parts`."""
    return _parts


def bounds(num_classes: int, number: int, of: int) -> tuple[int, int]:
    """Return the first class of part ``number`` (from 1) and its end. Raises ConfigError if a part would be empty."""
    if num_classes < of:
        raise ConfigError(f"part {number}/{of} would be of {num_classes} classes; make {num_classes} parts at most")
    return num_classes * (number - 1) // of, num_classes * number // of


class _Version(NamedTuple):
    """Version of a model at the service of one index part."""

    address: str
    path: str
    """Path of its queries."""
    number: int
    """Number of the part, from 1 on."""
    of: int


class Parts:
    """Services of all parts of a model. Thread-safe."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """``addresses``: host:port of each, in any order."""
        self.addresses = tuple(addresses)
        self._idle: dict[str, list[HTTPConnection]] = {address: [] for address in addresses}
        self.threads = ThreadPoolExecutor(4 * len(addresses), thread_name_prefix="parts")

    def request(
        self, address: str, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[HTTPMessage, bytes]:
        """Return headers and body of one service's answer. Raises as :func:`request_json`."""
        idle = self._idle[address]
        try:
            connection = idle.pop()  # another thread may have taken the last one
        except IndexError:
            connection = connection_to(address, _ANSWER_SECONDS)
        try:
            return send_request(connection, address, method, path, body, headers)
        finally:
            idle.append(connection)

    def unready_reason(self) -> str:
        """Return why a service is not ready, with its address; empty: all are. Costs a request to each."""

        def why(address: str) -> str:
            try:
                self.request(address, "GET", "/readyz")
            except GeartrainError as exc:
                return str(exc)
            return ""

        return next(filter(None, self.threads.map(why, self.addresses)), "")

    def versions(self, created: float) -> list[_Version]:
        """Return where each part of the moment ``created`` is queried.

        Raises Unavailable (a service does not answer), Busy (one has other versions), ConfigError (a part is missing or
        there twice).
        """
        states = dict(zip(self.addresses, self.threads.map(self._state, self.addresses), strict=True))
        found = []
        for address, state in states.items():
            version = next((one["version"] for one in state["loaded"] if one["created"] == created), None)
            if version is None:
                there = ", ".join(str(one["version"]) for one in state["loaded"]) or "none"
                raise Busy(f"the part at {address} has versions {there}, none of this moment yet; retry")
            path = f"/v2/models/{state['name']}/versions/{version}/infer"
            found.append(_Version(address, path, *state["facts"].get("part", (0, 0))))
        of = len(self.addresses)
        if sorted(version[2:] for version in found) != [(number, of) for number in range(1, of + 1)]:
            shown = ", ".join(f"{version.address} ({version.number}/{version.of})" for version in found)
            raise ConfigError(
                f"parts are {shown}; name the {of} services of 'geartrain serve --follow TRAINING --part 1/{of}' and "
                "so on, each once"
            )
        return found

    def _state(self, address: str) -> dict[str, Any]:
        names = [model["name"] for model in json.loads(self.request(address, "GET", "/v1/models")[1])["models"]]
        if len(names) != 1:
            raise ConfigError(f"the service at {address} has {len(names)} models; that of a part has one")
        state: dict[str, Any] = json.loads(self.request(address, "GET", f"/v1/models/{names[0]}")[1])
        return state


class PartsIndex:
    """Classes of one version, searched by the services of its parts. Immutable and thread-safe."""

    def __init__(self, parts: Parts, created: float, num_classes: int, ids: Ids | None) -> None:
        """``created`` is the moment of the version; ``ids`` [C] are those of its classes. Raises as
        :meth:`Parts.versions`."""
        self._parts, self._created, self._num_classes, self._ids = parts, created, num_classes, ids
        self._versions = parts.versions(created)
        self.facts: Mapping[str, Any] = {"kind": "parts", "parts": parts.addresses}

    def search(self, features_ND: Floats, k: int) -> Answers:
        """Search as :meth:`NearestIndex.search`. Raises also Unavailable (a part is lost), Busy (it has newer
        versions)."""
        data = to_raw(np.asarray(features_ND, np.float32))
        asked = [self._parts.threads.submit(self._request, one, data, features_ND.shape, k) for one in self._versions]
        scores, ids = best_of([answer.result() for answer in asked], k)
        return scores, ids if self._ids is None else np.searchsorted(self._ids, ids)

    def _request(self, version: _Version, data: bytes, shape: tuple[int, ...], k: int) -> Answers:
        """Return the best classes of one part, by their ids."""
        first, stop = bounds(self._num_classes, version.number, len(self._versions))
        features = {"name": "features", "datatype": "FP32", "shape": shape}
        question = {
            "inputs": [{**features, "parameters": {"binary_data_size": len(data)}}],
            "outputs": [{"name": name} for name in _DTYPES],
            "parameters": {"operation": "nearest", "k": min(k, stop - first), "binary_data_output": True},
        }
        head = json.dumps(question).encode()
        try:
            headers, body = self._parts.request(
                version.address, "POST", version.path, head + data, **{_LENGTH: str(len(head))}
            )
        except NotServed as exc:
            raise Busy(f"the part at {version.address} has gone on to other versions; ask again: {exc}") from exc
        at = int(headers[_LENGTH])
        said = json.loads(body[:at])
        if said["parameters"]["created"] != self._created:
            raise Busy(f"the part at {version.address} is of another moment of the training; ask again")
        found = {}
        for output in said["outputs"]:
            end = at + output["parameters"]["binary_data_size"]
            name, shape = output["name"], tuple(output["shape"])
            found[name], at = from_raw(name, body[at:end], _DTYPES[name], shape), end
        return found["scores"], found["ids"]
