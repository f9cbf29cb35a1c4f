"""Builds the index of a version for later ones. Its arguments: the version, an empty folder, the asked recall."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from geartrain.serving.index.registry import write_older
from geartrain.workers.models.saved_model import read_config, read_files


def main(arguments: Sequence[str]) -> None:
    """Build it."""
    version, folder, asked_recall = Path(arguments[0]), Path(arguments[1]), float(arguments[2])
    config = read_config(version)
    arrays = read_files(version, config).tensors
    centers = arrays["centers"]
    ids = arrays.get("ids", np.arange(len(centers)))
    biases = arrays.get("biases")
    write_older(folder, centers, biases, ids, is_cosine=config["is_cosine"], asked_recall=asked_recall)


if __name__ == "__main__":
    main(sys.argv[1:])
