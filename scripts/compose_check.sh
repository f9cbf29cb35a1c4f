#!/usr/bin/env bash
# docker-compose.yml for real: builds the image, starts the cluster, waits until it is ready, trains on it, takes and
# restores a snapshot, asks a service of models that runs once and three times, ends all.
#   COMPOSE="docker compose" scripts/compose_check.sh
# All of it is of a project of its own: containers, networks and volumes of the cluster that you may have stay as they are.
set -euo pipefail
cd "$(dirname "$0")/.."
read -r -a compose <<<"${COMPOSE:-docker compose}"
export COMPOSE_PROJECT_NAME=geartrain-check-$$ # podman-compose leaves some volumes behind: none is met again
end() { "${compose[@]}" --profile worker --profile gear --profile serve --profile cli down -v --remove-orphans; }
trap end EXIT

"${compose[@]}" up -d --build
health=("${compose[@]}" exec -T scheduler geartrain health 127.0.0.1:7000)
for _ in $(seq 60); do
  if "${health[@]}" --service ready 2>/dev/null; then ready=1 && break; fi
  sleep 1
done
if [ -z "${ready:-}" ]; then
  echo "the cluster is not ready after a minute:" >&2
  for part in shards complete restored; do "${health[@]}" --service "$part" >&2 || true; done
  "${compose[@]}" ps -a >&2
  "${compose[@]}" --profile cli run --rm -T cli status >&2 || true
  "${compose[@]}" logs --tail=5 >&2
  exit 1
fi
"${compose[@]}" --profile cli run --rm -T cli status
"${compose[@]}" --profile worker run --rm -T worker
if "${compose[@]}" --profile gear pull redis; then
  "${compose[@]}" --profile gear run --rm -T fast-gear
else
  echo "the image of the Redis service is not to be had here: slow and fast gears were not tried" >&2
fi
for pair in scheduler:scheduler shard-0:server shard-1:server graph:graph; do
  keys=$("${compose[@]}" exec -T "${pair%:*}" sh -c 'cd /certs && echo *' | tr -d '\r')
  [ "$keys" = "ca.pem ${pair#*:}.pem" ] || { echo "${pair%:*} has other keys than its own: $keys" >&2; exit 1; }
done
"${compose[@]}" --profile cli run --rm -T --entrypoint sh cli -ec '
  geartrain snapshot create /snapshots
  geartrain snapshot restore /snapshots --replace
  geartrain status --json'

"${compose[@]}" --profile cli run --rm -T --entrypoint sh cli -ec '
  python -c "
from pathlib import Path
import numpy as np
from PIL import Image
for number in range(32):
    folder = Path(\"photos\", str(number % 4))
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (16, 16), np.uint8)
    Image.fromarray(pixels).save(folder / f\"{number}.png\")
"
  geartrain worker classify --data photos --steps 5 --set look.size=16 --set batch_size=8 --scheduler scheduler:7000 \
    --snapshots /snapshots/photos --out run
  geartrain export run --to /models/000001
  cp photos/0/0.png /models/asked.png'
for replicas in 1 3; do
  "${compose[@]}" --profile serve up -d --scale serve=$replicas serve
  "${compose[@]}" --profile serve exec -T serve python -c "
import base64, socket, time
from geartrain.ams.values.config import identify
from geartrain.ams.values.errors import Unavailable
from geartrain.serving.http.client import request_json
identify('/certs', 'serve')
asked = {'images': [base64.b64encode(open('/models/asked.png', 'rb').read()).decode()], 'k': 1}
versions, deadline = {}, time.monotonic() + 60
while len(versions) < $replicas:
    assert time.monotonic() < deadline, f'of $replicas services answer {versions}'
    try:  # the name is unknown for a moment where the number of services changes
        for *_, (host, _) in socket.getaddrinfo('serve', 7000, socket.AF_INET, socket.SOCK_STREAM):
            versions[host] = request_json(f'{host}:7000', 'POST', '/v1/classify', asked)['version']
    except (Unavailable, socket.gaierror):
        time.sleep(0.5)
print('services of models that answer, with their versions:', versions)"
done
