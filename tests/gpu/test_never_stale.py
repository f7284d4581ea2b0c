"""On a GPU too a changed weight is seen, also by captured graphs, which read old addresses."""

import ctypes
import functools
import time

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ipex_inductor import derived_memory, refresh
from ipex_inductor.config import MODES
from ipex_inductor.passes.weights import weight_results, weight_snapshot
from ipex_inductor.reporting import decisions
from ipex_inductor.templates.tensor_reader import weights_triton

pytestmark = pytest.mark.gpu


class Model(nn.Module):
    """A batch norm to fold, a product of two weights."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.w, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x))).mean((2, 3)) @ (self.w * self.scale)


def step(make, model):
    with torch.enable_grad():
        optimizer = make(model.parameters())
        x = torch.rand(2, 3, 8, 8, dtype=model.w.dtype, device="cuda")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def load(model, **kwargs):
    other = Model().to(model.w.device, model.w.dtype)
    model.load_state_dict(other.state_dict(), **kwargs)


def write_unseen(model):
    for p in model.parameters():
        p.data.mul_(1.5)
    refresh(model)


SGD, Adam = torch.optim.SGD, torch.optim.AdamW
WRITES = {
    "in place": lambda m: [p.mul_(1.5) for p in m.parameters()],
    "load_state_dict": load,
    "load_state_dict, assigned": functools.partial(load, assign=True),
    "data": lambda m: [setattr(p, "data", p.data * 1.5) for p in m.parameters()],
    "reassigned": lambda m: [
        setattr(part, name, nn.Parameter(p * 1.5))
        for part in m.modules()
        for name, p in list(part.named_parameters(recurse=False))
    ],
    "plain step": functools.partial(step, functools.partial(SGD, lr=0.1, foreach=False)),
    "foreach step": functools.partial(step, functools.partial(Adam, lr=0.1, foreach=True)),
    "fused step": functools.partial(step, functools.partial(Adam, lr=0.1, fused=True)),
    "to another dtype": lambda m: m.to(torch.float64),
    "to another dtype and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "buffers": lambda m: [m.bn.running_mean.add_(1), m.bn.running_var.mul_(2)],
    "buffer reassigned": lambda m: setattr(m.bn, "running_mean", m.bn.running_mean + 1),
    "swapped": lambda m: torch.utils.swap_tensors(
        m.w, nn.Parameter(torch.randn(8, 8, dtype=m.w.dtype, device="cuda"))
    ),
    "refreshed": write_unseen,
}
CASES = {**{mode: {"mode": mode} for mode in MODES}, "dynamic": {"dynamic": True}}


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setenv("IPEX_STRICT", "1")


def agree(fn, model, x, name=""):
    """Warm-up, capture, replay; fp32 sums of some ten terms, TF32 off."""
    for _ in range(3):
        got = fn(x).clone()
        torch.testing.assert_close(
            got, model(x), rtol=1e-3, atol=1e-3, msg=lambda text: f"{name}: {text}"
        )


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_never_stale(case):
    model = Model().eval().cuda()
    fn = torch.compile(model, backend="ipex", **CASES[case])
    for name, write in WRITES.items():
        x = torch.rand(2, 3, 8, 8, dtype=model.w.dtype, device="cuda")
        agree(fn, model, x, name)
        write(model)
        agree(fn, model, x.to(model.w.dtype), name)
    assert any(e.kind == "hoisted" for r in decisions.reports() for e in r.events)


@torch.no_grad()
def test_refresh_lands_at_the_addresses_a_captured_graph_reads(no_garbage, monkeypatch):
    monkeypatch.setattr(weight_snapshot, "UNPAID", 100)  # or weights are left plain
    model = Model().eval().cuda()
    x = torch.rand(2, 3, 8, 8, device="cuda")
    fn = torch.compile(model, backend="ipex", mode="reduce-overhead")
    agree(fn, model, x)
    recorded = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
    held = derived_memory()
    for _ in range(5):
        write_unseen(model)
        agree(fn, model, x)
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == recorded
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert derived_memory() == held


@torch.no_grad()
def test_models_that_take_turns_under_capture():
    models = [Model().eval().cuda() for _ in range(3)]
    x = torch.rand(2, 3, 8, 8, device="cuda")
    fn = torch.compile(lambda m, x: m(x), backend="ipex", mode="reduce-overhead")
    for turn in range(3):
        for model in models:
            for _ in range(3):
                torch.testing.assert_close(fn(model, x).clone(), model(x), rtol=1e-3, atol=1e-3)
        models[turn].w.mul_(2)


@torch.no_grad()
def test_a_result_derived_on_one_stream_is_whole_on_another():
    torch.manual_seed(0)
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(4096, 4096, device="cuda"))
    x = torch.randn(1, 4096, device="cuda")

    def derived(x):
        return x @ torch.linalg.multi_dot([model.w, model.w, model.w])

    first = torch.compile(derived, backend="ipex")
    second = torch.compile(lambda x: derived(x) + 1, backend="ipex")
    first(x), second(x)
    for _ in range(5):
        model.w.mul_(0.9)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            first(x)
        with torch.cuda.stream(torch.cuda.Stream()):
            got = second(x)
        torch.cuda.synchronize()
        torch.testing.assert_close(got, derived(x) + 1, rtol=1e-2, atol=1e-1)


def keep_vector(model):
    vector = parameters_to_vector(model.parameters()).clone()
    vector_to_parameters(vector, model.parameters())
    return [vector]


def nothing(model):
    return []


# What is held before the calls between, and the write, of parameters and what is held.
UNCOUNTED = {
    "data": (nothing, lambda m, _: [p.data.mul_(1.5) for p in m.parameters()]),
    "column of data": (nothing, lambda m, _: m.w.data[:, 3].fill_(9)),
    "merged": (nothing, lambda m, _: m.w.data.add_(torch.ones_like(m.w))),
    "foreach": (nothing, lambda m, _: torch._foreach_mul_([p.data for p in m.parameters()], 2)),
    "alias": (lambda m: [p.data for p in m.parameters()], lambda m, a: [t.mul_(2) for t in a]),
    "vector": (keep_vector, lambda m, v: v[0].mul_(1.5)),
    "vector set": (
        keep_vector,
        lambda m, v: vector_to_parameters(v[0].mul_(1.5), m.parameters()),
    ),
    "DLPack": (lambda m: [torch.from_dlpack(m.w.detach())], lambda m, t: t[0][:, 3].fill_(7)),
    "storage": (lambda m: [m.w.untyped_storage()], lambda m, s: s[0].fill_(0)),
}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_writes_that_count_no_version_are_seen(mode):
    fn = torch.compile(lambda model, x: model(x), backend="ipex", mode=mode)
    x = torch.rand(2, 3, 8, 8, device="cuda")
    for name, (prepare, write) in UNCOUNTED.items():
        model = Model().eval().cuda()

        def check(model=model, name=name):
            for _ in range(14):  # warm-up, trial, capture, replay
                torch.testing.assert_close(
                    fn(model, x).clone(),
                    model(x),
                    rtol=1e-3,
                    atol=1e-3,
                    msg=lambda text: f"{name}: {text}",
                )

        check()
        held = prepare(model)
        check()
        before = model(x)
        write(model, held)
        assert not torch.equal(before, model(x)), f"{name}: else this test shows nothing"
        check()


def test_a_model_that_learns_online_reads_its_weights_as_they_are():
    model = Model().cuda()
    fn = torch.compile(model, backend="ipex")
    optimizer = SGD(model.parameters(), lr=1e-3)
    model.eval()
    x = torch.rand(2, 3, 8, 8, device="cuda")
    for _ in range(8):
        with torch.no_grad():
            agree(fn, model, x)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        agree(fn, model, x)


@torch.no_grad()
def test_any_number_of_models_behind_one_graph(no_garbage):
    models = [Model().eval().cuda() for _ in range(9)]
    fn = torch.compile(lambda model, x: model(x), backend="ipex")
    x = torch.rand(2, 3, 8, 8, device="cuda")
    for _ in range(3):
        for model in models:
            torch.testing.assert_close(fn(model, x), model(x), rtol=1e-3, atol=1e-3)
    held = derived_memory()
    for model in models:
        torch.testing.assert_close(fn(model, x), model(x), rtol=1e-3, atol=1e-3)
    assert derived_memory() == held


def set_words(tensor, begin, count):
    """Have the driver write `count` 32-bit words, unseen by torch: 48.5 each."""
    driver = ctypes.CDLL("libcuda.so.1")
    word, stream = 0x42424242, torch.cuda.current_stream().cuda_stream
    address = ctypes.c_uint64(tensor.data_ptr() + 4 * begin)
    assert not driver.cuMemsetD32Async(
        address, word, ctypes.c_size_t(count), ctypes.c_void_p(stream)
    )


@triton.jit
def negate(numbers, count, BLOCK: tl.constexpr):
    at = BLOCK * tl.program_id(0) + tl.arange(0, BLOCK)
    tl.store(numbers + at, -tl.load(numbers + at, mask=at < count), mask=at < count)


@torch.library.custom_op("ipex_tests::undeclared", mutates_args=())
def undeclared(weight: torch.Tensor) -> torch.Tensor:
    """Write its argument, which its schema does not say."""
    negate[(weight.numel() // 64,)](weight, weight.numel(), BLOCK=64)
    return weight.new_zeros(1)


class Large(nn.Module):
    """Four weights of 4 MiB, which are multiplied by vectors ahead."""

    def __init__(self):
        super().__init__()
        self.w = nn.ParameterList(torch.randn(1024, 1024) for _ in range(4))
        self.scale = nn.Parameter(torch.randn(1024))

    def forward(self, x):
        for w in self.w:
            x = torch.tanh(x @ (w * self.scale))
        return x


RAW = {
    "memset": lambda p: set_words(p, 0, p.numel()),
    "Triton": lambda p: negate[(p.numel() // 64,)](p, p.numel(), BLOCK=64),
    "operator without mutation": torch.ops.ipex_tests.undeclared,
}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_writes_that_nothing_notices_are_seen_at_the_next_call(mode, monkeypatch, warned):
    """By a sample of each weight's contents."""
    monkeypatch.setattr(weight_snapshot, "UNPAID", 100)
    model, x = Large().eval().cuda(), torch.randn(8, 1024, device="cuda")
    fn = torch.compile(model, backend="ipex", mode=mode)
    agree(fn, model, x)
    for name, write in RAW.items():
        for p in model.w:
            warned.clear()
            write(p)
            agree(fn, model, x, name)
            assert any("torch does not see" in text for text in warned), name
    assert any(e.kind == "hoisted" for r in decisions.reports() for e in r.events)


