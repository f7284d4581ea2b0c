"""Instances of a program, each pinned to its own cores: the practical part of `ipexrun`.

`python -m ipex_inductor.launch [options] script.py [arguments]`, `ipex-inductor launch`, and by its
old name `ipexrun`, which makes old imports of IPEX work too. Imports no torch.
"""

import argparse
import os
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ipex_inductor.cpu import cores
from ipex_inductor.cpu.cores import Core
from ipex_inductor.cpu.instances import Instance, become, run
from ipex_inductor.errors import CoresError, IpexError, OptionError

LATENCY = 4  # cores of an instance in latency mode, as ipexrun had it

# File names of memory allocators, also without their development packages.
ALLOCATORS = {
    "tcmalloc": ("libtcmalloc.so*", "libtcmalloc_minimal.so*"),
    "jemalloc": ("libjemalloc.so*",),
}
PACKAGES = {
    "tcmalloc": "apt-get install libgoogle-perftools4, or conda install gperftools",
    "jemalloc": "apt-get install libjemalloc2, or conda install jemalloc",
    "intel": "pip install intel-openmp",
}
JEMALLOC = "oversize_threshold:1,background_thread:true,metadata_thp:auto"
JEMALLOC_BENCHMARK = (
    "oversize_threshold:1,background_thread:false,metadata_thp:always,"
    "dirty_decay_ms:-1,muzzy_decay_ms:-1"  # keeps all used memory
)
# glibc returns blocks above 32 MiB at once, and the kernel clears them again at the next call.
GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
INTEL_OPENMP = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}

# Options of ipexrun in old command lines: the first two tables are ignored, the last is refused.
WITHOUT_EFFECT = {
    "--multi-task-manager": "neither numactl nor taskset is needed",
    "--strategy": "instances are on neighbouring cores",
}
FLAGS_WITHOUT_EFFECT = {
    "--bind-numa-node": "memory is on the cores' own NUMA nodes anyway",
    "--use-e-cores": "a Xeon has one kind of cores; name others with --cores-list",
}
REFUSED = {
    "--auto-ipex": "Call ipex_inductor.optimize, or torch.compile(model, backend='ipex').",
    "--dtype": "Give optimize(dtype=...).",
    "--nnodes": "torchrun starts the processes of distributed training.",
    "--nprocs-per-node": "torchrun starts the processes of distributed training.",
    "--hostfile": "torchrun starts the processes of distributed training.",
    "--ccl-worker-count": "torchrun starts the processes of distributed training.",
    "--master-addr": "torchrun starts the processes of distributed training.",
}


