"""Program that builds an index of a version for later ones. Arguments: the version, an empty folder, the recall."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from geartrain.serving.index.registry import write_older
from geartrain.workers.models.saved_model import CENTERS, read_config


def main(arguments: Sequence[str]) -> None:
    """Build the index."""
    version, folder, asked_recall = Path(arguments[0]), Path(arguments[1]), float(arguments[2])
    is_cosine = read_config(version)["is_cosine"]
    write_older(folder, version / CENTERS, is_cosine=is_cosine, asked_recall=asked_recall)


if __name__ == "__main__":
    main(sys.argv[1:])
