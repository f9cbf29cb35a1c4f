"""Three million flights as click samples: one that is more than 15 minutes late is a click.

The flights of January to June 2001 in the United States, by the Bureau of Transportation Statistics, as the npm package
``vega-datasets`` has them. May and June are held out by time.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.strings import hash_strings
from geartrain.workers.ctr.samples.click_samples import ClickSamples, SampleSchema
from geartrain.workers.ctr.samples.kinds import INTEGER, TEXT, FieldKind
from geartrain.workers.data.packages import Say, download_npm_package, member_of, require_pinned, write_pinned

PACKAGE, VERSION = "vega-datasets", "3.2.1"
FILE = "flights-3m.parquet"
SHA256 = "dbeb920c90f59b6ccaff823dcc3d08f25a97fa1ce128d93f40be4e931f5900b0"
LATE_MINUTES = 15
HELD_OUT_FROM = 988_675_200
"""1 May 2001, 0:00 UTC; the file's times have no zone."""
SCHEMA = SampleSchema(
    item=("destination",),
    crosses=(
        ("origin", "hour"),
        ("destination", "hour"),
        ("origin", "destination", "hour"),
        ("origin", "destination", "weekday"),
        ("origin", "destination", "slot", "weekday"),
    ),
    kinds={
        **dict.fromkeys(("origin", "destination"), FieldKind(item=TEXT)),
        **dict.fromkeys(("hour", "weekday", "slot", "distance"), FieldKind(item=INTEGER)),
    },
)
_MILES, _SLOT_MINUTES = 100, 10


def find_flights(cache: Path, say: Say) -> Path:
    """Return the file of flights: ``cache``/flights/flights-3m.parquet, fetched by npm the first time (18 MB).

    Raises ConfigError if npm cannot fetch it, or if it is not the pinned one.
    """
    path = cache / "flights" / FILE
    if not path.exists():
        _fetch(path, say)
    require_pinned(path, path.read_bytes(), SHA256)
    return path


def _fetch(path: Path, say: Say) -> None:
    packages = path.parent / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    say(f"Downloading 3,000,000 flights (18 MB, inside the npm package {PACKAGE}) to {path.parent}")
    reasons: list[str] = []
    try:
        archive = download_npm_package(f"{PACKAGE}@{VERSION}", packages, reasons.append)
        content = None if archive is None else member_of(archive, f"/{FILE}")
    finally:
        shutil.rmtree(packages, ignore_errors=True)
    if content is None:
        raise ConfigError(
            f"{FILE} is not in {path.parent}, and {reasons[0] if reasons else f'{PACKAGE} does not hold it'}. Check "
            f"the network, or put data/{FILE} of {PACKAGE} {VERSION} there"
        )
    write_pinned(path, content, SHA256)


def read_flights(path: Path) -> ClickSamples:
    """Read the ids of origin, destination, hour, weekday, slot (ten minutes of the day) and distance (100 miles).

    Raises ConfigError without pyarrow.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError as exc:
        raise ConfigError(
            f"flights need pyarrow, which cannot be imported: {exc}; pip install 'geartrain[data]'"
        ) from exc
    table = pq.read_table(path)
    seconds: Ids = table["date"].to_numpy().astype("datetime64[s]").astype(np.int64)
    minutes = seconds // 60
    fields = {
        "origin": hash_strings(table["origin"]),
        "destination": hash_strings(table["destination"]),
        "hour": minutes // 60 % 24,
        "weekday": (minutes // (24 * 60) + 3) % 7,  # 0 is Monday
        "slot": minutes // _SLOT_MINUTES % (24 * 60 // _SLOT_MINUTES),
        "distance": table["distance"].to_numpy() // _MILES,
    }
    airports = sorted({*table["origin"].unique().to_pylist(), *table["destination"].unique().to_pylist()})
    clicks = (table["delay"].to_numpy() > LATE_MINUTES).astype(np.float32)
    return ClickSamples(
        fields=fields,
        clicks=clicks,
        times=seconds,
        schema=SCHEMA,
        held_out_from=HELD_OUT_FROM,
        words=dict(zip(hash_strings(airports).tolist(), airports, strict=True)),
    )
