"""Options: what is accepted, what beats what, and what a mistake is answered with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipex_inductor.config import AUTOTUNE, MODES, SYCL, CompileConfig, own_options, resolve
from ipex_inductor.errors import IpexError, OptionError

pytestmark = pytest.mark.unit

INDUCTOR = {"max_autotune": bool, "triton.cudagraphs": bool, "cpp.threads": int, "any": None}


def config(options=None, mode=None, env=None):
    return resolve(mode, options, INDUCTOR, env or {})


def test_nothing_asked_for_is_the_defaults():
    assert config() == config({}) == CompileConfig()


def test_an_unknown_key_names_the_nearest_and_where_all_are_listed():
    with pytest.raises(OptionError) as caught:
        config({"weight_prolog": True})
    assert str(caught.value) == (
        "expected a known option; got 'weight_prolog'. "
        "Did you mean 'weight_prologue', 'weight_prologue_bytes'? `ipex-inductor config` lists all."
    )
    assert isinstance(caught.value, IpexError)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_key_may_be_near_one_of_inductors():
    with pytest.raises(OptionError, match=r"Did you mean 'triton[.]cudagraphs'"):
        config({"triton.cudagraph": True})


def test_a_key_near_nothing_still_gets_names_to_choose_from():
    with pytest.raises(OptionError, match="Did you mean 'mode', 'rules'"):
        config({"zzzzzz": 1})


def test_a_key_that_is_not_text_is_unknown():
    with pytest.raises(OptionError, match="got '7'"):
        config({7: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strict": "yes"}, "expected option 'strict' of type bool; got 'yes' (str)."),
        ({"strict": 1}, "expected option 'strict' of type bool; got 1 (int)."),
        ({"rules": ["-a"]}, "expected option 'rules' of type str; got ['-a'] (list)."),
        ({"mode": None}, "expected option 'mode' of type str; got None (NoneType)."),
        ({"cpp.threads": "4"}, "expected option 'cpp.threads' of type int; got '4' (str)."),
    ],
)
def test_a_wrong_type_names_the_expected_one(options, message):
    with pytest.raises(OptionError) as caught:
        config(options)
    assert str(caught.value).startswith(message)
    assert "Pass a value of type" in caught.value.todo


@pytest.mark.parametrize("ask", [{"mode": "max-autotun"}, {"options": {"mode": "max-autotun"}}])
def test_an_unknown_mode_names_the_nearest(ask):
    with pytest.raises(
        OptionError, match=r"known mode; got 'max-autotun'[.] Did you mean 'max-aut"
    ):
        config(**ask)


def test_an_unknown_mode_in_the_environment_is_no_better():
    with pytest.raises(OptionError, match="a known mode; got 'fast'"):
        config(env={"IPEX_MODE": "fast"})


def test_keyword_beats_environment_beats_default():
    env = {"IPEX_MODE": "max-autotune", "IPEX_STRICT": "1", "IPEX_RULES": "-a"}
    assert config(env=env) == CompileConfig(mode="max-autotune", strict=True, rules="-a")
    asked = config({"strict": False, "rules": ""}, mode="default", env=env)
    assert asked == CompileConfig()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("ON", True), ("0", False), ("False", False), ("off", False)],
)
def test_booleans_of_the_environment(text, value):
    assert config(env={"IPEX_WEIGHT_PROLOGUE": text}).weight_prologue is value


def test_a_bad_boolean_names_the_variable_and_the_values():
    with pytest.raises(OptionError) as caught:
        config(env={"IPEX_WEIGHT_PROLOGUE": "maybe"})
    assert str(caught.value) == (
        "expected IPEX_WEIGHT_PROLOGUE in ['0', '1', 'false', 'off', 'on', 'true']; "
        "got 'maybe'. Unset or fix it."
    )


def test_a_bad_number_names_the_variable():
    assert config(env={"IPEX_WEIGHT_PROLOGUE_BYTES": "4096"}).weight_prologue_bytes == 4096
    with pytest.raises(OptionError) as caught:
        config(env={"IPEX_WEIGHT_PROLOGUE_BYTES": "4 GiB"})
    assert str(caught.value) == (
        "expected IPEX_WEIGHT_PROLOGUE_BYTES that is a whole number; got '4 GiB'. Unset or fix it."
    )


def test_an_empty_variable_is_an_unset_one():
    assert config(env={"IPEX_STRICT": "", "IPEX_MODE": ""}) == CompileConfig()


def test_the_environment_is_read_at_the_call(monkeypatch):
    monkeypatch.setenv("IPEX_RULES", "-late")
    assert resolve(None, None, INDUCTOR).rules == "-late"


@pytest.mark.parametrize(
    ("rules", "off"),
    [
        ("", set()),
        ("-linear+gelu", {"linear+gelu"}),
        (" -a , -b ,", {"a", "b"}),
        ("-*", {"*"}),
        ("-a,-a", {"a"}),
        ("--a", {"-a"}),
    ],
)
def test_rules_off_are_the_names_without_their_dash(rules, off):
    assert config({"rules": rules}).rules_off == off


@pytest.mark.parametrize(
    ("rules", "entry"), [("linear+gelu", "linear+gelu"), ("-a, +b", "+b"), ("-a,-", "-")]
)
@pytest.mark.parametrize("where", ["options", "environment"])
def test_a_rule_without_its_dash_is_an_error_not_a_no_op(rules, entry, where):
    with pytest.raises(OptionError) as caught:
        config({"rules": rules}) if where == "options" else config(env={"IPEX_RULES": rules})
    assert str(caught.value) == (
        f"expected entries of `rules` like \"-name\"; got '{entry}'. "
        'Write "-name" to leave one rule out, "-*" for all of them.'
    )


def test_inductors_keys_come_out_sorted_and_with_underscores():
    asked = config({"triton.cudagraphs": True, "max-autotune": False, "weight-prologue": False})
    assert asked.inductor == (("max_autotune", False), ("triton.cudagraphs", True))
    assert asked.weight_prologue is False


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        ({"autotune": "nevr"}, {}, r"a known autotune; got 'nevr'. Did you mean 'never'\?"),
        ({}, {"IPEX_AUTOTUNE": "on"}, "a known autotune; got 'on'"),
        ({"autotune_budget_s": -1}, {}, "autotune_budget_s of 0 or more seconds; got -1"),
        ({}, {"IPEX_AUTOTUNE_BUDGET_S": "1m"}, "IPEX_AUTOTUNE_BUDGET_S that is a whole number"),
    ],
)
def test_what_autotune_takes(options, env, message):
    with pytest.raises(OptionError, match=message):
        config(options, env=env)


def test_a_config_is_hashable_whatever_inductor_is_given():
    one, two = config({"any": {"a": []}}), config({"any": {"a": [1]}})
    assert one != two
    assert len({one, two}) == 2
    assert one == config({"any": {"a": []}})


def test_every_option_of_ours_has_variable_accepted_values_and_doc():
    for name, option in own_options().items():
        assert option.metadata["env"] == f"IPEX_{name.upper()}"
        assert option.metadata["accepts"]
        assert option.metadata["doc"]


rule_names = st.text(st.sampled_from("abc+_()"), min_size=1, max_size=8)
VALID = {
    "mode": st.sampled_from(MODES),
    "rules": st.lists(rule_names, max_size=4).map(lambda n: ",".join(f"-{x}" for x in n)),
    "weight_prologue": st.booleans(),
    "weight_prologue_bytes": st.integers(),
    "drop_plain_weights": st.booleans(),
    "shared_packing": st.booleans(),
    "strict": st.booleans(),
    "autotune": st.sampled_from(AUTOTUNE),
    "autotune_budget_s": st.integers(min_value=0),
    "autotune_database": st.text(),
    "autotune_first_call": st.booleans(),
    "sycl": st.sampled_from(SYCL),
    "blocked_products": st.booleans(),
    "capture": st.booleans(),
    "progress": st.booleans(),
    "max_autotune": st.booleans(),
    "triton.cudagraphs": st.booleans(),
    "cpp.threads": st.integers(),
    "any": st.none() | st.lists(st.integers()) | st.dictionaries(st.text(), st.integers()),
}


def test_the_strategy_below_covers_every_option_of_ours():
    assert own_options().keys() <= VALID.keys()


@given(st.fixed_dictionaries({}, optional=VALID))
def test_any_subset_of_valid_options_round_trips(options):
    result = config(options)
    ours = {name: getattr(result, name) for name in own_options() if name in options}
    assert ours | dict(result.inductor) == options
    for name in own_options().keys() - options.keys():
        assert getattr(result, name) == getattr(CompileConfig(), name)
    shuffled = dict(reversed(options.items()))
    assert result == config(shuffled)
    assert hash(result) == hash(config(shuffled))
