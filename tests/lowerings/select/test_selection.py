"""Which kernel a graph gets, by records; and that nothing else of it changes."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from msgspec.structs import replace as changed
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.runtime import benchmarking
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

from ipex_inductor import compat
from ipex_inductor.aot_cache import cache_root
from ipex_inductor.autotune import select
from ipex_inductor.autotune.database import Records, Shard
from ipex_inductor.autotune.predictor import Guess
from ipex_inductor.autotune.record import Outcome, Record, Symbol, encode
from ipex_inductor.compiler import kernel_selection as choices
from ipex_inductor.compiler.request import Request
from ipex_inductor.config import resolve
from ipex_inductor.lowerings.problem import selector_hook, shapes, spaces
from ipex_inductor.lowerings.problem.selector_hook import Choosing, choosing
from ipex_inductor.lowerings.problem.settings import settings_of
from ipex_inductor.lowerings.select import peaks, selection
from ipex_inductor.reporting import decisions
from ipex_inductor.target import device as target
from support.autotune.autotune_records import PROVENANCE, timed

pytestmark = pytest.mark.usefixtures("instructions_known", "in_python")

A, B = torch.randn(3, 40, 24), torch.randn(3, 24, 56)
TEMPLATE, IN_CODE = "inductor.cpp.bmm", "_threaded_mm("


def fn(a, b):
    return torch.bmm(a, b).relu()


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))


@pytest.fixture
def database(tmp_path):
    return tmp_path / "database"


def offers_of(fn, *inputs):
    torch.compiler.reset()
    with choosing(Choosing()) as now, torch.no_grad():
        torch.compile(fn, options={"max_autotune": True})(*inputs)
    torch.compiler.reset()
    return list(now.offers.values())


def keep(database, problem, choices, fastest):
    """A record in which the choice of that name took half of what the others did."""
    times = [timed(c, 50.0 if c.name == fastest else 100.0, noise=0.001) for c in choices]
    shard = Shard(database)
    shard.append(Record(problem, tuple(times), PROVENANCE))
    shard.close()


@pytest.fixture(scope="module")
def offer(instructions_known):
    (offer,) = offers_of(fn, A, B)
    return offer


def compiled(fn, database, **options):
    options = {"strict": True, "autotune_database": str(database), **options}
    return torch.compile(fn, backend="ipex", options=options)


def said():
    return [e.reason for r in decisions.reports() for e in r.events if e.kind == "choice"]


def code_of(compiled, *inputs):
    with torch.no_grad():
        result, (code,) = run_and_get_code(compiled, *inputs)
    return result, code


@pytest.mark.parametrize("fastest", [TEMPLATE, "aten.bmm"])
@pytest.mark.parametrize("options", [{}, {"autotune": "never"}, {"max_autotune": True}], ids=str)
@pytest.mark.sampled
def test_the_recorded_choice_is_used(fastest, options, database, offer, monkeypatch):
    keep(database, offer.problem, offer.choices, fastest)
    timings = []
    for name in ("benchmark", "benchmark_cpu", "benchmark_gpu"):
        monkeypatch.setattr(benchmarking.Benchmarker, name, lambda *a, **k: timings.append(a))
    monkeypatch.setattr(selection, "store_results", lambda *a: timings.append(a))
    result, code = code_of(compiled(fn, database, **options), A, B)
    torch.testing.assert_close(result, fn(A, B))
    assert (IN_CODE in code) == (fastest == TEMPLATE)
    assert ("extern_kernels.bmm" in code) == (fastest == "aten.bmm")
    assert not timings
    against = ", aten.bmm 100" if fastest == TEMPLATE else ""
    (reason,) = said()
    assert reason.startswith(fastest)
    assert reason.endswith(f": 50 us{against}, recorded")


def test_rules_are_counted_once_where_the_graph_is_learned_first(database, offer):
    keep(database, offer.problem, offer.choices, TEMPLATE)
    layer = nn.Linear(B.shape[-1], 24)

    def more(a, b):
        return nn.functional.gelu(layer(fn(a, b)))

    with torch.no_grad():
        torch.testing.assert_close(compiled(more, database)(A, B), more(A, B))
    assert counters["ipex"] == {"linear+gelu": 1}


def test_nothing_recorded_is_the_librarys_and_is_said(database, offer):
    keep(database, changed(offer.problem, arch="sm_90:other"), offer.choices, TEMPLATE)
    _, code = code_of(compiled(fn, database, autotune="never", max_autotune=True), A, B)
    assert "extern_kernels.bmm" in code
    assert said() == ["aten.bmm: nothing is recorded of 2 choices"]


def test_a_choice_that_is_not_offered_any_more_is_not_used_and_said(database, offer):
    micros = {c.parameters["micro"] for c in offer.choices if c.template}
    other = {"micro": next(micro for micro in spaces.MICRO if micro not in micros)}
    gone = [changed(c, parameters=other) if c.template else c for c in offer.choices]
    keep(database, offer.problem, gone, TEMPLATE)
    _, code = code_of(compiled(fn, database), A, B)
    assert "extern_kernels.bmm" in code
    assert said() == [f"aten.bmm: {TEMPLATE} (recorded) is not offered here"]


@torch.no_grad()
def test_a_graph_is_learned_with_its_weights_known():
    """Or what folds into weights would not, and the problems learned not be those compiled."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()

    def learn(gm, inputs):
        config = resolve(None, {"strict": True}, compat.inductor_option_types())
        choices.list_candidates(Request(gm, inputs, config))
        return gm.forward

    torch.compile(model, backend=learn)(torch.randn(1, 3, 8, 8))
    assert counters["ipex"]["conv2d+batch_norm"] == 1


