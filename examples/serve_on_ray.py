"""An exported model on Ray Serve, in one replica or several, each with the app of gt.serve_app.

Run it: python examples/serve_on_ray.py models/signs [replicas] [port]    (pip install 'geartrain[serve]' 'ray[serve]')
"""

import sys
from pathlib import Path

import ray
from ray import serve

import geartrain as gt


def deployment(folder: str, replicas: int) -> serve.Application:
    """A service of the models in a folder, which every node of Ray sees at that path."""
    hosted = serve.ingress(lambda: gt.serve_app(folder))()  # called in each replica, which maps the folder
    return serve.deployment(hosted, num_replicas=replicas, max_ongoing_requests=64).bind()


def main() -> None:
    folder, replicas, port = [*sys.argv[1:], *["models", "1", "8000"][len(sys.argv) - 1 :]]
    ray.init(num_cpus=int(replicas) + 1, include_dashboard=False, log_to_driver=False)  # of yours: ray.init()
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(deployment(str(Path(folder).absolute()), int(replicas)), name="models", blocking=True)


if __name__ == "__main__":
    main()
