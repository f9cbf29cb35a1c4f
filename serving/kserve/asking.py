"""Interpretation of inference requests, the same over gRPC and HTTP: versions, operations, outputs, model index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.serving.answers import Arrays, Operation
from geartrain.serving.catalog import Catalog, Lease

EXTENSIONS = ("model_repository", "binary_tensor_data")
"""Supported extensions of the protocol."""


def version_of(text: str) -> int | None:
    """Return the version that a request names, None if it names none. Raises InvalidArgument."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise InvalidArgument(f"version {quoted(text)} is no number; leave it out to ask the one that is served")
    return int(text)


def operation_of(lease: Lease, name: object) -> Operation:
    """Return the operation called ``name``; None: the model's first one. Raises NotServed."""
    return lease.operation(next(iter(lease.servable.operations)) if name is None else str(name))


def wanted_of(answered: Arrays, names: Sequence[str]) -> Arrays:
    """Return the tensors called ``names``, or all if that is empty. Raises InvalidArgument for an unknown name."""
    for name in names:
        if name not in answered:
            raise InvalidArgument(f"output {quoted(name)} is none of this operation's: {', '.join(answered)}")
    return {name: answered[name] for name in names or answered}


def index_of(catalog: Catalog) -> list[dict[str, Any]]:
    """Return all versions that can be queried: name, version, state, and reason."""
    found = []
    for name in catalog.names:
        state = catalog.state(name)
        role_of = {state["current"]: "current", (state["canary"] or {}).get("version"): "canary"}
        for loaded in state["loaded"]:
            version = loaded["version"]
            reason = role_of.get(version, "previous")
            found.append({"name": name, "version": str(version), "state": "READY", "reason": reason})
    return found
