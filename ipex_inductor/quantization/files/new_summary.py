"""The configuration file of releases 1.12 to 2.8: operators by the module that calls them."""

import re
from itertools import chain

import msgspec

from ipex_inductor.quantization.files.summary import LayerRecord, TensorRecord, plain_operator

INTEGER_TYPES = ("torch.quint8", "torch.qint8")


class TensorInfo(msgspec.Struct):
    """One tensor of an operator; `force_dtype` is the decision of IPEX's recipe."""

    id: int | None = None
    force_dtype: str = ""
    scale: list[float] = []
    zero_point: list[int] = []


class OperatorInfo(msgspec.Struct):
    """One operator. `op_type` is the printed form of its class or function."""

    op_type: str
    fqn: str = ""
    input_tensor_infos: list[TensorInfo | None] = []
    weight_tensor_infos: list[TensorInfo | None] = []
    output_tensor_infos: list[TensorInfo | None] = []


class ModuleInfo(msgspec.Struct):
    """The operators that one module calls, by their number."""

    q_op_infos: dict[str, OperatorInfo]


def read_modules(text: bytes) -> tuple[LayerRecord, ...]:
    """Return the layers of a file that releases 1.12 to 2.8 of IPEX wrote.

    Raises:
        msgspec.DecodeError: if it is no such file.
    """
    modules = msgspec.json.decode(text, type=dict[str, ModuleInfo])
    infos = chain.from_iterable(_in_order(module) for module in modules.values())
    return tuple(map(_record, infos))


def _in_order(module: ModuleInfo) -> list[OperatorInfo]:
    """Return the operators of a module in the order of execution."""
    items = sorted(module.q_op_infos.items(), key=lambda item: (len(item[0]), item[0]))
    return [info for _, info in items]


def _record(info: OperatorInfo) -> LayerRecord:
    inputs = [tensor for tensor in info.input_tensor_infos if tensor is not None]
    return LayerRecord(
        operator=operator_of(info.op_type),
        quantized=bool(inputs) and all(t.force_dtype in INTEGER_TYPES for t in inputs),
        inputs=tuple(map(_tensor, info.input_tensor_infos)),
        output=next(map(_tensor, info.output_tensor_infos), None),
        module_path=module_path(info.fqn),
        weight_channels=_channels(info),
    )


def _tensor(info: TensorInfo | None) -> TensorRecord | None:
    if info is None or not info.scale or not info.zero_point:
        return None
    return TensorRecord(info.scale[0], info.zero_point[0], info.force_dtype == "torch.qint8")


def _channels(info: OperatorInfo) -> int | None:
    scales = [len(t.scale) for t in info.weight_tensor_infos if t is not None]
    return scales[0] if scales and scales[0] > 1 else None


def module_path(fqn: str) -> str:
    """Return the path of a module from the file's spelling: ":" for ".", " " for the root."""
    return fqn.strip().replace(":", ".")


def operator_of(op_type: str) -> str:
    """Return the operator that a printed class or function names.

    A function is printed with its address, which differs from run to run and is not read.
    """
    quoted = re.search(r"'([\w.]+)'", op_type)
    bare = re.search(r"(?:function|method) ([\w.]+)", op_type)
    name = quoted or bare
    return plain_operator((name[1] if name else op_type).rpartition(".")[2])