@pytest.mark.parametrize("winner", [TEMPLATE, "aten.bmm"])
def test_where_a_template_of_another_torch_won_it_is_measured_anew(
    winner, monkeypatch, database, offer
):
    """That template is another one; a library call is the same, and its records are used."""
    older = [changed(c, template="torch 2.0.0") if c.template else c for c in offer.choices]
    keep(database, offer.problem, older, winner)
    tried = []

    def refuses(problems, _):
        tried.extend(problems)
        yield from ((p, "no luck") for p in problems)

    monkeypatch.setattr(selection, "tune_locally", refuses)
    _, code = code_of(compiled(fn, database, autotune="always"), A, B)
    assert "extern_kernels.bmm" in code
    assert tried == ([offer.problem] if winner == TEMPLATE else [])


def test_what_failed_once_is_not_used_again(database, offer):
    keep(database, offer.problem, offer.choices, TEMPLATE)
    failed = timed(offer.choices[1], 1.0)
    wrong = Record(
        offer.problem, (changed(failed, timing=None, reason="wrong by 0.1"),), PROVENANCE
    )
    Shard(database).append(wrong)
    _, code = code_of(compiled(fn, database), A, B)
    assert "extern_kernels.bmm" in code


def test_a_size_that_varies_has_records_of_its_own(database, offer):
    keep(database, offer.problem, offer.choices, TEMPLATE)
    a, b = A.clone(), B.clone()
    for factor in (a, b):
        torch._dynamo.mark_dynamic(factor, 0)
    _, code = code_of(compiled(fn, database), a, b)
    assert "extern_kernels.bmm" in code, "the record is of three products exactly"
    (varying,) = offers_of(fn, a, b)
    assert varying.problem.symbols == (Symbol("n0", 2, 4),)
    keep(database, varying.problem, varying.choices, TEMPLATE)
    torch.compiler.reset()
    dynamic = compiled(fn, database)
    _, code = code_of(dynamic, a, b)
    assert IN_CODE in code
    for batch in (3, 4, 9):
        given = torch.randn(batch, 40, 24), torch.randn(batch, 24, 56)
        torch.testing.assert_close(dynamic(*given), fn(*given))


def test_the_epilogue_is_part_of_the_problem(database, offer):
    keep(database, offer.problem, offer.choices, TEMPLATE)
    _, code = code_of(compiled(lambda a, b: torch.bmm(a, b).sigmoid(), database), A, B)
    assert "extern_kernels.bmm" in code


def test_backward_graphs_are_settled_too(database):
    """Which are compiled later, after the call of the backend."""
    (choices,) = (offer.choices for offer in offers_of(fn, A, B))
    tangent = torch.randn(3, 40, 56)
    for problem in _problems_in_training():
        if problem.operands[0].shape == tangent.shape:  # that of the first factor's gradient
            keep(database, problem, choices, TEMPLATE)
    a, b = (t.clone().requires_grad_() for t in (A, B))
    _, codes = run_and_get_code(lambda: compiled(fn, database)(a, b).backward(tangent))
    assert [IN_CODE in code for code in codes] == [False, True]
    want = [t.clone().requires_grad_() for t in (A, B)]
    fn(*want).backward(tangent)
    for have, expected in zip((a, b), want, strict=True):
        torch.testing.assert_close(have.grad, expected.grad)


def _problems_in_training():
    seen = []
    offers = choices.list_candidates

    def noted(*args):
        seen.extend(offers(*args))
        return seen

    config = {"strict": True, "autotune": "always", "autotune_budget_s": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "list_candidates", noted)
        factors = (t.clone().requires_grad_() for t in (A, B))
        torch.compile(fn, backend="ipex", options=config)(*factors)
    torch.compiler.reset()
    decisions.clear()
    assert len(seen) >= 2
    return [offer.problem for offer in seen]


