#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# ranks_test.sh: ranks.sh tells each rank its place, ends all when one fails or the deadline passes, and leaves nobody behind;
# and the scripts that are run on GPUs by hand at least know what they would run.
set -uo pipefail
cd "$(dirname "$0")" || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
wrong() { echo "FAILED: $1"; failed=1; }

# shellcheck disable=SC2016 # the ranks expand it
bash ranks.sh 3 --one-gpu bash -c 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NCCL_HOSTID $NCCL_NVLS_ENABLE" >'"$work"'/$RANK' \
    || wrong "three ranks that end well: status $?"
for r in 0 1 2; do
    [ "$(cat "$work/$r")" = "$r/3 $r/3 host$r 0" ] || wrong "rank $r was told '$(cat "$work/$r")'"
done

begin=$SECONDS
# shellcheck disable=SC2016
bash ranks.sh 3 bash -c '[ "$RANK" = 1 ] && exit 5; echo $$ >'"$work"'/pid$RANK; sleep 60' 2>/dev/null
rc=$?
[ "$rc" = 5 ] || wrong "a rank ends with 5, ranks.sh with $rc"
[ $((SECONDS - begin)) -lt 30 ] || wrong "the others were not ended"
for r in 0 2; do
    if [ -s "$work/pid$r" ] && kill -0 "$(cat "$work/pid$r")" 2>/dev/null; then wrong "rank $r is still there"; fi
done

# A rank that ignores SIGTERM, and its child.
bash ranks.sh 2 --deadline 1 bash -c 'trap "" TERM; echo $$ >'"$work"'/deaf; sleep 60; sleep 60' 2>"$work/said"
rc=$?
[ "$rc" = 124 ] || wrong "after the deadline: status $rc"
grep -q "not done after 1 s" "$work/said" || wrong "the deadline is not named: $(cat "$work/said")"
if kill -0 "$(cat "$work/deaf")" 2>/dev/null; then wrong "a deaf rank is still there"; fi

for script in compare_fsdp2.sh multi_gpu.sh; do
    bash "$script" --dry-run --out "$work/$script" >"$work/plan" || wrong "$script --dry-run"
    grep -q 'bench_prefetch --device cuda --json' "$work/plan" || wrong "$script runs no bench"
done

# The table holds what the runs said.
cat >"$work/lines" <<'END'
{"section":"main","way":"bare","comms":1,"world":2,"layers":8,"dim":1024,"tokens":64,"nccl":22809,"step_ms":100.0,"losses":[1.0,0.9,0.8]}
{"section":"main","way":"library","comms":1,"world":2,"layers":8,"dim":1024,"tokens":64,"nccl":22809,"step_ms":101.0,"losses":[1.0,0.9,0.7],"device_bytes":7,"predicted_bytes":7}
{"section":"main","way":"fsdp2","comms":1,"world":2,"layers":8,"dim":1024,"tokens":64,"nccl":"2.27.5","step_ms":202.0}
END
if command -v python3 >/dev/null; then
    python3 bench_table.py "$work/lines" >"$work/table" || wrong "bench_table.py"
    grep -qE '100\.00 +101\.00 +1\.010 +202\.00 +0\.495 +0\.500' "$work/table" || wrong "the ratios: $(cat "$work/table")"
    grep -q 'not one NCCL' "$work/table" || wrong "two versions of NCCL are not named"
    grep -q 'they differ' "$work/table" || wrong "losses that differ are not named"
fi
exit "$failed"
