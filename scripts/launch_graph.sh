#!/usr/bin/env bash
# Starts the graph service, which builds and keeps the neighbour tables of class tables, on this host.
#
#   SCHEDULER=10.0.0.1:7000 LISTEN=10.0.0.3:7100 SNAPSHOT_ROOTS=/mnt/snapshots \
#     scripts/launch_graph.sh [FLAG...]
#
#   SCHEDULER   HOST:PORT of the scheduler (needed)
#   LISTEN      HOST:PORT to serve on
#   DATA        folder in which graphs, half-built ones too, outlive a kill
#   SNAPSHOT_ROOTS
#               folders and URLs, with commas between, below which snapshots are read and written (needed for snapshots
#               with a LISTEN that other machines reach)
#   INSECURE    1: allow a LISTEN that other machines reach without certificates (0)
#   GEARTRAIN_SECURITY__FOLDER
#               this machine's folder of certificates ('geartrain certs issue')
#   PYTHON      Python to run (.venv/bin/python of the repository, else python3)
#
# Flags are those of 'geartrain graph --help'. SIGTERM ends it.
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
case "${1:-}" in -h | --help) usage && exit ;; esac

flags=()
need_address SCHEDULER "${SCHEDULER:-}" "the address that the scheduler printed"
[ -z "${LISTEN:-}" ] || need_address LISTEN "$LISTEN" "the address to serve on"
flag scheduler "$SCHEDULER"
flag listen "${LISTEN:-}"
flag data "${DATA:-}"
flag snapshot-roots "${SNAPSHOT_ROOTS:-}"
insecure_flag
find_python
exec "$PYTHON" -P -m geartrain graph "${flags[@]}" "$@"
