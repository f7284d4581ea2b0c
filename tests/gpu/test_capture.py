"""Default mode on a GPU: what is captured computes and behaves as what is launched does."""

import copy
import gc
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees

from ipex_inductor import explain
from ipex_inductor.capture import cuda, policy
from ipex_inductor.capture.policy import MOVED, NAME, ROUNDS, WARM_UP
from ipex_inductor.reporting import decisions

pytestmark = pytest.mark.gpu

# Sums in another order than eager's, and a GELU that is not rounded before: a few ulp of values
# near 1 in fp32.
ATOL = 1e-4


@pytest.fixture(autouse=True)
def _decided_alike(monkeypatch):
    """What is captured must not hang on how busy the machine is; one test below measures."""
    monkeypatch.setattr(policy, "HOST_BOUND", 0.0)
    monkeypatch.setattr(policy, "GAIN", float("inf"))
    # Not by `monkeypatch`, which from pytest 9.2 on deletes what an object only answers for.
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


class Mlp(nn.Module):
    """Products of cuBLAS, which needs memory to work in, Triton's kernels, and derived weights."""

    def __init__(self, width=256, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.norm(x) @ (self.layers[0].weight * self.scale)


def made(**kwargs):
    return Mlp(**kwargs).eval().cuda()


def compiled(model, **options):
    return torch.compile(model, backend="ipex", options={"strict": True, **options})


def said(kind="choice"):
    found = (e for report in decisions.reports() for e in report.events)
    return [e.reason for e in found if e.subject == NAME and e.kind == kind]


def x_of(rows=32, width=256):
    return torch.randn(rows, width, device="cuda")


def close(run, model, x):
    result, expected = run(x), model(x)
    torch.testing.assert_close(result, expected, rtol=0, atol=ATOL)
    assert result.stride() == expected.stride()
    return result, expected


def warm(run, model, x=None):
    """Called until it is decided: captured."""
    for _ in range(WARM_UP + 1):
        close(run, model, x_of() if x is None else x)
    assert said()[-1].startswith("captured: "), said() + said("missed")


@pytest.fixture
def replays(monkeypatch):
    """How often graphs of ours were replayed."""
    counted, call = [], cuda.Graph.__call__

    def counting(graph, moving):
        counted.append(graph)
        return call(graph, moving)

    monkeypatch.setattr(cuda.Graph, "__call__", counting)
    return counted


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_and_whose_results_are(mode, replays):
    model = made()
    run = compiled(model)
    with mode():
        warm(run, model)
        before = len(replays)
        kept = [close(run, model, x_of()) for _ in range(5)]
        assert len(replays) == before + 5
        for result, expected in kept:
            torch.testing.assert_close(result, expected, rtol=0, atol=ATOL)
        assert len({result.data_ptr() for result, _ in kept}) == 5
        for result, _ in kept:
            result.zero_()  # a user's to write
        close(run, model, x_of())
        close(run, model, x_of(64)[::2])
    assert result.is_inference() == (mode is torch.inference_mode)


def test_one_mode_after_the_other(replays):
    model, x = made(), x_of()
    run = compiled(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(WARM_UP + 3):
                close(run, model, x)
    assert replays


def test_changed_weights(replays):
    model = made()
    run = compiled(model)
    with torch.no_grad():
        warm(run, model)
        model.layers[0].weight.mul_(-1.5)
        model.scale.mul_(2)
        before = len(replays)
        for _ in range(3):
            close(run, model, x_of())
        assert len(replays) == before + 3  # derived weights are where they were
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(x_of()).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        before = len(replays)
        for _ in range(3):
            close(run, model, x_of())
        assert len(replays) == before + 3
        model.load_state_dict(made().state_dict(), assign=True)
        for _ in range(2 * MOVED):
            close(run, model, x_of())
        assert sum(line.startswith("captured: ") for line in said()) == 2
        before = len(replays)
        close(run, model, x_of())
        assert len(replays) == before + 1
        model.layers[0].weight.data = model.layers[0].weight.data * 2
        for _ in range(3):
            close(run, model, x_of())


def test_two_models_in_turns():
    one, two = made(), made()

    @torch.compile(backend="ipex", options={"strict": True})
    def run(model, x):
        return model(x)

    with torch.no_grad():
        for _ in range(2 * MOVED):
            for model in (one, two):
                x = x_of()
                torch.testing.assert_close(run(model, x), model(x), rtol=0, atol=ATOL)


class Writes(nn.Module):
    """A sum over all calls, which shows one that is run twice."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(256))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


class Decode(nn.Module):
    """A step of attention behind a static cache, written in place behind its last row."""

    def __init__(self, rows=64, width=128):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.start(rows)

    def start(self, rows=64):
        """Another cache, at another address."""
        for name in ("keys", "values"):
            like = self.out.weight
            self.register_buffer(name, like.new_zeros(1, 4, rows, 32))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long, device=like.device))

    def forward(self, x):
        q, k, v = (part.view(1, 1, 4, 32).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        self.keys.index_copy_(2, self.at, k)
        self.values.index_copy_(2, self.at, v)
        seen = torch.arange(self.keys.shape[2], device=x.device) <= self.at
        self.at.add_(1)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen[None, None])
        return self.out(y.transpose(1, 2).flatten(2))


# Calls until a graph that writes is captured: those of the trial are the user's.
TRIAL = WARM_UP + 1 + ROUNDS + 1 + 2 * ROUNDS


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["counts", "decodes"])
def test_a_graph_that_writes_its_inputs_is_captured_and_runs_once_a_call(name, mode, replays):
    """The last call writes the cache's last row: one run too many would write behind it."""
    calls = TRIAL + 10
    with mode():
        model = (Writes() if name == "counts" else Decode(calls)).eval().cuda()
        twin = copy.deepcopy(model)
    run, where = compiled(model), [value.data_ptr() for value in model.buffers()]
    kept = []
    with mode():
        for _ in range(calls):
            x = x_of() if name == "counts" else torch.randn(1, 1, 128, device="cuda")
            kept.append((run(x), twin(x)))
            for mine, right in zip(model.buffers(), twin.buffers(), strict=True):
                torch.testing.assert_close(mine, right, rtol=0, atol=ATOL)
    for result, expected in kept:
        torch.testing.assert_close(result, expected, rtol=0, atol=ATOL)
    assert [value.data_ptr() for value in model.buffers()] == where
    assert [line[:10] for line in said()] == ["captured: "], said() + said("missed")
    assert len(replays) == 1 + ROUNDS + 10


def test_another_cache_is_written_where_it_is(replays):
    model = Decode(TRIAL + MOVED).eval().cuda()
    twin, run = copy.deepcopy(model), compiled(model)
    with torch.no_grad():
        for _ in range(3):
            for _ in range(TRIAL + MOVED):
                close(run, twin, torch.randn(1, 1, 128, device="cuda"))
            before, kept = [b.clone() for b in model.buffers()], [*model.buffers()]
            model.start(TRIAL + MOVED)
            twin.start(TRIAL + MOVED)
            close(run, twin, torch.randn(1, 1, 128, device="cuda"))
            torch.testing.assert_close(kept, before, rtol=0, atol=0)
            model.start(TRIAL + MOVED)
            twin.start(TRIAL + MOVED)
    assert sum(line.startswith("captured: ") for line in said()) >= 1, said()
    assert replays


class OnHost(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.tensor(3.0)

    def forward(self, x):
        return x * self.factor


def twice(x):
    y = x + 1
    return y, y[0]


def attention(x):
    q = x.view(1, 4, 32, 64)
    return F.scaled_dot_product_attention(q, q, q)


NOT = {
    "random": (lambda: lambda x: x + torch.rand_like(x), "random numbers"),
    "dropout": (lambda: lambda x: F.dropout(x, 0.5, True), "random numbers"),
    "cpu": (OnHost, "several devices"),
    "index": (lambda: lambda x: x.index_put((x > 0,), x.new_zeros(())), ""),
    "view": (lambda: lambda x: (x + 1, x.t()), ""),
    "shared": (lambda: twice, ""),
}


@pytest.mark.parametrize("name", NOT)
def test_what_is_not_captured_says_why_and_is_right(name, replays):
    make, reason = NOT[name]
    torch.manual_seed(0)
    model = make()
    model = model.cuda() if isinstance(model, nn.Module) else model
    run = compiled(model)
    with torch.no_grad():
        for _ in range(WARM_UP + 3):
            x = x_of()
            got, expected = run(x), model(x)
            if name not in ("random", "dropout"):
                torch.testing.assert_close(got, expected, rtol=0, atol=ATOL)
    told = said("missed") + said()
    assert any(reason in line for line in told) or not reason, told
    if reason:
        assert not replays


def test_attention_without_dropout_is_captured(replays):
    run = compiled(attention)
    with torch.no_grad():
        for _ in range(WARM_UP + 3):
            close(run, attention, torch.randn(1, 4, 32, 64, device="cuda"))
    assert replays, said("missed") + said()


def test_fresh_random_numbers_are_not_disturbed():
    model = made()
    run = compiled(model)
    torch.manual_seed(3)
    expected = [torch.rand(4, device="cuda") for _ in range(2)]
    torch.manual_seed(3)
    first = torch.rand(4, device="cuda")
    with torch.no_grad():
        warm(run, model, torch.ones(32, 256, device="cuda"))
    torch.testing.assert_close([first, torch.rand(4, device="cuda")], expected, rtol=0, atol=0)


def test_two_threads_on_two_streams(replays):
    model = made()
    run = compiled(model)
    with torch.no_grad():
        warm(run, model)
        xs = torch.randn(2, 100, 32, 256, device="cuda")
        expected = [[model(x) for x in each] for each in xs]
    torch.cuda.synchronize()
    got, failed = [[], []], []

    def work(number):
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()) as _:
                for x in xs[number]:
                    got[number].append(run(x))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert not failed, failed
    for mine, right in zip(got, expected, strict=True):
        for a, b in zip(mine, right, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=ATOL)


def test_a_users_own_capture_around_it(replays):
    model = made()
    run = compiled(model)
    place = x_of()
    with torch.no_grad():
        warm(run, model)
        graph = torch.cuda.CUDAGraph()
        before = len(replays)
        with torch.cuda.graph(graph):
            result = run(place)
        assert len(replays) == before
        for _ in range(3):
            x = x_of()
            place.copy_(x)
            graph.replay()
            torch.testing.assert_close(result, model(x), rtol=0, atol=ATOL)
            close(run, model, x_of())


def test_a_capture_that_fails_leaves_torch_working(monkeypatch):
    model, capture = made(), cuda.Device.capture

    def failing(device, call, inputs, moving):
        def waits(given):
            results = call(given)
            results[0].sum().item()  # not to be captured
            return results

        return capture(device, waits, inputs, moving)

    monkeypatch.setattr(cuda.Device, "capture", failing)
    run = compiled(model)
    with torch.no_grad():
        for _ in range(WARM_UP + 3):
            close(run, model, x_of())
        assert said()[-1].startswith("not captured: "), said()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert 0 < torch.rand(100, device="cuda").mean() < 1  # random numbers are to be had
        monkeypatch.setattr(cuda.Device, "capture", capture)
        torch.compiler.reset()
        run = compiled(model)
        warm(run, model)
        close(run, model, x_of())


def test_too_little_memory_leaves_torch_working(monkeypatch):
    model, capture = made(), cuda.Device.capture

    def failing(device, call, inputs, moving):
        def takes(given):
            torch.empty(1 << 46, dtype=torch.uint8, device="cuda")

        return capture(device, takes, inputs, moving)

    monkeypatch.setattr(cuda.Device, "capture", failing)
    run = compiled(model)
    with torch.no_grad():
        for _ in range(WARM_UP + 3):
            close(run, model, x_of())
        assert "OutOfMemoryError" in said()[-1], said()
        assert torch.rand(4, device="cuda").sum() >= 0


def test_memory_comes_back():
    def cycle():
        model = made(width=512)
        run = compiled(model)
        with torch.no_grad():
            warm(run, model, torch.randn(4096, 512, device="cuda"))
        del run, model
        torch.compiler.reset()
        decisions.clear()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # eager's, not ours
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    cycle()
    before = cycle()
    assert cycle() == before


def test_off():
    model = made()
    run = compiled(model, capture=False)
    with torch.no_grad():
        for _ in range(WARM_UP + 2):
            close(run, model, x_of())
    assert (said(), said("missed")) == ([], [])


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_where_a_mode_captures_inductor_does(mode):
    model = made()
    # Nothing is timed: which kernels there are is not the question.
    run = compiled(model, mode=mode, autotune="never")
    with torch.no_grad():
        for _ in range(WARM_UP + 3):
            x = x_of()
            torch.testing.assert_close(run(x).clone(), model(x), rtol=0, atol=ATOL)
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), False)
    assert sum(map(len, manager.roots.values())) == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert (said(), said("missed")) == ([], [])


