"""Samples by their name for ``--data``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import quoted
from geartrain.workers.ctr.samples.click_samples import ClickSamples
from geartrain.workers.ctr.samples.flights import find_flights, read_flights
from geartrain.workers.ctr.samples.kinds import FieldKind
from geartrain.workers.ctr.samples.movielens import RATINGS, find_movielens, read_movielens
from geartrain.workers.ctr.samples.settings import PLAIN_FILES, FileSettings
from geartrain.workers.data.packages import Say
from geartrain.workers.samples.files import require_arrow

PUBLIC: dict[str, tuple[Callable[[Path, Say], Path], Callable[[Path], ClickSamples]]] = {
    "movielens": (find_movielens, read_movielens),
    "flights": (find_flights, read_flights),
}
"""By name: functions that fetch the samples into a cache, and read them from there."""
_WHAT = (
    f"{', '.join(PUBLIC)}, files of Parquet, CSV or sample trees (a file, a folder, a pattern with * or a URL), a "
    "topic (kafka:TOPIC@BROKERS), or a folder with the files of MovieLens-100K"
)


def is_own(source: str | None) -> bool:
    """Return whether ``--data`` names one's own files. Raises as :func:`required`, and ConfigError without pyarrow."""
    source = required(source)
    if is_topic(source):
        raise ConfigError(f"{source} is a topic, whose samples are not read at once; give files")
    if source in PUBLIC or (Path(source) / RATINGS).exists():
        return False
    require_arrow()
    return True


def load_samples(
    source: str | None,
    cache: Path,
    say: Say,
    kinds: Mapping[str, FieldKind] | None = None,
    fold: Sequence[str] = (),
    files: FileSettings = PLAIN_FILES,
) -> ClickSamples:
    """Return the samples that ``--data`` names, in memory.

    ``kinds`` are those of the run that they are for, and say which fields are folded; without them ``fold`` does.
    Raises ConfigError, SourceError, and InvalidArgument for values of another kind.
    """
    if is_own(source):
        return own_samples(str(source), kinds=kinds, fold=fold, files=files)
    if fold:
        raise ConfigError(f"fold names {fold[0]!r}; public samples have ids already: leave it out")
    if source in PUBLIC:
        find, read = PUBLIC[source]
        return read(find(cache, say))
    return read_movielens(Path(str(source)))


def required(source: str | None) -> str:
    """Return ``source``. Raises ConfigError if ``--data`` names no samples, or none that exist."""
    if source is None:
        raise ConfigError(f"which samples? Give --data: {_WHAT}")
    if (
        source in PUBLIC
        or is_topic(source)
        or "://" in source
        or any(sign in source for sign in "*?[")
        or Path(source).exists()
    ):
        return source
    missing = "" if "/" not in source and "." not in source else ", which is not there"
    raise ConfigError(f"--data is {quoted(source)}{missing}; it must be {_WHAT}")


def own_samples(
    path: str,
    *,
    clicks: bool = True,
    kinds: Mapping[str, FieldKind] | None = None,
    fold: Sequence[str] = (),
    files: FileSettings = PLAIN_FILES,
) -> ClickSamples:
    """Return samples of files, in memory; see :class:`OwnSamples`. Raises ConfigError without pyarrow."""
    require_arrow()
    from geartrain.workers.ctr.samples.own import OwnSamples

    return OwnSamples(path, clicks=clicks, kinds=kinds, fold=fold, files=files).in_memory()


def is_topic(source: str | None) -> bool:
    """Return whether ``--data`` names a Kafka topic."""
    return source is not None and source.startswith("kafka:")


def found_again(source: str) -> str:
    """Return a name of ``source`` that is valid in any working folder."""
    return source if source in PUBLIC or is_topic(source) or "://" in source else str(Path(source).resolve())
