#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# launchers.sh LAUNCHER SHOW_LAUNCH: what fsdp_launch_from_env says under a real launcher, open_mpi, mpich or torchrun: each rank
# once, one nonce and one meeting place for all of a job, others for another job. 77 if the launcher is not here.
set -euo pipefail
launcher=$1 show=$2
# shellcheck source=tests/launch/run_under.sh
. "$(dirname "$0")/run_under.sh"
have_launcher "$launcher" || exit 77
case $launcher in open_mpi) name="Open MPI" ;; mpich) name=MPICH ;; *) name=$launcher ;; esac
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT FSDP_PORT FSDP_NONCE

folder=$(mktemp -d)
jobs_at_once=() nonces=
finish() {
    touch "$folder/go"
    [ "${#jobs_at_once[@]}" = 0 ] || wait "${jobs_at_once[@]}" 2>/dev/null || true
    rm -rf "$folder"
}
trap finish EXIT

die() { # die SENTENCE FILE…: and what the job printed
    echo "$launcher: $1"
    shift
    tail -n 40 "$@"
    exit 1
}

# check_job WHAT FILE N [HERE]: the lines of one job of N ranks, HERE of them (N) on each machine; sets nonce and place.
check_job() {
    local what=$1 file=$2 n=$3 here=${4:-$3} wrong
    wrong=$(grep -a '^launch|' "$file" | sort -t'|' -k3n | awk -F'|' -v n="$n" -v here="$here" -v name="$name" '
        $2 != name { print "launcher " $2 }
        $3 != NR - 1 || $4 != n { print "rank " $3 " of " $4 ", expected " NR - 1 " of " n }
        $5 >= here || $6 != here || seen[$5]++ == n / here { print "local rank " $5 " of " $6 ", expected 0 to " here - 1 " of " here }
        here == n && $5 != $3 { print "rank " $3 " has the local rank " $5 }
        NR > 1 && $7 "|" $8 != place { print "rank " $3 " goes to " $7 " " $8 ", rank 0 to " place }
        NR > 1 && $9 != nonce { print "rank " $3 " has the nonce " $9 ", rank 0 " nonce }
        $10 != "same" { print "the environment was changed" }
        { place = $7 "|" $8; nonce = $9 }
        END { if (NR != n) print NR " ranks of " n }')
    [ -z "$wrong" ] || die "$what: $wrong" "$file"
    nonce=$(grep -a -m 1 '^launch|' "$file" | cut -d'|' -f9)
    place=$(grep -a -m 1 '^launch|' "$file" | cut -d'|' -f7,8)
    case $nonces in *"$nonce"*) die "$what: it has the nonce of an earlier job, $nonce" "$file" ;; esac
    nonces+=" $nonce"
    echo "$what: $n ranks, nonce $nonce, at $place"
}

run() { # run WHAT N COMMAND…
    local what=$1 n=$2
    shift 2
    run_under "$launcher" "$n" "$@" >"$folder/out" 2>&1 || die "$what: exit status $?" "$folder/out"
    check_job "$what" "$folder/out" "$n"
}

if [ "$launcher" = torchrun ]; then
    # As people type it. Each start takes two seconds of a core, so that there are few.
    torchrun=$("$(dirname "$0")/torchrun.sh" --find)
    OMP_NUM_THREADS=1 timeout 120 "$torchrun" --no-python --nproc-per-node 4 "$show" >"$folder/out" 2>&1 ||
        die "exit status $?" "$folder/out"
    check_job "four ranks" "$folder/out" 4
else
    run "four ranks" 4 "$show"
fi
case $launcher:$place in
torchrun:localhost\|* | torchrun:127.*\|* | torchrun:"$(hostname)"*\|*) ;;
open_mpi:"@fsdp-$(id -u)-$nonce|0" | mpich:"@fsdp-$(id -u)-$nonce|0") ;;
*) die "they meet at $place" "$folder/out" ;;
esac

# A script in between, with a name that /proc/<pid>/stat is hard to read with; within a step of Slurm that runs one task.
printf '#!/bin/sh\n"$@"\nexit $?\n' >"$folder/a) S 1 (b"
chmod +x "$folder/a) S 1 (b"
export SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0
run "four ranks behind a script within a Slurm step" 4 "$folder/a) S 1 (b" "$show"
unset SLURM_JOB_ID SLURM_STEP_ID SLURM_PROCID SLURM_NTASKS SLURM_STEP_NUM_TASKS SLURM_LOCALID

# Two jobs that are there at the same time, behind shells: nobody leaves before both have said everything.
# shellcheck disable=SC2016
stay='"$0"; while [ ! -e "$1" ]; do sleep 0.05; done'
for job in a b; do
    run_under "$launcher" 4 sh -c "$stay" "$show" "$folder/go" >"$folder/$job" 2>&1 &
    jobs_at_once+=($!)
done
said() { grep -ac '^[a-z]*|' "$folder/$1" || true; }
for _ in $(seq 600); do
    [ "$(said a)" -lt 4 ] || [ "$(said b)" -lt 4 ] || break
    sleep 0.1
done
touch "$folder/go"
for pid in "${jobs_at_once[@]}"; do wait "$pid" || die "two jobs at once: exit status $?" "$folder/a" "$folder/b"; done
jobs_at_once=()
check_job "one of two at once" "$folder/a" 4
a_place=$place
check_job "the other" "$folder/b" 4
[ "$place" != "$a_place" ] || die "two jobs meet at one place" "$folder/a" "$folder/b"

[ "$launcher" != torchrun ] || exit 0

# Two machines, as far as the launcher knows: the second one's daemon is started here, too.
export LAUNCH_OPTIONS=
case $("$(mpirun_of "$launcher")" --version) in
*HYDRA*) LAUNCH_OPTIONS="-launcher fork -hosts 127.0.0.1,127.0.0.2" ;;
*"Open MPI"*" 4."* | *OpenRTE*" 4."*)
    printf '#!/bin/sh\nshift\nexec sh -c "$*"\n' >"$folder/rsh"
    chmod +x "$folder/rsh"
    LAUNCH_OPTIONS="--host localhost:2,elsewhere:2 --mca plm_rsh_agent $folder/rsh"
    ;;
esac
for what in "four ranks on two machines" "and again"; do
    [ -n "$LAUNCH_OPTIONS" ] || break
    run_under "$launcher" 4 "$show" >"$folder/out" 2>&1 || die "$what: exit status $?" "$folder/out"
    check_job "$what" "$folder/out" 4 2
    [ "$place" = "|0" ] || die "$what, without MASTER_ADDR, they meet at $place" "$folder/out"
done
unset LAUNCH_OPTIONS
run "one rank" 1 "$show"

export MASTER_ADDR=somewhere MASTER_PORT=29500
run "four ranks told where" 4 "$show"
[ "$place" = "somewhere|29501" ] || die "they meet at $place" "$folder/out"
unset MASTER_ADDR MASTER_PORT

# Left over from something else.
export RANK=0 WORLD_SIZE=2
if run_under "$launcher" 4 "$show" >"$folder/out" 2>&1; then die "RANK=0 of 2 beside four ranks is taken" "$folder/out"; fi
grep -aq '^error|two launchers contradict each other: .*seen: RANK=0, WORLD_SIZE=2, .*_SIZE=4' "$folder/out" ||
    die "no sentence about RANK=0 of 2 beside four ranks" "$folder/out"
