"""The launcher: which cores, settings and commands; instances as processes of their own."""

import os
import platform
import re
import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from torch.backends.xeon.run_cpu import _CPUinfo

from ipex_inductor.cpu import cores, launch
from ipex_inductor.cpu.cores import Core
from ipex_inductor.errors import CoresError, OptionError
from support.helpers import ended, wait_for

ROOT = Path(__file__).parents[2]
HERE = sorted(cores.available())
# Two sockets of two cores of two threads; the second threads come last, as on Xeons.
XEON = [Core(n, n // 2 % 2, (n // 2 % 2, n % 2), n < 4) for n in range(8)]
LSCPU = "\n".join(f"{c.number},{c.number % 4},{c.node},{c.node}" for c in XEON)

needs_two = pytest.mark.skipif(len(HERE) < 2, reason="needs two cores")


def asked(*options):
    return launch.parser().parse_args([*options, "-m", "torch"])


def pools(*options, available=range(8)):
    chosen = asked(*options)
    shared = launch.layout(chosen, launch._pool(chosen, XEON, frozenset(available)))
    return [[core.number for core in part] for part in shared]


def planned(*options, here=None, program=("-m", "torch")):
    chosen = launch.parser().parse_args([*options, *program])
    return launch.plan(chosen, here or {}, XEON, frozenset(range(8)))


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """A folder of libraries in place of those of this machine."""

    def install(*names):
        (tmp_path / "lib").mkdir(exist_ok=True)
        for name in names:
            (tmp_path / "lib" / name).touch()
        return str(tmp_path / "lib")

    monkeypatch.setattr(launch.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(launch.sysconfig, "get_config_var", lambda _: "none")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return install


# Which cores


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), [[0, 1, 2, 3]]),
        (("--ninstances", "2"), [[0, 1], [2, 3]]),
        (("--ninstances", "3"), [[0], [1], [2]]),
        (("--ncores-per-instance", "3"), [[0, 1, 2]]),
        (("--ncores_per_instance", "1", "--ninstances", "2"), [[0], [1]]),
        (("--nodes-list", "1"), [[2, 3]]),
        (("--cores-list", "1,3,4-5", "--ninstances", "2"), [[4, 1], [5, 3]]),
        (("--use-logical-cores",), [[0, 4, 1, 5, 2, 6, 3, 7]]),
        (("--use-logical-cores", "--ncores-per-instance", "2"), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (("--throughput-mode",), [[0, 1], [2, 3]]),
        (("--latency-mode",), [[0, 1, 2, 3]]),
        (("--latency-mode", "--nodes-list", "0"), [[0, 1]]),
        (("--skip-cross-node-cores", "--ninstances", "3"), [[0], [1], [2]]),
        (("--skip-cross-node-cores", "--ninstances", "2"), [[0, 1], [2, 3]]),
        (("--skip-cross-node-cores", "--ninstances", "1"), [[0, 1]]),
    ],
)
def test_cores_of_the_instances(options, wanted):
    assert pools(*options) == wanted


def test_only_cores_that_this_process_may_use():
    assert pools(available=[1, 4, 5]) == [[4, 1]]  # 5 is the other thread of 1
    assert pools("--throughput-mode", available=[0, 6, 7]) == [[0], [6, 7]]


@pytest.mark.parametrize("node", [0, 1])
def test_physical_cores_are_those_of_torchs_own_launcher(node):
    (ours,) = pools("--nodes-list", str(node))
    assert ours == _CPUinfo(test_input=LSCPU).get_node_physical_cores(node)


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        (("--ninstances", "5"), CoresError, "at most 4 cores"),
        (("--ncores-per-instance", "5"), CoresError, "at most 4 cores"),
        (("--ninstances", "2", "--ncores-per-instance", "3"), CoresError, "2 instances of 3"),
        (("--cores-list", "7-9"), CoresError, "8-9"),
        (("--cores-list", "all"), CoresError, "'all'"),
        (("--nodes-list", "0,2"), CoresError, "--nodes-list 2"),
        (("--ninstances", "-1"), OptionError, "-1"),
        (("--latency-mode", "--throughput-mode"), OptionError, "one mode"),
    ],
)
def test_what_cannot_be_is_said(options, error, word):
    with pytest.raises(error, match=re.escape(word)):
        pools(*options)


