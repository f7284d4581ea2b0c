"""A GPU's half of a fused step on tensors of the host: a driver that computes what kernels would.

A launch is given addresses and numbers; the kernel's formula is evaluated on what lies there. All
that the host decides is ours, as on a GPU: who looks, what is reused, what is counted where.
"""

import ctypes
import math
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor

from ipex_inductor.optim import norms, plan_replay, planning
from ipex_inductor.optim.launching import launch_groups_cuda
from ipex_inductor.templates.build import cuda
from ipex_inductor.templates.optimizer.norm_triton import parts_signature
from ipex_inductor.templates.optimizer.step import assignments, scalar_names
from ipex_inductor.templates.optimizer.step_triton import scalars_signature, signature
from support.optim.triton_plugin import Room

KINDS = ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3
NUMBERS = {
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
}
REALS = {"float32": ctypes.c_float, "float64": ctypes.c_double}


def _where(condition, a, b):
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def _root(x):
    return torch.sqrt(x) if isinstance(x, Tensor) else math.sqrt(x) if x >= 0 else math.nan


WORDS = {"sqrt": _root, "pow": pow, "maximum": torch.maximum, "where": _where}


def assigned(lines, known):
    """What the lines of a formula make of what is `known`, added to it."""
    for name, text in assignments(lines):
        known[name] = eval(text, WORDS, known)


def memory(address, count, name):
    """So many numbers of that dtype, where they lie."""
    dtype = getattr(torch, name)
    if not count:
        return torch.empty(0, dtype=dtype)
    there = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(there, dtype=dtype)


def row(address, count, kind=ctypes.c_int64):
    """So many numbers."""
    return (kind * count).from_address(address)


def at(address, kind=ctypes.c_float):
    """The number there."""
    return kind.from_address(address).value


class Table:
    """Stays where it was as long as stream and length do; how long each is, `lengths` knows."""

    def __init__(self, lengths):
        self._lengths, self._stream, self._there = lengths, None, None

    def address(self, values, stream):
        if self._stream != stream or len(self._there) != len(values):
            self._stream, self._there = stream, values[:]
        self._there[:] = values
        address, _ = self._there.buffer_info()
        self._lengths[address] = len(values)
        return address


