"""Images in two halves, from glyphs and from CIFAR-100's binary files (small ones, written here)."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gear_data.cifar import load_cifar100
from gear_data.halves import halve, halve_task

from geartrain.ams.values.errors import InvalidArgument, SampleNotFound
from geartrain.workers.data.images import ImageSet
from tests.support.face_files import write_tar

NAMES = "\n".join(f"class_{number}" for number in range(100)).encode() + b"\n"


def images(count: int, seed: int = 0) -> ImageSet:
    random = torch.Generator().manual_seed(seed)
    return ImageSet(
        torch.randint(256, (count, 1, 8, 8), generator=random, dtype=torch.uint8),
        torch.randint(5, (count,), generator=random),
    )


def record(coarse: int, fine: int, seed: int) -> bytes:
    return bytes([coarse, fine]) + np.random.default_rng(seed).integers(256, size=3072, dtype=np.uint8).tobytes()


def cifar_files() -> dict[str, bytes]:
    return {
        "train.bin": b"".join(record(n % 20, n, n) for n in (0, 42, 99)),
        "test.bin": record(3, 7, 100),
        "fine_label_names.txt": NAMES,
    }


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_two_halves_make_the_image() -> None:
    whole = images(6)
    cut = halve(whole, first_id=10)
    assert cut.tops.shape == cut.bottoms.shape == (6, 1, 4, 8)
    assert torch.equal(torch.cat([cut.tops, cut.bottoms], dim=2), whole.bitmaps)
    assert torch.equal(cut.bottom(12), cut.bottoms[2].float() / 255)
    with pytest.raises(SampleNotFound, match=r"no image 9; .*\[10, 16\)"):
        cut.bottom(9)
    with pytest.raises(InvalidArgument, match="7 pixels high"):
        halve(ImageSet(torch.zeros(1, 1, 7, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)))


def test_training_and_test_images_share_one_space_of_ids() -> None:
    task = halve_task(5, images(6), {"a": images(3, seed=1), "b": images(2, seed=2)})
    ids = [batch.image_ids for part in (task.train, *task.tests.values()) for batch in part.in_order(4)]
    assert torch.cat(ids).tolist() == list(range(11))
    assert torch.equal(task.bottom(7), task.tests["a"].bottoms[1].float() / 255)
    assert torch.equal(task.bottom(10), task.tests["b"].bottoms[1].float() / 255)
    with pytest.raises(SampleNotFound, match=r"no image 11; .*\[0, 11\)"):
        task.bottom(11)


def test_every_pass_asks_for_every_half_again_in_another_order() -> None:
    cut = halve(images(12))
    batches = list(cut.batches(4, seed=5, passes=3))
    passes = [torch.cat([batch.image_ids for batch in batches[n : n + 3]]).tolist() for n in (0, 3, 6)]
    assert all(sorted(pass_) == list(range(12)) for pass_ in passes)
    assert passes[0] != passes[1] != passes[2]
    again = [batch.image_ids.tolist() for batch in cut.batches(4, seed=5, passes=3)]
    assert again == [batch.image_ids.tolist() for batch in batches]
    assert torch.equal(batches[0].tops, cut.tops[batches[0].image_ids])
    assert torch.equal(batches[0].labels, cut.labels[batches[0].image_ids])
    with pytest.raises(InvalidArgument, match=r"batch size is 13.*\[1, 12\]"):
        next(cut.batches(13, seed=0))


@pytest.mark.parametrize("form", ["folder", "folder above", "tar.gz"])
def test_cifar_is_read_from_its_binary_version(form: str, tmp_path: Path) -> None:
    files = cifar_files()
    path = tmp_path / "cifar-100-binary"
    if form == "tar.gz":
        path = tmp_path / "cifar-100-binary.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(f"cifar-100-binary/{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    else:
        write_folder(path, files)
    found = load_cifar100(tmp_path if form == "folder above" else path)
    assert found.class_names[42] == "class_42"
    assert found.train.labels.tolist() == [0, 42, 99]
    assert found.test.labels.tolist() == [7]
    pixels = np.frombuffer(files["train.bin"], np.uint8).reshape(3, -1)[1, 2:]
    assert found.train.bitmaps[1].flatten().tolist() == pixels.tolist()
    assert halve(found.train).tops.shape == (3, 3, 16, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train.bin": b"x" * 3073}, r"train\.bin.*3,073 bytes"),
        ({"train.bin": b""}, r"train\.bin.*0 bytes"),
        ({"test.bin": record(20, 0, 0)}, "coarse class 20"),
        ({"test.bin": record(0, 0, 0) + record(0, 100, 0)}, "record 1 of test.bin.*fine class 100"),
        ({"fine_label_names.txt": b"a b"}, "names 2 classes"),
        ({"train": b"a pickle"}, "python version.*pickles.*binary version"),
    ],
)
def test_wrong_cifar_files_are_named(change: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load_cifar100(write_folder(tmp_path / "cifar", {**cifar_files(), **change}))


def test_cifar_that_is_not_there_or_cut_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not exist"):
        load_cifar100(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=r"no train\.bin, test\.bin"):
        load_cifar100(tmp_path / "empty")
    archive = tmp_path / "c.tar"
    write_tar(archive, [(f"c/{name}", content) for name, content in cifar_files().items()])
    archive.write_bytes(archive.read_bytes()[:5000])
    with pytest.raises(InvalidArgument, match=r"c\.tar is not a readable archive"):
        load_cifar100(archive)
