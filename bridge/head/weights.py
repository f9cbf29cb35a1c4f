"""Import and export of class centers: per-rank partial-FC files, one matrix, one safetensors file.

No step holds C·D at a time: files are mapped and read, rows pulled and written, in blocks of 8 MiB.
Legend: C classes, D width, n rows of one file.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from geartrain.ams.values.arguments import path_name
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, NonFinite
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.head.backends.row_stream import block_rows_for
from geartrain.bridge.head.loss.batch import with_zeros
from geartrain.bridge.head.loss.sub_centers import checked_dominant
from geartrain.bridge.rows.tables import TORCH_DTYPES, ReadableTable, as_numpy

if TYPE_CHECKING:
    from geartrain.bridge.head.class_head import ClassHead

EXPORTED_NAME = "weight"
"""Name of the tensor [C, D] of an exported file; [C, K, D] of classes with K centers."""
EXPORTED_BIASES = "bias"
"""Name of the tensor [C] of biases, if classes have them."""
SUFFIXES = (".pt", ".pth", ".safetensors", ".npy")
_RANK = re.compile(r"(?:rank|gpu|shard|part)\D?(\d+)", re.IGNORECASE)
_NPY_START = b"\x93NUMPY"
_SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "BF16"}

Read = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class _Part:
    """Matrix of one file: rows start … stop − 1 are ``read(start, stop)``."""

    path: Path
    num_rows: int
    read: Read
    biases: Tensor | None = None
    """Biases [n], if the file has them."""


@dataclass(frozen=True)
class _ExpectedShape:
    """Matrices that a head can take, and their number of classes."""

    dim: int
    sub_centers: int
    num_first: int | None
    """Number of first classes that may be given in place of all."""

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the shape is [n, D]; or with K centers a class [n · K, D], class by class, or [n, K, D]."""
        if len(shape) == 3:
            return self.sub_centers > 1 and list(shape[1:]) == [self.sub_centers, self.dim]
        return len(shape) == 2 and shape[1] == self.dim and shape[0] % self.sub_centers == 0

    def __str__(self) -> str:
        centers = self.sub_centers
        if centers == 1:
            return f"[n, {self.dim}], a row for each class"
        return f"[n, {centers}, {self.dim}] or [n · {centers}, {self.dim}], {centers} centers for each class"

    def part(self, path: Path, shape: Sequence[int], read: Read, biases: Tensor | None = None) -> _Part:
        """Return the part whose rows are whole classes."""
        if self.sub_centers == 1:
            return _Part(path, shape[0], read, biases)
        times = self.sub_centers if len(shape) == 2 else 1
        width = self.sub_centers * self.dim
        return _Part(
            path, shape[0] // times, lambda start, stop: read(start * times, stop * times).reshape(stop - start, width)
        )


def import_class_weights(
    head: ClassHead, paths: str | Path | Sequence[str | Path], *, key: str | None = None
) -> list[tuple[Path, int]]:
    """Overwrite the class centers by those in files; return each file and its number of classes, in their order.

    ``paths`` is one file [C, D], or files [n, D] in rank order whose classes follow one another, as partial FC of
    InsightFace and PLSC saves them (``rank:0_softmax_weight.pt``, …); or a folder of such files, taken in the order of
    the numbers in their names. A list in another order than that, or without one of the ranks, is refused. A file is a
    ``.safetensors`` or ``.npy``, or a ``.pt`` / ``.pth`` with a tensor or a state dict (loaded with
    ``weights_only=True``); ``key`` names its matrix where several would fit and none is called "weight". Rows are
    stored in the table's dtype, and their momentum becomes zero, as files have none. A head with biases takes those [n]
    beside the matrix ("fc.bias" beside "fc.weight"), or zeros. One with K centers a class takes files [n · K, D], class
    by class (as in InsightFace), or [n, K, D].

    The files hold all classes of the head; or, with ``num_live_classes=N``, the first N: so a head is enlarged.

    With ranks this is collective, and the first rank writes; of rows on ranks each reads its own from files that all of
    them see. All names, shapes and dtypes are checked before a row is written. Raises InvalidRows (naming file and
    shape), InvalidArgument (a file that cannot be read), NonFinite (naming the file; rows before it are written),
    SyncError if another rank failed. Costs one assign per 8 MiB and shard.
    """
    backend, wanted = head.backend, _ExpectedShape(head.dim, head.sub_centers, _num_live_prefix(head))
    table, peers = backend.table, backend.peers
    own = range(head.num_classes) if backend.local is None else backend.local.own_classes
    if peers is None:
        parts = _open_parts(_files(paths), table, wanted, key)
        _assign_all(table, parts, own)
    else:
        what = f"class weights of table {table.spec.name!r} were not imported"
        parts = peers.run_together(lambda: _open_parts(_files(paths), table, wanted, key), what)
        peers.write_together(lambda: _assign_all(table, parts, own), what)
    backend.imprinted = None
    return [(part.path, part.num_rows) for part in parts]


