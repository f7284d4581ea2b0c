"""A plugin of pytest: on the CPU, steps of compiled graphs go the way of an Intel GPU's.

`pytest -p support.optim.xpu_plugin ...`; kernels run on SYCL's CPU device, which reads torch's
memory as it lies. Numbers that tensors hold are read by the kernels.
"""

import pytest

from ipex_inductor.lowerings.optimizer import step
from ipex_inductor.lowerings.optimizer.step_sycl import SyclKernel
from ipex_inductor.ops.optimizer.update import HostScalar
from ipex_inductor.passes.optimizer.updates import Writing, dtype_name


def _held_as(writing, number):
    return dtype_name(writing.examples[number.operand]) if isinstance(number, HostScalar) else ""


@pytest.fixture(autouse=True)
def _as_on_xpu(monkeypatch):
    monkeypatch.setitem(step.KINDS, "cpu", step.KINDS["xpu"])
    monkeypatch.setattr(step, "_Kernel", SyclKernel)
    monkeypatch.setattr(Writing, "_held_as", _held_as)
