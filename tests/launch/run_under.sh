# SPDX-License-Identifier: MIT
# shellcheck shell=bash
# To be sourced: real launchers, each by one name whatever this machine calls it.
#   have_launcher LAUNCHER                    is it here? If not, the reason on stdout and 1. open_mpi, mpich or torchrun
#   run_under LAUNCHER N PROGRAM [ARGUMENT…]  N ranks of PROGRAM; their output, and the launcher's exit status. A launcher that
#                                             does not come back within LAUNCH_DEADLINE seconds (120) is killed: 124.
#                                             LAUNCH_OPTIONS: more options for the launcher, without spaces in them
# Open MPI and MPICH may be installed side by side: mpirun.openmpi and mpirun.mpich on Debian; elsewhere mpirun is one of them.

launch_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

mpirun_of() { # mpirun_of LAUNCHER: its command
    local name said
    for name in "mpirun.${1/open_mpi/openmpi}" mpirun mpiexec mpiexec.hydra; do
        said=$("$name" --version 2>/dev/null </dev/null || true)
        case $1:$said in
        open_mpi:*"Open MPI"* | open_mpi:*OpenRTE* | open_mpi:*open-mpi* | mpich:*HYDRA* | mpich:*"Intel(R) MPI"*) echo "$name"; return ;;
        esac
    done
    return 1
}

have_launcher() {
    case $1 in
    open_mpi) mpirun_of "$1" >/dev/null || { echo "no mpirun of Open MPI (Debian, Ubuntu: apt-get install openmpi-bin)"; return 1; } ;;
    mpich) mpirun_of "$1" >/dev/null || { echo "no mpirun of MPICH (Debian, Ubuntu: apt-get install mpich)"; return 1; } ;;
    torchrun) "$launch_folder/torchrun.sh" --find >/dev/null || { "$launch_folder/torchrun.sh" --find 2>&1; return 1; } ;;
    *) echo "no launcher is called '$1'"; return 1 ;;
    esac
}

run_under() {
    local launcher=$1 n=$2 command status=0 options=() variables=() own
    shift 2
    own=$(mktemp -d)
    # Nothing to read, and no end of it: Hydra hands an end of its input on, and dies of SIGPIPE if the ranks have ended by then.
    mkfifo "$own/input"
    case $launcher in
    open_mpi)
        command=$(mpirun_of open_mpi)
        options=(--oversubscribe --bind-to none -n "$n")
        [ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
        # Two mpiruns that start at the same moment may both make the folder they share, and one of them dies of it (seen with
        # 4.1.4): so each has its own. Its name in Open MPI 4, and in 5.
        variables=("OMPI_MCA_orte_tmpdir_base=$own" "PRTE_MCA_prte_tmpdir_base=$own")
        ;;
    mpich)
        command=$(mpirun_of mpich)
        options=(-n "$n")
        ;;
    torchrun)
        command=$("$launch_folder/torchrun.sh" --find)
        options=(--standalone --no-python --nproc-per-node "$n")
        # It warns where OMP_NUM_THREADS is not set, Python about a numpy that nobody needs.
        variables=("OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}" PYTHONWARNINGS=ignore)
        ;;
    esac
    # shellcheck disable=SC2206
    options+=(${LAUNCH_OPTIONS:-})
    env "${variables[@]}" timeout -k 5 "${LAUNCH_DEADLINE:-120}" "$command" "${options[@]}" "$@" <>"$own/input" || status=$?
    rm -rf "$own"
    return "$status"
}
