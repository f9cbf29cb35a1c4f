"""The role ``serve``: trained models over HTTP, in this process."""

from __future__ import annotations

from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.values.config import NO_FOLDER, ClusterConfig, split_address
from geartrain.ams.values.errors import ConfigError
from geartrain.serving.batching import Batcher
from geartrain.serving.catalog import Catalog
from geartrain.serving.folder import load_folder
from geartrain.serving.http.app import make_app
from geartrain.serving.http.callers import Callers
from geartrain.serving.http.limits import Limits
from geartrain.serving.http.server import HttpServer, listening_socket
from geartrain.serving.service import ModelService, open_models

DRAIN_SECONDS = 3.0


class ServeRole:
    """Serves the models of a configuration. A :class:`geartrain.launch.role.RunningRole`."""

    def __init__(self, config: ClusterConfig) -> None:
        """Load the models and listen. Raises ConfigError, ModelDamaged: no model, or nobody can listen there."""
        told = config.serve
        if not told.models and told.follow is None:
            raise ConfigError(
                "there is nothing to serve: give the folder of a model, as 'geartrain serve exported/', which "
                "'geartrain export RUN --to exported/' writes"
            )
        listener = listening_socket(told.listen, "serve")
        host, _ = split_address(told.listen)
        folder = None if config.security.folder in (None, NO_FOLDER) or told.insecure else config.security.folder
        callers = Callers(told.listen, folder, told.origins, is_open=told.insecure)
        tls, renew = None, None
        if folder is not None:
            tls, renew = Credentials.mine(told.listen).https(shows_certificate=not callers.want_tokens)
        catalog = Catalog(load_folder)
        batcher = Batcher(
            max_batch=told.max_batch, max_wait_seconds=told.max_wait_millis / 1000, max_queued=told.max_queued
        )
        self.service = ModelService(catalog, batcher)
        try:
            open_models(catalog, told)
            self._server = HttpServer(
                make_app(self.service, callers, Limits.of(told)),
                listener,
                host,
                name="http",
                tls=tls,
                each_second=renew,
                headers_seconds=told.body_seconds,
                grace_seconds=DRAIN_SECONDS,
            )
        except BaseException:
            listener.close()
            self.service.close()
            raise
        self.address = self._server.address
        self.url = f"http{'' if tls is None else 's'}://{self.address}"

    @property
    def end_reason(self) -> str | None:
        """Why it ended by itself; None if it did not."""
        return self._server.end_reason

    def wait(self) -> None:
        """Block until it has ended."""
        self._server.wait()

    def stop(self, grace_seconds: float) -> None:
        """Answer the requests under way, take no others, close the models."""
        self._server.stop(grace_seconds)
        self.service.close()
