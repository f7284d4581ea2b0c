"""The command: verbs are listed cheaply, our errors are one line, JSON is JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import ipex_inductor
from ipex_inductor.cli import VERBS, app
from ipex_inductor.cli.verbs import find_verb
from ipex_inductor.config import own_options

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
RUN = """
import sys
from ipex_inductor.cli import app
try:
    app(sys.argv[1:], prog_name="ipex-inductor")
finally:
    print("heavy:", sorted({"torch", "triton", "transformers"} & sys.modules.keys()))
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for option in own_options().values():
        monkeypatch.delenv(option.metadata["env"], raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def run(*args):
    return CliRunner().invoke(app, args)


def command(*args, module=True, **env):
    how = ["-m", "ipex_inductor"] if module else ["-c", RUN]
    env = os.environ | {"PYTHONPATH": str(ROOT), **env}
    line = [sys.executable, *how, *args]
    return subprocess.run(line, env=env, cwd="/", capture_output=True, text=True)


def test_version():
    done = run("--version")
    assert (done.exit_code, done.output) == (0, f"ipex-inductor {ipex_inductor.__version__}\n")


def test_help_lists_every_verb_with_its_line():
    done = run("--help")
    assert done.exit_code == 0
    for verb, line in VERBS.items():
        assert verb in done.output
        assert line in done.output


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_the_table_can_be_loaded(verb):
    function = find_verb((verb,))
    assert function.__doc__
    done = run(verb, "--help")
    assert done.exit_code == 0, done.output
    assert "--json" in done.output or isinstance(function, typer.Typer)  # its verbs have it


@pytest.mark.sampled
@pytest.mark.parametrize("args", [("config",), ("--help",), ("demo", "--help")], ids=" ".join)
def test_torch_is_not_imported(args):
    done = command(*args, module=False)
    assert done.stdout.endswith("heavy: []\n"), done.stdout + done.stderr


def test_python_dash_m_is_the_same_command():
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"ipex-inductor {ipex_inductor.__version__}\n")


def test_a_misspelt_verb_is_an_error():
    done = run("confg")
    assert done.exit_code == 2
    assert "No such command 'confg'" in done.output


def test_our_error_is_one_line_without_a_traceback():
    done = command("config", IPEX_STRICT="maybe", COLUMNS="40")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: expected IPEX_STRICT in ['0', '1', 'false', 'off', 'on', 'true']; "
        "got 'maybe'. Unset or fix it.\n"
    )


def test_our_error_is_red_on_a_terminal_and_quotes_brackets():
    done = command("config", IPEX_STRICT="[b]no[/b]", FORCE_COLOR="1")
    assert done.stderr.startswith("\x1b[31merror: expected IPEX_STRICT in [")
    assert "got '[b]no[/b]'. Unset or fix it." in done.stderr


def test_an_error_that_is_not_ours_is_not_swallowed(monkeypatch):
    def boom():
        """Fail."""
        raise ZeroDivisionError

    monkeypatch.setattr("ipex_inductor.cli.config.config", boom)
    assert isinstance(run("config").exception, ZeroDivisionError)


def options(**env):
    done = CliRunner().invoke(app, ["config", "--json"], env=env)
    assert done.exit_code == 0, done.output
    return {row["name"]: row for row in json.loads(done.stdout)["options"]}


def test_config_json_has_every_option_with_its_default():
    found = options()
    assert list(found) == list(own_options())
    assert {name: row["value"] for name, row in found.items()} == {
        name: option.default for name, option in own_options().items()
    }
    assert {row["source"] for row in found.values()} == {"default"}


def test_config_json_applies_the_environment_and_says_so():
    found = options(IPEX_STRICT="on", IPEX_RULES="-linear+gelu", IPEX_MODE="")
    assert (found["strict"]["value"], found["strict"]["source"]) == (True, "environment")
    assert (found["rules"]["value"], found["rules"]["source"]) == ("-linear+gelu", "environment")
    assert (found["mode"]["value"], found["mode"]["source"]) == ("default", "default")
    assert found["mode"]["env"] == "IPEX_MODE"
    assert "max-autotune-no-cudagraphs" in found["mode"]["accepts"]


@pytest.mark.parametrize("columns", ["80", "200"])
def test_config_table_shows_value_origin_variable_and_doc(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("IPEX_RULES", "-a[b]")
    done = run("config")
    assert done.exit_code == 0
    for option in own_options().values():
        assert option.name in done.output
        assert option.metadata["env"] in done.output
    assert "'-a[b]'" in done.output
    assert "environment" in done.output
    assert "…" not in done.output
    assert "torch._inductor.list_options()" in done.output
