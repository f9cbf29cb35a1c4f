"""Writes snapshots of clicks or of trees as folders to serve.

``python -m geartrain.workers.live.export``: a server that follows a training has no torch, so it starts this. It writes
``["SNAPSHOT", "OUT"]`` to stdin, and reads what went wrong from stdout, ``""`` if nothing did; then the next.
"""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path

from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.values.errors import GeartrainError
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.tdm.export import export_tree

_IDLE_SECONDS = 60.0
"""After so long without a snapshot its memory is worth more than its start."""


def export(snapshot: str, out: Path) -> str:
    """Write one; return what went wrong."""
    try:
        found = open_snapshot(snapshot)
        if found.manifest.job.get("job") == ClickTrainer.job:
            export_clicks(found, out, cache=Path(".cache"), say=lambda line: print(line, file=sys.stderr))
        else:
            export_tree(found, out)
    except (GeartrainError, OSError) as exc:
        return str(exc)
    return ""


def main() -> None:
    """Export until stdin ends."""
    while select.select([sys.stdin], [], [], _IDLE_SECONDS)[0] and (line := sys.stdin.readline()):
        snapshot, out = json.loads(line)
        print(json.dumps(export(snapshot, Path(out))), flush=True)


if __name__ == "__main__":
    main()