# Settings and commands


def test_threads_are_as_many_as_cores_unless_they_are_set():
    made = planned("--ninstances", "2", "--memory-allocator", "default")
    assert [dict(i.settings) for i in made.instances] == [{"OMP_NUM_THREADS": "2"}] * 2
    made = planned("--memory-allocator", "default", here={"OMP_NUM_THREADS": "7"})
    assert not made.instances[0].settings
    assert made.notes == ("OMP_NUM_THREADS=7 is set and stays; it would be 4",)


def test_the_allocator_that_is_installed_is_preloaded_before_what_is_there(libraries):
    folder = libraries("libtcmalloc_minimal.so.4", "libjemalloc.so.2")
    (instance,) = planned(here={"LD_PRELOAD": "/a.so /b.so"}).instances
    assert instance.settings["LD_PRELOAD"] == f"{folder}/libtcmalloc_minimal.so.4:/a.so:/b.so"
    assert "MALLOC_CONF" not in instance.settings
    (instance,) = planned("--memory-allocator", "jemalloc").instances
    assert instance.settings["LD_PRELOAD"] == f"{folder}/libjemalloc.so.2"
    assert instance.settings["MALLOC_CONF"] == launch.JEMALLOC
    (instance,) = planned("--memory-allocator", "jemalloc", "--benchmark").instances
    assert instance.settings["MALLOC_CONF"] == launch.JEMALLOC_BENCHMARK


def test_what_is_preloaded_already_is_not_preloaded_twice(libraries):
    libraries("libtcmalloc.so")
    (instance,) = planned(here={"LD_PRELOAD": "/opt/libtcmalloc.so"}).instances
    assert "LD_PRELOAD" not in instance.settings


def test_an_allocator_that_is_not_there(libraries):
    libraries()
    made = planned()
    assert "LD_PRELOAD" not in made.instances[0].settings
    assert launch.GLIBC.items() <= made.instances[0].settings.items()
    assert not launch.GLIBC.keys() & planned("--memory-allocator", "default").instances[0].settings
    assert "neither tcmalloc nor jemalloc is installed" in made.notes[0]
    assert "libgoogle-perftools4" in made.notes[0]
    for option, name in (("--memory-allocator", "jemalloc"), ("--omp-runtime", "intel")):
        with pytest.raises(OptionError, match="Install it") as caught:
            planned(option, name)
        assert name in str(caught.value)


def test_glibc_keeps_large_blocks_where_it_is_told_to():
    """Blocks of 80 MiB, which it else maps anew each time: no page of the later ones is cleared."""
    program = (
        "import resource\n"
        "def faults():\n"
        "    b'x' * (80 << 20)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "print([-faults() + faults() for _ in range(3)][-1])"
    )
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the C library is none of GNU's")
    told = {**os.environ, "PYTHONMALLOC": "malloc"}
    run = [sys.executable, "-c", program]
    usual, kept = (
        int(subprocess.check_output(run, env=told | more, text=True)) for more in ({}, launch.GLIBC)
    )
    assert usual > 10_000
    assert kept < 100


def test_intels_openmp(libraries):
    folder = libraries("libiomp5.so")
    (instance,) = planned("--omp-runtime", "intel", "--memory-allocator", "default").instances
    assert instance.settings["LD_PRELOAD"] == f"{folder}/libiomp5.so"
    assert instance.settings.items() >= launch.INTEL_OPENMP.items()


