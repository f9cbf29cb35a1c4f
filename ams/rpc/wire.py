"""Version check of the wire: messages and frames of rows."""

from __future__ import annotations

from geartrain.ams.pb.v1.wire import WIRE as WIRE
from geartrain.ams.values.errors import VersionMismatch
from geartrain.ams.values.rpc import version
from geartrain.ams.values.text import quoted


def require_same_wire(peer: str, peer_version: str, peer_wire: str, own: str) -> None:
    """Raise VersionMismatch, which names both builds and wires, unless ``peer`` speaks the wire of this build.

    Builds of one wire understand each other. A peer that names no wire is older than this check.
    """
    if peer_wire != WIRE:
        theirs = f"{quoted(peer_version)} of wire {quoted(peer_wire)}" if peer_wire else "of an older version, no wire"
        raise VersionMismatch(
            f"{peer} is Geartrain {theirs}, and {own} is {version()!r} of wire {WIRE!r}: they do not understand each "
            "other. Start all roles with one version of Geartrain: 'geartrain --version' names that of each machine"
        )