def test_what_inductor_times_itself_is_kept_as_its_word(database, offer):
    options = {"autotune": "inductor", "max_autotune": True}
    result, _ = code_of(compiled(fn, database, **options), A, B)
    torch.testing.assert_close(result, fn(A, B))
    (record,) = Records(database)
    assert record.problem == offer.problem
    assert record.provenance.source == "inductor"
    assert [o.choice for o in record.outcomes] == list(offer.choices)
    assert all(o.reported > 0 and o.timing is None for o in record.outcomes)
    assert not select.lookup([encode(record.problem)], database)


def test_lists_of_plain_inductor_are_left_as_they_are():
    selector_hook._hook()
    callers = [object(), object()]
    assert selector_hook._one(callers) is callers


def test_a_failure_leaves_the_librarys_kernels(monkeypatch, database, offer):
    keep(database, offer.problem, offer.choices, TEMPLATE)

    def broken(*_):
        raise RuntimeError("no luck")

    monkeypatch.setattr(selection, "lookup", broken)
    result, code = code_of(compiled(fn, database, strict=False), A, B)
    assert "extern_kernels.bmm" in code
    torch.testing.assert_close(result, fn(A, B))
    (event,) = [e for r in decisions.reports() for e in r.events if e.subject == "autotune"]
    assert event.reason == "RuntimeError: no luck"


def test_every_way_to_ask_for_precision_leaves_the_rules_on():
    """torch's older function raises where only the new switch was set."""
    onednn, layer = torch.backends.mkldnn.matmul, torch.nn.Linear(24, 8).eval()
    before = onednn.fp32_precision
    try:
        onednn.fp32_precision = "bf16"
        assert settings_of("cpu")["fp32 products"] == "bf16"
        for options in ({}, {"autotune": "never"}):
            torch.compiler.reset()
            with torch.no_grad():
                torch.compile(layer, backend="ipex", options={"strict": True, **options})(A[0])
        assert all(not r.count("fallback") for r in decisions.reports())
    finally:
        onednn.fp32_precision = before


@pytest.mark.parametrize("options", [{"autotune": "inductor", "max_autotune": True}], ids=str)
def test_a_database_that_cannot_be_written_is_said_also_in_a_backward(options, tmp_path):
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a.sum() + b.sum()

        @staticmethod
        def backward(ctx, tangent):
            a, b = ctx.saved_tensors
            product = torch.bmm(a, b).sum()
            return product.expand_as(a) * tangent, product.expand_as(b) * tangent

    file = tmp_path / "file"
    file.write_text("")
    a, b = (t.clone().requires_grad_() for t in (A, B))
    options = {**options, "autotune_database": str(file / "no folder")}
    torch.compile(Late.apply, backend="ipex", options=options)(a, b).backward()
    assert a.grad is not None
    events = [e for r in decisions.reports() for e in r.events if e.subject == "autotune"]
    assert any("what was timed is not kept" in e.reason for e in events)


def test_a_fault_of_ours_in_inductors_hands_is_the_librarys_kernel(monkeypatch, database, offer):
    keep(database, offer.problem, offer.choices, TEMPLATE)
    code_of(compiled(fn, database), A, B)  # remembers the problem

    def broken(*_):
        raise RuntimeError("no luck")

    torch.compiler.reset()
    decisions.clear()
    monkeypatch.setattr(selector_hook, "_problem", broken)
    monkeypatch.setattr(benchmarking.Benchmarker, "benchmark", broken)  # nor is anything timed
    result, code = code_of(compiled(fn, database), A, B)
    assert "extern_kernels.bmm" in code
    torch.testing.assert_close(result, fn(A, B))
    (event,) = [e for r in decisions.reports() for e in r.events if e.kind == "missed"]
    assert event.reason == "RuntimeError: no luck"


def test_problems_are_learned_anew_for_other_threads_and_other_sizes(monkeypatch, database):
    asked = []

    def refuses(problems, _):
        asked.extend(problems)
        yield from ((p, "no luck") for p in problems)

    monkeypatch.setattr(selection, "tune_locally", refuses)
    before = torch.get_num_threads()
    try:
        for threads in (before, before + 1):
            torch.set_num_threads(threads)
            torch.compiler.reset()
            code_of(compiled(fn, database, autotune="always"), A, B)
    finally:
        torch.set_num_threads(before)
    assert [p.settings["threads"] for p in asked] == [before, before + 1]
    del asked[:]
    for batch in (4, 100):
        torch.compiler.reset()
        a, b = torch.randn(batch, 40, 24), torch.randn(batch, 24, 56)
        for factor in (a, b):
            torch._dynamo.mark_dynamic(factor, 0)
        code_of(compiled(fn, database, autotune="always"), a, b)
    assert [p.symbols[0].high for p in asked] == [4, 128]
    reasons = [e for r in decisions.reports() for e in r.events if e.kind == "missed"]
    assert any(e.reason == "no luck" for e in reasons)