class HostGpu:
    """Runs launches at once; `error` is what one raised, `at_once` how many steps C++ took."""

    def __init__(self):
        self.stream, self.error, self.at_once = 7, None, 0
        self.lengths = {}  # of tables, by their addresses
        self._there = {}  # tensors that a GPU would have, by their ids
        self._functions, self._kernels, self._sums = [], {}, {}
        self.driver = SimpleNamespace(
            cuModuleLoadData=lambda *_: 0,
            cuModuleGetFunction=self._function,
            cuLaunchKernel=ctypes.CFUNCTYPE(ctypes.c_int32, *KINDS)(self._launched),
            cuGetErrorString=lambda *_: 0,
        )

    def keep(self, t):
        """Have it be on this GPU."""
        self._there[id(t)] = t

    def has(self, t):
        return self._there.get(id(t)) is t

    def kernel_of(self, kernel, device, aligned, name, tabled=False):
        kinds = signature(kernel, tabled) if name == "step" else scalars_signature(kernel)
        run = {"step": self._step, "scalars": self._scalars}[name]
        key = kernel, device, aligned, name, tabled
        return self._kernel(key, name, kinds, lambda given, blocks: run(kernel, given))

    def parts(self, dtype, aligned, device, real, squares, looks, kernel):
        key = dtype, aligned, real, squares, looks, kernel
        kinds = parts_signature(real, squares, kernel)
        read = SimpleNamespace(dtype=dtype, real=real, squares=squares, looks=looks, kernel=kernel)
        return self._kernel(key, "parts", kinds, lambda *given: self._parts(read, *given))

    def _kernel(self, key, name, kinds, run):
        if key not in self._kernels:
            meta = {"name": name, "signature": [*kinds.values()], "num_warps": 1, "shared": 0}
            self._kernels[key] = cuda.Kernel(SimpleNamespace(blob=b"", meta=meta))
            self._functions.append((kinds, run))
        return self._kernels[key]

    def _function(self, there, *_):
        ctypes.cast(there, ctypes.POINTER(ctypes.c_void_p))[0] = 1 + len(self._functions)
        return 0

    def _launched(self, function, blocks, *given):
        *_, arguments, _ = given
        kinds, run = self._functions[function - 1]
        places = (ctypes.c_void_p * len(kinds)).from_address(arguments)
        values = {
            name: at(place, NUMBERS.get(kind, ctypes.c_uint64))
            for (name, kind), place in zip(kinds.items(), places, strict=True)
        }
        try:
            run(values, blocks)
        except Exception as error:  # which C++ would not hand on
            self.error = error
        return 0

    def _scalars(self, kernel, given):
        times = given["times"]
        if given["divisor"]:
            times /= at(given["divisor"])
        if given["factor"]:
            times *= at(given["factor"], ctypes.c_double)
        left = at(given["found_inf"]) if given["found_inf"] else 0.0
        self._fill(kernel, given, times, left)

    def _fill(self, kernel, given, times, left):
        """A row of the table for each tensor: its scalars, and whether its step is left out."""
        own, names = kernel.rule.numbers, scalar_names(kernel)
        width, counted = len(names) + 1, REALS.get(kernel.counted)  # none where no step counts
        table = memory(given["table"], given["count"] * width, kernel.real)
        rows = row(given["rows"], 3 * given["count"])
        for number in range(given["count"]):
            step, group, far = rows[3 * number : 3 * number + 3]
            numbers = row(given["numbers"], len(own) * (group + 1), ctypes.c_double)
            known = dict(zip(own, numbers[len(own) * group :], strict=True))
            known |= {"scale": times, "first": far != 0, "step": far + 1.0}
            if rate := row(given["rates"], group + 1)[group]:
                wide = rate % 2  # the address of one in fp64 is odd
                known["lr"] = at(rate - wide, ctypes.c_double if wide else ctypes.c_float)
            if step:
                known["step"] = at(step, counted) + 1
                if not left:
                    counted.from_address(step).value = known["step"]
            assigned(kernel.rule.scalars(kernel.on), known)
            made = [*(float(known[name]) for name in names), left]
            table[width * number : width * (number + 1)] = torch.tensor(made, dtype=torch.float64)

    def _step(self, kernel, given):
        names, width = scalar_names(kernel), len(kernel.columns) + 1
        count = self.lengths[given["rows"]] // width
        rows, left = row(given["rows"], width * count), 0.0
        for number in range(count):
            *addresses, size = rows[width * number : width * (number + 1)]
            if "table" in given:
                table = memory(given["table"], (len(names) + 1) * count, kernel.real)
                *scalars, left = table.view(count, -1)[number].tolist()
            else:
                scalars = [given[name] for name in names]
            known = dict(zip(names, scalars, strict=True))
            held = {
                name: memory(address, size, dtype)
                for (name, dtype), address in zip(kernel.columns, addresses, strict=True)
            }
            real = getattr(torch, kernel.real)
            known |= {name: tensor.to(real, copy=True) for name, tensor in held.items()}
            self._updated(kernel, known)
            for name, tensor in held.items():
                if not left and name != "grad":
                    tensor.copy_(known[name])
            if kernel.zeroed:
                held["grad"].zero_()

    def _updated(self, kernel, known):
        if kernel.scaled:
            scaled = known["grad"] * known["scale"]
            known["grad"] = scaled.to(getattr(torch, kernel.grad)).to(scaled.dtype)
        if kernel.rule.norms:
            assigned(kernel.rule.before(kernel.on), known)
            for name in kernel.rule.norms:
                known[f"norm_{name}"] = known[name].double().square().sum().sqrt()
            assigned(kernel.rule.ratios(kernel.on), known)
        assigned(kernel.rule.update(kernel.on), known)

    def _parts(self, read, given, blocks):
        """A reading of gradients; the last of several launches has what all of them found."""
        sums = self._sums.setdefault(given["counters"], {"blocks": 0, "squares": 0.0, "bad": False})
        times = 1.0 / at(given["divisor"]) if given["divisor"] else 1.0
        count = self.lengths[given["rows"]] // 2
        rows = row(given["rows"], 2 * count)
        for number in range(count):
            grad = memory(*rows[2 * number : 2 * number + 2], read.dtype).double() * times
            sums["squares"] += float(grad.square().sum())
            sums["bad"] |= not grad.isfinite().all()
        sums["blocks"] += blocks
        if sums["blocks"] < given["count"]:
            return
        del self._sums[given["counters"]]
        left = 0.0
        if read.looks:
            left = float(sums["bad"])
            ctypes.c_float.from_address(given["found_inf"]).value = left
        elif given["found_inf"]:
            left = at(given["found_inf"])
        if read.squares:
            norm = memory(given["norm"], 1, "float64" if read.real == "float64" else "float32")
            norm[0] = math.sqrt(sums["squares"]) if sums["squares"] >= 0 else math.nan
            ratio = given["clip"] / (float(norm[0]) + 1e-6)
            factor = 1.0 if ratio > 1 else ratio
            ctypes.c_double.from_address(given["factor"]).value = factor
            times *= factor
        if read.kernel is not None:
            own = {**given, "rows": given["steps"], "count": given["stepped"]}
            self._fill(read.kernel, own, times, left)


