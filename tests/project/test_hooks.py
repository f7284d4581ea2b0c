"""Process-wide hooks of the product: all are rows of docs/internals/hooks.md."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "internals" / "hooks.md"
ROOMS = ("ipex_inductor", "lowerings", "templates", "autotune", "aot_cache")
FILES = sorted(f for folder in ROOMS for f in (ROOT / folder).rglob("*.py"))
COLUMNS = 6

# Calls that change the process, by the last part of their name. `register_*` belong to them.
REGISTRIES = {
    *("add_feedback_saver", "add_needs_realized_inputs", "add_preprocessing_fn", "custom_op"),
    *("set_code_exec_strategy", "register_at_fork", "finalize", "signal", "freeze"),
    *("set_threshold", "set_num_threads", "set_float32_matmul_precision"),
    *("sched_setaffinity", "omp_set_num_threads", "addHandler", "setLevel"),
    *("Thread", "ThreadPoolExecutor"),
}
BY_NAME = {"atexit.register", "gc.disable", "gc.enable", "torch.manual_seed"}
# Calls that register with one graph, module, parameter or optimizer.
PER_OBJECT = {
    *("register_buffer", "register_forward_hook", "register_forward_pre_hook", "register_hook"),
    *("register_load_state_dict_post_hook", "register_load_state_dict_pre_hook"),
    *("register_by_name", "register_operation_list", "register_post_accumulate_grad_hook"),
    *("register_state_dict_post_hook", "register_graph_pattern", "register_parameter"),
}
# Methods that change what another package holds.
CHANGES = {
    *("add", "append", "cache_clear", "clear", "extend", "insert", "pop", "remove"),
    *("setdefault", "update"),
}
# Names by which the product calls classes and modules of other packages that it does not import.
OWNERS = {"kind", "module", "owner"}
# Objects of one call or one model, by file and name, whose attributes are set.
OWNED = {
    ("ipex_inductor/compiler/inner_compile.py", "twin"),
    ("ipex_inductor/frontend/folding.py", "parent"),
    ("ipex_inductor/optim/launching/launch_groups_cuda.py", "self.turn"),
    ("ipex_inductor/passes/weights/weight_snapshot.py", "owner.left"),
    ("ipex_inductor/prebuild/exporting.py", "module"),
    ("ipex_inductor/quantization/capture.py", "module"),
    ("ipex_inductor/quantization/capture.py", "module.training"),
    ("ipex_inductor/quantization/capture.py", "owner"),
    ("ipex_inductor/quantization/fp8/recomputation.py", "region"),
    ("ipex_inductor/quantization/graphs/model_graph.py", "result"),
    ("templates/sycl/binding.py", "slot"),
}


INDUCTOR = "torch._inductor"
ISA, BUILDER, CODE = f"{INDUCTOR}.cpu_vec_isa", f"{INDUCTOR}.cpp_builder", f"{INDUCTOR}.codecache"
LEVELS = {
    *("torch.ops.mkldnn._is_mkldnn_bf16_supported", "torch.ops.mkldnn._is_mkldnn_fp16_supported"),
    *(f"{ISA}.valid_vec_isa_list", f"{CODE}.CacheBase.get_system"),
    *(f"{BUILDER}.get_cpp_compiler", f"{BUILDER}._is_intel_compiler"),
    f"{BUILDER}.CppBuilder.get_command_line",
}
# What the product changes by a variable, by file and by the text that the scan finds.
NAMED = {
    ("ipex_inductor/compat/files.py", "kind.cache"): {f"{CODE}.CppCodeCache.cache"},
    ("ipex_inductor/compat/inductor.py", "setattr(kind)"): {
        f"{INDUCTOR}.async_compile.AsyncCompile.wakeup",
        f"{INDUCTOR}.async_compile.AsyncCompile.use_process_pool",
        f"{INDUCTOR}.output_code.CompiledFxGraph.after_deserialization",
    },
    ("ipex_inductor/compat/levels.py", "setattr(*_usual.pop())"): LEVELS,
    ("ipex_inductor/compat/levels.py", "setattr(owner)"): LEVELS,
    ("ipex_inductor/passes/weights/weight_access.py", "setattr(owner)"): {
        *("torch.Tensor.numpy", "torch.Tensor.untyped_storage", "torch.Tensor.__dlpack__"),
        *("torch.to_dlpack", "torch.utils.dlpack.to_dlpack", "torch.distributed.ProcessGroup"),
        "torch.distributed._broadcast_coalesced",
    },
    ("ipex_inductor/prebuild/changes.py", "setattr(owner)"): {"Changes.set"},
    ("lowerings/problem/settings.py", "setattr(owner)"): {"torch.backends"},
}


class Scan(ast.NodeVisitor):
    """Collect the targets in one file that lie outside of the product, as dotted names.

    A name is of another package if it is imported, or assigned an attribute of such a name.
    """

    def __init__(self, file):
        self.file = file.relative_to(ROOT).as_posix()
        self.texts = {}  # module constants that are strings
        self.names = {}  # dotted names of other packages, by the name in this file
        self.found = set()

    def visit_Import(self, node):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top != "ipex_inductor":
                self.names[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node):
        if (node.module or "").partition(".")[0] != "ipex_inductor":
            for alias in node.names:
                self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_FunctionDef(self, node):
        for decorator in node.decorator_list:
            self.register(decorator)
        outer, arguments = self.names, node.args
        own = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        self.names = {name: value for name, value in outer.items() if name not in own}
        self.generic_visit(node)
        self.names = outer

    def visit_With(self, node):
        for statement in node.body:  # what a context manager sets, it restores
            self.visit(statement)

    def dotted(self, node):
        """Return the dotted name of an expression of another package, or None."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Subscript):
            return self.dotted(node.value)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return owner and f"{owner}.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.modules.get":
            return node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        return None

    def bind(self, target, value):
        """Note that a name stands for an expression of another package."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for pair in zip(target.elts, value.elts, strict=False):
                self.bind(*pair)
        elif isinstance(target, ast.Name):
            self.names.pop(target.id, None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                self.texts[target.id] = value.value
            if name := self.dotted(value):
                self.names[target.id] = name

    def change(self, target):
        """Note an attribute or an item that is assigned or deleted."""
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self.change(each)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            if name := self.dotted(target):
                self.found.add(name)
            elif target.value.id in OWNERS and (self.file, ast.unparse(target)) not in OWNED:
                self.found.add(ast.unparse(target))
        elif isinstance(target, (ast.Attribute, ast.Subscript)) and (name := self.dotted(target)):
            self.found.add(name)

    def visit_Assign(self, node):
        self.visit(node.value)
        for target in node.targets:
            self.change(target)
            self.bind(target, node.value)

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)
            self.change(node.target)
            self.bind(node.target, node.value)

    def visit_AugAssign(self, node):
        self.visit(node.value)
        self.change(node.target)

    def visit_Delete(self, node):
        for target in node.targets:
            self.change(target)

    def visit_For(self, node):
        for value in node.iter.elts if isinstance(node.iter, ast.Tuple) else [None]:
            if value is not None:
                self.bind(node.target, value)
            self.generic_visit(node)

    def visit_Call(self, node):
        self.generic_visit(node)
        name = ast.unparse(node.func)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        held = owner and self.dotted(owner)
        if name in ("setattr", "delattr"):
            self.set_attribute(node)
        elif name in BY_NAME:
            self.found.add(name)
        elif held and "." in held and node.func.attr in CHANGES:
            self.found.add(held)
        else:
            self.register(node.func)

    def register(self, function):
        """Note a function that adds to a registry, if it is one."""
        if isinstance(function, (ast.Name, ast.Attribute)):
            name = self.dotted(function) or ast.unparse(function)
            last = name.rpartition(".")[2]
            if last in REGISTRIES or (last.startswith("register_") and last not in PER_OBJECT):
                self.found.add(name if self.dotted(function) else last)

    def set_attribute(self, node):
        """Note the target of `setattr` or `delattr`."""
        owner = self.dotted(node.args[0])
        text = ast.unparse(node.args[0])
        if owner is not None:
            name = node.args[1]
            name = (
                name.value if isinstance(name, ast.Constant) else self.texts.get(ast.unparse(name))
            )
            self.found.add(f"{owner}.{name}" if name else owner)
        elif text != "self" and (self.file, text) not in OWNED:
            self.found.add(f"setattr({text})")


def hooks_in(file):
    """Return pairs of the file and each target that its source changes."""
    scan = Scan(file)
    scan.visit(ast.parse(file.read_text()))
    for target in scan.found:
        for name in NAMED.get((scan.file, target), {target}):
            yield scan.file, name


def rows():
    """Return the hooks and the files of each row of the document's tables."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    cells = [re.split(r" *\| *", line.strip("| ")) for line in lines]
    assert all(len(row) == COLUMNS and all(row) for row in cells), cells
    places = [re.findall(r"`([\w/]+(?:/|\.py))`", row[1]) for row in cells]
    return [(re.findall(r"`([^`]+)`", row[0]), at) for row, at in zip(cells, places, strict=True)]


