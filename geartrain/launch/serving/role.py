"""The role ``serve``: trained models over HTTP, in this process or in several workers."""

from __future__ import annotations

import gc
import socket
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from geartrain.ams.observe.metrics import Metric
from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.values.config import NO_FOLDER, ClusterConfig, join_address, split_address
from geartrain.ams.values.errors import ConfigError
from geartrain.launch.serving.workers import Workers
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.cores import use_threads
from geartrain.serving.folder import load_folder
from geartrain.serving.http.app import make_app
from geartrain.serving.http.callers import Callers
from geartrain.serving.http.limits import Limits
from geartrain.serving.http.server import HttpServer, listening_socket, shared_port
from geartrain.serving.live.start import follow
from geartrain.serving.metrics import ServingCounts
from geartrain.serving.service import ModelService, named_folders, open_models

if TYPE_CHECKING:
    from geartrain.serving.kserve.service import InferenceServer

DRAIN_SECONDS = 3.0


class ModelServer:
    """Serves the models of a configuration on a socket that listens, on threads of this process."""

    def __init__(self, config: ClusterConfig, listener: socket.socket) -> None:
        """Load the models. Raises ConfigError, ModelDamaged; the socket is closed then, and when it ends."""
        told = config.serve
        folder = certificates_of(config)
        warnings.filterwarnings("ignore", module=r"PIL\.")  # a line, kept for ever, for each picture that is damaged
        callers = Callers(told.listen, folder, told.origins, is_open=told.insecure)
        use_threads(told.threads)
        catalog = Catalog(load_folder)
        counts = ServingCounts()
        batcher = Batcher(
            max_batch=told.max_batch,
            max_wait_seconds=told.max_wait_millis / 1000,
            max_queued=told.max_queued,
            on_batch=counts.batch,
        )
        self.service = ModelService(catalog, batcher, counts)
        self.grpc: InferenceServer | None = None
        """The port of gRPC, if there is to be one."""
        try:
            tls, renew = None, None
            if folder is not None:
                tls, renew = Credentials.mine(told.listen).https(shows_certificate=not callers.want_tokens)
            open_models(catalog, told)
            gc.collect()
            gc.freeze()  # else looking through all that was imported stops answers for 0.1 s, now and then
            if told.grpc is not None:
                from geartrain.serving.kserve.service import InferenceServer  # gRPC with it

                self.grpc = InferenceServer(told.grpc, self.service, told, folder)
            self._server = HttpServer(
                make_app(self.service, callers, Limits.of(told)),
                listener,
                split_address(told.listen)[0],
                name="http",
                tls=tls,
                each_second=renew,
                headers_seconds=told.body_seconds,
                grace_seconds=DRAIN_SECONDS,
            )
        except BaseException:
            self._stop_grpc(0)
            listener.close()
            self.service.close()
            raise
        if self.grpc is not None:
            self.grpc.ready()

    @property
    def end_reason(self) -> str | None:
        """Why it ended by itself; None if it did not."""
        return self._server.end_reason

    def wait(self) -> None:
        """Block until it has ended."""
        self._server.wait()

    def stop(self, grace_seconds: float) -> None:
        """Answer the requests under way, take no others, close the models."""
        self._stop_grpc(grace_seconds)
        self._server.stop(grace_seconds)
        self.service.close()

    def _stop_grpc(self, grace_seconds: float) -> None:
        if self.grpc is not None:
            self.grpc.stop(grace_seconds)


class ServeRole:
    """The models of a configuration, served by this process or by workers. A
    :class:`geartrain.launch.role.RunningRole`."""

    def __init__(self, config: ClusterConfig) -> None:
        """Load the models and listen. Raises ConfigError, ModelDamaged: no model, or nobody can listen there."""
        told = config.serve
        if not told.models and told.follow is None:
            raise ConfigError(
                "there is nothing to serve: give the folder of a model, as 'geartrain serve exported/', which "
                "'geartrain export RUN --to exported/' writes"
            )
        self.models = list(named_folders(told.models))
        listener = listening_socket(told.listen, "serve")
        self.address = join_address(split_address(told.listen)[0], listener.getsockname()[1])
        self.url = f"http{'s' if certificates_of(config) else ''}://{self.address}"
        self.grpc: str | None = None
        """host:port of gRPC, if it is to be there."""
        self._shared: socket.socket | None = None
        self.workers: Workers | None = None
        self._here: ModelServer | None = None
        if told.workers == 1:
            self._here = ModelServer(config, listener)
            self.service = self._here.service
            self.grpc = None if self._here.grpc is None else self._here.grpc.address
        else:
            if told.grpc is not None:
                self._shared = shared_port(told.grpc)
                self.grpc = join_address(split_address(told.grpc)[0], self._shared.getsockname()[1])
                config = config.model_copy(update={"serve": told.model_copy(update={"grpc": self.grpc})})
            try:
                self.workers = Workers(config, listener)
            except BaseException:
                self._close_shared()
                raise
            self.service = ModelService(Catalog(), Batcher(threads=0))
            self.service.everywhere = self.workers.everywhere
        self._following = ExitStack()
        if told.follow is not None:
            try:
                follow(self.service, told, config.client, self._following)
            except BaseException:
                self.stop(0)
                raise
            self.models += list(self.service.following)

    def metrics(self) -> Iterator[Metric]:
        """What it counts."""
        yield from self.service.metrics()

    @property
    def end_reason(self) -> str | None:
        """Why it ended by itself; None if it did not."""
        return (self._here or self.workers).end_reason  # type: ignore[union-attr]

    def wait(self) -> None:
        """Block until it has ended."""
        if self._here is not None:
            self._here.wait()
        elif self.workers is not None:
            self.workers.ended_all.wait()

    def stop(self, grace_seconds: float) -> None:
        """Answer the requests under way, take no others, close the models."""
        self._following.close()
        if self._here is not None:
            self._here.stop(grace_seconds)
        elif self.workers is not None:
            self.workers.stop(grace_seconds + 1)
        self._close_shared()

    def _close_shared(self) -> None:
        if self._shared is not None:
            self._shared.close()


def certificates_of(config: ClusterConfig) -> str | None:
    """The folder under which HTTP goes: one that was named; on loopback none, by itself."""
    folder = config.security.folder
    return None if folder in (None, NO_FOLDER) or config.serve.insecure else folder
