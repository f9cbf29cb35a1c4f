"""Model server of ``geartrain serve`` in this process: the only process, or one of several workers."""

from __future__ import annotations

import gc
import socket
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from geartrain.ams.values.config import ClusterConfig, split_address
from geartrain.launch.serving.workers import DRAIN_SECONDS
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.folder import load_folder
from geartrain.serving.http.app import build_app
from geartrain.serving.http.callers import Callers, Limits
from geartrain.serving.http.ports import certificates_of
from geartrain.serving.http.server import HttpServer
from geartrain.serving.index.distributed_index import use_parts
from geartrain.serving.metrics import ServingCounts
from geartrain.serving.models.networks import use_threads
from geartrain.serving.models.own_code import trust
from geartrain.serving.rates import ClientRates
from geartrain.serving.service import ModelService, open_models

if TYPE_CHECKING:
    from geartrain.ams.rpc.server.server import GrpcServer


class ModelServer:
    """Serves the models of a configuration on a listening socket, on threads of this process."""

    def __init__(self, config: ClusterConfig, listener: socket.socket, models: Mapping[str, Any] | None = None) -> None:
        """Load the models of the configuration, or those of another process, whose state ``models`` is.

        The server owns the socket, and closes it if this raises. Raises ConfigError, ModelDamaged, NotServed.
        """
        with ExitStack() as opened:
            opened.callback(listener.close)
            self._open(config, listener, models, opened)
            opened.pop_all()
        if self.grpc is not None:
            self.grpc.ready()

    def _open(
        self, config: ClusterConfig, listener: socket.socket, models: Mapping[str, Any] | None, opened: ExitStack
    ) -> None:
        """Load the models and serve them; adds to ``opened`` what an error must close."""
        told = config.serve
        folder = certificates_of(config)
        warnings.filterwarnings("ignore", module=r"PIL\.")  # it stores a line for good for each damaged picture
        callers = Callers(told.listen, folder, told.origins, is_open=told.insecure)
        use_threads(told.threads)
        use_parts(told.parts)
        rates = ClientRates(told.requests_per_second)
        trust(told.preprocessing)
        catalog = Catalog(load_folder)
        counts = ServingCounts()
        batcher = Batcher(
            max_batch=told.max_batch,
            max_wait_seconds=told.max_wait_millis / 1000,
            max_queued=told.max_queued,
            on_batch=counts.batch,
        )
        self.service = ModelService(catalog, batcher, counts)
        opened.callback(self.service.close)
        self.grpc: GrpcServer | None = None
        """gRPC server; None without its port."""
        tls, renew = None, None
        if folder is not None:
            from geartrain.ams.rpc.credentials import Credentials  # imports gRPC

            tls, renew = Credentials.mine(told.listen).https(shows_certificate=not callers.want_tokens)
        if models is None:
            open_models(catalog, told)
        else:  # before the first request, so that all workers serve the same versions
            self.service.become(models)
        gc.collect()
        gc.freeze()  # otherwise garbage collection of all imports stops answers for 0.1 s, now and then
        if told.grpc is not None:
            from geartrain.serving.kserve.service import inference_server  # imports gRPC

            self.grpc = inference_server(told.grpc, self.service, told, folder, rates, callers.client)
            opened.callback(self.grpc.stop, 0)
        self._server = HttpServer(
            build_app(self.service, callers, Limits.of(told), rates=rates),
            listener,
            split_address(told.listen)[0],
            name="http",
            tls=tls,
            each_second=renew,
            headers_seconds=told.body_seconds,
            grace_seconds=DRAIN_SECONDS,
        )

    @property
    def stop_reason(self) -> str | None:
        """Reason why it ended by itself; None if it did not."""
        return self._server.stop_reason

    def wait(self) -> None:
        """Block until the server has ended."""
        self._server.wait()

    def stop(self, grace_seconds: float) -> None:
        """Answer the requests in progress, of HTTP and gRPC at once, refuse others, close the models."""
        with ThreadPoolExecutor(1, "grpc-stop") as threads:
            ending = None if self.grpc is None else threads.submit(self.grpc.stop, grace_seconds)
            self._server.stop(grace_seconds)
        if ending is not None:
            ending.result()
        self.service.close()