def export_class_weights(head: ClassHead, path: str | Path, *, dominant: Tensor | None = None) -> Path:
    """Write all class centers to one safetensors file, tensor ``weight`` [C, D] of the table's dtype; return the path.

    Biases are the tensor ``bias`` [C]. With K centers a class ``weight`` is [C, K, D]; or [C, D], only the centers with
    the numbers ``dominant`` [C] (:meth:`ClassHead.dominant_centers`). Memory O(1) except for biases: C · D may exceed
    it. The file appears whole or not at all; rows that are pushed meanwhile are in it from before or after. Costs one
    pull per 8 MiB and shard. With ranks, one of them calls it. For rows on ranks it is collective, and the first rank
    writes: one all-reduce per 8 MiB. Raises InvalidArgument, OSError, and then SyncError on the other ranks.
    """
    return write_centers(head, path, EXPORTED_NAME, dominant)


def write_centers(head: ClassHead, path: str | Path, name: str, dominant: Tensor | None = None) -> Path:
    """Do :func:`export_class_weights`, with the tensor called ``name``."""
    table, peers = head.table, head.backend.peers
    chosen_C = None if dominant is None else checked_dominant(dominant, head.num_classes, head.sub_centers)
    blocks = _blocks(table)

    def write(file: Path) -> None:
        check_export_path(file)
        if chosen_C is not None:
            _write_file(table.spec, file, name, _picked(blocks, chosen_C, head.dim), [head.num_classes, head.dim])
            return
        centers = [head.sub_centers] if head.sub_centers > 1 else []
        _write_file(table.spec, file, name, blocks, [head.num_classes, *centers, head.dim], has_biases=head.bias)

    if peers is None or head.backend.local is None:
        write(_path(path))
        return Path(path)
    failure: Exception | None = None
    try:
        file = _path(path)
        if peers.rank == 0:
            write(file)
    except Exception as exc:  # of any kind: the others wait for this rank
        failure = exc
    for _ in blocks:  # every rank takes part in every pull, even if the file was not written
        pass
    peers.raise_on_all_ranks(failure, f"class weights of table {table.spec.name!r} were not exported")
    return Path(path)


def check_export_path(path: Path) -> None:
    """Raise InvalidArgument unless the path can be exported to."""
    if path.is_dir() or path.suffix != ".safetensors":
        raise InvalidArgument(f"{path} is no file to export to; give the name of one that ends in .safetensors")


def export_rows(table: ReadableTable, path: Path) -> Path:
    """Do :func:`export_class_weights` for the rows of any dense table, as they are."""
    spec = table.spec
    check_export_path(path)
    if spec.num_rows is None:
        raise InvalidArgument(f"table {spec.name!r} is hashed: its rows are no matrix; export a dense table (num_rows)")
    _write_file(spec, path, EXPORTED_NAME, _blocks(table), [spec.num_rows, spec.dim])
    return path


def _blocks(table: ReadableTable) -> Iterator[npt.NDArray[Any]]:
    """Yield all rows in blocks; each must be used before the next is requested."""
    num_rows = table.spec.num_rows or 0
    step = min(block_rows_for(table.spec.row_bytes), num_rows)
    rows = np.empty((step, table.spec.dim), table.spec.numpy_dtype)
    for start in range(0, num_rows, step):
        ids = np.arange(start, min(start + step, num_rows), dtype=np.int64)
        table.pull_into(ids, rows[: len(ids)])
        yield rows[: len(ids)]