def test_sizes_that_vary():
    model = made()
    run = torch.compile(model, backend="ipex", dynamic=True, options={"strict": True})
    with torch.no_grad():
        for rows in (8, 16, 24, 32, 40):
            close(run, model, x_of(rows))
    assert any("varies" in line for line in said("missed"))


def test_explain_says_what_was_measured():
    with torch.no_grad():
        text = str(explain(made(), x_of()))
    assert "in a CUDA graph" in " ".join(text.split()), text


def test_what_the_device_limits_is_left_as_it_is(monkeypatch):
    """Measured: products of some 10 ms of arithmetic, and a chain of small ones."""
    monkeypatch.undo()
    layers = (nn.Linear(4096, 4096) for _ in range(4))  # in fp32 without TF32
    large, small = nn.Sequential(*layers).cuda().eval(), made(layers=12)
    with torch.no_grad():
        for model, x in ((large, x_of(4096, 4096)), (small, x_of())):
            run = compiled(model)
            for _ in range(WARM_UP + 1):
                run(x)
    told = said()
    assert "the host does not hold up the device" in told[0], told
    assert told[1].startswith("captured: "), told


def test_another_device_is_current_and_the_rest():
    """One GPU here: at least by its number."""
    model = made()
    run = compiled(model)
    with torch.no_grad(), torch.cuda.device(torch.cuda.device_count() - 1):
        warm(run, model)
        close(run, model, x_of().cuda())