def test_what_was_found_is_used_though_the_disk_fails_later(monkeypatch, database, offer):
    keep(database, offer.problem, offer.choices, TEMPLATE)
    other = replace(offer, problem=changed(offer.problem, epilogue=""))

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(selection, "tune_locally", full)
    said_ = []
    policy = selection.Policy(database, True, 10)

    def learned():
        return [offer, other]

    found = selection.settle(policy, "graph", learned, lambda *words: said_.append(words))
    assert [s.choice.name for s in found.values()] == [TEMPLATE]
    assert said_ == [("autotune", "measuring stopped: no space left")]


WORDS = "other=None stride=1,1 padding=0,0 dilation=1,1 transposed=False output_padding=0,0"
WORDS += " groups=1 binary='none' unary='relu' scalars=() packed=''"
IN_TURN = [
    f"ipex.conv.default bfloat16 8x256x56x56:L 64x256x1x1:L 64 {WORDS}",
    f"ipex.conv.default bfloat16 8x64x28x28:L 64x64x1x1:L 64 {WORDS}",  # thrice
    f"ipex.conv.default bfloat16 8x96x28x28:L 64x96x1x1:L 64 {WORDS}",
    "ipex.conv_pool.default bfloat16 99x3x224x224:L 64x3x7x7:L 64 stride=2,2 padding=3,3",
    "aten.mm.default bfloat16 8192x8192 8192x8192",
]


def test_what_takes_longest_is_measured_first_and_inductors_lists_last(
    monkeypatch, database, offer
):
    problems = [*shapes.problems(IN_TURN, "sm_90:NVIDIA-H200", {})]
    with choosing(Choosing()) as now:
        for each in (*reversed(problems), problems[1], problems[1]):
            selector_hook.add_offer(replace(offer, problem=each))
    asked = []
    monkeypatch.setattr(
        selection, "tune_locally", lambda problems, budget: asked.extend(problems) or []
    )
    policy = selection.Policy(database, may_time=True, budget=1.0, guesses=False)
    selection.settle(policy, "graph", now.offers.values, lambda *words: None)
    assert asked == problems


def test_sizes_that_vary_and_devices_that_are_not_known_have_no_floor():
    (known,) = shapes.problems(IN_TURN[:1], "sm_90:NVIDIA-H200", {})
    (other,) = shapes.problems(IN_TURN[:1], "sm_90:of-nobody", {})
    assert peaks.floor(other) == 0.0
    assert peaks.floor(changed(known, op="ipex.of_nobody.default")) == 0.0
    assert peaks.floor(changed(known, symbols=(Symbol("s0", 1, 8),))) == 0.0
    # Each number of the image and of the result once, at 4.8 TB/s: memory binds.
    assert peaks.floor(known) == pytest.approx(2 * 8 * 56 * 56 * 320 / 4.8e12, rel=0.01)


def test_what_cannot_be_measured_is_not_tried_by_every_process(monkeypatch, database, offer):
    tried = []

    def refuses(problems, _):
        tried.extend(problems)
        yield from ((p, "no luck") for p in problems)

    monkeypatch.setattr(selection, "tune_locally", refuses)
    for _ in range(2):
        torch.compiler.reset()
        _, code = code_of(compiled(fn, database, autotune="always"), A, B)
        assert "extern_kernels.bmm" in code
    assert tried == [offer.problem]


def test_the_hook_is_there_again_after_somebody_cleared_inductors(database, offer):
    from torch._inductor.select_algorithm import clear_preprocessing_fns

    keep(database, offer.problem, offer.choices, TEMPLATE)
    clear_preprocessing_fns()
    _, code = code_of(compiled(fn, database), A, B)
    assert IN_CODE in code


def test_a_remembered_list_that_is_damaged_is_made_anew(database, offer):
    keep(database, offer.problem, offer.choices, TEMPLATE)
    code_of(compiled(fn, database), A, B)
    (file,) = (cache_root.home() / "graphs").iterdir()
    whole = file.read_bytes()
    for damage in (whole[:-5], b"", b"[7]", whole.replace(b"bmm", b"nope")):
        file.write_bytes(damage)
        torch.compiler.reset()
        result, _ = code_of(compiled(fn, database), A, B)
        torch.testing.assert_close(result, fn(A, B))


def test_our_own_folder_is_used_only_if_nobody_else_can_write_it(offer):
    folder = cache_root.home() / "autotune"
    keep(folder, offer.problem, offer.choices, TEMPLATE)
    assert selection.database_of("") == folder
    folder.chmod(0o777)
    assert selection.database_of("") is None