def _picked(blocks: Iterator[npt.NDArray[Any]], numbers_C: Tensor, dim: int) -> Iterator[npt.NDArray[Any]]:
    """Yield of each row [K · D] the center with its number."""
    start = 0
    for rows in blocks:
        numbers = numbers_C[start : start + len(rows)].numpy()
        start += len(rows)
        yield rows.reshape(len(rows), -1, dim)[np.arange(len(rows)), numbers]


def _write_file(
    spec: TableSpec,
    path: Path,
    name: str,
    blocks: Iterator[npt.NDArray[Any]],
    shape: Sequence[int],
    *,
    has_biases: bool = False,
) -> None:
    """Write ``blocks`` of rows as the tensor ``name`` of ``shape``; their last column is biases if ``has_biases``."""
    kind, itemsize = _SAFETENSORS_DTYPES[spec.dtype], spec.numpy_dtype.itemsize
    width, middle = math.prod(shape[1:]), math.prod(shape) * itemsize
    tensors = {name: {"dtype": kind, "shape": list(shape), "data_offsets": [0, middle]}}
    if has_biases:
        end = middle + shape[0] * itemsize
        tensors[EXPORTED_BIASES] = {"dtype": kind, "shape": [shape[0]], "data_offsets": [middle, end]}
    header = json.dumps({"__metadata__": {"table": spec.name}, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    with _replacing(path) as temporary, temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        biases: list[bytes] = []
        for rows in blocks:
            file.write(np.ascontiguousarray(rows[:, :width]).view(np.uint8).data)
            biases.append(rows[:, width:].tobytes())
        file.writelines(biases)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as exc:
        if exc.errno is None or exc.filename is not None:
            raise
        raise OSError(exc.errno, f"{exc.strerror}, and the file was not written", str(path)) from exc  # a full disk
    finally:
        temporary.unlink(missing_ok=True)


def _files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
        paths = [paths]
    given = [_path(path) for path in paths]
    if len(given) == 1 and given[0].is_dir():
        folder = given[0]
        given = sorted((path for path in folder.iterdir() if path.suffix in SUFFIXES), key=_by_numbers)
        if not given:
            raise InvalidArgument(
                f"{folder} has no weight file ({', '.join(SUFFIXES)}); give another folder, or a file"
            )
    if len({path.resolve() for path in given}) < len(given):
        twice = next(path for path in given if [other.resolve() for other in given].count(path.resolve()) > 1)
        raise InvalidArgument(f"{twice} was given twice; give the file of each rank once, in rank order")
    if not given:
        raise InvalidArgument("no weight file was given; give one, or those of all ranks in their order")
    _check_order(given)
    return given


def _check_order(given: list[Path]) -> None:
    """Raise InvalidArgument where the numbers in the files' names contradict their order, or a rank has none or two.

    The number of a rank follows that word; without it, it is the only number that differs from file to file.
    """
    files = [path.absolute() for path in given]
    names = [os.path.relpath(file, os.path.commonpath([each.parent for each in files])) for file in files]
    ranks = [int(found[-1]) for name in names if (found := _RANK.findall(name))]
    listed = ", ".join(map(str, given))
    if len(given) > 1 and len(ranks) == len(given):
        missing = sorted(set(range(min(1, *ranks), max(ranks))) - set(ranks))
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if missing or twice:
            wrong = f"no file of rank {missing[0]}" if missing else f"several files of rank {twice[0]}"
            raise InvalidArgument(f"{listed} hold {wrong}; give the file of each rank once, in rank order")
    else:
        numbers = [[int(number) for number in re.findall(r"\d+", name)] for name in names]
        differing = [each for each in zip(*numbers, strict=False) if len(set(each)) > 1]
        ranks = list(differing[0]) if len(differing) == 1 and len(set(differing[0])) == len(names) else []
    if ranks != sorted(ranks):
        right = ", ".join(str(path) for _, path in sorted(zip(ranks, given, strict=True)))
        raise InvalidArgument(
            f"{listed} are not in the order of the numbers in their names, in which their classes follow one another "
            f"(as text, 10 is before 2); give {right}"
        )


def _path(path: object) -> Path:
    return Path(path_name("path", path, "the name of a file or folder"))


def _by_numbers(path: Path) -> tuple[list[int], str]:
    """Return a sort key by which rank 10 comes after rank 9."""
    return [int(number) for number in re.findall(r"\d+", path.stem)], path.name


def _num_live_prefix(head: ClassHead) -> int | None:
    """Return N if the live classes are 0 … N − 1 and others may come after them."""
    live_classes = head.backend.live_classes
    return (
        live_classes.num_live_classes
        if live_classes.retired_runs.tolist() == [[live_classes.num_live_classes, live_classes.num_classes]]
        else None
    )


def _open_parts(paths: list[Path], table: ReadableTable, wanted: _ExpectedShape, key: str | None) -> list[_Part]:
    spec = table.spec
    parts = [_open(path, wanted, key) for path in paths]
    total = sum(part.num_rows for part in parts)
    if total not in (spec.num_rows, wanted.num_first):
        centers = "" if wanted.sub_centers == 1 else f"{wanted.sub_centers}, "
        listed = ", ".join(f"{part.path} [{part.num_rows}, {centers}{wanted.dim}]" for part in parts)
        live_classes = f" ({wanted.num_first:,} of them live)" if wanted.num_first is not None else ""
        larger = f", or a larger one with num_live_classes={total}" if total < (spec.num_rows or 0) else ""
        raise InvalidRows(
            f"{listed} {'hold' if len(parts) > 1 else 'holds'} {total:,} classes, table {spec.name!r} has "
            f"{spec.num_rows:,}{live_classes}; give the files of all ranks, or a head of {total:,} classes{larger}"
        )
    return parts


def _open(path: Path, wanted: _ExpectedShape, key: str | None) -> _Part:
    opening = {".npy": _open_npy, ".safetensors": _open_safetensors, ".pt": _open_torch, ".pth": _open_torch}
    if path.suffix not in opening:
        raise InvalidArgument(f"{path} is no weight file; its name must end in one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise InvalidArgument(f"{path} does not exist; give a weight file ({', '.join(SUFFIXES)})")
    return opening[path.suffix](path, wanted, key)


def _open_npy(path: Path, wanted: _ExpectedShape, key: str | None) -> _Part:  # noqa: ARG001
    with path.open("rb") as file:
        if (start := file.read(len(_NPY_START))) != _NPY_START:  # numpy would open archives and pickles, too
            raise InvalidArgument(f"{path} is not a readable .npy file: it begins with {start!r}")
    try:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, TokenError, OverflowError) as exc:
        raise InvalidArgument(f"{path} is not a readable .npy file: {exc}") from exc
    native = matrix.dtype.newbyteorder("=")
    _require_matrix(path, list(matrix.shape), matrix.dtype, native.kind == "f" and native.itemsize <= 8, wanted)
    return wanted.part(path, matrix.shape, lambda start, stop: torch.from_numpy(np.array(matrix[start:stop], native)))


def _open_safetensors(path: Path, wanted: _ExpectedShape, key: str | None) -> _Part:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: list(tensor.get_shape()) for name, tensor in tensors.items()}
            name = _chosen(path, shapes, wanted, key)
            dtype = tensors[name].get_dtype()
            beside = _biases_name(name)
            biases = file.get_tensor(beside) if shapes.get(beside) == shapes[name][:1] else None
    except (OSError, SafetensorError) as exc:
        raise InvalidArgument(f"{path} is not a readable safetensors file: {exc}") from exc
    _require_matrix(path, shapes[name], dtype, dtype in ("F64", "F32", "F16", "BF16"), wanted)

    def read(start: int, stop: int) -> Tensor:
        with safe_open(path, framework="pt") as file:
            rows: Tensor = file.get_slice(name)[start:stop]
        return rows

    return wanted.part(path, shapes[name], read, biases)


def _open_torch(path: Path, wanted: _ExpectedShape, key: str | None) -> _Part:
    try:
        # mapped where possible: files from before torch 1.6 are no archives
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as exc:  # torch raises errors of many unrelated kinds on a damaged or forbidden file
        raise InvalidArgument(
            f"{path} cannot be read as tensors alone ({type(exc).__name__}); save a tensor or a state dict of tensors "
            "with torch.save, or use .safetensors or .npy"
        ) from exc
    tensors: dict[str, Tensor] = {"": held} if isinstance(held, Tensor) else {}
    if isinstance(held, dict):
        tensors = dict(_tensors_in(held))
    name = _chosen(path, {name: list(tensor.shape) for name, tensor in tensors.items()}, wanted, key)
    matrix = tensors[name].detach()
    if matrix.layout != torch.strided or matrix.device.type != "cpu":
        raise InvalidRows(f"{path} holds a {matrix.layout} tensor on {matrix.device}; save a dense one with its values")
    _require_matrix(path, list(matrix.shape), matrix.dtype, matrix.is_floating_point(), wanted)
    biases = tensors.get(_biases_name(name))
    biases = None if biases is None or biases.shape != matrix.shape[:1] else biases.detach()
    return wanted.part(path, matrix.shape, lambda start, stop: matrix[start:stop], biases)


def _tensors_in(held: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state dict and of the dicts in it, by their names joined with dots."""
    for name, value in held.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _tensors_in(value, f"{prefix}{name}.")


def _biases_name(name: str) -> str:
    """Return the name of the biases beside a matrix: "fc.bias" beside "fc.weight"."""
    return name.removesuffix(EXPORTED_NAME) + EXPORTED_BIASES


def _chosen(path: Path, shapes: dict[str, list[int]], wanted: _ExpectedShape, key: str | None) -> str:
    """Return the name of the matrix: ``key``, or the only one [n, D], or of several the one called "weight"."""
    held = ", ".join(f"{name or 'a tensor'} {shape}" for name, shape in shapes.items()) or "no tensor"
    if key is not None and "" not in shapes:
        if key not in shapes:
            raise InvalidRows(f"{path} has no tensor {key!r}; it holds {held}")
        return key
    fitting = [name for name, shape in shapes.items() if wanted.fits(shape)]
    if len(fitting) > 1 and EXPORTED_NAME in fitting:
        return EXPORTED_NAME
    if len(fitting) > 1:
        found = ", ".join(f"{name} {shapes[name]}" for name in fitting)
        raise InvalidRows(f"{path} holds {found}; name one with key=")
    if not fitting:
        raise InvalidRows(f"{path} holds {held}; the head needs a matrix {wanted}")
    return fitting[0]


def _require_matrix(path: Path, shape: list[int], dtype: Any, is_float: bool, wanted: _ExpectedShape) -> None:
    if not wanted.fits(shape):
        raise InvalidRows(f"{path} has shape {shape}; the head needs {wanted}")
    if not is_float:
        raise InvalidRows(f"{path} is of {dtype}; weights must be float16, bfloat16, float32 or float64")


def _assign_all(table: ReadableTable, parts: list[_Part], own: range) -> None:
    start = 0
    for part in parts:
        _assign(table, part, start, own)
        start += part.num_rows


def _assign(table: ReadableTable, part: _Part, first: int, own: range) -> None:
    """Assign the rows of one file to the classes from ``first`` on; a rank reads its own."""
    spec = table.spec
    end = min(part.num_rows, own.stop - first)
    step = block_rows_for(spec.row_bytes)
    for start in range(max(0, own.start - first), end, step):
        stop = min(start + step, end)
        rows = part.read(start, stop)
        if part.biases is not None and rows.shape[1] < spec.dim:
            rows = torch.cat([rows, part.biases[start:stop, None].to(rows.dtype)], 1)
        rows = with_zeros(rows, spec.dim).to(TORCH_DTYPES[spec.dtype]).contiguous()
        if not math.isfinite(float(rows.float().abs().amax())):
            wrong = start + int((~torch.isfinite(rows).all(dim=1)).nonzero()[0])
            raise NonFinite(
                f"{part.path}, row {wrong} (class {first + wrong}), holds NaN or infinity, or values beyond the range "
                f"of {spec.dtype}; the classes below {first + start} are imported"
            )
        table.assign(np.arange(first + start, first + stop, dtype=np.int64), as_numpy(rows))