def names(row, file, target):
    """Return True if the row has the target, and the file or a folder of it."""
    targets, places = row
    return target in targets and any(
        file.startswith(place) if place.endswith("/") else file == place for place in places
    )


@pytest.fixture(scope="module")
def hooks():
    return sorted({hook for file in FILES for hook in hooks_in(file)})


def test_each_hook_has_a_row(hooks):
    table = rows()
    assert not [hook for hook in hooks if not any(names(row, *hook) for row in table)]


def test_each_row_has_its_hooks(hooks):
    for row in rows():
        targets, places = row
        met = [hook for hook in hooks if names(row, *hook)]
        assert {target for _, target in met} == {*targets}, row
        files = [file for file, _ in met]
        assert all(any(file.startswith(place) for file in files) for place in places), row


HOOKS = {
    "an attribute": ("import torch\ntorch.Tensor.data = 1", "torch.Tensor.data"),
    "of an imported class": (
        "def f():\n from torch._inductor.ir import Layout\n kind: Any = Layout\n kind.size = 1",
        "torch._inductor.ir.Layout.size",
    ),
    "by setattr": ("import gc\nsetattr(gc, 'x', 1)", "gc.x"),
    "of any class": ("def f(owner):\n setattr(owner, 'x', 1)", "setattr(owner)"),
    "an item": ("import os\nos.environ['A'] = ''", "os.environ"),
    "a list": ("import gc\ngc.callbacks.append(print)", "gc.callbacks"),
    "a registry": ("import os\nos.register_at_fork(before=print)", "os.register_at_fork"),
    "a decorator": ("@op.register_fake\ndef f(): ...", "register_fake"),
    "at exit": ("import atexit\natexit.register(print)", "atexit.register"),
}


