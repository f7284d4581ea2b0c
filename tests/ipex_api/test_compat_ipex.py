"""Old imports: every name of IPEX works, is torch's, or says why not; torch gets what it lacks."""

import importlib
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ipex_inductor
from ipex_inductor import as_ipex
from ipex_inductor.errors import AlreadyImportedError, NotCarriedError, NotCarriedImportError
from ipex_inductor.ipex_api import compat_ipex, ipex_names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / ipex_names.PAGE).read_text()
NAMES = ipex_names.names()


@pytest.fixture
def ipex():
    compat_ipex.install()
    yield importlib.import_module("intel_extension_for_pytorch")
    compat_ipex.uninstall()


def run_python(*arguments, cwd=None):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)


def reached(ipex, name):
    for part in name.split("."):
        ipex = getattr(ipex, part)
    return ipex


def of_kind(*kinds):
    return [name for name, entry in NAMES.items() if entry.kind in kinds]


# The table


@pytest.mark.parametrize("name", of_kind("works", "torch"))
def test_it_resolves_to_what_the_table_says(ipex, name):
    found = reached(ipex, name)
    assert found is NAMES[name].get() or found == NAMES[name].get()
    parent, _, last = name.rpartition(".")
    scope = {}
    exec(
        f"from {'.'.join(filter(None, ['intel_extension_for_pytorch', parent]))} import {last}",
        scope,
    )
    assert scope[last] is found


PUBLIC = [name for name in of_kind("works") if "._" not in f".{name}"]
PUBLIC.remove("nn.modules.merged_embeddingbag.EmbeddingSpec")  # here nn.modules.EmbeddingSpec


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_works_with_the_import_changed(name):
    assert reached(ipex_inductor, name) == NAMES[name].get()


@pytest.mark.parametrize("name", of_kind("torch", "instead"))
def test_torch_has_it(name):
    assert NAMES[name].home.startswith("torch.")
    assert callable(NAMES[name].get()) or isinstance(NAMES[name].get(), ModuleType)


@pytest.mark.parametrize("listed", of_kind("instead", "not_carried"))
def test_it_says_what_to_do_where_it_does_not_resolve(ipex, listed):
    name = listed.replace("*", "anything_else")
    with pytest.raises(AttributeError) as caught:
        reached(ipex, name)
    assert isinstance(caught.value, NotCarriedError)
    assert NAMES[listed].note.rstrip(".") in caught.value.todo
    assert "docs/guides/migrating.md" in caught.value.todo
    parent, _, last = f"intel_extension_for_pytorch.{name}".rpartition(".")
    with pytest.raises(ImportError) as caught:
        exec(f"from {parent} import {last}")
    assert isinstance(caught.value, NotCarriedImportError)
    assert NAMES[listed].note.rstrip(".") in caught.value.todo
    with pytest.raises(ModuleNotFoundError, match=re.escape(last)):
        importlib.import_module(f"{parent}.{last}")


def test_every_answer_has_its_facts():
    for entry in NAMES.values():
        assert bool(entry.home) == (entry.kind != "not_carried"), entry
        assert bool(entry.note) == (not entry.resolves), entry
        assert entry.kind != "not_carried" or entry.note.endswith("."), entry


@pytest.mark.parametrize("kind", ["works", "torch", "instead", "not_carried"])
def test_the_page_is_the_table(kind):
    (shown,) = re.findall(rf"<!-- {kind} -->\n(.*?)\n<!-- end -->", PAGE, re.DOTALL)
    assert shown.splitlines()[2:] == ipex_names.tables()[kind].splitlines(), (
        "python -m ipex_inductor.ipex_api.ipex_names prints the tables"
    )


def test_no_name_is_both_a_module_and_refused():
    refused = {name for name, entry in NAMES.items() if not entry.resolves}
    assert not refused & ipex_names.modules()


