"""Inputs of `ipex-inductor prebuild`: the models and the examples that its arguments name."""

import importlib
import importlib.util
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipex_inductor.cli.demo.models import DTYPES, MODELS, Device, Dtype, check_name
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
    """Return the requested examples, and why lines of a record do not fit this model.

    Args:
        model: a named model, MODULE:FUNCTION, or a folder of model files.
        dtype: the dtype of weights and inputs, None to leave them.
        batch: the batch size of the named models.
        train: whether the models are in train mode.
        shapes: a file with a line for each set of inputs.
        record: the folder that a run wrote with IPEX_RECORD.

    Raises:
        OptionError: there is no such model.
        ArgumentError: a file or record cannot be read.
    """
    import torch

    from ipex_inductor.prebuild.examples import lines_of

    torch_dtype = getattr(torch, DTYPES[dtype]) if dtype else None
    examples_found = [
        example.with_mode(torch_dtype, train) for example in _load_examples(model, batch)
    ]
    if shapes or record:  # these replace the inputs that the function returned
        examples_found = [
            *{id(example.model): example for example in reversed(examples_found)}.values()
        ][::-1]
    if shapes is not None:
        examples_found = [
            example.with_sizes(line) for example in examples_found for line in lines_of(shapes)
        ]
    if record is None:
        return examples_found, []
    return _match_records(examples_found, record)


def _match_records(models: "list[Example]", folder: Path) -> "tuple[list[Example], list[str]]":
    """Return each model with each of its recorded inputs; repeated names are numbered."""
    from ipex_inductor.prebuild.examples import lines_of

    matched: list[Example] = []
    refusals: list[str] = []
    names: Counter[str] = Counter()
    for line in lines_of(folder):
        for model_example in models:
            try:
                example = model_example.with_record(line)
            except ArgumentError as error:
                refusals.append(str(error))
                continue
            names[example.name] += 1
            number = f" #{names[example.name]}" if names[example.name] > 1 else ""
            matched.append(replace(example, name=example.name + number))
    if not matched:
        raise ArgumentError("records of this model", "; ".join(refusals[:3]), "Check the folder.")
    return matched, refusals


def _load_examples(model: str, batch: int) -> "list[Example]":
    """Return the examples of a folder of model files, a named model, or MODULE:FUNCTION."""
    import torch

    from ipex_inductor.prebuild.examples import Example

    torch.manual_seed(0)
    if Path(model).is_dir():
        files = sorted(f for f in Path(model).glob("*.py") if not f.name.startswith("_"))
        if not files:
            raise OptionError("a folder of model files", f"no .py in {model}", "Check the path.")
        return [
            example for f in files for example in Example.all_of(f.stem, _call_factory(f.stem, f))
        ]
    if model in MODELS:
        return Example.all_of(model, load_model(model, None, batch, Device.CPU))
    check_name(model)
    return Example.all_of(model, _call_factory(model, None))


def _call_factory(name: str, file: Path | None) -> Any:
    """Return the result of the user's function; raise `OptionError` if it fails."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if file is None:
            module_or_file = importlib.import_module(module)
        else:
            # The module's name is unique: the file's name may be that of an imported module.
            name = f"_ipex_prebuilt_{file.stem}"
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            module_or_file = importlib.util.module_from_spec(spec)
            sys.modules[name] = module_or_file
            spec.loader.exec_module(module_or_file)
        return getattr(module_or_file, function or FUNCTION)()
    except Exception as error:
        actual = f"{type(error).__name__}: {error}"
        advice = "The current directory is importable; try the call in Python."
        raise OptionError(f"{file or name} to be importable and to run", actual, advice) from error
