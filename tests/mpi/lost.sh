#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# lost.sh MPIRUN PROCESSES PROGRAM kill|stop RANK WHERE: test_mpi_lost under an mpirun that lets the others live. Each of them
# must end with RANK_LOST, with the lost rank's name and the same sentence.
set -euo pipefail
here=$(dirname "$0") mpirun=$1 n=$2 how=$4 lost=$5
shift 2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
case $("$mpirun" --version 2>&1) in
*"Open MPI"* | *OpenRTE*) export MPIRUN_FLAGS=--enable-recovery ;;
*)
    # Hydra ends all once it sees one killed: a shell stands between. UCX ends a process that was reading the dead one's memory.
    export MPIRUN_FLAGS=-disable-auto-cleanup UCX_TLS=self,posix,sysv
    # shellcheck disable=SC2016
    set -- bash -c 'trap "" USR1; "$@"; exit 0' bash "$@"
    ;;
esac
bash "$here/run.sh" "$mpirun" "$n" "$@" >"$log" 2>&1 || true
sort "$log"
said=$(grep -cE "^rank [0-9]+ ends: FSDP_ERR_RANK_LOST: .*ranks? ([0-9]+, )*$lost\b" "$log" || true)
closed=$(grep -cE "^rank [0-9]+ has closed: FSDP_OK" "$log" || true)
sentences=$(grep -E "^rank [0-9]+ ends" "$log" | grep -v "^rank $lost " | sed 's/^rank [0-9]* ends: //' | sort -u | wc -l)
survivors=$((n - 1))
[ "$how" = stop ] && everybody=$n || everybody=$survivors
echo "$said ranks name rank $lost, $closed have closed, $sentences sentences"
[ "$said" -ge "$survivors" ] && [ "$closed" = "$everybody" ] && [ "$sentences" = 1 ]
