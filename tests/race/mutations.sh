#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# mutations.sh [--jobs N] [--doc | --check] [MUTANT…]: switch on every bug of lib/mutate.h and see that the tests notice.
#   --doc    also write the table into docs/allocator.md
#   --check  only whether that page lists the bugs there are; nothing is built
# Each program below runs once without a bug, when it must pass, and with each bug; but the slow ones, unless for --doc, only with
# those that the others have not caught. A bug counts as caught when a test failed and said so: neither a crash nor a deadline is
# enough, though both are told. Last line: "caught N of M"; fails unless N = M.
# What the programs said is kept in build/mutations/runs.
set -euo pipefail
cd "$(dirname "$0")/../.."

# Programs of which a race test also says which of its judges saw the bug; then those that see what follows from it.
race_tests=(test_alloc_race test_step_race)
quick_tests=(test_clock test_alloc_ranges test_allocator_example test_counts test_step_table test_formula
    test_capture test_capture_errors test_capture_memory)
slow_tests=(test_alloc test_parity test_passes)
other_tests=("${quick_tests[@]}" "${slow_tests[@]}")
export options_test_step_race=--quick
export deadline=120 # seconds; the slowest takes a few
export runs=$PWD/build/mutations/runs programs=$PWD/build/mutations/tests
page=docs/allocator.md begin='<!-- mutations: mutations.sh -->' end='<!-- mutations end -->'

usage() { sed -n '3,5s/^# \{0,1\}//p' "$0"; exit 2; }

# Lines NAME <tab> SENTENCE, as the preprocessor has them.
mutants_of_header() {
    printf '%s\n' '#include "lib/mutate.h"' '#define ROW(name, what) @@ name what' 'FSDP__MUTANTS(ROW)' |
        "${CC:-cc}" -E -P -I. -x c - | tr '\n' ' ' | sed 's/@@/\n/g; $s/$/\n/' |
        sed -nE 's/" +"//g; s/^ *([A-Z0-9_]+) +"(.*)" *$/\1\t\2/p'
}

mutants_of_page() {
    sed -n "/^$begin\$/,/^$end\$/p" "$page" | sed -nE 's/^\| `([A-Z0-9_]+)` \| ([^|]*) \|.*/\1\t\2/p'
}

check_page() {
    diff <(mutants_of_page) <(mutants_of_header) >&2 && return
    echo "$page does not list the bugs of lib/mutate.h: call tests/race/mutations.sh --doc" >&2
    return 1
}

run_one() { # run_one PROGRAM MUTANT; "none": without. Leaves PROGRAM.log and PROGRAM.status
    local out=$runs/$2 status=0 options=options_$1 mutant=$2
    [ "$mutant" != none ] || mutant=
    exec 2>/dev/null # bash tells of a crash
    FSDP_MUTANT=$mutant timeout -k 10 "$deadline" "$programs/$1" ${!options:-} >"$out/$1.log" 2>&1 || status=$?
    echo "$status" >"$out/$1.status"
}
export -f run_one

run_all() { # run_all MUTANT…: with each of ${programs_to_run[@]}
    local mutant program
    for mutant; do mkdir -p "$runs/$mutant"; done
    for program in "${programs_to_run[@]}"; do
        for mutant; do printf '%s %s\n' "$program" "$mutant"; done
    done | xargs -P "$jobs" -n 2 bash -c 'run_one "$@"' _
}

failed_tests() { grep -aoE '^\[ +(FAILED|ERROR) +\] [a-z_0-9]+$' "$1" | awk '!seen[$NF]++ { n++ } END { print n + 0 }'; }

# A race test prints the judges that spoke: "judges: call 0, data 18, order 96, …" or "judges order numbers".
judges_in() {
    { grep -aoE 'judges: ([a-z]+ [0-9]+,? ?)+' "$1" | grep -oE '[a-z]+ [1-9][0-9]*' | cut -d' ' -f1
      grep -aoE ': judges( [a-z]+)+$' "$1" | sed 's/^: judges //' | tr ' ' '\n'; } 2>/dev/null | awk '!seen[$0]++' | paste -sd' ' || true
}

# How PROGRAM took MUTANT: nothing if it passed. Status 0 if a test failed and said so.
verdict() { # verdict PROGRAM MUTANT
    local log=$runs/$2/$1.log status n how
    [ -e "$runs/$2/$1.status" ] || return 1 # it did not run
    status=$(cat "$runs/$2/$1.status")
    [ "$status" != 0 ] || return 1
    n=$(failed_tests "$log")
    how=$(judges_in "$log")
    [ -n "$how" ] || how=$n
    case $status in
    124 | 137 | 142) how+="${how:+, }deadline" ;;
    *) if [ "$status" -gt 128 ] && [ "$status" != 255 ] || grep -aqE 'Test failed with exception' "$log"; then how+=", crash"; fi ;;
    esac
    echo "${1#test_} (${how#0, })"
    [ "$n" -gt 0 ] && ! [[ $how =~ ^0 ]]
}

