"""Reports and explanations without compiling: what is said, how it is shown, what is escaped."""

import json
import logging
import re
from html.parser import HTMLParser

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

from ipex_inductor.cli import app
from ipex_inductor.inspection import explanation
from ipex_inductor.inspection.explanation import Break, Explanation
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import Event, GraphReport

pytestmark = pytest.mark.unit

FRAME = 'File "/somewhere/lib/python3/site-packages/nets/model.py", line {}, in forward'
CODE = """
cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], r'''
    for (int i = 0; i < 4; ++i) at::vec::load(x);
''')
def call(args):
        buf0 = torch.ops.mkldnn._linear_pointwise.default(arg2_1, derived_0)
        buf1 = torch.ops.mkldnn._convolution_pointwise.binary(buf0, arg1_1)
        extern_kernels.addmm(arg4_1, buf1, alpha=1, out=buf2)
        cpp_fused_add_0(buf2)
        cpp_fused_add_0(buf3)
        ipex_blocked(buf2, derived_1, out=buf3)
        triton_poi_fused_add_1.run(buf2, 4, stream=stream0)
"""


IN_CPP = """
cpp_wrapper_src = (
void inductor_entry_impl(
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, int_array_0, 0, &buf0_handle));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu__linear_pointwise(arg2_1, derived_0, &buf0_handle));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(buf1, buf0, buf0));
    /* ipex_blocked */ product_float32(4, 32, 48, 16, ipex_address(buf1), nullptr);
    /* ipex_blocked */ product_float32(4, 48, 16, 16, ipex_address(buf2), nullptr);
    cpp_fused_add_0((const float*)(buf0.data_ptr()), (float*)(buf2.data_ptr()));
kernel_src = (
extern "C"  void  cpp_fused_add_0(const float* in_ptr0,
"""


@pytest.fixture(autouse=True)
def no_reports():
    decisions.clear()


def graph_report():
    found = GraphReport(source="passes", stages={})
    found.add("hoisted", "weight prologue", "2 tensors of 2 weights")
    for line in (3, 3, 5, 6, 7, 8):
        found.add("fired", "linear+gelu", where=FRAME.format(line))
    found.add("left", "softmax", "measured no gain")
    found.add("missed", "linear+gelu", "a size is zero", FRAME.format(9))
    found.add("missed", "linear+relu", "a size is zero")
    found.show("traced", "x: float32[2] = input\ny = aten.a<b>(x)\nreturn (y,)")
    found.show("rewritten", "x: float32[2] = input\ny = ipex.<script>alert(1)</script>(x)")
    found.show("code", CODE)
    return found


@pytest.fixture
def explained():
    graphs = (
        explanation._explain_graph(graph_report()),
        explanation._explain_graph(GraphReport(source="passes")),
    )
    breaks = (Break("a <b> branch", "model.py:7 in forward", "Explanation: & more"),)
    return Explanation("Net<T>", graphs, breaks)


def test_table(explained):
    table = re.sub("─+", "---", str(explained))  # expecttest writes ASCII only
    assert_expected_inline(
        table,
        """\
Net<T>

graph 0
         what             n  why                     where
---
fired    linear+gelu      6                          nets/model.py:3 in forward
                                                     nets/model.py:5 in forward
                                                     nets/model.py:6 in forward
                                                     and 2 more lines
hoisted  weight prologue  1  2 tensors of 2 weights
left     softmax          1  measured no gain
missed   linear+gelu      1  a size is zero          nets/model.py:9 in forward
missed   linear+relu      1  a size is zero
kernels: mkldnn._linear_pointwise, mkldnn._convolution_pointwise.binary, addmm, cpp_fused_add_0 x2,
ipex_blocked, triton_poi_fused_add_1

graph 1: nothing of ours to do

graph breaks
why                  where
---
a <b> branch         model.py:7 in forward
Explanation: & more""",
    )


