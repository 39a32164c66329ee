#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# run.sh [--sanitize] [--install]: build the project and run every test; with CUDA, too, where nvcc and NCCL are found (without a
# GPU its tests are skipped).
#   --sanitize  also with AddressSanitizer + UndefinedBehaviorSanitizer, with ThreadSanitizer, some under valgrind, and with
#               each planted bug, which the tests must notice
#   --install   what is missing may be installed with sudo (as root it is installed anyway)
# The last line sums up all builds: "N passed, N failed, N skipped". Non-zero exit if anything failed.
set -euo pipefail
cd "$(dirname "$0")/.."

sanitize=0 install=0
for argument; do
    case $argument in
    --sanitize) sanitize=1 ;;
    --install) install=1 ;;
    *) sed -n '3,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done

has() { command -v "$1" >/dev/null 2>&1; }

# What the builds need, as Debian and Ubuntu name it.
missing_packages() {
    has cmake || echo cmake
    has "${CC:-cc}" || echo gcc libc6-dev
    has "${CXX:-c++}" || echo g++
    has make || has ninja || echo make
    has pkg-config || echo pkg-config
    { has pkg-config && pkg-config --exists cmocka; } || echo libcmocka-dev
    { has pkg-config && pkg-config --exists libcjson; } || echo libcjson-dev
    { has pkg-config && pkg-config --exists jemalloc; } || echo libjemalloc-dev
}

# Launchers that tests start; without one, its tests are skipped. Elsewhere than on Debian, mpirun is one MPI's or the other's.
missing_launchers() {
    . tests/launch/run_under.sh
    has mpirun.openmpi || have_launcher open_mpi >/dev/null || echo openmpi-bin
    has mpirun.mpich || have_launcher mpich >/dev/null || echo mpich
    python3 -c 'import ensurepip, venv' 2>/dev/null || have_launcher torchrun >/dev/null 2>&1 || echo python3-venv
    # What fsdp::mpi and its tests are built with.
    { has pkg-config && pkg-config --exists ompi-c; } || echo libopenmpi-dev
    { has pkg-config && pkg-config --exists mpich; } || echo libmpich-dev
}

install_missing() {
    local packages line needed
    needed=$(missing_packages | tr '\n' ' ')
    packages=$needed$(missing_launchers | tr '\n' ' ')
    packages=${packages% }
    [ -n "$packages" ] || return 0
    line="apt-get update && apt-get install -y --no-install-recommends $packages"
    if has apt-get && [ "$(id -u)" = 0 ]; then
        echo "+ $line"
        DEBIAN_FRONTEND=noninteractive bash -c "${line//apt-get/apt-get -qq}" </dev/null >/dev/null || [ -z "$needed" ]
    elif has apt-get && [ "$install" = 1 ] && has sudo; then
        echo "+ sudo sh -c '$line'"
        sudo DEBIAN_FRONTEND=noninteractive sh -c "${line//apt-get/apt-get -qq}" >/dev/null || [ -z "$needed" ]
    elif [ -z "$needed" ]; then
        echo "not installed: $packages; its tests are skipped"
    else
        echo "missing: $packages. Type this, or call $0 --install:"
        echo "    sudo sh -c '$line'"
        exit 1
    fi
    packages=$(missing_packages | tr '\n' ' ')
    [ -z "$packages" ] || { echo "still missing: $packages"; exit 1; }
}

passed=0 failed=0 skipped=0

# One number of ctest's JUnit report.
attribute() { grep -oE "[^a-z]$2=\"[0-9]+\"" "$1" | head -n 1 | grep -oE '[0-9]+'; }