DOCUMENTED = re.findall(
    r"\S+",
    """
optimize optimize_transformers enable_auto_channels_last disable_auto_channels_last
set_fp32_math_mode get_fp32_math_mode FP32MathMode fast_bert
verbose VERBOSE_OFF VERBOSE_ON VERBOSE_ON_CREATION
_set_compiler_backend _get_compiler_backend compile enable_onednn_fusion OnDevice set_logging_level
version _enable_dnnl _disable_dnnl _using_dnnl cmake_prefix_path cpu quantization nn jit optim fx
llm xpu _dynamo _inductor transformers utils llm.optimize quantization.fp8.fp8_autocast QuantConf
quantization.prepare quantization.convert quantization.calibrate quantization.QuantConf xpu.optimize
nn.utils._parameter_wrapper.ParameterWrapper nn.utils._parameter_wrapper.can_cast_training
nn.utils._parameter_wrapper.IPEX_WEIGHT_CONVERT_MODULE_XPU
optim._optimizer_utils.IPEX_FUSED_OPTIMIZER_LIST_XPU xpu.memory_summary cpu.runtime.CPUPool
""",
)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_the_documentation_of_ipex_names_is_in_the_table(name):
    assert name in NAMES or name in ipex_names.modules()


# Names that IPEX's documentation, examples and tests use, from 1.2 to 2.8.
USED = re.findall(
    r"\S+",
    """
_C.disable_jit_linear_repack _C.enable_jit_concat_linear _C._get_mkl_version _C.roc_auc_score
_C.FP8TensorMeta _isa_help.Float8Format.kFloat8_E4M3 _set_optimized_model_for_generation
AmpConf AutoMixPrecision DEVICE core.enable_auto_dnnl enable_auto_mixed_precision
amp.autocast get_train cpp_extension deepspeed woq fx.concat_linear jit cpu.auto_ipex
cpu.comm.has_ccl
cpu._auto_kernel_selection._enable_tpp cpu._auto_kernel_selection._enable_dnnl cpu.ipex_comm
cpu.nn._embeddingbag.torch_embedding_bag cpu.launch cpu.launch.main cpu.runtime.CPUPool
llm.modules.linearSilu llm.functional.utils.ipex_update_causal_mask
llm.functional.fusions.bgmv_expand
nn.functional._embeddingbag.torch_embedding_bag nn.modules.weight_only_quantization.WoqWeightFormat
nn.utils._fp8_convert.convert_fp8_model nn.utils._lstm_convert.replace_lstm_with_ipex_lstm
nn.utils._model_convert.replace_dropout_with_identity nn.utils._quantize_convert.GPTQShuffle
nn.utils._weight_cast.weight_dtype_convert_with_ipex nn.utils._weight_prepack._IPEXLinear
optim._optimizer_utils.IPEX_FUSED_OPTIMIZER_LIST optim._functional.sgd_step
quantization.get_smooth_quant_static_qconfig quantization._quantize.DynamicQuantizedLinearLayer
quantization.fp8.util.cast_to_fp8 utils.weight_only_quantization._gptq_lowp_checkpoint_config
utils._logger.logger xpu.fp8.recipe.DelayedScaling xpu.enable_simple_trace xpu.single_card
xpu.set_log_level xpu.get_log_output_file_path xpu.get_arch_list xpu.StreamContext xpu.random.seed
xpu.optim.Lars xpu.optim.FusedResourceApplyMomentum xpu.has_fp64_dtype xpu.FloatTensor
xpu.OnednnVerbLevel.ON xpu.set_onednn_verbose xpu.set_compute_eng xpu.get_compiler_version
xpu.cpp_extension.DPCPPExtension xpu.bitsandbytes xpu.deepspeed xpu.intrinsic.EMA
xpu.utils.clip_grad_norm_ xpu.using_onednn_layout xpu.amp.GradScaler xpu.amp.custom_fwd
xpu.get_autocast_xpu_dtype xpu.Generator xpu.set_default_tensor_type xpu.get_default_build_root
""",
)


@pytest.mark.parametrize("name", USED)
def test_what_old_programs_use_resolves_or_says_why_not(ipex, name):
    for package in (ipex, torch.xpu) if name.startswith("xpu.") else (ipex,):
        path = name.removeprefix("xpu.") if package is torch.xpu else name
        with suppress(NotCarriedError):  # which says why: see the test of the table
            reached(package, path)


def test_torch_xpu_says_why_what_only_ipex_had_is_not_there(ipex):
    with pytest.raises(NotCarriedError, match="has_fp64"):
        torch.xpu.has_fp64_dtype()
    assert torch.xpu.optim.Lars is ipex_inductor.optim.Lars
    assert not hasattr(torch.xpu, "has_xmx")
    with pytest.raises(AttributeError, match=r"module 'torch[.]xpu' has no attribute 'no_such"):
        _ = torch.xpu.no_such_thing
    compat_ipex.uninstall()
    assert "__getattr__" not in vars(torch.xpu)


