#!/usr/bin/env bash
# Run the test suite with the oldest and newest supported torch, a smoke test with the others.
#
#     [COMPAT_DIR=FOLDER] [WORKERS=N] python -m benchmarks compat
#
# Environments go to $COMPAT_DIR (default: ~/.cache/ipex-compat); each takes about 5 GB.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON312:-python3.12}
root=${COMPAT_DIR:-$HOME/.cache/ipex-compat}
smoke=(tests/passes/fusion/test_epilogue_rules.py tests/test_backend.py)
failed=()
# What is pinned, but for what comes with each torch: torch 2.11 needs setuptools below 82, and each
# version of SYCL's runtime its own tbb. Without pins, pip tried versions for eight minutes and was
# not through.
pinned=$(mktemp)
trap 'rm -f "$pinned"' EXIT
grep -vE '^(torch|triton|setuptools|intel-|umf|tcmlib|tbb)' constraints.txt > "$pinned"

check() {  # torch version, SYCL's as torch's XPU wheel of that version pins it, then what to test
  local version=$1 sycl=$2 env=$root/torch-$1-sycl-$2
  shift 2
  echo "== torch $version: ${*}"
  if [ ! -e "$env/installed" ]; then
    "$python" -m venv "$env" &&
      "$env/bin/python" -m pip install -q "torch==$version" setuptools &&
      "$env/bin/python" -m pip install -q --constraint "$pinned" --editable '.[test]' \
        "torch==$version" "intel-sycl-rt==$sycl.*" "intel-opencl-rt==$sycl.*" && touch "$env/installed"
  fi || { failed+=("$version (install)"); return; }
  "$env/bin/python" -m pytest "$@" -n "${WORKERS:-2}" -q -m "not slow" || failed+=("$version")
}

check 2.11.0 2025.3 tests
check 2.15.0 2026.2 tests
check 2.12.1 2025.3 "${smoke[@]}"
check 2.14.1 2026.1 "${smoke[@]}"
[ ${#failed[@]} -eq 0 ] && echo "== all green" && exit 0
echo "== failed: ${failed[*]}"
exit 1
