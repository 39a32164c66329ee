#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# run.sh MPIRUN PROCESSES PROGRAM [ARGUMENT…]: run it under mpirun, more processes than processors if need be, as root in a
# container, too. The result is mpirun's. MPIRUN_FLAGS: for mpirun.
set -euo pipefail
mpirun=$1 n=$2
shift 2
case $("$mpirun" --version 2>&1) in
*"Open MPI"* | *OpenRTE*)
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # Containers may not read each other's memory; and MPI's own words about it are no failure.
    export OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_rmaps_base_oversubscribe=1
    export OMPI_MCA_mpi_yield_when_idle=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
    exec "$mpirun" ${MPIRUN_FLAGS:-} -n "$n" "$@"
    ;;
*)
    # Nothing to read, and no end of it: Hydra hands an end of its input on, and dies of SIGPIPE if the ranks have ended by then.
    input=$(mktemp -u)
    mkfifo "$input"
    exec 0<>"$input"
    rm "$input"
    exec "$mpirun" ${MPIRUN_FLAGS:-} -n "$n" "$@"
    ;;
esac