def test_the_digest_is_of_what_was_selected(offer):
    first, second = offer.choices
    key = encode(offer.problem)
    digests = {select.digest(pairs) for pairs in ([], [(key, first)], [(key, second)])}
    assert len(digests) == 3
    assert select.digest([(key, first), (b"x", second)]) == select.digest(
        [(b"x", second), (key, first)]
    )


@pytest.mark.parametrize(
    ("call", "may"),
    [
        (lambda a, b: a @ b, True),
        (lambda a, b: a.matmul(b), True),
        (lambda a, b: torch.einsum("bij,bjk->bik", a, b), True),
        (lambda a, b: torch.baddbmm(a.sum(), a, b), True),
        (lambda a, b: torch.linalg.matmul(a, b), True),
        (lambda a, b: torch.ops.aten.bmm.default(a, b), True),
        (lambda a, b: checkpoint(torch.bmm, a, b, use_reentrant=False), True),
        (lambda a, b: a.relu() + b.sum(), False),
    ],
)
def test_graphs_without_a_choice_are_not_lowered_to_learn_that(call, may, tmp_path):
    graphs = []

    def note(gm, _):
        graphs.append(gm)
        return gm.forward

    torch.compile(call, backend=note)(A, B)
    policy = selection.Policy(tmp_path, True, 10)
    assert selection.may_choose(policy, graphs[0], {A.device}) == may


PROGRAM = """
import json, sys, hashlib, torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint
from ipex_inductor.reporting import decisions

torch.manual_seed(0)
a, b = torch.randn(3, 40, 24), torch.randn(3, 24, 56)
fn = torch.compile(
    lambda a, b: torch.bmm(a, b).relu(),
    backend="ipex", mode=sys.argv[2], options=json.loads(sys.argv[3]) or None,
) if sys.argv[2] == "default" else torch.compile(
    lambda a, b: torch.bmm(a, b).relu(), backend="ipex", mode=sys.argv[2]
)
with torch.no_grad():
    result, codes = run_and_get_code(fn, a, b)
torch.testing.assert_close(result, torch.bmm(a, b).relu())
print(json.dumps({
    "code": [hashlib.sha256(c.encode()).hexdigest() for c in codes],
    "extern": ["extern_kernels.bmm" in c for c in codes],
    "hit": counters["aot_autograd"]["autograd_cache_hit"],
    "said": [e.reason for r in decisions.reports() for e in r.events if e.kind == "choice"],
}))
"""


def process(tmp_path, database, name="a", mode="default", options=None, **env):
    folder = tmp_path / name
    env = {
        **os.environ,
        "IPEX_HOME": str(folder / "home"),
        "IPEX_AUTOTUNE_DATABASE": str(database),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # a folder here has a kernel or two
        **env,
    }
    (folder / "home").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", PROGRAM, "x", mode, json.dumps(options or {})]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # 40 s
def test_two_machines_with_one_table_get_the_same_code(tmp_path, database, offer):
    keep(database, offer.problem, offer.choices, TEMPLATE)
    # Without a cache of graphs: they share only what g++ made of the same C++.
    torchs = {n: v for n, v in os.environ.items() if n.startswith("TORCHINDUCTOR_")}
    first, second = (process(tmp_path, database, name, **torchs) for name in ("a", "b"))
    assert first["code"] == second["code"] != []
    assert first["extern"] == [False]


@pytest.mark.slow
def test_a_new_record_throws_only_the_graphs_away_that_it_changes(tmp_path, database, offer):
    keep(database, offer.problem, offer.choices, "aten.bmm")
    assert process(tmp_path, database)["hit"] == 0
    assert process(tmp_path, database)["hit"] == 1
    keep(database, changed(offer.problem, epilogue=""), offer.choices, TEMPLATE)
    assert process(tmp_path, database)["hit"] == 1
    for _ in range(2):  # the median of three
        keep(
            database,
            offer.problem,
            [changed(c, template=c.template) for c in offer.choices],
            TEMPLATE,
        )
        moved = replace(offer, choices=offer.choices[::-1])
        keep(database, moved.problem, moved.choices, TEMPLATE)
    found = process(tmp_path, database)
    assert found["hit"] == 0
    assert found["extern"] == [False]
    assert process(tmp_path, database)["hit"] == 1


def test_max_autotune_measures_once(database, monkeypatch):
    monkeypatch.setenv("IPEX_AUTOTUNE_DATABASE", str(database))
    asked = counted(monkeypatch, selection, "tune_locally")
    for _ in range(2):
        torch.compiler.reset()
        result, _ = code_of(torch.compile(fn, backend="ipex", mode="max-autotune"), A, B)
        torch.testing.assert_close(result, fn(A, B))
        (record,) = Records(database)
    assert len(asked) == 1
    assert {o.choice.name for o in record.outcomes if o.timing} == {TEMPLATE, "aten.bmm"}
    assert record.problem.epilogue == "aten.relu.default(y)"
    assert said()[-1].endswith("recorded")


