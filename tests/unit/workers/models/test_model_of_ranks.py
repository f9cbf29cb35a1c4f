"""The model of a job on ranks is written part by part: no rank ever has all class centers."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.values.errors import SyncError
from geartrain.bridge.head import weights
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models.trained_model import load_model, save_model_of_head
from tests.support.picture_models import picture_model
from tests.support.rank_processes import run_ranks

CLASSES, DIM = 70_001, 64


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError("the disk is full")


def save(rank: int, ranks: int, folder: Path) -> None:
    assert ranks == 2
    gt.ClassHead.weights = refuse  # type: ignore[assignment,method-assign]
    head = gt.ClassHead(None, "classes", num_classes=CLASSES, dim=DIM, rows="ranks")
    numbers = np.arange(head.table.first, head.table.stop, dtype=np.float32)  # type: ignore[attr-defined]
    head.table.rows_LD.copy_(torch.from_numpy(numbers).unsqueeze(1))  # type: ignore[attr-defined]
    gathered: list[int] = []
    link = head.table.link  # type: ignore[attr-defined]
    plain_sum = link.sum

    def counted(tensor: Tensor) -> Tensor:
        gathered.append(tensor.nbytes)
        return plain_sum(tensor)  # type: ignore[no-any-return]

    link.sum = counted
    centers, names = torch.empty(CLASSES, DIM, device="meta"), list(map(str, range(CLASSES)))
    model = picture_model(centers, names, Preprocessing(kind="ink", size=16, channels=1))
    save_model_of_head(folder / "model", model, head, is_first=rank == 0)
    assert sum(gathered) == CLASSES * DIM * 4
    assert max(gathered) <= 8 << 20
    if rank == 0:
        weights._write_file = refuse  # type: ignore[assignment]
    with pytest.raises(OSError if rank == 0 else SyncError):
        save_model_of_head(folder / "model", model, head, is_first=rank == 0)


def test_no_rank_ever_has_all_centers_and_the_old_model_stays_where_they_cannot_be_written(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)
    found = load_model(tmp_path / "model")
    assert isinstance(found.backbone, nn.Module)
    assert torch.equal(found.centers, torch.arange(CLASSES).float().unsqueeze(1).expand(CLASSES, DIM))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".safetensors")] == []
