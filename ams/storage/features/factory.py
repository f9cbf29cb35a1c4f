"""Feature stores by URL: memory, LMDB or Redis. Nothing is loaded but what is opened."""

from __future__ import annotations

from geartrain.ams.storage.features.store import DEFAULT_RECORD_SECONDS, FeatureStore, checked_namespace
from geartrain.ams.values.config import feature_store
from geartrain.ams.values.errors import ConfigError, InvalidArgument

_NO_REDIS = "a redis:// store needs the package redis: pip install 'geartrain[redis]'; or give memory or lmdb:FOLDER"


def open_store(
    url: str,
    *,
    namespace: str = "features",
    max_bytes: int | None = None,
    record_seconds: float | None = DEFAULT_RECORD_SECONDS,
    timeout_seconds: float = 5.0,
) -> FeatureStore:
    """Open ``"memory"``, ``"lmdb:FOLDER"`` or ``"redis://HOST:PORT/DB"`` (``rediss://``, ``unix://SOCKET?db=0`` too).

    A password lies in a file, ``"redis://USER@HOST:PORT/0?password_file=/run/secrets/redis"``: one in the URL itself
    is seen by whoever lists processes.

    Args:
        url: what to open. Memory ends with the process; a folder is held by one process at a time; a Redis server is
            shared by all that name it.
        namespace: keeps records of different kinds apart; letters, digits and ``._-/``, at most 100.
        max_bytes: most bytes of sealed values, the least recently used records go first; None: no bound. A Redis
            server bounds itself (``maxmemory``), so there it must be None.
        record_seconds: Redis only: a record goes so long after it was written; None: never.
        timeout_seconds: Redis only: longest wait for the server to connect, and for each reply.

    Raises:
        ConfigError: the URL names no store, the folder cannot be used, or the package is missing.
        InvalidArgument: another argument is outside its range.
        StateDamaged: the folder's file is damaged.
        StoreUnavailable: the server does not answer.
    """
    feature_store(url)
    checked_namespace(namespace)
    if max_bytes is not None and max_bytes < 1:
        raise InvalidArgument(f"max_bytes is {max_bytes}; it must be at least 1, or None for no bound")
    if url == "memory":
        from geartrain.ams.storage.features.memory_features import MemoryFeatures

        return MemoryFeatures(namespace, max_bytes=max_bytes)
    if url.startswith("lmdb:"):
        from geartrain.ams.storage.features.lmdb_features import LmdbFeatures

        return LmdbFeatures(url.removeprefix("lmdb:"), namespace, max_bytes=max_bytes)
    if max_bytes is not None:
        raise InvalidArgument(
            f"max_bytes is {max_bytes}; a Redis server bounds itself for all who share it: start it with "
            "--maxmemory BYTES --maxmemory-policy volatile-lru and leave max_bytes out"
        )
    try:
        from geartrain.ams.storage.features.redis_features import RedisFeatures
    except ImportError as exc:
        raise ConfigError(_NO_REDIS) from exc
    return RedisFeatures(url, namespace, record_seconds=record_seconds, timeout_seconds=timeout_seconds)
