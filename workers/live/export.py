"""Writes a snapshot of clicks or of a tree as a folder to serve.

``python -m geartrain.workers.live.export SNAPSHOT OUT``: a server that follows the training has no torch, so it starts
this for each version.
"""

from __future__ import annotations

import sys
from pathlib import Path

from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.values.errors import GeartrainError
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.tdm.export import export_tree


def main(snapshot: str, out: str) -> int:
    """Run it as a child; what goes wrong is the last line."""
    try:
        found = open_snapshot(snapshot)
        if found.manifest.job.get("job") == ClickTrainer.job:
            export_clicks(found, Path(out), cache=Path(".cache"), say=print)
        else:
            export_tree(found, Path(out))
    except (GeartrainError, OSError) as exc:
        print(exc, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