def installed(monkeypatch):
    """Optimizers that are fused step by it, whose tensors are of the host."""
    gpu = HostGpu()
    look, begun, rates = (
        plan_replay.compare_tensors,
        planning._begun_step,
        launch_groups_cuda.rate_on,
    )

    def batch(made, kernel, columns, group, step, first, looks):
        device, far = columns[0].device, planning.count_steps_before(step, first)
        given = made, launch_groups_cuda.CountingBatch, kernel, device
        aligned = not any(t.data_ptr() % 16 for t in columns)
        if step is not None and gpu.has(step):
            return planning._find_batch(*given, aligned)
        if looks and planning.is_whole(far):
            return planning._find_batch(*given, aligned, None if step is None else far)
        return planning._find_batch(
            made, launch_groups_cuda.CudaBatch, kernel, device, aligned, group, far
        )

    def begun_step(group, held, dtype):
        step = begun(group, held, dtype)
        if group.get("capturable") or group.get("fused"):
            gpu.keep(step)
        return step

    def reading(grads):
        known = all(g.dtype in norms.REALS and norms.is_dense(g) for g in grads)
        return norms.Reading(grads, grads[0].device) if known else None

    def rate_on(group, device):
        return rates(group, device) if gpu.has(group["lr"]) else None

    def looked(*args, take):
        seen = look(*args, take=take)
        gpu.at_once += bool(seen and seen.taken)
        return seen

    ours = {
        plan_replay: {"compare_tensors": looked},
        launch_groups_cuda: {"rate_on": rate_on},
        norms: {"_make_reading": reading},
        planning: {"_batch": batch, "_begun_step": begun_step, "rate_on": rate_on},
    }
    for names in (_driven(gpu), ours):
        for room, values in names.items():
            for name, value in values.items():
                monkeypatch.setattr(room, name, value)
    return gpu


def _driven(gpu):
    """What stands for a driver, its memory and its streams, by where it is looked up."""
    shared = {
        "On": lambda device: nullcontext(gpu.stream),
        "Sent": lambda device: Table(gpu.lengths),
        "Room": Room,
        "chunks_of": lambda blocks, device: torch.zeros(sum(blocks), 2, dtype=torch.int32),
    }
    return {
        torch.cuda: {"is_current_stream_capturing": lambda: False},
        cuda: {"_driver": lambda: gpu.driver},
        launch_groups_cuda: {
            **shared,
            "kernel_of": gpu.kernel_of,
            "stream_on": lambda device: gpu.stream,
            "turns_of": lambda blocks, device: torch.zeros(2 * sum(blocks), 2),
        },
        norms: {
            **shared,
            "parts": gpu.parts,
            "_look_on_cuda": lambda optimizer, seen: seen or norms.gradients(optimizer),
        },
        planning: {"_refuse": lambda *_: None},
    }
