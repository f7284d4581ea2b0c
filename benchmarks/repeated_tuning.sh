#!/usr/bin/env bash
# The same problems tuned again and again, each time in a fresh process with an empty database: do
# the winners agree, and what does it cost where they do not?
#   benchmarks/repeated_tuning.sh [DEVICE [TIMES [OUT [FILE]]]]
set -euo pipefail
device=${1:-cuda} times=${2:-10} out=${3:-build/repeated_tuning}
file=${4:-$(dirname "$0")/tuning_problems.txt}
mkdir -p "$out"
for i in $(seq "$times"); do
  rm -rf "$out/$i"
  # Problems with a reason and no record do not stop the others.
  ipex-inductor autotune run --shapes "$file" --device "$device" --into "$out/$i" > "$out/$i.txt" || cat "$out/$i.txt"
done
ipex-inductor autotune merge "$out/all.jsonl" "$out"/*/
ipex-inductor autotune regret "$out"/*/ --max-regret 0.02 --min-identical 0.9
