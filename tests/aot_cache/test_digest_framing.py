"""Pairs of keys that are easily taken for one another: no two share a digest."""

import random

import pytest

from ipex_inductor.aot_cache.digest import digest_fields, frame_fields, unframe_fields

pytestmark = pytest.mark.reliability

LOOK_ALIKE = (
    1,
    True,
    "1",
    1.0,
    b"1",
    (1,),
    ("1",),
    0,
    False,
    0.0,
    -0.0,
    "",
    b"",
    (),
    ((),),
    None,
    "None",
    "nan",
    float("nan"),
    float("inf"),
    -1,
    255,
    "a",
    "ab",
    "b",
    "c",
    "bc",
    ("a", "b"),
    ("ab",),
    "\0",
    "\ud800",
    1 << 64,
    "s",
    "t",
    "i",
)


def exact(value):
    """Equality that tells types, signs of zero and nesting apart; all nan are one."""
    if isinstance(value, tuple):
        return ("tuple", *map(exact, value))
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


def value(rng, depth=3):
    if depth and rng.random() < 0.3:
        return tuple(value(rng, depth - 1) for _ in range(rng.randrange(4)))
    return rng.choice(LOOK_ALIKE)


def near(rng, fields):
    """The same fields but for one thing that a careless key would not see."""
    items = list(fields.items())
    at = rng.randrange(len(items))
    name, old = items[at]
    kind = rng.randrange(5)
    if kind == 0:
        items[at] = (name, value(rng))
    elif kind == 1:
        items[at] = (name, (old,))
    elif kind == 2 and isinstance(old, str) and old:
        items[at] = (name + old[0], old[1:])  # the border between a name and its value
    elif kind == 3:
        rng.shuffle(items)
    elif isinstance(old, tuple) and old:
        items[at] = (name, (*old[:-1], *(old[-1] if isinstance(old[-1], tuple) else (old[-1],))))
    return dict(items)


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_two_keys_share_a_digest(count):
    rng, of_digest, pairs, different = random.Random(0), {}, 0, 0
    while pairs < count:
        names = rng.sample(["a", "b", "ab", "c", "", "as"], rng.randrange(1, 5))
        one = {name: value(rng) for name in names}
        two = near(rng, one)
        identities = [tuple((n, exact(v)) for n, v in fields.items()) for fields in (one, two)]
        digests = [digest_fields(one), digest_fields(two)]
        assert (digests[0] == digests[1]) == (identities[0] == identities[1]), (one, two)
        for digest, identity in zip(digests, identities, strict=True):
            assert of_digest.setdefault(digest, identity) == identity
        assert frame_fields(unframe_fields(frame_fields(one))) == frame_fields(one)
        pairs += 1
        different += digests[0] != digests[1]
    print(f"{pairs} pairs, {different} of them different, {len(of_digest)} digests, no collision")
    assert different > count / 2
