#!/usr/bin/env bash
# docker-compose.yml for real: builds the image, starts the cluster, waits until it is ready, trains on it, takes and
# restores a snapshot, ends it.
#   COMPOSE="docker compose" scripts/compose_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
read -r -a compose <<<"${COMPOSE:-docker compose}"
trap '"${compose[@]}" --profile worker --profile gear down -v' EXIT

"${compose[@]}" up -d
for _ in $(seq 60); do
  if "${compose[@]}" exec -T scheduler geartrain health 127.0.0.1:7000 --service ready; then ready=1 && break; fi
  sleep 1
done
[ "${ready:-}" ] || { echo "the cluster is not ready after a minute" >&2; exit 1; }
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