@pytest.mark.parametrize(
    ("options", "program", "command"),
    [
        ((), (__file__, "--a", "1"), (sys.executable, "-u", __file__, "--a", "1")),
        ((), ("-m", "torch", "-x"), (sys.executable, "-u", "-m", "torch", "-x")),
        (("--no-python",), ("sh", "-c", "true"), ("sh", "-c", "true")),
        (
            ("--as-ipex",),
            ("-m", "torch"),
            (sys.executable, "-u", "-m", "ipex_inductor.as_ipex", "-m", "torch"),
        ),
    ],
)
def test_commands(options, program, command):
    (instance,) = planned(*options, program=program).instances
    assert instance.command == command


@pytest.mark.parametrize(("options", "program"), [((), "no.py"), (("--no-python",), "no-such")])
def test_a_program_that_is_not_there(options, program):
    with pytest.raises(OptionError, match=program):
        planned(*options, program=(program,))


def test_some_of_the_instances():
    made = planned("--ncores-per-instance", "1", "--instance-idx", "3,1")
    assert [(i.index, i.cores, i.nodes) for i in made.instances] == [
        (1, (1,), (0,)),
        (3, (3,), (1,)),
    ]
    with pytest.raises(OptionError, match="2 instances"):
        planned("--ninstances", "2", "--instance-idx", "2")


def test_what_has_no_effect_any_more_is_read_and_said():
    made = planned("--multi-task-manager", "numactl", "--bind-numa-node", "--throughput_mode")
    assert [note.split(":")[0] for note in made.notes if "no effect" in note] == [
        "--multi-task-manager has no effect",
        "--bind-numa-node has no effect",
    ]


def test_what_is_not_carried_says_what_to_do(capsys):
    for name in launch.REFUSED:
        with pytest.raises(SystemExit, match="2"):
            launch.main([name, __file__])
        assert launch.REFUSED[name] in capsys.readouterr().err


def test_the_old_name_is_a_command_and_a_module():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["ipexrun"].partition(":")
    assert getattr(import_module(module), function) is launch.ipexrun


# Processes

SHOW = """
import os, sys
print(sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], *sys.argv[1:])
print("to the other stream", file=sys.stderr)
sys.exit(int(sys.argv[1]) if os.sched_getaffinity(0) == {%d} else 0)
"""
WAIT = """
import pathlib, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
here = pathlib.Path(sys.argv[1])
child = subprocess.Popen(["sleep", "300"])
import os
(here / f"{os.getpid()}.started").write_text(str(child.pid))
try:
    time.sleep(300)
except KeyboardInterrupt:
    print("asked")
    (here / f"{os.getpid()}.cleaned").touch()
    sys.exit(7)
"""


def command(*arguments, verb=("-m", "ipex_inductor.launch")):
    quiet = ("--memory-allocator", "default")
    return [sys.executable, *verb, *quiet, *map(str, arguments)]


def environment(**more):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**kept, "PYTHONPATH": path, **more}


def launched(*arguments, **how):
    line = command(*arguments, **how)
    return subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "show.py"
    file.write_text(SHOW % HERE[-1])
    return file


@needs_two
@pytest.mark.parametrize("verb", ["-m ipex_inductor.launch", "-m ipex_inductor launch"])
def test_instances_run_on_their_cores_with_their_output_and_exit_codes(script, tmp_path, verb):
    logs = tmp_path / "logs"
    options = ("--cores-list", f"{HERE[0]},{HERE[-1]}", "--ninstances", 2)
    more = ("--log-dir", logs, "--log-file-prefix", "night")
    done = launched(*options, *more, script, 5, "--flag", verb=verb.split())
    assert done.returncode == 5
    assert f"[0] [{HERE[0]}] 1 5 --flag\n" in done.stdout
    assert f"[1] [{HERE[-1]}] 1 5 --flag\n" in done.stdout
    assert done.stdout.count("to the other stream\n") == 2
    assert done.stderr == "launch: instance 1 ended with exit code 5\n"
    files = {re.sub(r"\d{14}", "TIME", f.name): f.read_text() for f in logs.iterdir()}
    assert files == {
        f"night_TIME_instance_{i}_cores_{core}.log": f"[{core}] 1 5 --flag\nto the other stream\n"
        for i, core in enumerate((HERE[0], HERE[-1]))
    }