def test_nothing_compiled_is_said():
    assert "no graph to compile" in str(Explanation("Net", (), ()))
    assert "no graph to compile" in Explanation("Net", (), ()).to_html()


def test_equal_decisions_are_one_row_with_every_line(explained):
    (row,) = [r for r in explained.graphs[0].rows if r.kind == "fired"]
    assert (row.subject, row.count) == ("linear+gelu", 6)
    assert row.where[:2] == ("nets/model.py:3 in forward", "nets/model.py:5 in forward")
    assert len(row.where) == 5
    assert explained.fired() == {"linear+gelu": 6}


def test_kernels_are_counted_from_the_calls_in_the_generated_code(explained):
    assert explained.graphs[0].kernels == {
        "mkldnn._linear_pointwise": 1,
        "mkldnn._convolution_pointwise.binary": 1,
        "addmm": 1,
        "cpp_fused_add_0": 2,
        "ipex_blocked": 1,
        "triton_poi_fused_add_1": 1,
    }


def test_kernels_are_counted_in_cpp_too():
    found = GraphReport(source="passes", stages={})
    found.show("code", IN_CPP)
    assert explanation._explain_graph(found).kernels == {
        "_linear_pointwise": 1,
        "mm": 1,
        "ipex_blocked": 2,
        "cpp_fused_add_0": 1,
    }


def test_json_holds_rows_kernels_and_breaks(explained):
    told = json.loads(explained.to_json())
    assert told == json.loads(json.dumps(explained.to_dict()))
    assert told["torch"] == torch.__version__
    assert told["graphs"][0]["rows"][0] == {
        "kind": "fired",
        "subject": "linear+gelu",
        "count": 6,
        "reason": "",
        "where": [f"nets/model.py:{line} in forward" for line in (3, 5, 6, 7, 8)],
    }
    assert told["breaks"][0]["details"] == "Explanation: & more"


class Page(HTMLParser):
    """What a browser would see: the tags with their attributes, and the text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_html_escapes_and_needs_nothing_from_elsewhere(explained):
    html = explained.to_html()
    page = Page(html)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "a", "b", "t"}
    assert not {"src", "href"} & {name for _, attributes in page.tags for name in attributes}
    assert "url(" not in html
    assert "@import" not in html
    for text in ("Net<T>", "y = aten.a<b>(x)", "<script>alert(1)</script>", "a <b> branch"):
        assert text in page.text


def test_html_marks_the_lines_that_differ(explained):
    marks = [attributes.get("class") for tag, attributes in Page(explained.to_html()).tags]
    assert marks.count("del") == 2
    assert marks.count("add") == 1


def test_diff_pairs_replaced_lines_and_leaves_the_other_side_of_the_rest_empty():
    changes = explanation._diff("a\nb\nc\nd", "a\nB\nc\nnew\nd")
    assert [(c.mark, c.before, c.after) for c in changes] == [
        (" ", "a", "a"),
        ("~", "b", "B"),
        (" ", "c", "c"),
        ("+", "", "new"),
        (" ", "d", "d"),
    ]


def test_graph_text_has_names_types_and_calls():
    def fn(x):
        return torch.stack([x, x.relu()]).sum(0, keepdim=True)

    graph = make_fx(fn, tracing_mode="fake")(torch.ones(2, 3, dtype=torch.bfloat16)).graph
    assert_expected_inline(
        decisions.graph_text(graph),
        """\
