"""Torch versions: tested ones, one too old, one too new, and what users then see."""

import subprocess
import sys
import types
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from ipex_inductor import compat
from ipex_inductor.errors import CompilerNotFoundError, UnsupportedTorchError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("minor", compat.TESTED)
def test_tested_minors_have_no_objection(minor):
    assert compat.untested_reason(f"{minor[0]}.{minor[1]}.0+cu130") is None


def test_this_torch_is_tested():
    assert compat.untested_reason() is None


def test_too_new_is_a_reason_and_too_old_an_error():
    assert "2.16" in compat.untested_reason("2.16.0.dev20261101")
    message = r"torch >= 2\.11; got torch 2\.8\.0.*pip install"
    with pytest.raises(UnsupportedTorchError, match=message):
        compat.untested_reason("2.8.0")


def test_option_types_are_known():
    types = compat.inductor_option_types()
    assert types["max_autotune"] is bool
    assert types["cpp.threads"] is int
    assert len(types) > 200


def test_a_missing_compiler_is_found_inside_wrapped_errors():
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        try:
            raise InvalidCxxCompiler
        except InvalidCxxCompiler as inner:
            raise RuntimeError("wrapped") from inner
    except RuntimeError as error:
        found = compat.compiler_missing(error)
    assert isinstance(found, CompilerNotFoundError)
    assert "apt-get install g++" in str(found)
    assert compat.compiler_missing(RuntimeError("other")) is None


NAMED = """
import sys, torch
from torch._inductor.codecache import CacheBase
from ipex_inductor import compat
hashed = []
def watch(event, args):
    if event == "open" and "libtriton" in str(args[0]):
        hashed.append(args[0])
compat.name_system()
sys.addaudithook(watch)
ours = CacheBase.get_system()
skipped = not hashed
CacheBase.get_system.cache_clear()
assert CacheBase.get_system() == ours, ours
print(skipped)
"""


@pytest.fixture(scope="module")
def fresh():
    """What a process says that has neither named the system nor imported Inductor."""
    command = [sys.executable, "-c", TEMPLATES + NAMED]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_system_has_inductors_name(fresh):
    """Whether Triton is hashed for it or not."""
    assert fresh.returncode == 0, fresh.stderr
    assert fresh.stdout.split()[-1] == str(compat.torch_minor() in ((2, 13), (2, 14)))


def test_workers_are_put_off_as_long_as_anybody_is_inside():
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.output_code import CompiledFxGraph

    names = [(AsyncCompile, "wakeup"), (AsyncCompile, "use_process_pool")]
    names += [(CompiledFxGraph, "after_deserialization")]
    usual = [vars(kind)[name] for kind, name in names]
    with compat.no_early_workers():
        with compat.no_early_workers():
            pass
        assert all(vars(kind)[n] is not u for (kind, n), u in zip(names, usual, strict=True))
        AsyncCompile.wakeup()
    assert [vars(kind)[name] for kind, name in names] == usual


@pytest.fixture
def pool(monkeypatch):
    """A pool of workers that is asked for and never ready; how often it was begun."""
    from torch._inductor import async_compile, output_code

    begun = []

    class Pool:
        def submit(self, _):
            begun.append(True)
            return Future()

    kind = async_compile.AsyncCompile
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    monkeypatch.setattr(kind, "process_pool", staticmethod(Pool))
    monkeypatch.setattr(kind, "_ready_future", None)

    def loads(self, constants):
        """Of a graph with one kernel."""
        return str(kind.use_process_pool())

    monkeypatch.setattr(output_code.CompiledFxGraph, "after_deserialization", loads)
    return begun


def loaded():
    from torch._inductor.output_code import CompiledFxGraph

    return CompiledFxGraph.after_deserialization(None, None)


def test_what_is_loaded_begins_no_workers(pool):
    from torch._inductor.async_compile import AsyncCompile

    with compat.no_early_workers():
        assert loaded() == "False"
        assert not pool
        AsyncCompile.use_process_pool()  # a kernel to compile after all
        assert loaded() == "False"
        assert len(pool) == 1


def test_what_others_load_meanwhile_is_as_ever(pool):
    with compat.no_early_workers(), ThreadPoolExecutor() as others:
        others.submit(loaded).result()
    assert len(pool) == 1


TEMPLATES = """
import sys, jinja2, torch
from ipex_inductor import compat
compiled, compile = [], jinja2.Environment.compile
jinja2.Environment.compile = lambda *args, **named: compiled.append(1) or compile(*args, **named)
with compat.templates_compiled_when_used():
    import torch._inductor.compile_fx
from torch._inductor.codegen.common import KernelTemplate
from torch._inductor.select_algorithm import TritonTemplate
assert KernelTemplate._template_from_string.__module__ == KernelTemplate.__module__
assert "torch._inductor.kernel.mm" in sys.modules and not compiled
made = [template.template for template in TritonTemplate.all_templates.values()]
assert len(made) > 10
assert all(callable(template.root_render_func) for template in made)  # none has an error
assert {type(template) for template in made} == {jinja2.Template}
assert len(compiled) == len(made)
with compat.templates_compiled_when_used():
    KernelTemplate._template_from_string("{{ 1 }}")
assert len(compiled) == len(made) + 1
print("compiled when used")
"""


def test_inductors_templates_are_compiled_when_they_are_used_and_are_its_own(fresh):
    assert fresh.stdout.startswith("compiled when used"), fresh.stderr


def test_a_template_that_waits_is_what_it_would_have_been():
    from torch._inductor.codegen.common import KernelTemplate

    from ipex_inductor.compat.templates import _later

    source = "{% for n in range(count) %}{{ n }}\n{% endfor %}"
    own = KernelTemplate._template_from_string(source)
    later = _later(KernelTemplate._template_from_string, source)
    assert later.render(count=3) == own.render(count=3) == "0\n1\n2\n"
    assert type(later) is type(own)
    assert vars(later).keys() == vars(own).keys()
    broken = _later(KernelTemplate._template_from_string, "{% for %}")
    with pytest.raises(Exception, match=r"Expected an expression|Error in template"):
        _ = broken.render()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_memory_formats_are_pickled_alike_whatever_was_imported_first(
    layout, tmp_path, monkeypatch
):
    """Pickle names the first module that has torch, and Inductor's keys hold pickles."""
    import pickle

    def pickled():
        with compat.cache_folder(tmp_path, dict):
            return pickle.dumps(layout)

    usual = pickled()
    other = types.ModuleType("imported_before_torch")
    other.torch = torch
    modules = {"imported_before_torch": other, **sys.modules}
    monkeypatch.setattr(sys, "modules", modules)
    with pytest.raises(pickle.PicklingError, match="imported_before_torch"):
        pickle.dumps(layout)  # outside, as torch has it
    assert pickled() == usual
    assert pickle.loads(usual) is layout  # noqa: S301


def test_an_old_module_has_no_modules():
    assert not hasattr(sys.modules["ipex_inductor.compat_ipex"], "torch")