CHILD = """
import json, torch
from torch import nn
from ipex_inductor.reporting import decisions
from ipex_inductor.capture.policy import NAME, WARM_UP
torch.manual_seed(0)
model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU()))).cuda().eval()
run = torch.compile(model, backend="ipex", options={"strict": True})
off = 0.0
with torch.no_grad():
    for _ in range(WARM_UP + 3):
        x = torch.randn(8, 64, device="cuda")
        off = max(off, (run(x) - model(x)).abs().max().item())
events = [e for r in decisions.reports() for e in r.events]
said = [e.reason for e in events if e.subject == NAME]
print(json.dumps([off, said, [r.source for r in decisions.reports()]]))
"""


@pytest.mark.alone
def test_a_second_process_captures_what_the_graph_cache_has(tmp_path):
    env = {**os.environ, "IPEX_HOME": str(tmp_path)}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_FX_GRAPH_CACHE"):
        env.pop(name, None)
    env.pop("TORCHINDUCTOR_AUTOGRAD_CACHE", None)
    for source in ("passes", "cache"):
        done = subprocess.run(
            [sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr[-3000:]
        off, told, sources = json.loads(done.stdout.splitlines()[-1])
        assert off < ATOL
        assert sources == [source]
        assert len(told) == 1
        assert told[0].startswith("captured: "), told