@pytest.mark.parametrize(("source", "target"), HOOKS.values(), ids=HOOKS)
def test_the_scan_finds(source, target):
    scan = Scan(ROOT / "lowerings" / "new.py")
    scan.visit(ast.parse(source))
    assert scan.found == {target}


def test_the_scan_leaves_out_what_a_block_restores():
    scan = Scan(ROOT / "lowerings" / "new.py")
    scan.visit(ast.parse("from torch import config\nwith config.patch(a=1):\n x.y = 1"))
    assert not scan.found


# What Dynamo and tensor subclasses get, before our process-wide hooks are installed and after.
EFFECTS = """
import json
import operator
import torch
from torch._dynamo.utils import counters

HANDLED = {torch.Tensor.numpy: "handled", torch.Tensor.data.__get__: "data"}
METHODS = [torch.Tensor.numpy, torch.Tensor.untyped_storage, torch.Tensor.__dlpack__]


class Kind(torch.Tensor):
    pass


class Handling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return HANDLED.get(func) or super().__torch_function__(func, types, args, kwargs or {})


def array(x):
    return torch.from_numpy(x.numpy()) * 2


def storage(x):
    x.untyped_storage()
    return x * 2


def traces(function, x):
    torch._dynamo.reset()
    try:
        torch.compile(function, backend="eager", fullgraph=True)(x)
    except torch._dynamo.exc.Unsupported:
        return False
    return True


def facts():
    plain, kind = torch.ones(2), torch.ones(2).as_subclass(Kind)
    return {
        "plain tensors": [traces(f, plain) for f in (array, storage)],
        "subclasses": [traces(f, kind) for f in (array, storage)],
        "handlers": handled(),
        "fused SGD": fused_sgd(),
    }


def handled():
    handling = torch.ones(2).as_subclass(Handling)
    methods = [torch.Tensor.numpy, torch.Tensor.untyped_storage, torch.Tensor.__dlpack__]
    same = all(map(operator.is_, methods, METHODS))
    return [str(handling.numpy()), str(handling.data), same]


def fused_sgd():
    param = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    torch.optim.SGD([param], lr=0.5, fused=True).step()
    return param[0].item()


def frames():
    before = counters["frames"]["ok"]
    step()
    return counters["frames"]["ok"] - before


param = torch.nn.Parameter(torch.ones(8))
param.grad = torch.ones(8)
before = facts()
torch._dynamo.reset()
step = torch.compile(torch.optim.SGD([param], lr=0.1).step, backend="eager")
step()
step()
before["compiled steps"] = frames()
from ipex_inductor import backend, optim
from ipex_inductor.passes.weights import derived, weight_access
steps = frames()  # neither master weights nor results of weights exist
weight_access.install()
print(json.dumps([before, {**facts(), "compiled steps": steps}]))
"""


@pytest.fixture(scope="module")
def effects():
    command = [sys.executable, "-W", "ignore", "-c", EFFECTS]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "fact", ["plain tensors", "subclasses", "handlers", "fused SGD", "compiled steps"]
)
def test_other_backends_see_no_hook(effects, fact):
    before, after = effects
    assert after[fact] == before[fact]