@torch.no_grad()
def test_an_element_that_nothing_notices_is_found_within_64_calls(monkeypatch, warned):
    monkeypatch.setattr(weight_snapshot, "UNPAID", 100)
    model, x = Large().eval().cuda(), torch.randn(8, 1024, device="cuda")
    fn = torch.compile(model, backend="ipex")
    for place in (0, 100_003, 1024 * 1024 - 1):
        agree(fn, model, x)
        warned.clear()
        set_words(model.w[2], place, 1)
        calls = next((n for n in range(64) if not fn(x).isnan().all() and warned), None)
        assert calls is not None, place
        agree(fn, model, x)


@torch.no_grad()
def test_without_contents_such_a_write_is_missed(monkeypatch):
    monkeypatch.setattr(weight_results, "hash_on_device", lambda *_: None)
    model, x = Large().eval().cuda(), torch.randn(8, 1024, device="cuda")
    fn = torch.compile(model, backend="ipex")
    agree(fn, model, x)
    RAW["Triton"](model.w[0])
    assert not torch.allclose(fn(x), model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_writes_in_a_busy_stream_are_seen_at_the_next_call(mode, monkeypatch):
    """The graph runs with what it had, and again."""
    monkeypatch.setattr(weight_snapshot, "UNPAID", 100)
    model, x = Large().eval().cuda(), torch.randn(8, 1024, device="cuda")
    fn = torch.compile(model, backend="ipex", mode=mode)
    agree(fn, model, x)
    for p in (*model.w, *model.w):  # before each call
        torch.cuda._sleep(20_000_000)  # ten milliseconds
        negate[(p.numel() // 64,)](p, p.numel(), BLOCK=64)
        got = fn(x).clone()
        torch.testing.assert_close(got, model(x), rtol=1e-3, atol=1e-3)
    agree(fn, model, x)


@torch.no_grad()
def test_more_launches_than_there_are_slots():
    """In several streams, of which the last launched ends first."""
    from ipex_inductor.templates.tensor_reader.weights_triton import SLOTS, Comparer, hash_on_device

    memory = torch.randn(1 << 20, device="cuda")
    comparer = Comparer([hash_on_device(memory.data_ptr(), memory.nbytes, memory.device)], 56)
    slow, quick = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(40_000_000)
        late = [comparer.launch() for _ in range(3)]
    with torch.cuda.stream(quick):
        for _ in range(3 * SLOTS):
            ticket = comparer.launch()
            if ticket is not None:
                assert comparer.find_differing(ticket) is None
    assert not slow.query()
    assert [comparer.find_differing(ticket) for ticket in late] == [None] * 3
    assert comparer._waits
    memory.neg_()
    assert comparer.find_differing(comparer.launch()) == 0


@torch.no_grad()
def test_what_a_graph_writes_is_written_once(monkeypatch):
    """Such a graph waits for the comparison before it runs."""
    monkeypatch.setattr(weight_snapshot, "UNPAID", 100)
    model, x = Large().eval().cuda(), torch.randn(8, 1024, device="cuda")
    count = torch.zeros(1, device="cuda")

    def counted(x):
        count.add_(1)
        return model(x) * count

    fn = torch.compile(counted, backend="ipex")
    for n in range(1, 9):
        if n % 2 == 0:
            torch.cuda._sleep(20_000_000)
            negate[(model.w[0].numel() // 64,)](model.w[0], model.w[0].numel(), BLOCK=64)
        got = fn(x)
        assert count.item() == n
        torch.testing.assert_close(got, model(x) * n, rtol=1e-3, atol=1e-2)


@torch.no_grad()
def test_a_stream_that_waits_for_the_caller_is_not_waited_for_long(monkeypatch, warned):
    """Results of contents come late then; the call returns before the stream is done."""
    monkeypatch.setattr(weights_triton, "PATIENCE", 0.05)
    model, x = Large().eval().cuda(), torch.randn(8, 1024, device="cuda")
    fn = torch.compile(model, backend="ipex")
    agree(fn, model, x)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second
    for most in (0.2, 0.05):
        began = time.perf_counter()
        fn(x)
        assert time.perf_counter() - began < most
    assert not torch.cuda.current_stream().query()
    assert ["was busy" in text for text in warned] == [True]
    negate[(model.w[0].numel() // 64,)](model.w[0], model.w[0].numel(), BLOCK=64)
    fn(x)
    torch.cuda.synchronize()
    agree(fn, model, x)
    assert len(warned) == 2


@torch.no_grad()
def test_contents_of_any_place_and_size_are_compared():
    from ipex_inductor.templates.tensor_reader.weights_triton import Comparer, hash_on_device

    memory = torch.randint(0, 255, (100_000,), dtype=torch.uint8, device="cuda")
    for begin, size in ((0, 1), (1, 3), (2, 511), (3, 512), (511, 513), (77, 70_001)):
        hashes = hash_on_device(memory.data_ptr() + begin, size, memory.device)
        assert hashes.is_same()
        comparer = Comparer([hashes])
        for place in {begin, begin + size // 2, begin + size - 1}:
            for bit in (1, 128):
                memory[place] ^= bit
                assert not hashes.is_same(), (begin, size, place)
                assert any(comparer.find_differing(comparer.launch()) == 0 for _ in range(300))
                memory[place] ^= bit
                assert hashes.is_same()
                comparer.forget()
                assert comparer.find_differing(comparer.launch()) is None
