"""Lowering of int8 ops to kernels for CPUs: `templates/cpu/int8.py`."""

import math
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from ipex_inductor.lowerings.common.registering import register_by_name
from ipex_inductor.lowerings.gemm.blocked import OurCall, address, expressions, without_gaps
from ipex_inductor.lowerings.problem import selector_hook
from ipex_inductor.ops.common.defining import Arguments
from ipex_inductor.ops.conv.conv import CHANNELS_LAST
from ipex_inductor.ops.quant.int8_operands import is_depthwise
from ipex_inductor.templates.cpu import int8

ipex = torch.ops.ipex
OLDEST = 80  # the first architecture whose tensor cores multiply integers as templates need


class Int8Call(OurCall):
    """Call of the kernel of convolutions and linear layers."""

    imported = int8.__name__

    def declare(self, wrapper: Any) -> None:
        """Write once per graph what calls in C++ depend on."""
        super().declare(wrapper)
        if not hasattr(wrapper, "ipex_int8"):
            wrapper.ipex_int8 = True
            declarations = int8.declarations(inside=V.graph.aot_mode)
            wrapper.define_kernel("ipex_int8", "", None, False, declarations)

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        x, weight, factors, scales, *others = self.inputs
        added, by_row, window, binary, unary, scalars = self.constant_args
        other, rows = others[0] if added else None, others[-1] if by_row else None
        sizes = _geometry(x.get_size(), self.get_size(), window)
        alone = bool(window) and is_depthwise((0, x.get_size()[1] // window[-1]), window[-1])
        ends = [int8.NUMBERS[x.get_dtype()], int8.NUMBERS[other.get_dtype()] if other else 0]
        ends += [int8.NUMBERS[self.get_dtype()], binary, unary, int(alone)]
        ends.append(int(factors.get_size()[0] == int8.FACTORS_WITH_ZEROS and not by_row))
        floats = ", ".join(map(_float_in_cpp, (*scalars, *[0] * int8.SCALARS)[: int8.SCALARS]))
        tensors = (x, weight, factors, scales, other, rows, self)
        pointers = ", ".join("nullptr" if t is None else address(t) for t in tensors)
        return (
            f"{{ const int64_t numbers[] = {{{_in_cpp([*sizes, *ends])}}}; "
            f"const float scalars[] = {{{floats}}}; "
            f"int8_convolve(numbers, scalars, {pointers}); }}"
        )


class Int8Pool(Int8Call):
    """Call of the kernel of max pools."""

    function = "pool"

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        (x,) = self.inputs
        window, stride, padding, dilation, _ = self.constant_args
        sizes = int8.conv_numbers(
            x.get_size(), self.get_size(), window, stride, padding, dilation, 1
        )
        is_signed = int(x.get_dtype() == torch.int8)
        pointers = f"{is_signed}, {address(x)}, {address(self)}"
        numbers = f"const int64_t numbers[] = {{{_in_cpp(sizes)}}};"
        return f"{{ {numbers} int8_max_pool(numbers, {pointers}); }}"


class Int8Bmm(Int8Call):
    """Call of the kernel of products of two activations."""

    function = "multiply"

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        a, b, scales = self.inputs
        (factor,) = self.constant_args
        numbers = [*a.get_size(), b.get_size()[2]]
        numbers += [int8.NUMBERS[t.get_dtype()] for t in (a, b, self)]
        pointers = ", ".join(map(address, (a, b, scales, self)))
        listed = f"const int64_t numbers[] = {{{_in_cpp(numbers)}}};"
        return f"{{ {listed} int8_multiply(numbers, {_float_in_cpp(factor)}, {pointers}); }}"


class Int8Bag(Int8Call):
    """Call of the kernel of embedding bags."""

    function = "sum_bags"

    def in_cpp(self) -> str:
        """Return the C++ statements of the call."""
        table, scales, indices, offsets, *others = self.inputs
        weighted, *words = self.constant_args
        sizes = int8.bag_sizes(table.get_size(), indices.get_size(), self.get_size())
        numbers = [*sizes, *words, indices.get_dtype().itemsize, int8.NUMBERS[self.get_dtype()]]
        given = [table, scales, indices, offsets, others[0] if weighted else None, self]
        pointers = ", ".join("nullptr" if t is None else address(t) for t in given)
        listed = f"const int64_t numbers[] = {{{_in_cpp(numbers)}}};"
        fails = f'throw std::runtime_error("{int8.OUT_OF_RANGE}");'
        return f"{{ {listed} if (int8_embedding_bag(numbers, {pointers})) {fails} }}"


def _geometry(x: Any, out: Any, window: Any) -> list[Any]:
    if window:
        return int8.conv_numbers(x, out, *window)
    return int8.linear_numbers(math.prod(x[:-1]), x[-1], out[-1])


def _in_cpp(numbers: list[Any]) -> str:
    return ", ".join(str(V.graph.wrapper_code.codegen_sizevar(n)) for n in numbers)


def _float_in_cpp(number: float) -> str:
    if math.isinf(number):
        return "-INFINITY" if number < 0 else "INFINITY"
    return f"{float(number)!r}f"


def _lower_conv(call: Arguments) -> Any:
    window = tuple(map(tuple, (call.window, call.stride, call.padding, call.dilation)))
    return _lower(call, (*window, call.groups))


def _lower_linear(call: Arguments) -> Any:
    return _lower(call, ())


def _lower(call: Arguments, window: tuple[Any, ...]) -> Any:
    image = bool(window)
    tensors = [without_gaps(call.x, image)]
    tensors += [without_gaps(t) for t in (call.weight, call.factors, call.scales)]
    tensors += [] if call.other is None else [without_gaps(call.other, image)]
    rows = None if image else call.row_scales
    tensors += [] if rows is None else [without_gaps(rows)]
    given = call.other is not None, rows is not None
    words = int8.BINARY.index(call.binary), int8.UNARY.index(call.unary), tuple(call.scalars)
    layout = _layout(call.x, image)
    kernel = Int8Call(layout, tensors, (*given, window, *words), python_kernel_name="ipex_int8")
    return _as_traced(ir.TensorBox.create(kernel))


def _lower_bmm(call: Arguments) -> Any:
    tensors = [without_gaps(t) for t in (call.a, call.b, call.scales)]
    layout = _layout(call.a, False)
    kernel = Int8Bmm(layout, tensors, (call.factor,), python_kernel_name="ipex_int8_bmm")
    return ir.TensorBox.create(kernel)


def _lower_pool(call: Arguments) -> Any:
    window = tuple(map(tuple, (call.window, call.stride, call.padding, call.dilation)))
    constants = (*window, call.ceil_mode)
    tensors = [without_gaps(call.x, image=True)]
    kernel = Int8Pool(
        _layout(call.x, True), tensors, constants, python_kernel_name="ipex_int8_pool"
    )
    return _as_traced(ir.TensorBox.create(kernel))


def _lower_bag(call: Arguments) -> Any:
    given = [call.table, call.scales, call.indices, call.offsets]
    given += [] if call.sample_weights is None else [call.sample_weights]
    tensors = [without_gaps(tensor) for tensor in given]
    constants = call.sample_weights is not None, *call.words
    layout = _layout(call.scales, False)
    kernel = Int8Bag(layout, tensors, constants, python_kernel_name="ipex_int8_bag")
    return ir.TensorBox.create(kernel)


def _layout(x: Any, image: bool) -> ir.FixedLayout:
    """Return the layout of the kernel's result: the traced value's, but channels-last of images."""
    value = V.graph.current_node.meta["val"]
    if image:
        value = value.contiguous(memory_format=CHANNELS_LAST[value.dim()])
    return ir.FixedLayout(x.get_device(), value.dtype, *expressions(value))


def _as_traced(result: Any) -> Any:
    """Return `result` in the strides of the traced value, copied if the kernel has others."""
    _, strides = expressions(V.graph.current_node.meta["val"])
    return ir.ExternKernel.require_exact_strides(result, strides)


def why_not(packaged: bool, device: torch.device) -> str | None:
    """Return why int8 kernels of a device cannot be called; None if they can.

    Args:
        packaged: whether the code is part of a package, or for other CPUs.
        device: device of the product.
    """
    if device.type == "cpu":
        return int8.why_not_in_cpp() if packaged else int8.why_not()
    if torch.version.hip:
        return "no int8 kernel for ROCm yet: it is computed as a float"
    if packaged:
        return "packages have no int8 kernels of GPUs yet: it is computed as a float"
    arch = selector_hook.arch_of(device)
    level = arch.split(":")[0].removeprefix("sm_")
    if not level.isdigit() or int(level) < OLDEST:
        return f"int8 kernels are for sm_{OLDEST} and later, not {arch}"
    return None


def register() -> None:
    """Add the lowerings to Inductor's registry."""
    register_by_name(ipex.int8_conv.default, _lower_conv)
    register_by_name(ipex.int8_linear.default, _lower_linear)
    register_by_name(ipex.int8_bmm.default, _lower_bmm)
    register_by_name(ipex.int8_embedding_bag.default, _lower_bag)
    register_by_name(ipex.int8_max_pool.default, _lower_pool)
