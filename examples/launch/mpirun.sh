#!/bin/sh
# One host: sh mpirun.sh. Two hosts, with Open MPI:
#   HOST0=host0 HOSTS=host0:2,host1:2 WORKERS=4 sh mpirun.sh
# MPI starts the workers; tensors travel by gloo, so PyTorch need not be built with MPI.
if [ -n "$HOSTS" ]; then
    export MASTER_ADDR="$HOST0" MASTER_PORT="${PORT:-29500}"
    set -- --host "$HOSTS" -x MASTER_ADDR -x MASTER_PORT
fi
mpirun -n "${WORKERS:-4}" "$@" python "$(dirname "$0")/train.py"
