"""The modules and functions of `ipex.nn` beside references: values, gradients, compiled."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ipex_inductor.errors import ArgumentError, MissingPackageError
from ipex_inductor.nn import boxes
from ipex_inductor.nn.functional import interaction, nms, roi_align
from ipex_inductor.nn.modules import (
    EmbeddingSpec,
    FrozenBatchNorm2d,
    MergedEmbeddingBag,
    MergedEmbeddingBagWithAdaGrad,
    MergedEmbeddingBagWithCat,
    MergedEmbeddingBagWithSGD,
    RoIAlign,
)
from ipex_inductor.optim.bf16_split import join

WITH_UPDATE = {
    MergedEmbeddingBagWithSGD: torch.optim.SGD,
    MergedEmbeddingBagWithAdaGrad: torch.optim.Adagrad,
}


def compiled(fn):
    return torch.compile(fn, backend="ipex", options={"strict": True})


# interaction


def by_hand(*tensors):
    """One dot product after the other."""
    products = [
        (tensors[row] * tensors[column]).sum(1, keepdim=True)
        for row in range(len(tensors))
        for column in range(row)
    ]
    return torch.cat([tensors[0], *products], 1)


@pytest.mark.parametrize(("count", "compile_it"), [(1, 0), (2, 0), (5, 0), (3, 1)])
def test_interaction(op_by_op, count, compile_it):
    run = compiled(interaction) if compile_it else interaction
    tensors = [torch.randn(6, 8, dtype=torch.double, requires_grad=True) for _ in range(count)]
    result = run(*tensors)
    assert result.shape == (6, 8 + count * (count - 1) // 2)
    torch.testing.assert_close(result, by_hand(*tensors))
    weight = torch.randn_like(result)
    ours = torch.autograd.grad((result * weight).sum(), tensors)
    theirs = torch.autograd.grad((by_hand(*tensors) * weight).sum(), tensors)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("tensors", "came"),
    [
        ((), "none"),
        ((torch.ones(2, 3), torch.ones(2, 4)), r"\[2, 3\], \[2, 4\]"),
        ((torch.ones(2, 3, 4),), r"\[2, 3, 4\]"),
    ],
)
def test_interaction_wants_features_of_one_shape(tensors, came):
    with pytest.raises(ArgumentError, match=came):
        interaction(*tensors)


def test_interaction_is_captured_for_all_sizes():
    class Pairs(nn.Module):
        def forward(self, x, y):
            return interaction(x, y)

    x, y = torch.randn(2, 4, 8)
    sizes = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Pairs(), (x, y), dynamic_shapes=(sizes, sizes))
    more = torch.randn(2, 7, 8)
    torch.testing.assert_close(program.module()(*more), interaction(*more))


def test_interaction_promotes():
    low, high = torch.randn(6, 8).bfloat16(), torch.randn(6, 8)
    torch.testing.assert_close(interaction(low, high), by_hand(low.float(), high))


# FrozenBatchNorm2d


def frozen(channels=8, eps=1e-3):
    norm = nn.BatchNorm2d(channels, eps=eps).eval()
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    ours = FrozenBatchNorm2d(channels, eps=eps)
    ours.load_state_dict(norm.state_dict())
    return ours, norm


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_frozen_batch_norm_is_batch_norm_in_eval_mode(layout):
    ours, norm = frozen()
    ours.train()
    x = torch.randn(2, 8, 5, 5).to(memory_format=layout).requires_grad_()
    result = ours(x)
    torch.testing.assert_close(result, norm(x))
    assert result.is_contiguous(memory_format=layout)
    ours_grad, norm_grad = (torch.autograd.grad(m(x).square().sum(), x) for m in (ours, norm))
    torch.testing.assert_close(ours_grad, norm_grad)


def test_frozen_batch_norm_learns_nothing():
    ours, _ = frozen()
    assert not list(ours.parameters())
    assert set(ours.state_dict()) == {"weight", "bias", "running_mean", "running_var"}
    assert repr(FrozenBatchNorm2d(8)) == "FrozenBatchNorm2d(8, eps=1e-05)"


def test_frozen_batch_norm_takes_bf16_activations():
    ours, norm = frozen()
    x = torch.randn(2, 8, 5, 5).bfloat16()
    result = ours(x)
    assert result.dtype == torch.bfloat16
    # one rounding to bf16, of 8 bits
    torch.testing.assert_close(result.float(), norm(x.float()), rtol=2**-8, atol=0)


@torch.no_grad()
def test_frozen_batch_norm_is_folded_into_the_convolution():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), frozen()[0], nn.ReLU()).eval()
    x = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert counters["ipex"]["conv2d+batch_norm"] == 1


# MergedEmbeddingBag


def tables(count=3, rows=20, width=4, **kind):
    return nn.ModuleList(nn.EmbeddingBag(rows + n, width, **kind) for n in range(count))


def bags(count=3, rows=20, include_last_offset=False):
    """Five bags a table, of which one is empty; one row stands in two bags."""
    indices = [torch.randint(rows, (9,)) for _ in range(count)]
    for index in indices:
        index[0] = index[8]
    ends = [0, 2, 2, 5, 6] + [9] * include_last_offset
    return indices, [torch.tensor(ends)] * count


def looked_up(list_of_tables, indices, offsets):
    return [table(*bag) for table, *bag in zip(list_of_tables, indices, offsets, strict=True)]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_merged_bags_are_the_bags(mode, include_last_offset, sparse):
    check_bags(lambda module: module, mode, include_last_offset, sparse)


def test_compiled_bags_are_the_bags():
    check_bags(compiled, "sum", include_last_offset=False, sparse=False)


def check_bags(run, mode, include_last_offset, sparse):
    kind = {"mode": mode, "include_last_offset": include_last_offset, "sparse": sparse}
    reference = tables(**kind)
    merged = MergedEmbeddingBag.from_embeddingbag_list(copy.deepcopy(reference))
    given = bags(include_last_offset=include_last_offset)
    ours, theirs = run(merged)(*given), looked_up(reference, *given)
    torch.testing.assert_close(ours, theirs)
    for found in (ours, theirs):
        sum(out.square().sum() for out in found).backward()
    for weight, table in zip(merged.weights, reference, strict=True):
        assert weight.grad.is_sparse == sparse
        torch.testing.assert_close(weight.grad.to_dense(), table.weight.grad.to_dense())


def test_bags_and_their_interaction_under_autocast():
    """As in a recommender: what the bags give meets what a linear gives."""
    merged, linear = MergedEmbeddingBag.from_embeddingbag_list(tables()), nn.Linear(3, 4)

    def model(x, indices, offsets):
        return interaction(linear(x), *merged(indices, offsets))

    given = torch.randn(5, 3), *bags()
    exact = model(*given)
    with torch.autocast("cpu", torch.bfloat16):
        found, pooled = model(*given), merged(*given[1:])
    assert [t.dtype for t in (found, *pooled)] == [torch.bfloat16] * 4
    # rounded to bf16 (8 bits) before and after sums of four products of values up to 3
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.1)
    found.float().sum().backward()
    assert all(w.grad.dtype == torch.float32 for w in merged.weights)


def test_merged_bags_share_the_memory_of_the_tables():
    reference = tables()
    merged = MergedEmbeddingBag.from_embeddingbag_list(reference)
    assert merged.weights[1].data_ptr() == reference[1].weight.data_ptr()
    assert merged.n_tables == 3
    assert repr(merged).startswith("MergedEmbeddingBag(\n  mean, 20x4, 21x4, 22x4")


def test_tables_can_be_made_from_their_specs():
    spec = EmbeddingSpec(7, 4, "sum", torch.float64, None, False, False)
    merged = MergedEmbeddingBag([spec, spec])
    assert [tuple(w.shape) for w in merged.weights] == [(7, 4)] * 2
    assert merged.weights[0].dtype == torch.float64
    assert merged.weights[0].std() > 0.3  # drawn as nn.EmbeddingBag draws its own


@pytest.mark.parametrize("compile_it", [False, True])
def test_bags_behind_a_dense_feature(op_by_op, compile_it):
    reference = tables(mode="sum")
    merged = MergedEmbeddingBagWithCat.from_embeddingbag_list(copy.deepcopy(reference))
    given, dense = bags(), torch.randn(5, 6, requires_grad=True)
    ours = (compiled(merged) if compile_it else merged)(*given, dense)
    theirs = torch.cat([dense, *looked_up(reference, *given)], 1)
    torch.testing.assert_close(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(merged.weights[2].grad, reference[2].weight.grad)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (list, "no table"),
        (lambda: [nn.EmbeddingBag(5, 4), nn.EmbeddingBag(5, 8)], "tables of one embedding_dim"),
        (lambda: [nn.EmbeddingBag(5, 4, mode="max")], "got 'max'"),
        (lambda: [nn.EmbeddingBag(5, 4, padding_idx=0)], "one with padding_idx"),
        (lambda: [nn.EmbeddingBag(5, 4, max_norm=1.0)], "one with max_norm"),
    ],
)
def test_tables_that_cannot_be_merged(made, says):
    with pytest.raises(ArgumentError, match=says):
        MergedEmbeddingBag.from_embeddingbag_list(made())


def test_each_table_wants_its_indices():
    merged = MergedEmbeddingBag.from_embeddingbag_list(tables())
    with pytest.raises(ArgumentError, match="3 indices and offsets; got 2 indices and 3 offsets"):
        merged(bags()[0][:2], bags()[1])


# Updates in the backward


def train(merged, reference, optimizer, steps=3, run=None):
    run = merged if run is None else run
    for _ in range(steps):
        given = bags()
        for found in (run(*given), looked_up(reference, *given)):
            sum((out.float() * torch.arange(4.0)).square().sum() for out in found).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", WITH_UPDATE)
@pytest.mark.parametrize(
    ("dtype", "compile_it"), [(torch.float32, 0), (torch.float64, 0), (torch.float32, 1)]
)
def test_a_backward_is_a_step_of_the_optimizer(kind, dtype, compile_it):
    reference = tables(mode="sum", dtype=dtype)
    merged = kind.from_embeddingbag_list(copy.deepcopy(reference), lr=0.05)
    optimizer = WITH_UPDATE[kind](reference.parameters(), lr=0.05)
    train(merged, reference, optimizer, run=compiled(merged) if compile_it else None)
    for weight, table in zip(merged.weights, reference, strict=True):
        torch.testing.assert_close(weight, table.weight)
        assert weight.grad is None


def test_only_rows_that_were_looked_up_decay():
    reference = tables(1, mode="sum")
    merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(
        copy.deepcopy(reference), lr=0.1, weight_decay=0.5
    )
    before = reference[0].weight.detach().clone()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, weight_decay=0.5)
    given = ([torch.tensor([3, 3, 7])], [torch.tensor([0])])
    merged(*given)[0].sum().backward()
    looked_up(reference, *given)[0].sum().backward()
    optimizer.step()
    touched = torch.tensor([3, 7])
    torch.testing.assert_close(merged.weights[0][touched], reference[0].weight[touched])
    others = [row for row in range(20) if row not in (3, 7)]
    assert torch.equal(merged.weights[0][others], before[others])


@pytest.mark.parametrize("kind", WITH_UPDATE)
def test_bf16_tables_learn_as_fp32_ones_do(kind):
    reference = tables(mode="sum")
    merged = kind.from_embeddingbag_list(copy.deepcopy(reference), lr=1e-4)
    merged.to_bfloat16_train()
    assert {w.dtype for w in merged.weights} == {torch.bfloat16}
    start = reference[0].weight.detach().clone()
    optimizer = WITH_UPDATE[kind](reference.parameters(), lr=1e-4)
    train(merged, reference, optimizer, steps=20)
    exact = join(merged.weights[0].detach(), merged.trail0)
    moved = (reference[0].weight - start).norm()
    # the gradient is rounded to bf16 (8 bits), the weight is not: what was learnt differs by 2%
    assert (exact - reference[0].weight).norm() < 0.02 * moved
    assert (merged.weights[0] - reference[0].weight).norm() > 0.02 * moved  # bf16 alone loses more


def test_the_halves_of_a_weight_are_its_bits():
    exact = torch.randn(20, 4).mul_(torch.logspace(-30, 30, 20)[:, None])
    merged = MergedEmbeddingBagWithSGD([EmbeddingSpec(20, 4, "sum", exact.dtype, exact, 0, 0)])
    merged.to_bfloat16_train()
    assert torch.equal(join(merged.weights[0].detach(), merged.trail0), exact)
    # cut off, not rounded: never larger, and less than one step of bf16 smaller
    assert torch.all(merged.weights[0].float().abs() <= exact.abs())
    torch.testing.assert_close(merged.weights[0].float(), exact, rtol=2**-7, atol=0)


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(module):
    other = MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(tables(mode="sum"), lr=0.05)
    other.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded, assigned])
def test_a_copy_updates_itself_and_not_its_original(copied):
    reference = tables(mode="sum")
    merged = MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(copy.deepcopy(reference), lr=0.05)
    optimizer = torch.optim.Adagrad(reference.parameters(), lr=0.05)
    train(merged, reference, optimizer)
    kept = merged.weights[0].detach().clone()
    train(copied(merged), reference, optimizer)
    assert torch.equal(merged.weights[0], kept)
    other = copied(merged)
    train(other, copy.deepcopy(reference), optimizer)
    assert not torch.equal(other.weights[0], kept)


def test_a_copy_goes_on_where_its_original_was():
    """The sums of squares are part of the state."""
    reference = tables(mode="sum")
    merged = MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(copy.deepcopy(reference), lr=0.05)
    optimizer = torch.optim.Adagrad(reference.parameters(), lr=0.05)
    train(merged, reference, optimizer)
    resumed = assigned(merged)
    train(resumed, reference, optimizer)
    torch.testing.assert_close(resumed.weights[1], reference[1].weight)


def test_a_state_of_the_weights_alone_is_enough():
    merged = MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(tables(mode="sum"))
    merged.sum0.fill_(1)
    state = {key: value for key, value in merged.state_dict().items() if "weights" in key}
    merged.load_state_dict(state)
    assert not merged.sum0.any()


def test_a_dense_gradient_updates_too():
    """As when a penalty on the whole table is part of the loss."""
    merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(tables(1, mode="sum"), lr=0.1)
    before = merged.weights[0].detach().clone()
    given = bags(1)
    (merged(*given)[0].sum() * 0 + merged.weights[0].square().sum()).backward()
    torch.testing.assert_close(merged.weights[0], before * 0.8)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda t: MergedEmbeddingBagWithSGD.from_embeddingbag_list(t, lr=-1), "lr of 0 or more"),
        (
            lambda t: MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(t, eps=-1),
            "eps of 0 or more",
        ),
        (
            lambda t: MergedEmbeddingBagWithSGD.from_embeddingbag_list(t.half()),
            "float32, float64 or bfloat16; got torch.float16",
        ),
    ],
)
def test_what_cannot_be_updated(made, says):
    with pytest.raises(ArgumentError, match=says):
        made(tables(mode="sum"))


# Operators on boxes

BOXES = torch.tensor([[0, 1.0, 1.0, 9.0, 9.0], [1, 2.5, 0.0, 6.0, 12.0]])


def test_without_torchvision_boxes_name_the_package(monkeypatch):
    monkeypatch.setattr(boxes.importlib.util, "find_spec", lambda name: None)
    for call in (
        lambda: roi_align(torch.ones(2, 3, 16, 16), BOXES, 4),
        lambda: nms(BOXES[:, 1:], torch.ones(2), 0.5),
        lambda: RoIAlign(4, 1.0, 2)(torch.ones(2, 3, 16, 16), BOXES),
    ):
        with pytest.raises(MissingPackageError, match="pip install torchvision") as caught:
            call()
        assert isinstance(caught.value, ImportError)


def averaged(image, box, size):
    """ROIAlign with one sample a bin: bilinear at the centres of the bins (arXiv 1703.06870)."""
    number, left, top, right, bottom = box.tolist()
    step = (torch.arange(size) + 0.5) / size
    x, y = left + step * (right - left), top + step * (bottom - top)
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
    grid = grid / (image.shape[-1] - 1) * 2 - 1  # corners are pixel centres
    return F.grid_sample(image[int(number)][None], grid[None], align_corners=True)[0]


@pytest.mark.parametrize("compile_it", [False, True])
def test_roi_align(compile_it):
    pytest.importorskip("torchvision")
    image = torch.randn(2, 3, 16, 16, requires_grad=True)
    module = RoIAlign(4, 1.0, 1)
    pooled = (compiled(module) if compile_it else module)(image, BOXES)
    reference = torch.stack([averaged(image, box, 4) for box in BOXES])
    torch.testing.assert_close(pooled, reference, rtol=1e-4, atol=1e-5)  # another order of sums
    weight = torch.randn_like(pooled)
    ours = torch.autograd.grad((pooled * weight).sum(), image)
    theirs = torch.autograd.grad((reference * weight).sum(), image)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert repr(module).startswith("RoIAlign(output_size=4, spatial_scale=1.0")


def test_nms():
    pytest.importorskip("torchvision")
    dets = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30]])
    assert nms(dets, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist() == [1, 2]