x_1: bfloat16[2, 3] = input
relu: bfloat16[2, 3] = aten.relu.default(x_1)
stack: bfloat16[2, 2, 3] = aten.stack.default([x_1, relu])
sum_1: bfloat16[1, 2, 3] = aten.sum.dim_IntList(stack, [0], True)
return sum_1""",
    )


PLACES = {
    'File "/x/site-packages/a/b.py", line 3, in f': "a/b.py:3 in f",
    'File "/elsewhere/b.py", line 3, in <lambda>': "/elsewhere/b.py:3 in <lambda>",
    'File "/x/b.py", line 3, in torch_dynamo_resume_in_forward_at_12': "/x/b.py:3 in forward",
    "no frame": "no frame",
}


@pytest.mark.parametrize("frame", PLACES)
def test_places_are_short(frame):
    assert explanation._short_place(frame) == PLACES[frame]


def test_places_are_relative_to_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert explanation._short_place(f'File "{tmp_path}/m.py", line 1, in f') == "m.py:1 in f"


# Reports.


SUMMARIES = {
    "passes": "fired linear+gelu x2; hoisted weight prologue",
    "cache": "fired linear+gelu x2; hoisted weight prologue (out of a graph cache)",
    "": "nothing is known: it came out of a graph cache, or joint graph passes are off",
}


@pytest.mark.parametrize("source", SUMMARIES)
def test_summary_says_where_it_comes_from(source):
    found = GraphReport(source=source)
    found.add("hoisted", "weight prologue")
    found.add("fired", "linear+gelu")
    found.add("fired", "linear+gelu")
    assert found.summary() == SUMMARIES[source]


def test_a_graph_without_decisions_says_so():
    assert GraphReport(source="passes").summary() == "nothing of ours to do"


def test_a_fallback_is_a_summary_whatever_the_source():
    found = GraphReport()
    found.add("fallback", "plain Inductor", "broken")
    assert found.summary() == "fallback plain Inductor"


def test_recalled_events_fill_a_report_no_pass_has_written():
    events = [Event("fired", "linear+gelu")]
    loaded, compiled = GraphReport(), GraphReport(source="passes")
    for found in (loaded, compiled):
        with decisions.about(found):
            decisions.recall(events)
    assert (loaded.source, loaded.events) == ("cache", events)
    assert (compiled.source, compiled.events) == ("passes", [])


def test_recall_without_a_compile_opens_a_report():
    decisions.recall([Event("fired", "linear+gelu")])
    assert decisions.reports()[-1].source == "cache"


def test_captured_reports_keep_graphs_and_are_not_remembered():
    with decisions.capturing() as seen:
        inside = decisions.open_report()
    outside = decisions.open_report()
    for found in (inside, outside):
        found.show("traced", "text")
    assert seen == [inside]
    assert decisions.reports() == [outside]
    assert (inside.stages, outside.stages) == ({"traced": "text"}, None)


def test_decisions_are_logged_at_debug_and_the_summary_at_info(caplog):
    debug = caplog.at_level(logging.DEBUG, "ipex_inductor")
    with debug, decisions.about(GraphReport(source="passes")) as found:
        found.add("missed", "linear+gelu", "a size is zero", "model.py:3")
    ours = [r for r in caplog.records if r.name == "ipex_inductor"]
    said = [(r.levelname, r.getMessage()) for r in ours]
    assert said == [
        ("DEBUG", "missed: linear+gelu (a size is zero) at model.py:3"),
        ("INFO", "missed linear+gelu"),
    ]


# The verb.


def test_an_unknown_model_is_exit_code_2():
    done = CliRunner().invoke(app, ["explain", "resnet51"])
    assert done.exit_code == 2
    assert "resnet50" in done.stderr


def test_a_page_in_no_folder_is_refused_before_anything_is_loaded(tmp_path):
    page = tmp_path / "none" / "page.html"
    done = CliRunner().invoke(app, ["explain", "no:module", "--html", str(page)])
    assert done.exit_code == 2
    assert "--html" in done.stderr


def test_a_function_that_returns_no_model_is_exit_code_2(tmp_path, monkeypatch):
    (tmp_path / "made_for_explain.py").write_text("def three():\n    return 3, (1,)\n")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["explain", "made_for_explain:three"])
    assert done.exit_code == 2
    assert "got int, tuple" in done.stderr
