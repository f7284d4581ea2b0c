#!/usr/bin/env bash
# Tune the same problems repeatedly and print the agreement of the winners and their regret.
#
#     [GPUS=1] python -m benchmarks repeated_tuning [DEVICE [TIMES [OUT [FILE]]]]
#
# Each tuning is a fresh process with an empty database. GPUS=2 runs two at once, one on each GPU.
# `python -m benchmarks tuning_agreement` makes rows of results from the databases.
set -euo pipefail
device=${1:-cuda} times=${2:-10} out=${3:-build/repeated_tuning}
file=${4:-$(dirname "$0")/../problems/tuning.txt}
mkdir -p "$out"
tune() {
  # What OUT has from before is kept, and not measured again; but what the package's tables know is.
  if [ ! -e "$out/$1" ]; then
    # Problems with a reason and no record do not stop the others.
    ipex-inductor autotune run --again --shapes "$file" --device "$device" --into "$out/$1" > "$out/$1.txt" || [ $? = 1 ]
  fi
}
if [ "${GPUS:-1}" -gt 1 ]; then
  for gpu in $(seq 0 $((GPUS - 1))); do
    for i in $(seq $((gpu + 1)) "$GPUS" "$times"); do CUDA_VISIBLE_DEVICES=$gpu tune "$i"; done &
  done
  wait
else
  for i in $(seq "$times"); do tune "$i"; done
fi
tunings=$(seq -f "$out/%g" "$times")
rm -f "$out/all.jsonl"
ipex-inductor autotune merge "$out/all.jsonl" $tunings
ipex-inductor autotune regret $tunings --max-regret 0.02 --min-agreement 0.9
