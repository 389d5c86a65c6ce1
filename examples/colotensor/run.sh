#!/bin/sh
# Trains with GPUNUM processes (default: 1), of which TPDEGREE (default: 1) share each layer; the rest are replicas.
# Arguments are those of train.py.
set -eu
exec torchrun --standalone --nproc_per_node="${GPUNUM:-${NPROC:-1}}" "$(dirname "$0")/train.py" \
    --tp-degree "${TPDEGREE:-1}" "$@"
