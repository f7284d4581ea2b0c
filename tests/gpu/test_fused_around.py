"""What surrounds a step on a GPU, folded into it: clipping, scales, zeroing; and who waits."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from ipex_inductor.optim import FusedStep, GradScaler, Lamb, attach_master_weights, fuse_step, norms
from ipex_inductor.optim.weights import TABLE
from ipex_inductor.templates.optimizer.formulas import FORMULAS
from support.optim.gpu_step_inputs import CAPTURED, MADE, close, doubles, draw, tensors, wide_grads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["sgd momentum", "adagrad", "adam", "lamb", "lars"])
def test_the_host_waits_for_nothing(name, launches):
    """Scaler, clipped norm and zeroing, with a step that overflows among them."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    ours, theirs = MADE[name](mine, fused=True), MADE[name](exact, foreach=False)
    step = FusedStep(ours, clip_norm=0.5, zero_grad=True)
    scale = torch.tensor(1024.0, device="cuda")
    found = torch.tensor(0.0, device="cuda")
    for number in range(4):
        overflow = number == 2
        draw(mine, seed=number)
        wide_grads(mine, exact)
        for p in mine:
            p.grad.mul_(1024.0)
        if overflow:
            mine[1].grad[0, 0] = torch.inf
        found.fill_(float(overflow))
        ours.grad_scale, ours.found_inf = scale, found
        torch.cuda.synchronize()
        launches.clear()
        try:
            torch.cuda.set_sync_debug_mode("error" if number else "default")
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # The norm with the scalars, and the step with norms of tensors.
        assert len(launches) == 2 or not number
        assert not any(p.grad.any() for p in mine)
        if not overflow:
            norm = nn.utils.clip_grad_norm_(exact, 0.5)
            torch.testing.assert_close(step.grad_norm.double(), norm, rtol=1e-6, atol=0)
            theirs.step()
    for a, b in zip(mine, exact, strict=True):
        # The norm is fp32's, of 40,000 numbers, and all gradients are multiplied by it.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)
    if name not in ("sgd momentum", "lars"):
        assert {int(s["step"]) for s in ours.state.values()} == {3}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_graph_takes_the_norm_that_is_clipped(name, launches):
    """By our reading, with the scalars; twice, with a step outside between the graphs."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    rate = torch.tensor(0.01, device="cuda")
    ours, theirs = CAPTURED[name](mine, rate, capturable=True), CAPTURED[name](exact, 0.01)
    step, seed = FusedStep(ours, clip_norm=0.5), iter(range(100))

    def stepped(run, norm=None):
        held = [p.grad for p in mine]
        draw(mine, seed=next(seed))
        wide_grads(mine, exact)
        for p, grad in zip(mine, held, strict=True):
            p.grad = p.grad if grad is None else grad.copy_(p.grad)
        run()
        wanted = nn.utils.clip_grad_norm_(exact, 0.5)
        theirs.step()
        # Of 40,000 squares in fp32.
        norm = step.grad_norm if norm is None else norm
        torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=0)

    for _ in range(2):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                stepped(step)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        launches.clear()
        with torch.cuda.graph(graph):
            step()
        assert len(launches) == 2
        of_graph = step.grad_norm
        for _ in range(2):
            stepped(graph.replay, of_graph)
    for a, b in zip(mine, exact, strict=True):
        # The norm is fp32's, of 40,000 numbers, and all gradients are multiplied by it.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["adamw", "adagrad", "sgd momentum", "lamb", "lars"])
def test_a_clipped_step_that_the_host_counts(name, launches, quiet):
    """One launch takes the norm, and one steps; the host waits for neither, from the first on."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    ours, theirs = MADE[name](mine), MADE[name](exact, foreach=False)
    step = FusedStep(ours, clip_norm=0.5)
    for number in range(9):
        later = number >= 6 and name != "adagrad"  # torch's has states from the beginning
        if later and number == 6:  # what comes later has a count of its own
            mine.append(nn.Parameter(torch.ones(77, device="cuda")))
            exact += doubles(mine[-1:])
            ours.add_param_group({"params": mine[-1:]})
            theirs.add_param_group({"params": exact[-1:]})
        if number == 4:
            ours.load_state_dict(ours.state_dict())
        draw(mine, seed=number)
        wide_grads(mine, exact)
        torch.cuda.synchronize()
        launches.clear()
        quiet(True)
        step()
        quiet(False)
        norm = nn.utils.clip_grad_norm_(exact, 0.5)
        theirs.step()
        torch.testing.assert_close(step.grad_norm.double(), norm, rtol=1e-6, atol=0)
        # Of two counts: the norm, and scalars and a step each.
        apart = later and FORMULAS[type(ours).__name__].counts
        assert len(launches) == (5 if apart else 2), number
    for a, b in zip(mine, exact, strict=True):
        # The norm is fp32's, of 40,000 numbers, and all gradients are multiplied by it.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)
        assert ours.state[a].get("step") == theirs.state[b].get("step")