@pytest.mark.slow  # 40 s
def test_max_autotune_measures_once_and_remembers(tmp_path, database):
    found = process(tmp_path, database, mode="max-autotune")
    assert found["hit"] == 0
    (record,) = Records(database)
    assert {o.choice.name for o in record.outcomes if o.timing} == {TEMPLATE, "aten.bmm"}
    assert record.problem.epilogue == "aten.relu.default(y)"
    assert found["said"][-1].endswith("recorded")
    assert process(tmp_path, database, mode="max-autotune")["hit"] == 1
    assert [encode(r) for r in Records(database)] == [encode(record)]


@dataclass(frozen=True)
class Planted:
    """A model that knows of this machine what `select.guesser` knows of GPUs."""

    wins: bool = True
    reason: str = ""

    def ops(self):
        return {"aten.bmm.default"}

    def guess(self, problem, choices):
        templates = [c for c in choices if c.kind == "template"]
        if self.reason or not templates:
            return self.reason or "none of the templates it knows is offered"
        return Guess(templates[0], 5.0, 20.0 if self.wins else 6.0, 1.5)


@pytest.fixture
def model(monkeypatch):
    """Plants one; for `may_choose`, this CPU is a device that there may be a model of."""

    def plant(**given):
        for room in (select, selection):
            monkeypatch.setattr(room, "guesser", lambda arch: Planted(**given))
        monkeypatch.setattr(selection, "may_choose", lambda *_: True)

    return plant


def counted(monkeypatch, room, name):
    calls, real = [], getattr(room, name)
    monkeypatch.setattr(room, name, lambda *a, **k: calls.append(a) or real(*a, **k))
    return calls


def test_the_model_chooses_where_nothing_is_recorded(database, model, monkeypatch):
    model()
    measured = counted(monkeypatch, selection, "store_results")
    result, code = code_of(compiled(fn, database), A, B)
    torch.testing.assert_close(result, fn(A, B))
    assert IN_CODE in code
    (reason,) = said()
    assert reason.startswith(f"{TEMPLATE} micro=")
    assert reason.endswith(": 5 us, aten.bmm 20, model")
    assert not measured


def test_never_is_records_and_tables_alone(database, offer, model):
    model()
    _, code = code_of(compiled(fn, database, autotune="never"), A, B)
    assert "extern_kernels.bmm" in code
    assert not said()
    keep(database, offer.problem, offer.choices, TEMPLATE)
    torch.compiler.reset()
    _, code = code_of(compiled(fn, database, autotune="never"), A, B)
    assert IN_CODE in code


def test_the_model_may_leave_it_to_the_library(database, model):
    model(wins=False)
    _, code = code_of(compiled(fn, database), A, B)
    assert "extern_kernels.bmm" in code
    assert said() == [f"aten.bmm: 6 us, model ({TEMPLATE} 5, taken from 1.5 times as fast)"]


def test_what_the_model_refuses_is_the_librarys_and_is_said(database, model):
    model(reason="its sizes vary")
    _, code = code_of(compiled(fn, database), A, B)
    assert "extern_kernels.bmm" in code
    (event,) = [e for r in decisions.reports() for e in r.events if e.kind == "missed"]
    assert event.subject == "a template for aten.bmm.default"
    assert event.reason == "the library's: its sizes vary"


def test_records_come_before_the_model(database, offer, model):
    model()
    keep(database, offer.problem, offer.choices, "aten.bmm")
    _, code = code_of(compiled(fn, database), A, B)
    assert "extern_kernels.bmm" in code
    assert said() == ["aten.bmm: 50 us, recorded"]


def test_measuring_comes_before_the_model(database, offer, model, monkeypatch):
    model()
    times = [timed(c, 50.0 if c.name == "aten.bmm" else 100.0) for c in offer.choices]
    record = Record(offer.problem, tuple(times), PROVENANCE)
    monkeypatch.setattr(
        selection, "tune_locally", lambda problems, _: ((p, record) for p in problems)
    )
    _, code = code_of(compiled(fn, database, autotune="always"), A, B)
    assert "extern_kernels.bmm" in code
    assert said() == ["aten.bmm: 50 us, recorded"]


def test_what_the_time_did_not_suffice_for_is_the_models(database, model, monkeypatch):
    model()
    options = {"autotune": "always", "autotune_budget_s": 0, "strict": False}
    _, code = code_of(compiled(fn, database, **options), A, B)
    assert IN_CODE in code


