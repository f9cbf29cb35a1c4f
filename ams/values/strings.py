"""Hashing of strings to ids."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidIds
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted

_KINDS_OF_TEXT = "USTO"
"""numpy's codes of str, bytes, strings of variable length, and objects."""


def hash_strings(strings: Any, seed: int = 0, bits: int = 63) -> Ids:
    """Return an id for each string: the low ``bits`` of its XXH3 (64 bits) under ``seed``, int64 ≥ 0 of the same shape.

    The same on every machine and in every version. A str is hashed as its UTF-8, so that "a" and b"a" are one id.

    Two strings may have one id, and so one row. Of n different strings the expected number of such pairs is about n² /
    2^(bits + 1), for 63 bits n² / 2^64. While it is small it is the probability that there is one (the birthday
    problem):

    | strings | 10^6 | 10^7 | 10^8 | 10^9 |
    |---|---|---|---|---|
    | 63 bits | 5.4e-8 | 5.4e-6 | 5.4e-4 | 0.054 |
    | 40 bits | 0.45 | 45 | 4,500 | 450,000 |

    Cost: about 0.15 µs a string of some ten letters, on one core, 0.1 µs in an array of pyarrow; in its dictionaries
    once for each of their words.

    Args:
        strings: A list or tuple of str or bytes, nested ones of equal lengths too; a numpy array of str, bytes or
            objects, of any shape; a pyarrow array or chunked array of strings or binaries, also encoded as a
            dictionary; anything else that ``numpy.asarray`` makes such an array of (a pandas Series). numpy's arrays of
            bytes forget zero bytes at the end of each.
        seed: From 0 to 2^64 − 1. Another one gives other ids: one for each field keeps fields of one table apart.
        bits: From 1 to 63: ids are below 2^bits.

    Raises:
        InvalidIds: ``strings`` is one string or holds something else (None, NaN, a number); it names the position.
        InvalidArgument: ``seed`` or ``bits`` is out of range.
    """
    seed, bits = integer("seed", seed, 0, 2**64 - 1), integer("bits", bits, 1, 63)
    is_arrow = type(strings).__module__.partition(".")[0] == "pyarrow" and hasattr(strings, "null_count")
    hashes = _hashed_arrow(strings, seed) if is_arrow else _hashed(strings, seed)
    return (hashes & np.uint64(2**bits - 1)).view(np.int64)


def _hashed(strings: Any, seed: int) -> npt.NDArray[np.uint64]:
    if isinstance(strings, str | bytes | bytearray | memoryview):
        raise InvalidIds(f"strings is {quoted(strings)}; give a list or an array of strings")
    if isinstance(strings, list | tuple) and not any(
        issubclass(kind, list | tuple) for kind in set(map(type, strings))
    ):
        return _hashed_list(list(strings), seed, (len(strings),))
    array = np.array(strings, object) if isinstance(strings, list | tuple) else strings
    if not isinstance(array, np.ndarray):
        array = np.asarray(array)
    if array.ndim == 0 or (array.size and array.dtype.kind not in _KINDS_OF_TEXT):
        raise InvalidIds(f"strings is {quoted(strings)} of {array.dtype}; give a list or an array of strings")
    # Masked elements come as None.
    return _hashed_list(array.ravel().tolist(), seed, array.shape).reshape(array.shape)


def _hashed_list(strings: list[Any], seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """Return the hashes [N] of N strings of an array of ``shape``."""
    kinds = set(map(type, strings))  # a check of every string in Python would take longer than its hash
    for kind in kinds:
        if not issubclass(kind, str | bytes):
            position = next(at for at, text in enumerate(strings) if type(text) is kind)
            raise _not_text(strings[position], position, shape)
    is_text = {issubclass(kind, str) for kind in kinds}
    try:
        if is_text == {True, False}:
            strings = [text.encode() if isinstance(text, str) else text for text in strings]
        values = map(str.encode, strings) if is_text == {True} else iter(strings)
        return _digests(values, seed, len(strings))
    except UnicodeEncodeError as exc:
        position = next(at for at, text in enumerate(strings) if text == exc.object)
        raise _not_text(exc.object, position, shape, f" is no text: {exc.reason}") from exc


def _digests(values: Iterable[bytes], seed: int, count: int) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, values, repeat(seed)), np.uint64, count)


def _not_text(value: object, position: int, shape: tuple[int, ...], why: str = "") -> InvalidIds:
    place = ", ".join(str(int(index)) for index in np.unravel_index(position, shape))
    why = why or f" is {quoted(value)}"
    return InvalidIds(
        f"strings[{place}]{why}; it must be a str or bytes: leave it out, or fill it with a word of its own"
    )


def _hashed_arrow(strings: Any, seed: int) -> npt.NDArray[np.uint64]:
    """Return the hashes of an array or its chunks, without :mod:`pyarrow`, which may not be installed."""
    if strings.null_count:
        raise _not_text(None, int(np.argmax(strings.is_null().to_numpy(zero_copy_only=False))), (len(strings),))
    if hasattr(strings, "chunks"):
        hashed = [_hashed_arrow(chunk, seed) for chunk in strings.chunks]
        return np.concatenate([np.empty(0, np.uint64), *hashed])
    if hasattr(strings, "dictionary"):
        places: npt.NDArray[Any] = strings.indices.to_numpy(zero_copy_only=False)
        hashes: npt.NDArray[np.uint64] = _hashed_arrow(strings.dictionary, seed)[places]
        return hashes
    if str(strings.type) in ("string", "large_string"):  # as bytes: no str is made and encoded
        strings = strings.cast(str(strings.type).replace("string", "binary"))
        return _digests(strings.to_numpy(zero_copy_only=False), seed, len(strings))
    return _hashed(strings.to_numpy(zero_copy_only=False), seed)
