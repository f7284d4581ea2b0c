"""The check of many weights in C++ says what Python's own way says, whatever is done to them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ipex_inductor.compat.private_memory import fields
from ipex_inductor.passes.weights import derived, program, weight_reader, weight_results
from ipex_inductor.templates.build.cpp import NotBuiltError
from ipex_inductor.templates.tensor_reader import weights_cpp
from ipex_inductor.templates.tensor_reader.weights_cpp import FACTS, SAME, Contents
from support.helpers import Mlp

pytestmark = pytest.mark.unit

READER = weights_cpp.reader()
PYTHON = weight_reader.PythonReader()


class Mine(torch.Tensor):
    """A subclass."""


def weights():
    """Of every kind that can be one, at versions of their own."""
    base = torch.randn(4, 6)
    made = [
        nn.Parameter(torch.randn(3, 3)),
        nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False),
        base,
        base.t()[1:],
        torch.zeros(0, 2),
        torch.tensor(1.0),
        torch.randn(3).as_subclass(Mine),
    ]
    with torch.no_grad():
        for number, weight in enumerate(made):
            for _ in range(number):
                weight.add_(1)
    return made


def both(tensors):
    """What either way reads, as the same three lists."""
    count = len(tensors)

    def blocks(reader):
        numbers = memoryview(reader.read(tuple(tensors))).cast("q").tolist()
        return [numbers[:count], numbers[count : 2 * count], numbers[2 * count :]]

    return blocks(READER), blocks(PYTHON)


def test_there_is_one():
    assert READER is not None


def test_it_says_what_python_says():
    ours, theirs = both(weights())
    assert ours == theirs
    assert ours[1][:3] != [0, 0, 0]  # versions that are told apart


def storage_of(tensor, size):
    """Another address under the same tensor."""
    tensor.untyped_storage().resize_(size)


WRITES = {
    "nothing": (lambda w: None, False),
    "read": (lambda w: (w[0].sum(), w[2].numpy(), w[3].contiguous()), False),
    "in place": (lambda w: w[0].add_(1), True),
    "through a view": (lambda w: w[3].zero_(), True),
    "the base of a view": (lambda w: w[2].fill_(3), True),
    "copy": (lambda w: w[1].copy_(torch.ones(3)), True),
    "out": (lambda w: torch.add(w[2], 1, out=w[2]), True),
    "data": (lambda w: setattr(w[0], "data", torch.randn(3, 3)), True),
    "set": (lambda w: w[2].set_(torch.randn(4, 6)), True),
    "storage": (lambda w: storage_of(w[0], 1 << 16), True),
    "swap": (lambda w: torch.utils.swap_tensors(w[0], nn.Parameter(torch.randn(3, 3))), True),
    "another": (lambda w: w.__setitem__(5, torch.tensor(1.0)), True),
    "subclass": (lambda w: w[6].mul_(2), True),
    "unseen": (lambda w: w[0].data.add_(1), False),  # `weight_access` and contents are for it
}


@torch.no_grad()
@pytest.mark.parametrize("name", WRITES)
def test_it_sees_what_python_sees(name):
    write, seen = WRITES[name]
    mine = weights()
    before = READER.read(tuple(mine)), both(mine)[1]
    kept = list(mine)  # no identity goes to another object
    write(mine)
    after = READER.read(tuple(mine)), both(mine)[1]
    assert (before[0] != after[0]) is (before[1] != after[1]) is seen
    assert both(mine)[0] == both(mine)[1]
    for reader in (READER, PYTHON):
        changed = reader.make_comparer(range(len(mine)))
        assert changed(mine, before[0], None) == (FACTS if seen else SAME)
        assert changed(mine, after[0], None) == SAME
    del kept


def test_tensors_without_versions_have_one_that_stays():
    with torch.inference_mode():
        mine = (nn.Parameter(torch.ones(2)), torch.ones(2))
        ours, theirs = both(mine)
        mine[0].add_(1)
        assert ours == theirs == both(mine)[0]
    assert ours[1] == [-1, -1]


def test_only_inputs_with_these_numbers_count():
    mine = weights()
    inputs = [torch.randn(1), mine[0], 3, mine[2]]  # sizes are inputs too
    read, changed = READER.read((mine[0], mine[2])), READER.make_comparer([1, 3])
    assert changed(inputs, read, None) == SAME
    inputs[0] = None
    assert changed(inputs, read, None) == SAME
    assert changed(inputs[:3], read, None) == FACTS
    with torch.no_grad():
        mine[2].add_(1)
    assert changed(inputs, read, None) == FACTS


def test_a_tensor_that_lost_its_version_is_not_the_same():
    mine, changed = weights()[0], READER.make_comparer([0])
    read = READER.read((mine,))
    with torch.inference_mode():
        other = nn.Parameter(torch.ones(2))
    read = int.to_bytes(id(other), 8, "little") + read[8:]
    assert changed([other], read, None) == FACTS


def contents_of(reader, tensors, limit):
    hashes = [reader.hashes(t.data_ptr(), t.nbytes) if t.numel() else None for t in tensors]
    return Contents(hashes, (limit, limit))


@pytest.mark.parametrize("reader", [READER, PYTHON], ids=["C++", "Python"])
def test_any_byte_that_changes_is_found_in_turn(reader):
    """Of sizes around those of a block and of a word, in one round of all contents."""
    sizes = (1, 3, 7, 8, 9, 31, 63, 64, 65, 255, 256, 257, 1000, 70_000)
    mine = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    read, changed = reader.read(tuple(mine)), reader.make_comparer(range(len(mine)))
    contents = contents_of(reader, mine, 1 << 20)
    for number, tensor in enumerate(mine):
        for place in {0, len(tensor) // 2, len(tensor) - 1}:
            for bit in (1, 128):
                raw = tensor.numpy()
                raw[place] ^= bit
                rounds = [changed(mine, read, contents) for _ in range(20)]
                assert number in rounds
                raw[place] ^= bit
                rounds = [changed(mine, read, contents) for _ in range(20)]
                assert {*rounds} == {SAME}


def test_one_sample_of_each_weight_shows_a_write_to_all_of_it():
    mine = [torch.randn(300, 300) for _ in range(20)]
    read, changed = READER.read(tuple(mine)), READER.make_comparer(range(20))
    contents = contents_of(READER, mine, 0)
    for number in range(20):
        mine[number].numpy().__imul__(-1)  # signs alone
        assert changed(mine, read, contents) == number
        mine[number].numpy().__imul__(-1)
        assert changed(mine, read, contents) == SAME


def test_samples_are_drawn_anew_and_the_turn_goes_on():
    """One element of 90,000 is found in turn within one round, and by samples alone at last."""
    mine = [torch.randn(300, 300)]
    read, changed = READER.read(tuple(mine)), READER.make_comparer([0])
    for limit, most in ((1 << 14, 300 * 300 * 4 // (1 << 14) + 1), (0, 50_000)):
        contents = contents_of(READER, mine, limit)
        mine[0].numpy()[150, 150] += 1
        found = next((n for n in range(most) if changed(mine, read, contents) == 0), None)
        assert found is not None
        mine[0].numpy()[150, 150] -= 1


def test_what_tensors_share_is_read():
    base = torch.zeros(4)
    alias, view = base.data, base[1:]
    own, shared, viewed = READER.owners((base, alias, view))
    assert own.storage == shared.storage == viewed.storage == base.untyped_storage()._cdata
    assert own.counter == viewed.counter != shared.counter
    assert own.deleter == READER.allocator
    (borrowed,) = READER.owners((torch.from_numpy(base.numpy().copy()),))
    assert borrowed.deleter != READER.allocator
    alias.add_(1)
    assert [*memoryview(READER.counters((base, alias))).cast("q")] == [0, 1, 2, 1]
    assert READER.storage_of(alias) == own.storage
    assert READER.storage_of(torch.eye(2).to_sparse()) == 0


def test_parts_have_one_state_in_either_way():
    """Graphs share results, whichever way each of them reads."""
    mine = tuple(weights())
    own = derived.make_getter([5, 0, 3])
    parts = [weight_results.state_of_part(reader.read(mine), own) for reader in (READER, PYTHON)]
    assert parts[0] == parts[1]
    assert len(parts[0]) == 6


def sums(count):
    step = program.Step("aten::add.Tensor", (program.Ref(0), program.Ref(0)), ())
    programs = [program.Program((i,), ("",), (step,), (program.Ref(1),)) for i in range(count)]
    return derived.DerivedWeights(programs, captured=False)


MANY = 32


def test_all_are_read_in_one_call_and_computed_when_one_changes(monkeypatch):
    asked = []

    class Counted(weights_cpp.Reader):
        def make_comparer(self, numbers):
            changed = super().make_comparer(numbers)
            return lambda *args: asked.append(len(numbers)) or changed(*args)

    counted = Counted(**vars(READER))
    monkeypatch.setattr(derived, "any_reader", lambda: counted)
    made, mine = sums(MANY), [torch.ones(1) for _ in range(MANY)]
    assert [v.item() for v in made.of(mine)] == [2.0] * MANY
    first = made.of(mine)
    assert made.of(mine) is first
    assert asked == [MANY] * 2
    mine[7].fill_(5)
    assert [v.item() for v in made.of(mine)][6:9] == [2.0, 10.0, 2.0]


def test_where_it_cannot_be_built_python_reads(monkeypatch):
    monkeypatch.setattr(derived, "any_reader", lambda: PYTHON)
    made, mine = sums(MANY), [torch.ones(1) for _ in range(MANY)]
    made.of(mine)
    mine[7].fill_(5)
    assert made.of(mine)[7].item() == 10.0


@pytest.mark.parametrize("dtype", fields.KINDS, ids=str)
def test_where_a_view_of_any_kind_begins_is_told(dtype):
    base = torch.zeros(7, dtype=dtype)
    mine = (base, base[3:], base.view(torch.uint8)[5:])
    ours, theirs = both(mine)
    assert ours == theirs
    assert ours[2][1] == base.data_ptr() + 3 * base.element_size()


@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference mode"])
def test_fields_are_found_whatever_the_mode(inference):
    found = fields.find_layout()
    with torch.inference_mode(inference), torch.device("meta"):
        assert fields.find_layout() == found


def test_what_has_no_storage_has_no_state():
    assert READER.read((torch.eye(2).to_sparse(),)) == b""


def test_what_says_something_else_than_torch_is_not_believed():
    with pytest.raises(NotBuiltError, match="where it was"):
        weights_cpp._check(replace(READER, read=lambda tensors: READER.read(tensors[::-1])))
    with pytest.raises(NotBuiltError, match="where it was"):
        weights_cpp._check(replace(READER, _changed=lambda *_: FACTS))
    with pytest.raises(NotBuiltError, match="where it was"):
        weights_cpp._check(replace(READER, _counters=lambda tensors: bytes(16 * len(tensors))))


def test_a_compiled_model_follows_its_weights_in_this_way():
    model, x = Mlp().eval(), torch.randn(2, 32)
    fn = torch.compile(model, backend="ipex", options={"strict": True})
    with torch.no_grad():
        for _ in range(2):
            # packed products add in another order
            torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=1e-5)
            model.up.weight.mul_(2)
        torch.testing.assert_close(fn(x), model(x), rtol=1e-5, atol=1e-5)