def test_what_failed_once_is_not_guessed(database, offer, model):
    model()
    wrong = [Outcome(c, reason="wrong by 0.1") for c in offer.choices if c.kind == "template"]
    Shard(database).append(Record(offer.problem, tuple(wrong), PROVENANCE))
    _, code = code_of(compiled(fn, database), A, B)
    assert "extern_kernels.bmm" in code
    (event,) = [e for r in decisions.reports() for e in r.events if e.kind == "missed"]
    assert event.reason == "the library's: none of the templates it knows is offered"


def test_the_models_choice_is_part_of_the_key(database, model, monkeypatch):
    selected, real = [], Request.identity_fields

    def noted(*args):
        fields = real(*args)
        selected.append(fields["selected"])
        return fields

    monkeypatch.setattr(Request, "identity_fields", noted)
    digests = []
    for wins in (True, False, True):
        model(wins=wins)
        torch.compiler.reset()
        _, code = code_of(compiled(fn, database), A, B)
        assert (IN_CODE in code) == wins, "not what was compiled for the other choice"
        digests.append(selected[-1])
    assert digests[0] == digests[2] != digests[1]
    assert select.digest([]) not in digests


def test_without_a_model_nothing_is_looked_at(database, monkeypatch):
    """As on every CPU: neither lowered to learn, nor is a model read, nor anything asked."""
    learned = counted(monkeypatch, choices, "list_candidates")
    read = counted(monkeypatch, select.predictor, "load")
    code_of(compiled(fn, database), A, B)
    assert not learned
    assert not read
    assert said() == []


def scores(q, k):
    return q @ k.transpose(-1, -2) * 0.125


