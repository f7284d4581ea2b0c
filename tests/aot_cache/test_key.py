"""Keys: one field changed is one key changed, and a difference is said by the field's name."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipex_inductor.aot_cache import digest
from ipex_inductor.aot_cache.key import Key, describe_differences, nearest, read
from support.cache.cache_keys import key

pytestmark = pytest.mark.unit

# Of every field another value, and what a user is told when an entry has the value of `key()`.
CHANGED = {
    "kind": ("hsaco", "kind: hsaco here, cubin there"),
    "source": ("5" * 64, "built by other sources of ipex_inductor"),
    "tables": ((("matmul.py.jinja", "a1"), ("epilogue", "x")), "tables: epilogue=x here, b2 there"),
    "options": ((("warps", True), ("stages", 3)), "options: warps=True here, 1 there"),
    "problem": (
        (("dtype", "bf16"), ("shape", (64, 32)), ("layout", (1, 64))),
        "problem: layout=(1, 64) here, (32, 1) there",
    ),
    "architecture": (
        "sm_90:NVIDIA-H200",
        "built for sm_90:NVIDIA-H100, running on sm_90:NVIDIA-H200",
    ),
    "toolkit": ((("ptxas", "12.8"), ("flags", "-O1")), "toolkit: flags=-O1 here, -O3 there"),
    "triton": ("3.6.1", "triton: 3.6.1 here, 3.6.0 there"),
    "torch": ("2.13.0+cpu", "torch: 2.13.0+cpu here, 2.13.0+cu130 there"),
    "environment": (
        (("CXX", "/opt/gcc/bin/g++"),),
        "CXX=/opt/gcc/bin/g++ here, g++ there",
    ),
}


def test_every_field_is_tried():
    assert CHANGED.keys() == {f.name for f in fields(Key) if f.init}


@pytest.mark.parametrize("name", CHANGED)
def test_one_field_changed_is_another_key_and_is_named(name):
    value, said = CHANGED[name]
    other = replace(key(), **{name: value})
    assert other.digest != key().digest
    assert describe_differences(other, read(key().framed)) == (said,)


def test_every_named_value_counts():
    """Each of options, problem, toolkit, tables and environment: changed, gone, or renamed."""
    seen = {key().digest}
    for name in ("tables", "options", "problem", "toolkit", "environment"):
        pairs = getattr(key(), name)
        for i, (inner, value) in enumerate(pairs):
            rest = pairs[:i], pairs[i + 1 :]
            for middle in ((), ((inner + "x", value),), ((inner, (value,)),)):
                seen.add(replace(key(), **{name: rest[0] + middle + rest[1]}).digest)
    assert len(seen) == 1 + 3 * sum(len(v) for v in key().fields.values() if type(v) is tuple)


def test_a_key_reads_back():
    assert read(key().framed) == key().fields
    assert describe_differences(key(), read(key().framed)) == ()


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("kind", 1, "field 'kind': expected str, got 1"),
        ("options", [("a", 1)], "field 'options': expected pairs"),
        ("options", (("a", 1, 2),), "field 'options': expected pairs"),
        ("options", ((1, "a"),), "field 'options': expected pairs"),
        ("options", (("a", 1), ("a", 2)), "field 'options': a name stands twice"),
        ("options", (("a", [1]),), "field 'options': no digest of list"),
        ("problem", (("a", 1j),), "field 'problem': no digest of complex"),
    ],
)
def test_what_has_no_digest_is_an_error_at_once(name, value, match):
    with pytest.raises(TypeError, match=match):
        replace(key(), **{name: value})


def test_an_option_unset_is_not_an_option_of_zero():
    unset = replace(key(), environment=())
    zero = replace(key(), environment=(("CXX", "0"),))
    assert describe_differences(zero, unset.fields) == ("CXX=0 here, unset there",)


def test_order_is_a_difference():
    other = replace(key(), options=key().options[::-1])
    assert describe_differences(other, key().fields) == ("options: in another order",)


def test_fields_of_other_versions_are_told():
    found = {k: v for k, v in key().fields.items() if k != "triton"} | {"colour": 3}
    assert describe_differences(key(), found) == (
        "triton: 3.6.0 here, None there",
        "colour: None here, 3 there",
    )


def test_the_nearest_entry_differs_least_and_is_of_one_kind():
    near = replace(key(), triton="3.7.0")
    far = replace(near, torch="2.11.0")
    entries = [far.fields, near.fields, replace(key(), kind="cpp").fields]
    assert nearest(key(), entries) == (near.fields, ("triton: 3.6.0 here, 3.7.0 there",))
    assert nearest(replace(key(), kind="other"), entries) is None


PRINT = """
from support.cache.cache_keys import key
print(key().digest)
"""


def test_hash_seed_folder_and_locale_do_not_change_it(tmp_path):
    tests = os.path.dirname(os.path.dirname(__file__))
    path = os.pathsep.join([tests, os.path.dirname(tests)])
    seen = {key().digest}
    for seed in range(20):
        env = {
            "PYTHONPATH": path,
            "PYTHONHASHSEED": str(seed),
            "LC_ALL": ("C", "C.UTF-8")[seed % 2],
        }
        ran = subprocess.run(
            [sys.executable, "-c", PRINT],
            env=env,
            cwd=("/", tmp_path)[seed % 2],
            capture_output=True,
        )
        seen.add(ran.stdout.decode().strip())
    assert len(seen) == 1


# --- reading back

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda v: st.lists(v, max_size=4).map(tuple), max_leaves=12)


@given(st.dictionaries(st.text(max_size=4), values, max_size=4))
def test_framed_fields_read_back(given_fields):
    framed = digest.frame_fields(given_fields)
    assert list(digest.unframe_fields(framed).items()) == list(given_fields.items())
    assert digest.digest_framed(framed) == digest.digest_fields(given_fields)


@given(st.binary(max_size=64))
def test_other_bytes_are_refused_or_the_only_ones_for_their_fields(data):
    try:
        found = digest.unframe_fields(data)
    except ValueError:
        return
    assert digest.frame_fields(found) == data


def framed(tag, payload):
    return tag + len(payload).to_bytes(8, "big") + payload


@pytest.mark.parametrize(
    "value",
    [
        framed(b"i", b"0x1"),
        framed(b"i", b"01"),
        framed(b"i", b"A"),
        framed(b"i", b"1_0"),
        framed(b"b", b"yes"),
        framed(b"n", b"x"),
        framed(b"f", b"1.0"),
    ],
)
def test_a_value_has_one_spelling(value):
    with pytest.raises(ValueError, match="made by something else"):
        digest.unframe_fields(framed(b"t", framed(b"s", b"a") + value))


def test_a_name_stands_once():
    field = framed(b"t", framed(b"s", b"a") + framed(b"i", b"1"))
    assert digest.unframe_fields(field) == {"a": 1}
    with pytest.raises(ValueError, match="made by something else"):
        digest.unframe_fields(2 * field)


def test_every_changed_byte_of_a_key_is_refused_or_another_key():
    framed = key().framed
    for at in range(len(framed)):
        for bit in range(8):
            other = framed[:at] + bytes([framed[at] ^ 1 << bit]) + framed[at + 1 :]
            try:
                assert read(other) != key().fields
            except ValueError:
                continue


def test_nesting_is_bounded():
    value = ()
    for _ in range(100):
        value = (value,)
    with pytest.raises(ValueError, match="nested too deep"):
        digest.unframe_fields(digest.frame_fields({"a": value}))


def test_a_key_is_plain_json_but_for_bytes():
    assert json.loads(json.dumps(key().fields))["problem"][0] == ["dtype", "bf16"]
