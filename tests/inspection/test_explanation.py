"""Reports and explanations without compiling: what is said, how it is shown, what is escaped."""

import dataclasses
import json
import logging
import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

from ipex_inductor.cli import app
from ipex_inductor.inspection import explanation
from ipex_inductor.inspection.explanation import Break, Explanation
from ipex_inductor.inspection.kernel_times import KernelTime
from ipex_inductor.reporting import decisions
from ipex_inductor.reporting.decisions import Event, GraphReport
from support import browser, html_check

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
    found.add("hoisted", "weight preprocessing", "2 tensors of 2 weights")
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
         what                  n  why                     where
---
fired    linear+gelu           6                          nets/model.py:3 in forward
                                                          nets/model.py:5 in forward
                                                          nets/model.py:6 in forward
                                                          and 2 more lines
hoisted  weight preprocessing  1  2 tensors of 2 weights
left     softmax               1  measured no gain
missed   linear+gelu           1  a size is zero          nets/model.py:9 in forward
missed   linear+relu           1  a size is zero
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


def test_html_escapes_and_needs_nothing_from_elsewhere(explained):
    html = explained.to_html()
    html_check.check(html)
    page = html_check.Page(html)
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "t"}
    assert "alert(1)" not in html.replace("&lt;script&gt;alert(1)", "")
    for text in ("Net<T>", "y = aten.a<b>(x)", "<script>alert(1)</script>", "a <b> branch"):
        assert text in page.text


def test_html_marks_the_lines_that_differ(explained):
    tags = [tag for tag, _ in html_check.Page(explained.to_html()).tags]
    assert tags.count("del") == 2
    assert tags.count("ins") == 1


def test_every_kind_and_stage_has_plain_words():
    assert explanation.LABELS.keys() == explanation.MEANINGS.keys() == decisions.KINDS.keys()
    assert explanation.LEVELS.keys() <= decisions.KINDS.keys()


def test_unchanged_lines_far_from_a_change_are_folded():
    changes = explanation._diff("\n".join("abcdefghi"), "\n".join("abcdefghI"))
    lines = list(explanation._fold_unchanged(changes))
    assert [line.hidden for line in lines] == [5] + 9 * [0]
    assert [line.before for line in lines if line.far] == list("abcde")


def test_operators_of_this_package_are_marked_and_the_rest_is_escaped():
    marked = explanation._mark_operators("y = ipex.linear.default(x<1>, my.ipex.no)")
    assert marked == "y = <mark>ipex.linear.default</mark>(x&lt;1&gt;, my.ipex.no)"


@pytest.fixture
def timed(explained):
    times = (KernelTime("slow<b>", 2.0, 30.0), KernelTime("fast", 10.0, 10.0))
    return dataclasses.replace(explained, kernel_times=times)


def test_kernel_times_are_bars_on_the_page_and_figures_in_json(timed):
    html = timed.to_html()
    html_check.check(html)
    assert "width:75.00%" in html
    assert json.loads(timed.to_json())["kernel_times"][1]["microseconds"] == 10.0


@pytest.mark.skipif(browser.found() is None, reason="no browser is installed")
def test_the_page_in_a_browser(timed, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(timed.to_html(), encoding="utf-8")
    with browser.opened(path, tmp_path / "profile") as page:
        html_check.check_in_browser(page)
        names = "[...document.querySelectorAll('#times tbody th')].map(th => th.textContent)"
        sort = "document.querySelectorAll('#times thead button')[{}].click()"
        assert page.run(names) == ["slow<b>", "fast"]  # after two sorts by keyboard: descending
        page.run(sort.format(1))
        assert page.run(names) == ["slow<b>", "fast"]  # 2 comes before 10
        page.run(sort.format(2))
        assert page.run(names) == ["fast", "slow<b>"]
        shown = "getComputedStyle(document.querySelector('.diff {}')).display"
        assert page.run(shown.format("td.old")) != "none"
        page.run("document.querySelector('.diff [value=after]').click()")
        assert page.run(shown.format("td.old")) == "none"
        assert page.requests == [path.as_uri()]


@pytest.mark.parametrize("changed", [0, 1, 200, 201])
def test_a_comparison_is_open_at_first_if_it_has_few_changes(changed):
    found = GraphReport(source="passes", stages={})
    found.show("traced", "\n".join(f"a{n}" for n in range(300)))
    found.show("rewritten", "\n".join(f"{'b' if n < changed else 'a'}{n}" for n in range(300)))
    page = Explanation("Net", (explanation._explain_graph(found),), ()).to_html()
    assert ('<details class="diff" open>' in page) == (0 < changed <= 200)


def test_a_large_model_makes_a_small_page():
    found = GraphReport(source="passes", stages={})
    nodes = [
        f"linear_{n}: bfloat16[8, 512] = ipex.linear.default(view_{n}, arg{n}_1, None, 'none')"
        for n in range(4000)
    ]
    found.show("traced", "\n".join(nodes).replace("ipex.linear", "aten.linear", 50))
    found.show("rewritten", "\n".join(nodes))
    found.show("compiled", "\n".join(nodes).replace("arg", "derived_", 500))
    page = Explanation("Large", (explanation._explain_graph(found),), ()).to_html()
    assert len(page.encode()) < 2 << 20


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
    "passes": "fired linear+gelu x2; hoisted weight preprocessing",
    "cache": "fired linear+gelu x2; hoisted weight preprocessing (out of a graph cache)",
    "": "nothing is known: it came out of a graph cache, or joint graph passes are off",
}


@pytest.mark.parametrize("source", SUMMARIES)
def test_summary_says_where_it_comes_from(source):
    found = GraphReport(source=source)
    found.add("hoisted", "weight preprocessing")
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
