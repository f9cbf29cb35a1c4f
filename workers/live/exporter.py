"""Exporter of snapshots of click models or trees to folders that can be served.

``python -m geartrain.workers.live.exporter``: a server that follows a training has no torch, so it starts this process.
It writes ``["SNAPSHOT", "OUT"]`` to stdin and reads the error from stdout, ``""`` if there is none; then the next.
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
"""Idle time after which the process exits to free its memory."""


def export(snapshot: str, out: Path) -> str:
    """Export one snapshot; return the error, or ""."""
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
