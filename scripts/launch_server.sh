#!/usr/bin/env bash
# Starts a server, which holds one or more shards, on this host. As many as it takes until the cluster has all shards.
#
#   SCHEDULER=10.0.0.1:7000 LISTEN=10.0.0.2:7001 SHARDS=2 SNAPSHOT_ROOTS=/mnt/snapshots \
#     scripts/launch_server.sh [FLAG...]
#
#   SCHEDULER   HOST:PORT of the scheduler (needed)
#   LISTEN      HOST:PORT to serve on; port 0 picks a free one, as it does for the further SHARDS (127.0.0.1:0)
#   ADVERTISE   HOST:PORT for clients, if not the one bound
#   DATA_PORT   port for rows of the host's first shard, the same for every server of a host; each further one takes the
#               next (free ones)
#   SHARDS      shards to hold in this process (1)
#   SNAPSHOT_ROOTS
#               folders and URLs, with commas between, below which snapshots are read and written (needed for snapshots
#               with a LISTEN that other machines reach)
#   INSECURE    1: allow a LISTEN that other machines reach without certificates (0)
#   GEARTRAIN_SECURITY__FOLDER
#               this machine's folder of certificates ('geartrain certs issue')
#   PYTHON      Python to run (.venv/bin/python of the repository, else python3)
#
# Flags are those of 'geartrain server --help', and settings also come as GEARTRAIN_SERVER__KEY. One line of JSON on
# stdout says when it has joined the cluster. SIGTERM ends it.
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
case "${1:-}" in -h | --help) usage && exit ;; esac

flags=()
scheduler=${SCHEDULER:-${GEARTRAIN_SERVER__SCHEDULER:-}}
need_address SCHEDULER "$scheduler" "the address that the scheduler printed"
[ -z "${LISTEN:-}" ] || need_address LISTEN "$LISTEN" "the address to serve on"
flag scheduler "$scheduler"
flag listen "${LISTEN:-}"
flag advertise "${ADVERTISE:-}"
flag shards "${SHARDS:-}"
flag data-port "${DATA_PORT:-}"
flag snapshot-roots "${SNAPSHOT_ROOTS:-}"
insecure_flag
find_python
exec "$PYTHON" -P -m geartrain server "${flags[@]}" "$@"
