"""Quantization of an ONNX network: float16, or int8 with ranges measured on images."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.workers.models.onnx_backbone import needed

Precision = Literal["fp32", "fp16", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
CALIBRATION_IMAGES = 512
_PRODUCTS = ["Conv", "Gemm", "MatMul"]
"""Operations that are faster in 8 bits; all others stay float32."""

Batch = Mapping[str, npt.NDArray[Any]]
"""Inputs of the network by name."""


def require_precision(precision: str) -> Precision:
    """Return ``precision``. Raises ConfigError if it is unknown."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    return precision


def lower_precision(path: Path, precision: Precision, batches: Iterable[Batch]) -> None:
    """Replace the network by one of ``precision``, with the same inputs and outputs.

    fp16 halves the bytes. int8 quarters them: weights have a scale per channel, activations one by their range over
    ``batches``; the file has integer and float32 operations (QDQ). Raises ConfigError without the libraries,
    InvalidArgument, OSError.
    """
    if precision == "fp32":
        return
    try:
        if precision == "fp16":
            onnx = needed("onnx")
            lower = needed("onnxruntime.transformers.float16").convert_float_to_float16
            onnx.save(lower(onnx.load(path), keep_io_types=True), path)
        else:
            _to_int8(path, batches)
    except (ConfigError, InvalidArgument, OSError):
        raise
    except Exception as exc:  # of many unrelated kinds
        raise InvalidArgument(
            f"the network cannot be made {precision}: {type(exc).__name__}: {exc}; export it with --precision fp32"
        ) from exc


class _Reader:
    """Batches, in the interface of onnxruntime's calibration."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._left = iter(batches)

    def get_next(self) -> dict[str, npt.NDArray[Any]] | None:
        """Return the next batch; None after the last."""
        batch = next(self._left, None)
        return None if batch is None else dict(batch)


def _to_int8(path: Path, batches: Iterable[Batch]) -> None:
    quantization = needed("onnxruntime.quantization")
    prepared = path.with_name(f"{path.name}.prepared")

    with _quiet():
        prepare = needed("onnxruntime.quantization.shape_inference").quant_pre_process
        prepare(str(path), str(prepared), skip_symbolic_shape=True)
        quantization.quantize_static(
            str(prepared),
            str(path),
            _Reader(batches),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=_PRODUCTS,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            calibrate_method=quantization.CalibrationMethod.MinMax,
        )
    prepared.unlink()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's messages through the root logger."""
    level = logging.root.level
    logging.root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.root.setLevel(level)
