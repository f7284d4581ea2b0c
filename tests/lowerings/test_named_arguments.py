"""Lowerings and fakes read arguments by the names of their op's schema."""

import ast
import inspect
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
import torch

import ipex_inductor
from ipex_inductor import lowerings
from ipex_inductor.ops.common import defining

pytestmark = pytest.mark.unit

ROOT = Path(ipex_inductor.__file__).parents[1]
FOLDERS = ("ipex_inductor/ops", "lowerings", "templates")


def read_names(tree):
    """Return the names that a function reads of its parameter `call`."""
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if ast.unparse(node.value) == "call"}


def functions_of_named_arguments():
    """Return each op, and the function of its arguments by name, from the sources."""
    lowerings.register(sycl=True)
    for file in sorted(f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")):
        text = file.read_text()
        if "register_by_name(" not in text and "@fake(" not in text:
            continue
        parts = file.relative_to(ROOT).with_suffix("").parts
        own = parts[1:] if parts[0] == "ipex_inductor" else parts
        module = import_module(".".join(("ipex_inductor", *own)))
        scope = {**vars(module), "torch": torch}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "register_by_name":
                op, function = node.args
                if isinstance(op, ast.Name) and op.id not in scope:  # a local name of `register`
                    op = find_local(ast.parse(text), op.id)
                yield eval(ast.unparse(op), scope), parse(scope[ast.unparse(function)])
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "fake":
                        op = eval(ast.unparse(decorator.args[0]), scope)
                        yield op._opoverload, node


def parse(function):
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def find_local(tree, name):
    """Return the expression that is assigned to a name in the function `register`."""
    (register,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "register")
    for node in register.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise LookupError(name)


def test_names_are_those_of_the_schema():
    pairs = [*functions_of_named_arguments()]
    assert len(pairs) > 25
    wrong = {
        str(overload): unknown
        for overload, tree in pairs
        if (unknown := read_names(tree) - {a.name for a in overload._schema.arguments})
    }
    assert not wrong


def test_arguments_get_names_and_defaults():
    overload = torch.ops.aten.add.Tensor
    named = defining.name_arguments(overload, (1, 2), {"alpha": 3})
    assert vars(named) == {"self": 1, "other": 2, "alpha": 3}
    assert defining.name_arguments(overload, (1, 2), {}).alpha == 1
