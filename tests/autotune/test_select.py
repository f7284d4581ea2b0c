"""What records of other sizes say of a problem, and how often a database is read for it."""

import math
import os
import random

import pytest
from msgspec.structs import replace

from ipex_inductor.autotune import database, ranges, select
from ipex_inductor.autotune.database import Records, Shard, write
from ipex_inductor.autotune.record import Operand, Problem, Record, Symbol, encode
from support.autotune.autotune_records import LIBRARY, PROVENANCE, TILES, failed, record, timed

pytestmark = pytest.mark.unit

FAST, OTHER = TILES[0], TILES[1]


def product(rows, columns=16, arch="sm_90", **changes):
    """Of so many rows by 32 with 32 by so many columns; either may be a symbol's name."""
    first = Operand((rows, 32), (32, 1), "bfloat16")
    second = Operand((32, columns), (columns, 1), "bfloat16")
    return replace(Problem("aten.mm.default", (first, second), arch), **changes)


def ranged(low, high, **changes):
    return product("n0", symbols=(Symbol("n0", low, high),), **changes)


def keep(folder, problem, fastest, *out):
    """A record in which `fastest` took half of what the library did, and those in `out` failed."""
    outcomes = [timed(c, 5.0 if c == fastest else 10.0) for c in (LIBRARY, *TILES) if c not in out]
    shard = Shard(folder)
    shard.append(Record(problem, (*outcomes, *map(failed, out)), PROVENANCE))
    shard.close()


def found(problem, folder):
    return select.lookup([encode(problem)], folder).get(encode(problem))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "database"


# A size within a range.


@pytest.mark.parametrize(("rows", "within"), [(128, False), (129, True), (256, True), (257, False)])
def test_the_record_of_a_range_serves_the_sizes_in_it(rows, within, folder):
    keep(folder, ranged(129, 256), FAST)
    selection = found(product(rows), folder)
    assert (selection is not None) == within
    if within:
        assert selection.choice == FAST
        assert selection.source == "recorded for 129..256"
        assert selection.library.choice == LIBRARY
        assert str(selection).endswith("5 us, aten.mm 10, recorded for 129..256")


def test_a_record_of_the_size_itself_comes_first(folder):
    keep(folder, ranged(129, 256), FAST)
    keep(folder, product(200), OTHER)
    assert found(product(200), folder).choice == OTHER
    assert found(product(200), folder).source == "recorded"
    assert found(product(200), folder).is_measured
    assert found(product(201), folder).choice == FAST
    assert not found(product(201), folder).is_measured  # so `autotune run` measures it


def test_the_narrowest_range_serves(folder):
    keep(folder, ranged(2, 1024), OTHER)
    two = product("n0", "n1", symbols=(Symbol("n0", 200, 201), Symbol("n1", 15, 16)))
    keep(folder, two, OTHER)
    keep(folder, ranged(129, 256), FAST)
    assert found(product(200), folder).source == "recorded for 129..256"
    assert found(product(300), folder).source == "recorded for 2..1024"
    assert found(product(201, 15), folder).source == "recorded for 200..201, 15..16"


@pytest.mark.parametrize(
    "other",
    [
        {"arch": "sm_80"},
        {"epilogue": "aten.relu.default(y)"},
        {"settings": {"threads": 3}},
        {"constants": {"alpha": 2}},
        {"op": "aten.addmm.default"},
    ],
    ids=str,
)
def test_what_differs_in_anything_but_the_size_is_not_served(other, folder):
    keep(folder, ranged(129, 256), FAST)
    assert found(product(200, **other), folder) is None


def test_strides_must_be_what_they_are_at_that_size(folder):
    transposed = Operand(("n0", 32), (1, "n0"), "bfloat16")
    problem = ranged(129, 256)
    problem = replace(problem, operands=(transposed, problem.operands[1]))
    keep(folder, problem, FAST)
    assert found(product(200), folder) is None
    at = replace(
        product(200), operands=(Operand((200, 32), (1, 200), "bfloat16"), product(200).operands[1])
    )
    assert found(at, folder).choice == FAST
    off = replace(at, operands=(Operand((200, 32), (1, 208), "bfloat16"), at.operands[1]))
    assert found(off, folder) is None


