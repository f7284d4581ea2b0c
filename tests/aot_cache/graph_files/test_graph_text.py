"""What sets a graph apart from those that are in the cache, by their text."""

import random

import msgspec
import pytest
import torch
from torch import nn

from ipex_inductor.aot_cache.folder import Folder
from ipex_inductor.aot_cache.graph_files import graph_text, graphs
from ipex_inductor.aot_cache.graph_files.graph_text import difference
from ipex_inductor.aot_cache.key import Key
from ipex_inductor.aot_cache.store import Store
from ipex_inductor.compiler.request import _text
from support.cache.cache_keys import KEY

pytestmark = pytest.mark.unit


def text_of(model, *inputs):
    texts = []

    def keep(gm, _):
        texts.append(_text(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep)(*inputs)
    return texts[0]


def layers(width=16, activation=nn.ReLU, count=3):
    made = (m for _ in range(count) for m in (nn.Linear(width, width), activation()))
    return nn.Sequential(*made).eval()


@pytest.fixture(scope="module")
def known():
    return text_of(layers(), torch.ones(4, 16))


def meta(text):
    return msgspec.json.encode({"files": 3, **graph_text.pack_text(text)})


def test_kept_and_back(known):
    (packed,) = graph_text.pack_text(known).values()
    assert len(packed) < len(known) / 2
    assert list(graph_text.read_texts([meta(known), meta(""), meta(known)])) == [known, known]


NOT_KEPT = [b"", b"[]", b"{", b'{"graph": 3}', b'{"graph": "no base 85"}', b'{"graph": "00"}']


@pytest.mark.parametrize("data", NOT_KEPT)
def test_what_was_not_kept_is_passed_over(data, known):
    assert list(graph_text.read_texts([data, meta(known)]))[-1] == known
    assert difference(known, graph_text.read_texts([data])) == ""


def test_what_would_make_an_entry_too_large_is_not_kept():
    text = random.Random(0).randbytes(1 << 20).hex()
    assert graph_text.pack_text(text) == {}


def test_other_shapes(known):
    told = difference(text_of(layers(), torch.ones(8, 16)), [known])
    assert told == 'input_2: "f32[8, 16][16, 1]" here, input_2: "f32[4, 16][16, 1]" there'


def test_another_op(known):
    told = difference(text_of(layers(activation=nn.GELU), torch.ones(4, 16)), [known])
    here, there = told.removesuffix(" there").split(" here, ")
    assert "gelu" in here
    assert "relu" in there


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x, y):
        return self.layers(x) + y


def test_one_input_more(known):
    x = torch.ones(4, 16)
    told = difference(text_of(Added().eval(), x, x.clone()), [known])
    here, there = told.removesuffix(" there").split(" here, ")
    assert here.endswith(': "f32[4, 16][16, 1]"')
    assert here.startswith("input_")
    assert " = " in there  # the first op


class Turned(nn.Module):
    def __init__(self, turned):
        super().__init__()
        self.turned = turned

    def forward(self, x, y):
        a, b = x.sin(), y.cos()
        return torch.addmm(x, *((b, a) if self.turned else (a, b)))


def test_lines_of_ops_stay_whole():
    x, y = torch.ones(4, 4), torch.zeros(4, 4)
    here, there = (text_of(Turned(turned), x, y) for turned in (True, False))
    told = difference(here, [there])
    assert told.count("torch.addmm(") == 2


def test_of_equals_the_first(known):
    sizes = [text_of(layers(), torch.ones(n, 16)) for n in (2, 64, 8)]
    assert "f32[2, 16]" in difference(known, sizes).split(" here, ")[1]


def test_the_same_is_no_difference(known):
    assert difference(known, [known]) == ""


def test_the_most_alike_is_compared(known):
    far = text_of(layers(8), torch.ones(2, 8))
    here = text_of(layers(), torch.ones(8, 16))
    assert difference(here, [far, known, far]) == difference(here, [known])


def test_what_has_nothing_in_common_is_not_compared(known):
    assert difference("x = y\nz = x", [known]) == ""
    assert difference(known, []) == ""


def test_a_part_of_another(known):
    lines = known.splitlines()
    assert difference("\n".join(lines[:-2]), [known]).startswith("nothing more here, ")


def graphs_key(graph, rules=""):
    fields = {"kind": graphs.KIND, "problem": (("graph", graph),), "options": (("rules", rules),)}
    return Key(**KEY.fields | fields)


def test_entries_are_looked_through_once_for_keys_and_texts(tmp_path, monkeypatch, known):
    store = Store(tmp_path / "store", bundles=())
    for number in range(graphs.COMPARED + 3):
        store.put(graphs_key(f"graph {number}"), {"graph": ""}, b"")
    store.put(graphs_key("known"), {**graph_text.pack_text(known)}, b"")
    store.put(KEY, {}, b"a kernel")
    loaded = []
    load = Folder.load
    monkeypatch.setattr(
        Folder, "load", lambda self, name, **how: loaded.append(name) or load(self, name, **how)
    )
    reason, texts = graphs.why_missed(store, graphs_key("another"))
    assert reason == graphs.IN_NONE
    assert [*texts] == [known]
    assert len(loaded) == len(set(loaded)) == graphs.COMPARED + 5
    reason, texts = graphs.why_missed(store, graphs_key("known", rules="-relu"))
    assert (reason, [*texts]) == ("options: rules=-relu here, '' there", [])