verdicts() { # verdicts MUTANT PROGRAM…: joined; status 0 if one of them caught it
    local mutant=$1 program text all='' caught=1
    shift
    for program; do
        if text=$(verdict "$program" "$mutant"); then caught=0; fi
        [ -z "$text" ] || all+="${all:+; }$text"
    done
    echo "$all"
    return "$caught"
}

jobs=$(nproc) doc=0 wanted=()
while [ $# -gt 0 ]; do
    case $1 in
    --jobs) [ $# -gt 1 ] || usage; jobs=$2; shift ;;
    --doc) doc=1 ;;
    --check) check_page && exit 0 || exit 1 ;;
    -*) usage ;;
    *) wanted+=("$1") ;;
    esac
    shift
done

declare -A sentence
names=()
while IFS=$'\t' read -r name what; do names+=("$name"); sentence[$name]=$what; done < <(mutants_of_header)
[ "${#names[@]}" = "$(grep -cE '^ +X\(' lib/mutate.h)" ] || { echo "lib/mutate.h is not understood"; exit 1; }
for name in "${wanted[@]}"; do
    [ -n "${sentence[$name]:-}" ] || { echo "there is no bug $name in lib/mutate.h; there are: ${names[*]}"; exit 2; }
done
[ "${#wanted[@]}" = 0 ] || { names=("${wanted[@]}"); [ "$doc" = 0 ] || { echo "--doc is for all bugs"; exit 2; }; }

log=build/mutations/log
mkdir -p build/mutations
if ! { cmake --preset mutations && cmake --build --preset mutations -j "$jobs" --target "${race_tests[@]}" "${other_tests[@]}"; } \
    >"$log" 2>&1; then
    grep -nE 'error|Error|undefined reference' "$log" | head -n 30 || tail -n 30 "$log"
    echo "the build failed, see $log"
    exit 1
fi

rm -rf "$runs"
programs_to_run=("${slow_tests[@]}" "${race_tests[@]}" "${quick_tests[@]}")
run_all none
for program in "${race_tests[@]}" "${other_tests[@]}"; do
    [ "$(cat "$runs/none/$program.status")" = 0 ] && continue
    tail -n 30 "$runs/none/$program.log"
    echo "$program fails without any bug: it can judge none"
    exit 1
done
left=("${names[@]}")
if [ "$doc" = 0 ]; then
    programs_to_run=("${race_tests[@]}" "${quick_tests[@]}")
    run_all "${names[@]}"
    left=()
    for name in "${names[@]}"; do
        verdicts "$name" "${programs_to_run[@]}" >/dev/null || left+=("$name")
    done
    programs_to_run=("${slow_tests[@]}")
fi
[ "${#left[@]}" = 0 ] || run_all "${left[@]}"

caught=0 rows=()
for name in "${names[@]}"; do
    race='' other='' good=0
    if race=$(verdicts "$name" "${race_tests[@]}"); then good=1; fi
    if other=$(verdicts "$name" "${other_tests[@]}"); then good=1; fi
    caught=$((caught + good))
    printf '%-8s%-27s%s\n        races: %s\n        other: %s\n' "$([ "$good" = 1 ] && echo caught || echo MISSED)" \
        "$name" "${sentence[$name]}" "${race:--}" "${other:--}"
    rows+=("| \`$name\` | ${sentence[$name]} | ${race:--} | ${other:--} |")
done

if [ "$doc" = 1 ]; then
    # How many tests failed, or crashed, is left out: that changes too easily.
    table=$(printf '%s\n' "$begin" '## Planted bugs' '' \
        "A test in a build with \`FSDP_MUTATIONS\` switches on the bug that \`FSDP_MUTANT\` names in the environment;" \
        "\`tests/race/mutations.sh\` does so with each and runs the tests. Of a race test, the judges that spoke are named: *order*" \
        "(nothing orders two touches of the same bytes), *data* or *numbers* (other values), *call* (an error, or a check of the" \
        "test's own), *device* (it was misused: memory that is gone), *memory* (more than it must be), *traces* (other places)." \
        "The other tests see what follows from it. Caught: $caught of ${#names[@]}." '' \
        '| bug | what is wrong then | seen by the race tests | and by |' '|---|---|---|---|' "${rows[@]}" "$end" |
        sed -E 's/ \([0-9]+(, [a-z]+)?\)//g')
    grep -qF "$begin" "$page" || { echo "$page has no line $begin"; exit 1; }
    TABLE=$table awk -v begin="$begin" -v end="$end" '
        $0 == begin { print ENVIRON["TABLE"]; skip = has_end; next }
        $0 == end { skip = 0; next }
        !skip' has_end="$(grep -cF "$end" "$page")" "$page" >"$page.new"
    mv "$page.new" "$page"
fi
current=1
check_page || current=0
echo "caught $caught of ${#names[@]}"
[ "$caught" = "${#names[@]}" ] && [ "$current" = 1 ]