def test_what_torch_has_under_xpu_is_torchs(ipex):
    assert ipex.xpu.get_arch_list is torch.xpu.get_arch_list
    assert ipex.xpu.random is torch.xpu.random
    assert importlib.import_module("intel_extension_for_pytorch.xpu.random") is torch.xpu.random
    assert "torch/xpu" not in (getattr(ipex.xpu, "__file__", None) or "")


def test_what_casts_and_takes_the_optimizer_names_optimize(ipex):
    with pytest.raises(NotCarriedError, match=r"optimize\(model, dtype=[.]{3}, optimizer="):
        reached(ipex, "fast_bert")


def test_the_reason_for_fx_names_no_switch_that_does_nothing(ipex):
    with pytest.raises(NotCarriedError) as caught:
        _ = ipex.fx
    assert "concat_linear=" not in str(caught.value)


# Imports


@pytest.mark.parametrize("package", compat_ipex.PACKAGES)
def test_modules_are_imported_by_either_name(ipex, package):
    functional = importlib.import_module(f"{package}.nn.functional")
    assert functional.interaction is ipex.nn.functional.interaction
    assert sys.modules[package].nn.functional is functional
    assert functional.__name__ == f"{package}.nn.functional"


def test_a_star_takes_what_resolves(ipex):
    scope = {}
    exec("from intel_extension_for_pytorch import *", scope)
    assert scope["optimize"] is ipex_inductor.optimize
    assert "compile" not in scope
    assert "_C" not in scope


WHOLE = [name for name in of_kind("works") if NAMES[name].is_module]


@pytest.mark.parametrize("package", compat_ipex.PACKAGES)
@pytest.mark.parametrize("name", WHOLE)
def test_a_module_that_works_is_imported_and_stays_itself(ipex, name, package):
    ours = NAMES[name].get()
    spec = ours.__spec__
    assert importlib.import_module(f"{package}.{name}") is ours
    assert ours.__spec__ is spec
    compat_ipex.uninstall()
    assert f"{package}.{name}" not in sys.modules
    assert sys.modules[ours.__name__] is ours


def test_every_module_that_a_working_name_stands_in_is_imported(ipex):
    assert {"cpu.launch"} <= set(WHOLE)
    for name in of_kind("works", "torch"):
        parent = name.rpartition(".")[0]
        module = importlib.import_module(f"intel_extension_for_pytorch.{parent}".rstrip("."))
        assert isinstance(module, ModuleType)


def test_an_unknown_name_is_an_ordinary_error(ipex):
    assert not hasattr(ipex, "no_such_thing")
    assert getattr(ipex.xpu, "no_such_thing", 7) == 7
    with pytest.raises(ModuleNotFoundError, match=r"pytorch[.]no_such_thing"):
        importlib.import_module("intel_extension_for_pytorch.no_such_thing")


def test_guards_of_old_programs_hold(ipex):
    assert not hasattr(ipex, "fast_bert")
    try:
        from intel_extension_for_pytorch.llm import utils
    except ImportError:
        utils = None
    assert utils is None


def test_language_models_are_optimized_by_both_old_names(ipex):
    from intel_extension_for_pytorch.llm import optimize

    assert optimize is ipex.llm.optimize is ipex_inductor.llm.optimize
    assert ipex.optimize_transformers is ipex.llm.optimize


def test_dir_shows_what_resolves(ipex):
    assert {"optimize", "FP32MathMode"} <= set(dir(ipex))
    assert {"interaction"} <= set(dir(ipex.nn.functional))
    assert "compile" not in dir(ipex)


def test_the_version_is_torchs_for_those_who_compare(ipex):
    assert ipex.__version__.split(".")[:2] == torch.__version__.split(".")[:2]
    assert ipex.__version__.endswith(ipex_inductor.__version__)


def test_uninstalled_nothing_is_found(ipex):
    compat_ipex.uninstall()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("intel_extension_for_pytorch")
    assert not hasattr(torch.xpu, "memory_summary")


def test_where_ipex_itself_is_loaded_nothing_is_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", ModuleType("theirs"))
    with pytest.raises(AlreadyImportedError, match=r"Call install\(\) before"):
        compat_ipex.install()
    assert not hasattr(torch.xpu, "optimize")


