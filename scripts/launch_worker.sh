#!/usr/bin/env bash
# Starts the workers of this host, several under torchrun: one for each GPU, all of all hosts training in step.
#
#   SCHEDULER=10.0.0.1:7000 scripts/launch_worker.sh classify --data FOLDER --out RUN
#   SCHEDULER=10.0.0.1:7000 NNODES=2 scripts/launch_worker.sh train.py ARG...     # on each of two hosts
#
# The arguments are those of 'geartrain worker', or a Python script of yours (it finds SCHEDULER in its environment).
#
#   SCHEDULER       HOST:PORT of the scheduler, by which hosts meet, too (needed, but for a single worker, whose rows are
#                   its own, and for --rows ranks on one host)
#   NPROC_PER_NODE  workers on this host (the GPUs in CUDA_VISIBLE_DEVICES, or that nvidia-smi lists, or 1)
#   NNODES          hosts, or MIN:MAX for a number that may change (1)
#   INSECURE        1: let several hosts meet at MASTER_ADDR, although whoever reaches MASTER_PORT then runs code there
#   MASTER_ADDR     host on which they then meet, the same everywhere
#   MASTER_PORT     port there (29500)
#   JOB_ID          name of the meeting, the same everywhere and another for each job (geartrain)
#   MAX_RESTARTS    how often torchrun starts the workers again, from their last snapshot (0)
#   OMP_NUM_THREADS threads of a worker (the cores of this host shared out)
#   PYTHON          Python to run (.venv/bin/python of the repository, else python3)
#
# SIGTERM and SIGINT reach torchrun, which passes them on: 'geartrain worker' saves and says how to go on.
# shellcheck source-path=SCRIPTDIR source=launch_common.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
case "${1:-}" in
  -h | --help) usage && exit ;;
  "") die "what shall be trained? Give the arguments of 'geartrain worker' (as: glyphs), or a Python script; see --help" ;;
esac

gpus_here() {
  if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    awk -F, '{print NF}' <<<"$CUDA_VISIBLE_DEVICES"
  elif [ -z "${CUDA_VISIBLE_DEVICES+set}" ] && command -v nvidia-smi >/dev/null; then
    nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
  fi
}

workers=${NPROC_PER_NODE:-$(gpus_here)}
[ "${workers:-0}" != 0 ] || workers=1
case "$workers" in *[!0-9]*) die "NPROC_PER_NODE is '$workers'; it must be a number from 1 on" ;; esac
nodes=${NNODES:-1}
case "$nodes" in
  0 | :* | *: | *[!0-9:]* | *:*:*) die "NNODES is '$nodes'; it must be a number from 1 on, or MIN:MAX" ;;
esac

torchrun=(-m torch.distributed.run "--nproc-per-node=$workers" "--max-restarts=${MAX_RESTARTS:-0}")
if [ "$nodes" = 1 ]; then
  torchrun+=(--rdzv-backend=loopback) # of geartrain: --standalone listens on all addresses, and unpickles what comes
elif [ "${INSECURE:-0}" = 0 ]; then
  need_address SCHEDULER "${SCHEDULER:-}" "where $nodes hosts meet, under the certificates of the cluster,"
  torchrun+=("--nnodes=$nodes" --rdzv-backend=geartrain "--rdzv-endpoint=$SCHEDULER" "--rdzv-id=${JOB_ID:-geartrain}")
else
  risk="NNODES is $nodes, and torchrun's rendezvous of several hosts runs code that whoever reaches its port sends"
  flags=()
  insecure_flag
  printf '%s: %s (INSECURE=1)\n' "$(basename "$0")" "$risk" >&2
  [ -n "${MASTER_ADDR:-}" ] || die "MASTER_ADDR is not set; $nodes hosts need one to meet on, as MASTER_ADDR=10.0.0.4"
  torchrun+=("--nnodes=$nodes" --rdzv-backend=c10d "--rdzv-endpoint=$MASTER_ADDR:${MASTER_PORT:-29500}")
  torchrun+=("--rdzv-id=${JOB_ID:-geartrain}")
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # hosts count restarts each for themselves, see workers/job/ranks.py
fi
case " $* " in
  *" --rows ranks "* | *" --rows=ranks "*) needs_cluster= ;;
  *) needs_cluster=1 ;;
esac
if [ -n "${SCHEDULER:-}" ] || { [ -n "$needs_cluster" ] && { [ "$nodes" != 1 ] || [ "$workers" -gt 1 ]; }; }; then
  need_address SCHEDULER "${SCHEDULER:-}" "the cluster whose rows the workers share"
fi

cores=$(nproc)
threads=$((cores / workers))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
find_python
case "$1" in
  *.py)
    [ -f "$1" ] || die "$1 does not exist"
    export SCHEDULER
    exec "$PYTHON" "${torchrun[@]}" "$@"
    ;;
esac
flags=()
flag scheduler "${SCHEDULER:-}"
# A single worker needs no torchrun, whose exit code is 1 whatever happened.
[ "$nodes:$workers:${MAX_RESTARTS:-0}" != 1:1:0 ] || exec "$PYTHON" -m geartrain worker "$@" "${flags[@]}"
exec "$PYTHON" "${torchrun[@]}" -m geartrain worker "$@" "${flags[@]}"
