#!/usr/bin/env bash
# Run the SYCL code path on an Intel GPU that Intel's own driver simulates without hardware.
#
#     python -m benchmarks sycl_simulated FOLDER pvc|bmg|dg2|arl|ptl [PYTHON]
#
# Devices, compiling, loading and launching are real; kernels compute nothing. The driver's switches
# are not documented and may be removed. FOLDER is the output of benchmarks/common/ocloc.sh; PYTHON
# needs torch and intel-sycl-rt.
set -euo pipefail
libraries=$(realpath "${1:?what benchmarks/common/ocloc.sh made}")/files/usr/lib/x86_64-linux-gnu
python=${3:-.venv/bin/python}
prefix=$("$python" -c 'import sys; print(sys.prefix)')
# The product, without hardware and without a record of what it is sent.
export NEOReadDebugKeys=1 ProductFamilyOverride=${2:?a product} HardwareInfoOverride=1x4x16
export UseAubStream=0 SetCommandStreamReceiver=1 UseBindlessMode=0
export UseExternalAllocatorForSshAndDsh=0 SYCL_UR_USE_LEVEL_ZERO_V2=0
export ZE_ENABLE_ALT_DRIVERS=$libraries/libze_intel_gpu.so.1 ONEAPI_DEVICE_SELECTOR=level_zero:gpu
# The driver needs a younger C library than most systems have: its own loader runs all of it.
export IPEX_SIMULATED_LOADER="$libraries/ld-linux-x86-64.so.2 --argv0 $prefix/bin/python \
--library-path $libraries:$prefix/lib:/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu \
$(readlink -f "$python")"
export IPEX_SIMULATED_OCLOC=$(realpath "$1")/ocloc
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root:$root/tests
exec timeout 300 $IPEX_SIMULATED_LOADER "$root/benchmarks/common/sycl_simulated_program.py"