def test_what_failed_at_the_size_itself_is_not_served(folder):
    keep(folder, ranged(129, 256), FAST)
    outcomes = (failed(FAST),)
    Shard(folder).append(Record(product(200), outcomes, PROVENANCE))
    assert found(product(200), folder) is None
    assert found(product(201), folder).choice == FAST


@pytest.mark.parametrize(
    "text", ["((((", "n0 +", "nobody", "n0 // 0", "2 ** 99999", "n0.real", "(" * 400, "f(n0)"]
)
def test_expressions_that_are_none_are_nobodys_sizes(text, folder):
    problem = ranged(129, 256)
    strange = replace(problem.operands[0], stride=(text, 1))
    keep(folder, replace(problem, operands=(strange, problem.operands[1])), OTHER)
    assert found(product(200), folder) is None
    keep(folder, problem, FAST)
    assert found(product(200), folder).choice == FAST


# A range whose sizes are known.


def test_a_range_is_served_where_both_sizes_it_is_measured_at_agree(folder):
    problem = ranged(129, 256)
    middle, end = ranges.points(problem)
    assert [p.operands[0].shape[0] for p in (middle, end)] == [181, 256]
    keep(folder, end, FAST)
    assert found(problem, folder) is None
    keep(folder, middle, FAST)
    selection = found(problem, folder)
    assert selection.choice == FAST
    assert selection.source == "recorded at its middle and end"


def test_a_range_whose_sizes_disagree_is_not_known(folder):
    problem = ranged(129, 256)
    for point, best in zip(ranges.points(problem), (FAST, OTHER), strict=True):
        keep(folder, point, best)
    assert found(problem, folder) is None
    keep(folder, problem, OTHER)
    assert found(problem, folder).source == "recorded"


def test_a_range_is_not_served_by_what_ranges_say_of_its_sizes(folder):
    keep(folder, ranged(129, 256), FAST)
    assert found(ranged(129, 250), folder) is None


def test_what_failed_in_the_range_is_not_served_by_its_sizes(folder):
    problem = ranged(129, 256)
    for point in ranges.points(problem):
        keep(folder, point, FAST)
    Shard(folder).append(Record(problem, (failed(FAST),), PROVENANCE))
    assert found(problem, folder) is None


def test_the_answer_does_not_depend_on_the_order_of_records(tmp_path):
    problems = [
        ranged(129, 256),
        ranged(129, 300),
        ranged(100, 256),
        *map(product, (181, 200, 256)),
    ]
    asked = [*problems, product(130), product(260), product(110)]
    answers = set()
    for seed in range(5):
        folder = tmp_path / str(seed)
        for i in random.Random(seed).sample(range(len(problems)), len(problems)):
            keep(folder, problems[i], TILES[i % 4])
        selections = select.lookup([encode(p) for p in asked], folder)
        answers.add(tuple((k, encode(s.choice), s.source) for k, s in sorted(selections.items())))
    assert len(answers) == 1
    assert len(next(iter(answers))) == len(asked)


# How often it is read.


@pytest.fixture
def indexed(monkeypatch):
    """The names of the files that were read from their first line to the last."""
    names, read = [], database._build_index
    monkeypatch.setattr(
        database, "_build_index", lambda file: names.append(file.name) or read(file)
    )
    return names


def test_a_database_is_read_once_for_as_long_as_it_does_not_change(folder, indexed):
    keep(folder, product(1), FAST)
    keep(folder, product(2), FAST)
    for rows in (1, 2, 3, 1):
        assert (found(product(rows), folder) is not None) == (rows < 3)
    own = [file for file in indexed if str(folder) in str(file)]  # not the package's tables
    assert len(own) == 2
    keep(folder, product(3), FAST)
    assert found(product(3), folder).choice == FAST
    own = [file for file in indexed if str(folder) in str(file)]
    assert len(own) == 3, "only the file that is new"