def halves(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def mixed(q, k):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return scores(q, k)


LIKELY = {
    "scores": (scores, halves(32, 128, 64), True),
    "torch.bmm": (
        lambda q, k: torch.bmm(q, k.mT.contiguous()).mul(0.125),
        halves(32, 128, 64),
        True,
    ),
    "four dimensions": (scores, halves(8, 4, 128, 64), True),
    "views behind": (lambda q, k: scores(q, k).view(8, 4, 128, 128), halves(32, 128, 64), True),
    "a product behind": (lambda q, k: scores(q, k) @ q, halves(32, 128, 64), True),
    "checkpointed": (
        lambda q, k: checkpoint(scores, q, k, use_reentrant=False),
        halves(32, 128, 64),
        True,
    ),
    "autocast": (mixed, halves(32, 128, 64, dtype=torch.float32), True),
    "fp32": (scores, halves(32, 128, 64, dtype=torch.float32), False),
    "no epilogue": (lambda q, k: q @ k.mT, halves(32, 128, 64), False),
    "another epilogue": (lambda q, k: (q @ k.mT).sigmoid(), halves(32, 128, 64), False),
    "more behind": (lambda q, k: scores(q, k).softmax(-1), halves(32, 128, 64), False),
    "other heads": (scores, halves(32, 128, 80), False),
    "few": (scores, halves(31, 128, 64), False),
    "short": (scores, halves(32, 127, 64), False),
    "no batch": (scores, halves(128, 64), False),
    "nothing": (lambda q, k: q * k, halves(32, 128, 64), False),
}


@pytest.fixture
def gpu(monkeypatch):
    """As if that device were there."""

    def plant(name):
        monkeypatch.setattr(target, "current", lambda device: target.find_target(name))
        return {torch.device("cuda", 0)}

    return plant


def captured(call, *inputs, dynamic=None):
    graphs = []

    def note(gm, _):
        graphs.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(call, backend=note, dynamic=dynamic)(*inputs)
    return graphs[0]


@pytest.mark.parametrize("name", LIKELY)
def test_for_the_model_only_what_plainly_is_of_a_class_is_lowered(name, gpu):
    call, inputs, may = LIKELY[name]
    policy = selection.Policy(None, False, 10)
    assert selection.may_choose(policy, captured(call, *inputs), gpu("h200")) == may


def test_what_varies_or_has_no_model_is_not_lowered_for_it(gpu):
    policy = selection.Policy(None, False, 10)
    graph = captured(scores, *halves(32, 128, 64))
    assert not selection.may_choose(
        policy, captured(scores, *halves(32, 128, 64), dynamic=True), gpu("h200")
    )
    assert selection.may_choose(policy, graph, gpu("h200"))
    assert not selection.may_choose(policy, graph, gpu("a100-80gb"))
    assert not selection.may_choose(policy, graph, {torch.device("mps")})
    assert not selection.may_choose(policy, graph, {torch.device("cpu")})


def test_a_model_of_other_ops_is_asked_of_every_graph(gpu, monkeypatch):
    linear = captured(torch.nn.Linear(8, 8), torch.randn(4, 8))
    known = select.guesser("sm_90:NVIDIA-H200")
    other = [changed(c, op="aten.mm.default") for c in known.classes if c.templates]
    policy = selection.Policy(None, False, 10)
    assert not selection.may_choose(policy, linear, gpu("h200"))
    monkeypatch.setattr(selection, "guesser", lambda arch: changed(known, classes=tuple(other)))
    assert selection.may_choose(policy, linear, gpu("h200"))


@pytest.fixture
def uncompilable(monkeypatch):
    """The C++ of that template is no C++."""
    from torch._inductor.codegen.cpp_bmm_template import CppBmmTemplate

    real = CppBmmTemplate.render
    monkeypatch.setattr(
        CppBmmTemplate, "render", lambda *a, **k: real(*a, **k) + "\n#error planted\n"
    )


@pytest.mark.slow  # each half of it is in one of the next two
def test_a_template_that_does_not_compile_is_the_librarys(database, model, uncompilable, caplog):
    model()
    result, codes = run_and_get_code(torch.no_grad()(compiled(fn, database, strict=False)), A, B)
    torch.testing.assert_close(result, fn(A, B))
    assert ["extern_kernels.bmm" in code for code in codes] == [False, True]
    (reason,) = said()
    assert reason.startswith(f"aten.bmm: {TEMPLATE} (model) does not compile (")
    assert not any(r.count("fallback") for r in decisions.reports()), "our passes stay"
    assert any("does not compile" in message for message in caplog.messages)


def test_also_in_a_backward(database, model, uncompilable, caplog):
    model()
    a, b = (t.clone().requires_grad_() for t in (A, B))
    tangent = torch.randn(3, 40, 56)
    compiled(fn, database, strict=False)(a, b).backward(tangent)
    want = [t.clone().requires_grad_() for t in (A, B)]
    fn(*want).backward(tangent)
    for have, expected in zip((a, b), want, strict=True):
        torch.testing.assert_close(have.grad, expected.grad)
    graphs = [m for m in caplog.messages if m.startswith("a selected template does not compile")]
    assert len(graphs) == 2, "forward and backward"
    assert said()
    assert all("(model) does not compile" in reason for reason in said())


def test_a_recorded_template_that_does_not_compile_any_more_as_well(database, offer, uncompilable):
    keep(database, offer.problem, offer.choices, TEMPLATE)
    result, codes = run_and_get_code(torch.no_grad()(compiled(fn, database, strict=False)), A, B)
    torch.testing.assert_close(result, fn(A, B))
    assert ["extern_kernels.bmm" in code for code in codes] == [False, True]
    assert "(recorded) does not compile" in said()[0]
    assert not any(r.count("fallback") for r in decisions.reports()), "our passes stay"


def test_strict_compilation_says_what_does_not_compile(database, model, uncompilable):
    model()
    with pytest.raises(Exception, match="planted"):
        code_of(compiled(fn, database), A, B)


def test_what_fails_without_templates_too_is_told_as_it_was(database, model, monkeypatch):
    model()
    tries = []

    def broken(*_, **__):
        tries.append(1)
        raise RuntimeError("no luck")

    monkeypatch.setattr(compat, "compile_inner", broken)
    result, _ = code_of(compiled(fn, database, strict=False), A, B)
    torch.testing.assert_close(result, fn(A, B))
    assert len(tries) == 2
    reasons = [e.reason for r in decisions.reports() for e in r.events if e.kind == "fallback"]
    assert reasons == ["RuntimeError: no luck"]


def test_templates_are_listed_only_where_one_was_selected(database, model, monkeypatch):
    """Nothing more is compiled."""
    from torch._inductor import config as inductor

    seen = []

    def noted(*_, **__):
        seen.append(inductor.max_autotune_gemm)
        raise InterruptedError

    monkeypatch.setattr(compat, "compile_inner", noted)
    for given, options, wanted in (
        ({"wins": True}, {}, True),
        ({"wins": False}, {}, False),
        ({"reason": "no"}, {}, False),
        ({"wins": True}, {"max_autotune_gemm": False}, False),
        ({"wins": False}, {"max_autotune_gemm": True, "autotune": "never"}, True),
    ):
        model(**given)
        torch.compiler.reset()
        del seen[:]
        with pytest.raises(BackendCompilerFailed, match="InterruptedError"):
            code_of(compiled(fn, database, **options), A, B)
        assert seen == [wanted]
    assert not inductor.max_autotune_gemm


def test_the_users_word_keeps_templates_out(database, offer, model):
    model()
    keep(database, offer.problem, offer.choices, TEMPLATE)
    _, code = code_of(compiled(fn, database, max_autotune_gemm=False), A, B)
    assert "extern_kernels.bmm" in code
