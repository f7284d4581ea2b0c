"""What tests of SYCL share: whether its CPU device is here, and a kernel to try things with."""

import os

import pytest

from ipex_inductor.errors import SyclAbsentError
from ipex_inductor.templates.sycl import wheels
from ipex_inductor.templates.sycl.source import Entry, Source

HEAD = """
#include <sycl/ext/oneapi/free_function_queries.hpp>
#include <sycl/ext/oneapi/kernel_properties/properties.hpp>

namespace sx = sycl::ext::oneapi::experimental;
#define KERNEL extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sx::nd_range_kernel<1>)) void
"""
AXPY = """
KERNEL axpy(float a, const float* x, float* y, long n) {
  long i = sycl::ext::oneapi::this_work_item::get_nd_item<1>().get_global_linear_id();
  if (i < n) y[i] += a * x[i];
}
"""

# For a parser that descends into each, which ends it; and 4^30 times nothing.
_MINUS = f"KERNEL f(float* x) {{ x[0] = {'- ' * 200_000} x[0]; }}\n"
_DOUBLED = "".join(f"#define A{n + 1} A{n} A{n} A{n} A{n}\n" for n in range(30))
DEEP = Source(HEAD + _MINUS, (Entry("f", ("*",)),))
ENDLESS = Source(f"{HEAD}#define A0\n{_DOUBLED}A30\n", (Entry("f", ()),))


def axpy(**more):
    """y += a x, of n elements."""
    return Source(HEAD + AXPY, (Entry("axpy", ("fp32", "*", "*", "i64")),), **more)


def why_not():
    """What is missing here; "" if nothing is."""
    try:
        return "" if wheels.runtime().cpu else f"{wheels.CPU_DRIVER} is not installed"
    except SyclAbsentError as error:
        return str(error)


needs_sycl = pytest.mark.skipif(bool(why_not()), reason=f"needs SYCL's CPU device: {why_not()}")
if os.environ.get("IPEX_TESTS_NEED_SYCL"):  # CI has it
    assert not why_not(), why_not()