def test_what_grows_is_read_again(tmp_path, indexed):
    shard = Shard(tmp_path / "db")
    for rows in range(1, 4):
        shard.append(record(timed(LIBRARY, 10.0), rows=rows))
        keys = [encode(record(rows=n).problem) for n in range(1, 5)]
        assert len(select.lookup(keys, tmp_path / "db")) == rows
    assert len(indexed) == 3


def test_a_file_that_was_replaced_is_read_again(tmp_path, indexed):
    file = tmp_path / "db.jsonl"
    for rows in (1, 2):
        write(file, [record(timed(LIBRARY, 10.0), rows=rows)])
        (only,) = Records(file, only=[encode(record(rows=rows).problem)])
        assert only.problem == record(rows=rows).problem
        assert not list(Records(file, only=[encode(record(rows=3 - rows).problem)]))
    assert len(indexed) == 2


def test_an_index_that_is_wrong_finds_nothing_false(tmp_path):
    """A file that changed and says that it did not."""
    file = tmp_path / "db.jsonl"
    write(file, [record(timed(LIBRARY, 10.0), rows=11), record(timed(LIBRARY, 10.0), rows=22)])
    key = encode(record(rows=11).problem)
    assert len(list(Records(file, only=[key]))) == 1
    before, lines = os.stat(file), file.read_bytes().splitlines(keepends=True)
    with open(file, "r+b") as opened:
        opened.write(b"".join(lines[::-1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    read = Records(file, only=[key])
    assert [r.problem for r in read] in ([record(rows=11).problem], [])
    with open(file, "r+b") as opened:
        opened.write(lines[1].replace(b"10.0", b"90.0"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert all(r.problem == record(rows=11).problem for r in Records(file, only=[key]))


def test_lines_that_are_torn_are_passed_over(tmp_path):
    file = tmp_path / "db.jsonl"
    write(file, [record(timed(LIBRARY, 10.0), rows=n) for n in (1, 2, 3)])
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(
        lines[0] + b"\n" + b"nonsense\n" + lines[1][:50] + b"\n" + lines[2] + lines[1][:-20]
    )
    read = Records(file, only=[encode(record(rows=n).problem) for n in (1, 2, 3)])
    assert [r.problem.operands[0].shape[0] for r in read] == [1, 3]
    assert [refusal.line for refusal in read.refused] == [6]


# A convolution of another batch.


def convolution(batch, channels=64, unary="relu", **changes):
    """Of images of 8x8, with an addend of the result's size."""
    image = Operand((batch, channels, 8, 8), (64 * channels, 1, 8 * channels, channels), "bfloat16")
    weight = Operand((channels, channels, 1, 1), (channels, 1, channels, channels), "bfloat16")
    operands = (image, weight, Operand((channels,), (1,), "bfloat16"), image)
    constants = {"binary": "add", "unary": unary, "groups": 1}
    return replace(Problem("ipex.conv.default", operands, "sm_90", constants), **changes)


def near(problem, folder, offered=(FAST, OTHER)):
    assert found(problem, folder) is None
    return select.nearest({encode(problem): offered}, folder).get(encode(problem))


@pytest.mark.parametrize(("batch", "of"), [(2, 1), (16, 64), (32, 64), (64, None), (500, 64)])
def test_a_convolution_is_as_at_the_nearest_batch(batch, of, folder):
    keep(folder, convolution(1), FAST)
    keep(folder, convolution(64), OTHER)
    if of is None:
        assert found(convolution(batch), folder).source == "recorded"
        return
    selection = near(convolution(batch), folder)
    assert selection.choice == (FAST if of == 1 else OTHER)
    assert selection.source == f"recorded for a batch of {of}"
    assert not selection.is_measured  # so it is measured where that is asked for


@pytest.mark.parametrize(
    "other",
    [
        convolution(2, channels=32),
        convolution(2, unary="none"),
        convolution(2, arch="sm_80"),
        convolution(2, settings={"allow_tf32": True}),
        convolution(0),
        convolution("n0"),
        convolution("n0", symbols=(Symbol("n0", 1, 9),)),
        product(2),
    ],
    ids=[
        "channels",
        "activation",
        "architecture",
        "settings",
        "of nothing",
        "any",
        "range",
        "product",
    ],
)
def test_a_convolution_that_differs_in_more_says_nothing(other, folder):
    keep(folder, convolution(64), FAST)
    keep(folder, product(64), FAST)
    assert near(other, folder) is None


def test_where_images_have_as_many_channels_as_there_are_in_a_batch_weights_stay(folder):
    keep(folder, convolution(64), FAST)  # 64 images of 64 channels
    assert near(convolution(32), folder).choice == FAST
    assert near(convolution(32, channels=32), folder) is None


def test_what_failed_at_this_batch_is_not_taken_from_another(folder):
    keep(folder, convolution(64), FAST)
    shard = Shard(folder)
    shard.append(Record(convolution(32), (failed(FAST),), PROVENANCE))
    shard.close()
    assert near(convolution(32), folder) is None


# A linear layer of other rows.


def layer(*leading, width=768, other=False, **changes):
    """Of `leading` rows, with an addend if asked for."""

    def rows(columns):
        sizes = *leading, columns
        return Operand(
            sizes, tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes))), "float16"
        )

    weight, bias = Operand((3072, width), (width, 1), "float16"), Operand((3072,), (1,), "float16")
    operands = (rows(width), weight, bias, *([rows(3072)] if other else []))
    problem = Problem("ipex.linear.default", operands, "sm_90", {"unary": "gelu"})
    return replace(problem, **changes)


LEADING = {
    (24576,): 24576,
    (8, 16, 192): 24576,
    (32, 512): 16384,
    (6, 2048): 16384,
    (8192,): 16384,
}


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_a_linear_layer_is_as_at_the_nearest_number_of_rows(leading, folder):
    """Whatever numbers them."""
    keep(folder, layer(64, 384), FAST)
    keep(folder, layer(4, 4096), OTHER)
    selection = near(layer(*leading), folder)
    assert selection.choice == (FAST if LEADING[leading] == 24576 else OTHER)
    assert selection.source == f"recorded for {LEADING[leading]} rows"


def test_a_third_of_the_rows_is_another_matter(folder):
    keep(folder, layer(16384), FAST)
    assert near(layer(8192), folder).choice == FAST
    assert near(layer(8191), folder) is None
    assert near(layer(32769), folder) is None


def test_what_is_not_offered_for_these_rows_is_passed_over(folder):
    keep(folder, layer(1), FAST)
    keep(folder, layer(4), OTHER)
    assert near(layer(2), folder, [OTHER]).source == "recorded for 4 rows"
    assert near(layer(2), folder, []) is None


def test_rows_of_an_addend_too_and_none_that_lie_apart(folder):
    keep(folder, layer(64, 384, other=True), FAST)
    assert near(layer(16384, other=True), folder).choice == FAST
    assert near(layer(16384), folder) is None
    apart = layer(32, 512, other=True)
    first = replace(apart.operands[0], stride=(1024 * 768, 768, 1))
    assert near(replace(apart, operands=(first, *apart.operands[1:])), folder) is None
    assert near(layer(32, 512, width=512, other=True), folder) is None
    assert near(layer(0, 512, other=True), folder) is None


def test_of_a_batch_that_nothing_is_selected_of_the_next_is_asked(folder):
    keep(folder, convolution(64), FAST)
    shard = Shard(folder)
    shard.append(Record(convolution(16), (failed(OTHER),), PROVENANCE))
    shard.close()
    assert near(convolution(8), folder).source == "recorded for a batch of 64"