# run_preset NAME [TARGET [CMAKE-ARGUMENT…]]: configure, build, test; a build that fails is one failure.
run_preset() {
    local preset=$1 target=${2:-all} log=build/$1/log report=$PWD/build/$1/ctest.xml started=$SECONDS total
    echo "== $preset"
    mkdir -p "build/$preset"
    rm -f "$report"
    if ! { cmake --preset "$preset" "${@:3}" && cmake --build --preset "$preset" --target "$target"; } >"$log" 2>&1; then
        if [ "$preset" = cuda ] && tr -s '\n ' ' ' <"$log" |
            sed -nE 's/.*FSDP_WITH_CUDA is ON, and (.*) Call Stack.*/-- not built with CUDA: \1\n/p' | grep .; then
            skipped=$((skipped + 1))
            return
        fi
        grep -nE 'error|Error|undefined reference' "$log" | head -n 30 || tail -n 30 "$log"
        echo "-- $preset: the build failed, see $log"
        failed=$((failed + 1))
        return
    fi
    wait_for_torchrun
    "${no_aslr[@]}" ctest --preset "$preset" --output-junit "$report" || true
    if [ ! -s "$report" ]; then
        failed=$((failed + 1))
        return
    fi
    total=$(attribute "$report" tests)
    failed=$((failed + $(attribute "$report" failures)))
    skipped=$((skipped + $(attribute "$report" skipped) + $(attribute "$report" disabled)))
    passed=$((passed + total - $(attribute "$report" failures) - $(attribute "$report" skipped) - $(attribute "$report" disabled)))
    echo "-- $preset: $total tests, $((SECONDS - started)) s"
}

# Of the first GPU: "90"; without one, 90: this build is for this machine and need not be for others.
gpu_architecture() {
    { nvidia-smi --query-gpu=compute_cap --format=csv,noheader || true; echo 9.0; } 2>/dev/null |
        grep -oE '^[0-9]+\.[0-9]+' | head -n 1 | tr -d .
}

run_valgrind() { # some tests without threads: what they read before it is written, and leaks
    local name
    echo "== valgrind"
    if ! has valgrind; then
        echo "-- valgrind is not installed"
        skipped=$((skipped + 1))
        return
    fi
    mkdir -p build/host/valgrind
    for name in "${valgrind_tests[@]}"; do [ ! -x "build/host/tests/$name" ] || echo "$name"; done | xargs -P "$(nproc)" -I{} sh -c '
        rm -f build/host/valgrind/{}.passed
        if timeout 300 valgrind -q --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=definite,indirect \
            build/host/tests/{} >build/host/valgrind/{}.log 2>&1; then touch build/host/valgrind/{}.passed; fi'
    for name in "${valgrind_tests[@]}"; do
        [ -x "build/host/tests/$name" ] || continue
        if [ -e "build/host/valgrind/$name.passed" ]; then
            echo "   passed  $name"
            passed=$((passed + 1))
        else
            echo "   FAILED  $name"
            tail -n 40 "build/host/valgrind/$name.log"
            failed=$((failed + 1))
        fi
    done
}

run_mutations() {
    local started=$SECONDS
    echo "== mutations"
    if tests/race/mutations.sh; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    echo "-- mutations: $((SECONDS - started)) s"
}

valgrind_tests=(test_trace test_clock test_tree test_sim_device test_sim_conformance test_step_table test_counts)
no_aslr=()

install_missing
# It fetches much; what comes first is built meanwhile.
torchrun_install=
if ! tests/launch/torchrun.sh --find >/dev/null 2>&1; then
    echo "+ tests/launch/torchrun.sh --install"
    tests/launch/torchrun.sh --install >/dev/null & # it says why, if it fails
    torchrun_install=$!
fi
wait_for_torchrun() {
    [ -z "$torchrun_install" ] || wait "$torchrun_install" || true
    torchrun_install=
}
if ! has make && has ninja; then export CMAKE_GENERATOR=Ninja; fi
run_preset host
run_preset cuda cuda_tests "-DCMAKE_CUDA_ARCHITECTURES=$(gpu_architecture)"
if [ "$sanitize" = 1 ]; then
    run_preset asan
    # ThreadSanitizer's fixed shadow map and a kernel that randomises more address bits do not go together.
    if setarch -R true 2>/dev/null; then no_aslr=(setarch -R); fi
    run_preset tsan
    no_aslr=()
    run_valgrind
    run_mutations
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