def test_one_instance_is_the_process_itself(script):
    line = command("--cores-list", HERE[-1], script, 6)
    started = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True)
    assert started.stdout.read() == f"[{HERE[-1]}] 1 6\n"
    assert started.wait(60) == 6


@needs_two
def test_all_well_is_exit_code_0_and_a_signal_is_128_and_more(script):
    assert launched("--ninstances", 2, script, 0).returncode == 0
    killed = launched("--ninstances", 2, "--no-python", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 128 + signal.SIGKILL


def test_the_commands_without_running_them(script):
    done = launched("--dry-run", "--cores-list", HERE[0], script, "a b")
    assert done.returncode == 0
    assert done.stdout == (
        f"instance 0: cores {HERE[0]}, memory of node 0: "
        f"OMP_NUM_THREADS=1 {sys.executable} -u {script} 'a b'\n"
    )


def test_what_is_wrong_is_a_line_and_exit_code_2(tmp_path):
    done = launched("--cores-list", 9999, tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "9999" in done.stderr


def test_where_no_instance_can_be_started_nothing_stays(tmp_path):
    program = tmp_path / "program"
    program.write_text("neither a script nor a program")
    program.chmod(0o755)
    logs = tmp_path / "logs"
    done = launched("--log-dir", logs, "--no-python", program)
    assert done.returncode == 2
    assert "Exec format error" in done.stderr
    assert not list(logs.iterdir())


def test_old_imports_are_found_under_the_old_name(tmp_path):
    file = tmp_path / "old.py"
    file.write_text("import intel_extension_for_pytorch as ipex; print(ipex.cpu.runtime.CPUPool())")
    run = "from ipex_inductor.cpu.launch import ipexrun; ipexrun()"
    done = launched("--cores-list", HERE[0], file, verb=("-c", run))
    assert done.stdout == f"CPUPool([{HERE[0]}])\n", done.stderr


@pytest.fixture
def waiting(tmp_path):
    """Two instances that wait, each with a process of its own; all gone afterwards."""
    file = tmp_path / "wait.py"
    file.write_text(WAIT)
    pids = []

    def start(*arguments):
        logs = ("--log-dir", tmp_path / "logs")
        line = command("--ninstances", min(2, len(HERE)), *logs, file, tmp_path, *arguments)
        started = subprocess.Popen(
            line, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        pids.append(started.pid)
        wait_for(lambda: len(list(tmp_path.glob("*.started"))) == min(2, len(HERE)), 60)
        wait_for(lambda: all(f.read_text() for f in tmp_path.glob("*.started")), 60)
        for found in tmp_path.glob("*.started"):
            pids.extend((int(found.stem), int(found.read_text())))
        return started, pids[1:]

    yield start
    for pid in pids:
        if not ended(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_ctrl_c_asks_all_of_them_once_and_waits(waiting, tmp_path):
    started, below = waiting()
    started.send_signal(signal.SIGINT)
    assert started.wait(60) == 128 + signal.SIGINT
    wait_for(lambda: all(map(ended, below)), 30)
    assert len(list(tmp_path.glob("*.cleaned"))) == min(2, len(HERE))
    assert {f.read_text() for f in (tmp_path / "logs").iterdir()} == {"asked\n"}


def test_a_second_ends_those_that_do_not_hear(waiting):
    started, below = waiting("deaf")
    started.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        started.wait(1)
    started.send_signal(signal.SIGINT)
    assert started.wait(60) == 128 + signal.SIGINT
    wait_for(lambda: all(map(ended, below)), 30)


def test_a_launcher_that_is_killed_leaves_no_instance(waiting):
    started, below = waiting("deaf")
    started.kill()
    started.wait(60)
    wait_for(lambda: all(map(ended, below[::2])), 30)
