"""The role ``serve``: trained models over HTTP, from this process or from several workers.

A parent of workers needs few imports; what answers requests is imported by the workers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from geartrain.ams.observe.metrics import Metric
from geartrain.ams.values.config import ClusterConfig, ServeConfig, format_address, split_address
from geartrain.ams.values.errors import ConfigError
from geartrain.launch.serving.workers import DRAIN_SECONDS, Workers
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.http.ports import certificates_of, listening_socket
from geartrain.serving.service import ModelService, named_folders

if TYPE_CHECKING:
    from geartrain.launch.serving.server import ModelServer


class ServeRole:
    """The models of a configuration, served by this process or by workers. A
    :class:`geartrain.launch.role.RunningRole`.
    """

    def __init__(self, config: ClusterConfig) -> None:
        """Load the models and listen. Raises ConfigError, ModelDamaged: no model, or the address cannot be bound."""
        told = config.serve
        if not told.models and told.follow is None:
            raise ConfigError(
                "there is nothing to serve: give the folder of a model, as 'geartrain serve exported/', which "
                "'geartrain export RUN --to exported/' writes"
            )
        _require_startable(told)
        self.models = list(named_folders(told.models))
        self._serving: ModelServer | Workers
        if told.workers == 1:
            from geartrain.launch.serving.server import ModelServer

            listener = listening_socket(told.listen, "serve")
            self.address = format_address(split_address(told.listen)[0], listener.getsockname()[1])
            self._serving = here = ModelServer(config, listener)
            self.service = here.service
            self.grpc = None if here.grpc is None else here.grpc.address
            """host:port of gRPC; None without it."""
        else:
            self._serving = workers = Workers(config)
            self.address, self.grpc = workers.address, workers.grpc
            self.service = ModelService(Catalog(), Batcher(threads=0))
            self.service.everywhere = workers.everywhere
        self.url = f"http{'s' if certificates_of(config) else ''}://{self.address}"
        self._following = ExitStack()
        if told.follow is not None:
            from geartrain.serving.live.start import follow

            try:
                follow(self.service, told, config.client, self._following)
            except BaseException:
                self.stop(0)
                raise
            self.models += list(self.service.following)

    def metrics(self) -> Iterator[Metric]:
        """Yield the counters of the service."""
        yield from self.service.metrics()

    @property
    def stop_reason(self) -> str | None:
        """Reason why it ended by itself; None if it did not."""
        return self._serving.stop_reason

    def wait(self) -> None:
        """Block until the service has ended."""
        self._serving.wait()

    def stop(self, grace_seconds: float) -> None:
        """Answer the requests in progress, refuse others, close the models. Any grace is at least
        :data:`DRAIN_SECONDS`."""
        self._following.close()
        self._serving.stop(max(grace_seconds, DRAIN_SECONDS) if grace_seconds else 0)


def _require_startable(told: ServeConfig) -> None:
    """Raise ConfigError if a library is missing, or if a changed setting would have no effect."""
    for library in ("starlette", "uvicorn", "onnxruntime"):
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"a service needs {library}, which is not installed: pip install 'geartrain[serve]'")
    if told.part is not None and told.parts:
        raise ConfigError(f"part is {told.part!r}, and parts are set; a service has class rows itself, or asks others")
    for needed, names in {"canary": ("share",), "follow": ("versions", "keep", "recall", "part", "backbone")}.items():
        for name in names if getattr(told, needed) is None else ():
            if (value := getattr(told, name)) != ServeConfig.model_fields[name].default:
                raise ConfigError(f"{name} is {value!r} without {needed}; give --{needed}")
