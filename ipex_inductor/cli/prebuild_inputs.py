"""What `ipex-inductor prebuild` compiles: the models and the inputs that its arguments name."""

import importlib
import importlib.util
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipex_inductor.cli.demo_models import DTYPES, MODELS, Device, Dtype, check_name
from ipex_inductor.cli.model_options import load_model
from ipex_inductor.errors import ArgumentError, OptionError

if TYPE_CHECKING:
    from ipex_inductor.prebuild.examples import Example

FUNCTION = "make"  # of each file of a folder


def examples(
    model: str,
    dtype: Dtype | None,
    batch: int,
    train: bool,
    shapes: Path | None,
    record: Path | None,
) -> "tuple[list[Example], list[str]]":
    """All that is asked for, and why lines of a record are not of this model.

    Raises `OptionError` where there is no model, `ArgumentError` for what cannot be read.
    """
    import torch

    from ipex_inductor.prebuild.examples import lines_of

    named = getattr(torch, DTYPES[dtype]) if dtype else None
    found = [each.as_asked(named, train) for each in _made(model, batch)]
    if shapes or record:  # in the place of the inputs that came with it
        found = [*{id(each.model): each for each in reversed(found)}.values()][::-1]
    if shapes is not None:
        found = [each.sized(line) for each in found for line in lines_of(shapes)]
    if record is None:
        return found, []
    return _recorded(found, record)


def _recorded(models: "list[Example]", folder: Path) -> "tuple[list[Example], list[str]]":
    """Each model with each of the inputs that are its own; equal names are numbered."""
    from ipex_inductor.prebuild.examples import lines_of

    known: list[Example] = []
    others: list[str] = []
    names: Counter[str] = Counter()
    for line in lines_of(folder):
        for each in models:
            try:
                example = each.recorded(line)
            except ArgumentError as error:
                others.append(str(error))
                continue
            names[example.name] += 1
            number = f" #{names[example.name]}" if names[example.name] > 1 else ""
            known.append(replace(example, name=example.name + number))
    if not known:
        raise ArgumentError("records of this model", "; ".join(others[:3]), "Check the folder.")
    return known, others


def _made(model: str, batch: int) -> "list[Example]":
    import torch

    from ipex_inductor.prebuild.examples import Example

    torch.manual_seed(0)
    if Path(model).is_dir():
        files = sorted(f for f in Path(model).glob("*.py") if not f.name.startswith("_"))
        if not files:
            raise OptionError("a folder of model files", f"no .py in {model}", "Check the path.")
        return [each for f in files for each in Example.all_of(f.stem, _called(f.stem, f))]
    if model in MODELS:
        return Example.all_of(model, load_model(model, None, batch, Device.CPU))
    check_name(model)
    return Example.all_of(model, _called(model, None))


def _called(name: str, file: Path | None) -> Any:
    """What the function returns."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if file is None:
            made = importlib.import_module(module)
        else:
            # A name of its own: a file may be called as a module that others import.
            name = f"_ipex_prebuilt_{file.stem}"
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            made = importlib.util.module_from_spec(spec)
            sys.modules[name] = made
            spec.loader.exec_module(made)
        return getattr(made, function or FUNCTION)()
    except Exception as error:
        came = f"{type(error).__name__}: {error}"
        todo = "The current directory is importable; try the call in Python."
        raise OptionError(f"{file or name} to be importable and to run", came, todo) from error