@dataclass(frozen=True)
class Plan:
    """Instances to start, fully resolved, with notes for the user; nothing is started yet."""

    instances: tuple[Instance, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the commands, as a user would type them."""
        return "\n".join(f"instance {i.index}: {_line(i)}" for i in self.instances)


def main(arguments: Sequence[str] | None = None, as_ipex: bool = False) -> NoReturn:
    """Start the instances of the command line and exit with the code of the first that failed.

    `as_ipex` has the effect of `--as-ipex`. An error in the command line is printed as one line,
    with exit code 2.
    """
    try:
        options = parser().parse_args(arguments)
        options.as_ipex |= as_ipex
        launch_plan = plan(options, os.environ, cores.machine(), cores.available())
        for note in launch_plan.notes:
            print(f"launch: {note}", file=sys.stderr, flush=True)
        raise SystemExit(_start(launch_plan, options.dry_run))
    except IpexError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _start(launch_plan: Plan, dry_run: bool) -> int:
    if dry_run:
        print(launch_plan)
        return 0
    if len(launch_plan.instances) == 1 and launch_plan.instances[0].log is None:
        become(launch_plan.instances[0])
    return run(launch_plan.instances)


def ipexrun() -> NoReturn:
    """Run the command `ipexrun`."""
    main(as_ipex=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options, with dashes or, as in older command lines, underscores."""
    options = _Parser(
        prog="ipex-inductor launch",
        description="Start a program in one or more instances, each pinned to cores of its own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )

    def option(name: str, **kwargs: Any) -> None:
        older = "--" + name[2:].replace("-", "_")
        options.add_argument(*dict.fromkeys((name, older)), **kwargs)

    def flag(name: str, text: str) -> None:
        option(name, action="store_true", help=text)

    number = {"type": int, "default": 0, "metavar": "N"}
    listed = {"default": "", "metavar": "LIST"}
    option("--ninstances", help="how many instances; 0: as many as the cores give", **number)
    option("--ncores-per-instance", help="cores of each; 0: shared out evenly", **number)
    option("--instance-idx", help="start only these of the instances", **listed)
    option("--nodes-list", help='NUMA nodes to use, as in "0-1"', **listed)
    option("--cores-list", help='cores to use, as in "0-3,8"', **listed)
    flag("--use-logical-cores", "use all threads of a core, not only the first")
    flag("--skip-cross-node-cores", "no instance has cores of two NUMA nodes")
    flag("--latency-mode", f"{LATENCY} cores an instance")
    flag("--throughput-mode", "an instance a NUMA node")
    option(
        "--memory-allocator",
        choices=("auto", "default", *ALLOCATORS),
        default="auto",
        help="preloaded; auto: the first that is installed",
    )
    flag("--benchmark", "jemalloc never gives memory back")
    option(
        "--omp-runtime",
        choices=("auto", "default", "intel"),
        default="auto",
        help="intel: libiomp5 preloaded; auto: torch's own",
    )
    option("--log-dir", default="", metavar="DIR", help="a log file an instance, in this folder")
    option("--log-file-prefix", default="run", metavar="TEXT", help="what their names begin with")
    flag("--dry-run", "print the commands and start nothing")
    flag("--as-ipex", "imports of intel_extension_for_pytorch find this package")
    options.add_argument("-m", "--module", action="store_true", help="the program is a module")
    flag("--no-python", "the program is none of Python's")
    for name in WITHOUT_EFFECT:
        option(name, help=argparse.SUPPRESS)
    for name in FLAGS_WITHOUT_EFFECT:
        option(name, action="store_true", help=argparse.SUPPRESS)
    options.add_argument("program")
    options.add_argument("arguments", nargs=argparse.REMAINDER)
    return options


def plan(
    asked: argparse.Namespace,
    here: Mapping[str, str],
    machine: Sequence[Core],
    available: frozenset[int],
) -> Plan:
    """Return the plan for the options `asked`; raise `OptionError` or `CoresError`.

    Args:
        asked: the parsed command line.
        here: the environment; its variables are not overwritten.
        machine: all cores.
        available: the numbers of the cores that this process may use.
    """
    notes = _Notes()
    for name, why in {**WITHOUT_EFFECT, **FLAGS_WITHOUT_EFFECT}.items():
        if getattr(asked, name[2:].replace("-", "_")):
            notes.add(f"{name} has no effect: {why}")
    pools = layout(asked, _pool(asked, machine, available), notes)
    chosen = cores.parse(asked.instance_idx) or range(len(pools))
    if max(chosen) >= len(pools):
        expected = f"indices of the {len(pools)} instances"
        raise OptionError(expected, asked.instance_idx, "The first is 0.")
    command = _command(asked)
    stamp = time.strftime("%Y%m%d%H%M%S")
    instances = []
    for index in sorted(set(chosen)):
        numbers = tuple(core.number for core in pools[index])
        log = None
        if asked.log_dir:
            on = cores.text(numbers).replace(",", "_")
            name = f"{asked.log_file_prefix}_{stamp}_instance_{index}_cores_{on}.log"
            log = Path(asked.log_dir, name)
        settings = _settings(asked, len(numbers), here, notes)
        nodes = tuple(sorted({core.node for core in pools[index]}))
        instances.append(Instance(index, command, numbers, nodes, settings, log))
    return Plan(tuple(instances), tuple(notes.said))


def layout(
    asked: argparse.Namespace, pool: Sequence[Core], notes: "_Notes | None" = None
) -> list[list[Core]]:
    """Return the cores of each instance; raise `CoresError` if there are too few."""
    notes = notes or _Notes()
    count, size = asked.ninstances, asked.ncores_per_instance
    if asked.latency_mode and asked.throughput_mode:
        raise OptionError("one mode", "--latency-mode and --throughput-mode", "Leave one out.")
    if min(count, size) < 0:
        actual = f"--ninstances {count} --ncores-per-instance {size}"
        raise OptionError("numbers from 0", actual, "0 leaves it to the launcher.")
    if (asked.latency_mode or asked.throughput_mode) and (count or size):
        notes.add("--ninstances and --ncores-per-instance have no effect: a mode says them")
    nodes = sorted({core.node for core in pool})
    groups = [[core for core in pool if core.node == node] for node in nodes]
    if asked.throughput_mode:
        return groups
    if asked.latency_mode:
        count, size = 0, min(LATENCY, len(pool))
    if not asked.skip_cross_node_cores or (count and size):
        return _share_cores(pool, count, size)
    instances_per_node = -(
        -count // len(groups)
    )  # instances of a node, where their number is given
    return [part for group in groups for part in _share_cores(group, instances_per_node, size)][
        : count or None
    ]


def _share_cores(pool: Sequence[Core], count: int, size: int) -> list[list[Core]]:
    """Return `count` runs of `size` cores; 0 stands for as many as fit.

    If both are 0, there is one instance with all cores.
    """
    count = count or (len(pool) // size if size else 1)
    size = size or len(pool) // count
    if not size or not count or count * size > len(pool):
        request = f"{count} instances of {size or 1} cores"
        advice = "Ask for fewer; --use-logical-cores counts all threads of a core."
        raise CoresError(f"at most {len(pool)} cores", request, advice)
    return [list(pool[i * size : (i + 1) * size]) for i in range(count)]


def _pool(
    options: argparse.Namespace, machine: Sequence[Core], available: frozenset[int]
) -> list[Core]:
    """Return the cores to share out, sorted so that neighbors are adjacent."""
    usable_cores = {core.number: core for core in machine if core.number in available}
    if options.cores_list:
        numbers = cores.parse(options.cores_list)
        if lacking := set(numbers) - usable_cores.keys():
            expected = f"cores this process may use ({cores.text(usable_cores)})"
            raise CoresError(expected, f"--cores-list {cores.text(lacking)}", "Name some of them.")
        pool = [usable_cores[number] for number in dict.fromkeys(numbers)]
    else:
        nodes = cores.parse(options.nodes_list) or sorted(
            {core.node for core in usable_cores.values()}
        )
        if lacking := set(nodes) - {core.node for core in usable_cores.values()}:
            expected = f"nodes ({cores.text({core.node for core in usable_cores.values()})})"
            raise CoresError(expected, f"--nodes-list {cores.text(lacking)}", "Name some of them.")
        pool = [core for core in usable_cores.values() if core.node in nodes]
        if not options.use_logical_cores:
            first_threads: dict[tuple[int, int], Core] = {}
            for core in pool:
                first_threads.setdefault(core.physical, core)
            pool = list(first_threads.values())
    return sorted(pool, key=lambda core: (core.node, core.physical, core.number))


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    if options.no_python:
        if shutil.which(options.program) is None:
            raise OptionError("a program that can be run", options.program, "Is it on PATH?")
        return (options.program, *options.arguments)
    if not options.module and not Path(options.program).is_file():
        advice = "-m runs a module, --no-python what is none of Python's."
        raise OptionError("a script", options.program, advice)
    how = ("-m", "ipex_inductor.as_ipex") if options.as_ipex else ()
    module = ("-m",) if options.module else ()
    return (sys.executable, "-u", *how, *module, options.program, *options.arguments)


def _settings(
    options: argparse.Namespace, size: int, environment: Mapping[str, str], notes: "_Notes"
) -> dict[str, str]:
    """Return the variables to add for an instance; existing values are kept."""
    preload, variables = [], {"OMP_NUM_THREADS": str(size)}
    allocator = _allocator(options.memory_allocator, notes)
    if allocator:
        preload.append(allocator)
        if "jemalloc" in Path(allocator).name:
            variables["MALLOC_CONF"] = JEMALLOC_BENCHMARK if options.benchmark else JEMALLOC
    elif options.memory_allocator == "auto":
        variables |= GLIBC
    if options.omp_runtime == "intel":
        preload.append(
            _find_library("intel", ("libiomp5.so",)) or _raise_missing("intel", "libiomp5.so")
        )
        variables |= INTEL_OPENMP
    for name in [
        name for name in variables if environment.get(name, variables[name]) != variables[name]
    ]:
        notes.add(f"{name}={environment[name]} is set and stays; it would be {variables.pop(name)}")
    loaded = list(filter(None, environment.get("LD_PRELOAD", "").replace(" ", ":").split(":")))
    names = {Path(library).name for library in loaded}
    added = [library for library in preload if Path(library).name not in names]
    return variables | ({"LD_PRELOAD": ":".join([*added, *loaded])} if added else {})


def _allocator(choice: str, notes: "_Notes") -> str | None:
    """Return the library of the chosen allocator, None for the C library's."""
    if choice == "default":
        return None
    if choice != "auto":
        return _find_library(choice, ALLOCATORS[choice]) or _raise_missing(
            choice, ALLOCATORS[choice][0]
        )
    for name, patterns in ALLOCATORS.items():
        if library := _find_library(name, patterns):
            return library
    names = " nor ".join(ALLOCATORS)
    source = "the C library's, which keeps large blocks"
    notes.add(f"neither {names} is installed: memory is {source} ({PACKAGES['tcmalloc']})")
    return None


def _find_library(name: str, patterns: Sequence[str]) -> str | None:
    """Return the first file that matches in the folders of libraries, None for none."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    system = ("/usr/local/lib", "/usr/local/lib64", f"/usr/lib/{multiarch}", "/usr/lib64")
    folders = (f"{sys.prefix}/lib", str(Path.home() / ".local/lib"), *system, "/usr/lib")
    files = (f for d in folders for p in patterns for f in sorted(Path(d).glob(p)) if f.is_file())
    return next(map(str, files), None)


def _raise_missing(name: str, file: str) -> NoReturn:
    raise OptionError(f"{name} ({file})", "no such library", f"Install it: {PACKAGES[name]}.")


def _line(instance: Instance) -> str:
    settings = [f"{name}={value}" for name, value in instance.settings.items()]
    nodes = cores.text(instance.nodes)
    on = f"cores {cores.text(instance.cores)}, memory of node {nodes}"
    log = f", log {instance.log}" if instance.log else ""
    return f"{on}{log}: {shlex.join([*settings, *instance.command])}"


@dataclass
class _Notes:
    """Notes for the user, without repetition."""

    said: list[str] = field(default_factory=list)

    def add(self, note: str) -> None:
        if note not in self.said:
            self.said.append(note)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Explain an option that is not supported, then fail as argparse does."""
        refused = [name for name in REFUSED if name in message.replace("_", "-")]
        if refused:
            message = f"{refused[0]} is not carried. {REFUSED[refused[0]]}"
        super().error(message)


if __name__ == "__main__":
    main()