# torch.xpu


def test_torch_xpu_gets_what_it_lacks_and_loses_it_again(monkeypatch, caplog):
    before = set(dir(torch.xpu))
    monkeypatch.setattr(torch.xpu, "memory_summary", len, raising=False)
    with caplog.at_level("INFO", "ipex_inductor"):
        attached = compat_ipex.install()
    try:
        assert torch.xpu.memory_summary is len
        assert set(attached) == {*compat_ipex.XPU_NAMES} - {"memory_summary"}
        assert set(dir(torch.xpu)) - before == {*attached, "memory_summary", "__getattr__"}
        assert torch.xpu.optimize is ipex_inductor.xpu.optimize
        assert all(name in caplog.text for name in attached)
        assert compat_ipex.install() == ()
    finally:
        compat_ipex.uninstall()
    monkeypatch.undo()
    assert set(dir(torch.xpu)) == before


PATCHED = """
import torch
import torch.utils.data
watched = (torch, torch.Tensor, torch.nn.functional, torch.jit, torch.xpu, torch.utils.data)
before = [dict(vars(each)) for each in watched]
import ipex_inductor.as_ipex, ipex_inductor.nn.modules, ipex_inductor.xpu
print([
    name
    for each, old in zip(watched, before)
    for name, value in vars(each).items()
    if value is not old.get(name) and type(value) is not type(torch) and name[:2] != "__"
])
"""


def test_importing_us_patches_nothing():
    done = run_python("-c", PATCHED)
    assert done.stdout.strip() == "[]", done.stderr


# Scripts

SCRIPT = """
import sys
import torch
import intel_extension_for_pytorch as ipex
from intel_extension_for_pytorch.nn.functional import interaction
import beside
print(__name__, sys.argv, beside.VALUE, interaction is ipex.nn.functional.interaction)
"""


AS_IPEX = ("-m", "ipex_inductor.as_ipex")


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "beside.py").write_text("VALUE = 7\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


def test_an_unchanged_script_runs(script, tmp_path):
    done = run_python(*AS_IPEX, "programs/train.py", "--epochs", "3", cwd=tmp_path)
    assert done.stdout == "__main__ ['programs/train.py', '--epochs', '3'] 7 True\n", done.stderr


def test_an_unchanged_module_runs(script):
    done = run_python(*AS_IPEX, "-m", "train", "--epochs", "3", cwd=script.parent)
    assert done.stdout == f"__main__ [{str(script)!r}, '--epochs', '3'] 7 True\n", done.stderr


CHILDREN = """
import multiprocessing, subprocess, sys
import intel_extension_for_pytorch as ipex

def here(_):
    return ipex.optimize.__module__

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(here, [0])[0])
    code = "import intel_pytorch_extension.nn.functional as F; print(F.interaction.__module__)"
    print(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
"""


def test_processes_that_a_script_starts_find_us_too(tmp_path):
    (tmp_path / "train.py").write_text(CHILDREN)
    done = run_python(*AS_IPEX, "train.py", cwd=tmp_path)
    found = ["ipex_inductor.frontend", "ipex_inductor.nn.functional"]
    assert done.stdout.split() == found, done.stderr


LAUNCHED = """
import intel_extension_for_pytorch as ipex
print(ipex.optimize.__module__)
"""
BY_A_CHILD = """
import subprocess, sys
module = "intel_extension_for_pytorch.cpu.launch"
sys.exit(subprocess.call([sys.executable, "-m", module, *sys.argv[1:]]))
"""


@pytest.mark.sampled("a child")
@pytest.mark.parametrize("by", ["itself", "a child"])
def test_the_launcher_is_run_by_its_old_name(tmp_path, by):
    (tmp_path / "train.py").write_text(LAUNCHED)
    (tmp_path / "run.py").write_text(BY_A_CHILD)
    first = ("-m", "intel_extension_for_pytorch.cpu.launch") if by == "itself" else ("run.py",)
    done = run_python(*AS_IPEX, *first, "--ninstances", "1", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "ipex_inductor.frontend\n"), done.stderr


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--help"]])
def test_without_a_script_the_usage_is_shown(arguments):
    with pytest.raises(SystemExit, match=r"^usage: python -m"):
        as_ipex.main(arguments)