def test_a_clipped_step_of_what_is_no_whole_number():
    """Nor can a table of the GPU's have it: the host waits."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    ours, theirs = MADE["adamw"](mine), MADE["adamw"](exact, foreach=False)
    step = FusedStep(ours, clip_norm=0.5)
    for number in range(4):
        draw(mine, seed=number)
        wide_grads(mine, exact)
        step()
        nn.utils.clip_grad_norm_(exact, 0.5)
        theirs.step()
        for each in (ours, theirs):
            for state in each.state.values():
                state["step"].fill_(number + 1.5)
    for a, b in zip(mine, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)  # as above


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_rate_of_the_gpus_where_the_host_counts(clip, dtype, quiet):
    """It is read there, when the step runs."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    rate = torch.tensor(0.01, device="cuda", dtype=dtype)
    ours, theirs = AdamW(mine, rate, foreach=False), AdamW(exact, 0.01, foreach=False)
    step = FusedStep(ours, clip_norm=clip)
    for number in range(5):
        draw(mine, seed=number)
        wide_grads(mine, exact)
        rate.fill_(0.01 * (number + 1))
        theirs.param_groups[0]["lr"] = 0.01 * (number + 1)
        torch.cuda.synchronize()
        quiet(number > 0)
        step()
        quiet(False)
        if clip:
            nn.utils.clip_grad_norm_(exact, clip)
        theirs.step()
    for a, b in zip(mine, exact, strict=True):
        # fp32's rates, and its norm, of 40,000 numbers.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)
        assert ours.state[a]["step"] == 5


def test_a_rate_of_the_gpus_in_a_step_that_is_left_out():
    """The host counts, and so reads what GradScaler found."""
    mine = tensors(torch.float32)
    exact = doubles(mine)
    rate, scale = torch.tensor(0.01, device="cuda"), torch.tensor(8.0, device="cuda")
    ours, theirs = AdamW(mine, rate, foreach=False), AdamW(exact, 0.01, foreach=False)
    fuse_step(ours)
    for number in range(5):
        draw(mine, seed=number)
        wide_grads(mine, exact)
        for p in mine:
            p.grad.mul_(8.0)
        left_out = number in (0, 3)
        ours.grad_scale, ours.found_inf = scale, torch.tensor(float(left_out), device="cuda")
        ours.step()
        if not left_out:
            theirs.step()
    close(mine, exact)
    assert {float(ours.state[p]["step"]) for p in mine} == {3.0}


def test_a_step_left_out_of_what_was_to_be_capturable():
    """Where steps lie on the host they are counted there, whatever the group says since."""
    params = tensors(torch.float32, [(5,)])
    ours = AdamW(params)
    fuse_step(ours)
    draw(params, seed=0)
    ours.step()
    ours.param_groups[0]["capturable"] = True
    for found, counted in ((1.0, 1), (1.0, 1), (0.0, 2), (1.0, 2)):
        ours.grad_scale = torch.tensor(2.0, device="cuda")
        ours.found_inf = torch.tensor(found, device="cuda")
        ours.step()
        assert ours.state[params[0]]["step"] == counted


def test_a_graph_of_scaled_steps_after_the_first():
    """Which had to wait, as states began; its plan holds."""
    params = tensors(torch.float32)
    exact = doubles(params)
    ours, theirs = AdamW(params, capturable=True), AdamW(exact, foreach=False)
    fuse_step(ours)
    draw(params, seed=0)
    ours.grad_scale = torch.tensor(1.0, device="cuda")
    ours.found_inf = torch.tensor(0.0, device="cuda")
    ours.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    graph.replay()
    wide_grads(params, exact)
    for _ in range(2):
        theirs.step()
    close(params, exact)


