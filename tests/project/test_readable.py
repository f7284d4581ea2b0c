"""The product's code keeps the aims of its style: names, docstrings, arguments and folders."""

import ast
import re
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PRODUCT = ("ipex_inductor", "lowerings", "templates", "autotune", "aot_cache")
FILES = sorted(
    file
    for folder in PRODUCT
    for file in (ROOT / folder).rglob("*.py")
    if not file.is_symlink() and ROOT.joinpath(folder).is_symlink() is False
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)

# A function is a verb with an object, so one participle or adverb is no name of one.
PARTICIPLE = re.compile(
    r"(made|said|told|kept|left|cut|met|heard|seen|found|begun|given|taken|known|built|laid|sent"
    r"|lost|held|drawn|shown|written|chosen|hidden|done|gone|behind|here|there|whole|both|alike"
    r"|near|around|apart|beside|together|again|own|now|odd|plain|[a-z]{2,}ed)"
)
NOUNS = {"cached", "embed", "feed", "frozen", "need", "seed", "shared", "speed", "unused"}
# A variable names the thing that it holds.
VAGUE = {
    *("found", "known", "given", "made", "told", "said", "own", "each", "other", "others", "kept"),
    *("left", "here", "there", "now", "its", "came", "todo", "asked", "seen", "heard", "around"),
    *("places", "words", "word", "behind", "beside", "apart", "alike", "those"),
}
# A docstring begins with a verb or a noun, so that its first line can be read alone.
OPENER = re.compile(
    r"(What|Whether|Of|As|Those|That|Which|Who|Whose|Where|How|The same|By|In|Nobody|None|Not)\b"
)
ARGS = re.compile(r"^\s*Args:", re.M)


@cache
def nodes():
    """Return each node of the product's syntax trees with its file."""
    trees = ((file, ast.parse(file.read_text())) for file in FILES)
    return [(file.relative_to(ROOT), node) for file, tree in trees for node in ast.walk(tree)]


def of_type(*types):
    return [(file, node) for file, node in nodes() if isinstance(node, types)]


def count_arguments(function):
    args = function.args
    return len([*args.posonlyargs, *args.args, *args.kwonlyargs])


def participles():
    functions = of_type(*FUNCTIONS)
    names = ((file, node.name.strip("_")) for file, node in functions)
    bad = [(f, n) for f, n in names if PARTICIPLE.fullmatch(n) and n not in NOUNS]
    return bad, len(functions), 0.5


def vague_variables():
    variables = [
        (file, node.id if isinstance(node, ast.Name) else node.arg)
        for file, node in of_type(ast.Name, ast.arg)
        if isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)
    ]
    return [each for each in variables if each[1] in VAGUE], len(variables), 1.5


def docstrings_that_open_with_a_relative_word():
    texts = [(file, ast.get_docstring(node) or "") for file, node in of_type(*DOCUMENTED)]
    bad = [(file, text.splitlines()[0]) for file, text in texts if OPENER.match(text)]
    return bad, sum(bool(text) for _, text in texts), 0.5


def functions_of_many_arguments():
    functions = of_type(*FUNCTIONS)
    bad = [(file, node.name) for file, node in functions if count_arguments(node) > 7]
    return bad, len(functions), 1.5


def docstrings_without_their_arguments():
    texts = [
        (file, node.name, ast.get_docstring(node))
        for file, node in of_type(*FUNCTIONS)
        if count_arguments(node) > 4 and ast.get_docstring(node)
    ]
    return [each[:2] for each in texts if not ARGS.search(each[2])], len(texts), 15


@pytest.mark.parametrize(
    "measure",
    [
        participles,
        vague_variables,
        docstrings_that_open_with_a_relative_word,
        functions_of_many_arguments,
        docstrings_without_their_arguments,
    ],
    ids=lambda measure: measure.__name__,
)
def test_style(measure):
    """The share of places that miss the style is at most the aim, in percent."""
    bad, count, aim = measure()
    listed = "\n".join(" ".join(map(str, place)) for place in bad)
    assert 100 * len(bad) <= aim * count, f"{len(bad)} of {count}, aim {aim} %:\n{listed}"


def test_every_module_class_and_public_function_has_a_docstring():
    missing = [
        f"{file}: {getattr(node, 'name', 'module')}"
        for file, node in of_type(ast.ClassDef, ast.Module)
        if not ast.get_docstring(node) and not getattr(node, "name", "").startswith("_")
    ]
    modules = (node for _, node in of_type(ast.Module))
    files = (file for file, _ in of_type(ast.Module))
    missing += [
        f"{file}: {node.name}"
        for file, module in zip(files, modules, strict=True)
        for node in module.body
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ]
    assert not missing


def test_the_measures_see_the_product():
    folders = Counter(chain(file.parts[0] for file, _ in of_type(ast.Module)))
    assert {*folders} == {*PRODUCT}
    assert len(of_type(*FUNCTIONS)) > 3000