@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "lars"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_graph_of_our_scalers_steps_after_the_first(name, clip, launches):
    """The first waited as states began; what reads gradients and makes scalars is there by then."""
    params = tensors(torch.float32)
    exact = doubles(params)
    ours, theirs = (MADE[name](p, foreach=False) for p in (params, exact))
    for group in ours.param_groups:
        group["capturable"] = name == "adamw"
    FusedStep(ours, clip_norm=clip)
    scaler = GradScaler("cuda", init_scale=4.0)
    draw(params, seed=0)
    wide_grads(params, exact)
    for p in params:
        p.grad.mul_(4.0)
    scaler.scale(torch.ones((), device="cuda"))
    scaler.step(ours)
    scaler.update()
    graph = torch.cuda.CUDAGraph()
    launches.clear()
    with torch.cuda.graph(graph):
        scaler.step(ours)
    assert len(launches) == 2
    for _ in range(2):
        graph.replay()
    if clip:
        nn.utils.clip_grad_norm_(exact, clip)
    for _ in range(3):
        theirs.step()
    for a, b in zip(params, exact, strict=True):
        # The norm is fp32's, of 40,000 numbers, and all gradients are multiplied by it.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("others", ["dtypes", "left to torch", "CPU"])
def test_a_clipped_step_of_several_kinds(others):
    """All are clipped by one norm: of two dtypes, with one that torch steps, with one elsewhere."""
    mine = tensors(torch.float32)
    if others == "dtypes":
        mine += tensors(torch.float64, [(33,)])
    elif others == "left to torch":
        mine += [nn.Parameter(torch.randn(66, device="cuda")[::2])]
    else:
        mine += [nn.Parameter(torch.randn(33))]
    exact = doubles(mine)
    ours, theirs = AdamW(mine, 0.01), AdamW(exact, 0.01, foreach=False)
    step = FusedStep(ours, clip_norm=0.5)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for p in mine:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        wide_grads(mine, exact)
        step()
        norm = nn.utils.clip_grad_norm_(exact, 0.5)
        theirs.step()
        torch.testing.assert_close(step.grad_norm.double().to(norm), norm, rtol=1e-6, atol=0)
    for a, b in zip(mine, exact, strict=True):
        # The norm is fp32's, of 40,000 numbers, and all gradients are multiplied by it.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)
        assert ours.state[a]["step"] == 4


def test_a_graph_of_clipped_steps_that_the_host_counts_is_refused():
    params = tensors(torch.float32, [(5,)])
    ours = AdamW(params)
    step = FusedStep(ours, clip_norm=1.0)
    for number in range(2):
        draw(params, seed=number)
        step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    assert ours.state[params[0]]["step"] == 2


def test_norms_of_large_tensors():
    """Of more chunks than a program has elements, added up in the same order each time."""
    made = []
    for _ in range(2):
        mine = tensors(torch.float32, [(5_000_011,), (7,)])
        ours = Lamb(mine, 0.01, weight_decay=0.1)
        fuse_step(ours)
        for number in range(2):
            draw(mine, seed=number)
            ours.step()
        made.append(mine)
    exact = doubles(tensors(torch.float32, [(5_000_011,), (7,)]))
    theirs = Lamb(exact, 0.01, weight_decay=0.1)
    for number in range(2):
        draw(mine, seed=number)
        wide_grads(mine, exact)
        theirs.step()
    close(made[0], exact)
    assert all(map(torch.equal, *made))


BAD = {2: float("inf"), 4: float("nan"), 5: -float("inf")}  # at these steps


@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("name", "counted"),
    [
        *((n, "GPU") for n in ("sgd momentum", "adagrad", "adam", "adamw", "lamb", "lars")),
        *((n, "host") for n in ("adagrad", "adamw", "lamb")),
    ],
)
def test_our_scaler_is_torchs(name, counted, dtype, clip, launches, quiet):
    """unscale_, clip_grad_norm_, step, zero_grad and update, one after the other, in fp64.

    Steps that are skipped change nothing, the scale backs off and grows; nobody waits but a host
    that counts.
    """
    mine = tensors(dtype)
    exact = doubles(mine)
    there = counted == "GPU"
    ours, theirs = MADE[name](mine, fused=there), MADE[name](exact, foreach=False)
    step = FusedStep(ours, clip_norm=clip, zero_grad=True)
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    scaler, reference = GradScaler(**options), torch.amp.GradScaler(**options)
    for each in (scaler, reference):
        each.scale(torch.ones((), device="cuda"))
    for number in range(9):
        draw(mine, seed=number)
        for p in mine:
            p.grad.mul_(reference.get_scale())
        if number in BAD:
            mine[1].grad[200, 100] = BAD[number]
        wide_grads(mine, exact)
        before = copy.deepcopy((mine, [dict(ours.state[p]) for p in mine]))
        torch.cuda.synchronize()
        launches.clear()
        quiet(there and number > 1)
        scaler.step(ours)
        scaler.update()
        quiet(False)
        if number > 1:
            # One reading of all gradients, whose last program makes the scalars, norms of
            # tensors, and the step.
            assert len(launches) == (2 if there or number not in BAD else 1), number
        if clip:
            reference.unscale_(theirs)
            norm = nn.utils.clip_grad_norm_(exact, clip)
            if number not in BAD:
                # Of 40,000 squares in fp32.
                torch.testing.assert_close(step.grad_norm.double(), norm, rtol=1e-6, atol=0)
        reference.step(theirs)
        reference.update()
        assert scaler.state_dict() == reference.state_dict()
        assert not any(p.grad.any() for p in mine)
        if number in BAD:
            after = (mine, [dict(ours.state[p]) for p in mine])
            torch.testing.assert_close(after, before, rtol=0, atol=0)
    for a, b in zip(mine, exact, strict=True):
        # All gradients are multiplied by a norm of fp32.
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_finite_gradients_are_never_called_infinite(dtype):
    """Though their squares are; the norm is infinite then, as torch's is, but for fp16."""
    large = torch.finfo(dtype).max
    params = tensors(dtype, [(5_000_011,), (7,), (64, 3, 3, 3)])
    optimizer = AdamW(params, fused=True)
    scale = torch.ones((), device="cuda")
    for clip in (None, 1.0):
        for planted, wanted in ((large, 0.0), (-large, 0.0), (torch.inf, 1.0), (torch.nan, 1.0)):
            draw(params, seed=1)
            params[0].grad[-1] = planted
            found = norms.found_inf(optimizer, scale, clip, defer=clip is not None)
            norms.settle(optimizer)
            assert found.item() == wanted
            if dtype is not torch.bfloat16:  # of which torch says nothing
                torch_found = torch.zeros((), device="cuda")
                grads = [p.grad for p in params]
                torch._amp_foreach_non_finite_check_and_unscale_(grads, torch_found, scale)
                assert torch_found == found


def norm_of(optimizer, clip, divisor):
    """By a reading of its own."""
    read = norms.read_of(optimizer, clip, divisor, None)
    assert not read.run()
    return read.clipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norms_are_torchs_and_repeat(dtype):
    """Of many chunks, views that are not aligned, empty ones; the same to the bit each time."""
    params = tensors(dtype, [(5_000_011,), (7,), (0,), (257, 129), (64, 3, 3, 3)])
    optimizer = SGD(params, 0.1)
    draw(params, seed=0)
    params[3].grad = torch.randn(257 * 129 + 1, device="cuda").to(dtype)[1:].view(257, 129)
    scale = torch.tensor(1024.0, device="cuda")
    made = [norm_of(optimizer, 1e-3, scale) for _ in range(3)]
    wanted = nn.utils.get_total_norm([p.grad.double() / 1024 for p in params])
    for norm, factor in made:
        assert torch.equal(norm, made[0].norm)
        # fp32's sums of 16384 squares, in a tree of 2048; then fp64's.
        torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=0)
        torch.testing.assert_close(factor, 1e-3 / (norm.double() + 1e-6), rtol=1e-15, atol=0)
    draw(params, seed=0)  # elsewhere
    params[3].grad = None
    wanted = nn.utils.get_total_norm([p.grad.double() for p in params if p.grad is not None])
    norm, factor = norm_of(optimizer, 1e9, None)
    torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=0)
    assert factor == 1


def test_scaled_master_weights_of_several_dtypes():
    """bf16 beside fp32 gradients: one norm of both."""
    model = nn.ParameterList(tensors(torch.float32))
    exact = doubles(model)
    ours, theirs = AdamW(model.parameters(), 0.01), AdamW(exact, 0.01, foreach=False)
    step = FusedStep(ours, clip_norm=0.5)
    attach_master_weights(model, ours, list(model)[:3], torch.bfloat16, split=True)
    scaler = GradScaler(init_scale=256.0)
    scaler.scale(torch.ones((), device="cuda"))
    for _ in range(3):
        for p, e in zip(model, exact, strict=True):
            p.grad = (256.0 * torch.randn_like(p, dtype=torch.float32)).to(p.dtype)
            e.grad = p.grad.double() / 256.0
        scaler.step(ours)
        scaler.update()
        norm = nn.utils.clip_grad_norm_(exact, 0.5)
        torch.testing.assert_close(step.grad_norm.double(), norm, rtol=1e-6, atol=0)
        theirs.step()
    full = [vars(ours)[TABLE][p].full() if p in vars(ours)[TABLE] else p for p in model]
    for a, b in zip(full, exact, strict=True):
        # bf16 gradients are scaled in bf16: an ulp of it, times three steps of the rate.
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3 * 2**-8 * 0.01)
