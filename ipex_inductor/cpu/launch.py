"""Instances of a program, each on cores of its own: the practical part of `ipexrun`.

`python -m ipex_inductor.launch [options] script.py [arguments]`, `ipex-inductor launch`, and by its
old name `ipexrun`, under which old imports of IPEX are found too. Imports no torch.
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

# Files that a memory allocator may be installed as, without its development package too.
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
    "dirty_decay_ms:-1,muzzy_decay_ms:-1"  # keeps all memory that was ever used
)
# glibc gives blocks above 32 MiB back at once, and the kernel clears them again at the next call.
GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
INTEL_OPENMP = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}

# Options of ipexrun that old command lines have. The first are read over, the others refused.
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
    """What is to be started: all of it known, nothing started."""

    instances: tuple[Instance, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The commands, as one would type them."""
        return "\n".join(f"instance {i.index}: {_line(i)}" for i in self.instances)


def main(arguments: Sequence[str] | None = None, as_ipex: bool = False) -> NoReturn:
    """Start what the command line asks for and exit with its code, that of the first that failed.

    `as_ipex`: as `--as-ipex`. What the command line has wrong is a line, and exit code 2.
    """
    try:
        asked = parser().parse_args(arguments)
        asked.as_ipex |= as_ipex
        made = plan(asked, os.environ, cores.machine(), cores.available())
        for note in made.notes:
            print(f"launch: {note}", file=sys.stderr, flush=True)
        raise SystemExit(_start(made, asked.dry_run))
    except IpexError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _start(made: Plan, dry_run: bool) -> int:
    if dry_run:
        print(made)
        return 0
    if len(made.instances) == 1 and made.instances[0].log is None:
        become(made.instances[0])
    return run(made.instances)


def ipexrun() -> NoReturn:
    """The command `ipexrun`."""
    main(as_ipex=True)


def parser() -> argparse.ArgumentParser:
    """The options; with dashes, and with underscores as older command lines have them."""
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
    """What `asked` comes to. Raises `OptionError` and `CoresError`.

    `here`: the environment, of which nothing is overwritten. `machine`: all cores; `available`: the
    numbers of those that this process may use.
    """
    notes = _Notes()
    for name, why in {**WITHOUT_EFFECT, **FLAGS_WITHOUT_EFFECT}.items():
        if getattr(asked, name[2:].replace("-", "_")):
            notes.add(f"{name} has no effect: {why}")
    pools = layout(asked, _pool(asked, machine, available), notes)
    chosen = cores.parse(asked.instance_idx) or range(len(pools))
    if max(chosen) >= len(pools):
        there = f"indices of the {len(pools)} instances"
        raise OptionError(there, asked.instance_idx, "The first is 0.")
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
    """The cores of each instance. Raises `CoresError` where there are too few."""
    notes = notes or _Notes()
    count, size = asked.ninstances, asked.ncores_per_instance
    if asked.latency_mode and asked.throughput_mode:
        raise OptionError("one mode", "--latency-mode and --throughput-mode", "Leave one out.")
    if min(count, size) < 0:
        came = f"--ninstances {count} --ncores-per-instance {size}"
        raise OptionError("numbers from 0", came, "0 leaves it to the launcher.")
    if (asked.latency_mode or asked.throughput_mode) and (count or size):
        notes.add("--ninstances and --ncores-per-instance have no effect: a mode says them")
    nodes = sorted({core.node for core in pool})
    groups = [[core for core in pool if core.node == node] for node in nodes]
    if asked.throughput_mode:
        return groups
    if asked.latency_mode:
        count, size = 0, min(LATENCY, len(pool))
    if not asked.skip_cross_node_cores or (count and size):
        return _shared(pool, count, size)
    each = -(-count // len(groups))  # instances of a node, where their number is given
    return [part for group in groups for part in _shared(group, each, size)][: count or None]


def _shared(pool: Sequence[Core], count: int, size: int) -> list[list[Core]]:
    """`count` runs of `size` cores; 0 stands for as many as there are, of both for one instance."""
    count = count or (len(pool) // size if size else 1)
    size = size or len(pool) // count
    if not size or not count or count * size > len(pool):
        wanted = f"{count} instances of {size or 1} cores"
        todo = "Ask for fewer; --use-logical-cores counts all threads of a core."
        raise CoresError(f"at most {len(pool)} cores", wanted, todo)
    return [list(pool[i * size : (i + 1) * size]) for i in range(count)]


def _pool(
    asked: argparse.Namespace, machine: Sequence[Core], available: frozenset[int]
) -> list[Core]:
    """The cores to share out, neighbours beside each other."""
    known = {core.number: core for core in machine if core.number in available}
    if asked.cores_list:
        numbers = cores.parse(asked.cores_list)
        if lacking := set(numbers) - known.keys():
            expected = f"cores this process may use ({cores.text(known)})"
            raise CoresError(expected, f"--cores-list {cores.text(lacking)}", "Name some of them.")
        pool = [known[number] for number in dict.fromkeys(numbers)]
    else:
        nodes = cores.parse(asked.nodes_list) or sorted({core.node for core in known.values()})
        if lacking := set(nodes) - {core.node for core in known.values()}:
            expected = f"nodes ({cores.text({core.node for core in known.values()})})"
            raise CoresError(expected, f"--nodes-list {cores.text(lacking)}", "Name some of them.")
        pool = [core for core in known.values() if core.node in nodes]
        if not asked.use_logical_cores:
            seen: dict[tuple[int, int], Core] = {}
            for core in pool:
                seen.setdefault(core.physical, core)
            pool = list(seen.values())
    return sorted(pool, key=lambda core: (core.node, core.physical, core.number))


def _command(asked: argparse.Namespace) -> tuple[str, ...]:
    if asked.no_python:
        if shutil.which(asked.program) is None:
            raise OptionError("a program that can be run", asked.program, "Is it on PATH?")
        return (asked.program, *asked.arguments)
    if not asked.module and not Path(asked.program).is_file():
        todo = "-m runs a module, --no-python what is none of Python's."
        raise OptionError("a script", asked.program, todo)
    how = ("-m", "ipex_inductor.as_ipex") if asked.as_ipex else ()
    module = ("-m",) if asked.module else ()
    return (sys.executable, "-u", *how, *module, asked.program, *asked.arguments)


def _settings(
    asked: argparse.Namespace, size: int, here: Mapping[str, str], notes: "_Notes"
) -> dict[str, str]:
    """What is added to the environment of an instance; what is set there already stays."""
    preload, wanted = [], {"OMP_NUM_THREADS": str(size)}
    allocator = _allocator(asked.memory_allocator, notes)
    if allocator:
        preload.append(allocator)
        if "jemalloc" in Path(allocator).name:
            wanted["MALLOC_CONF"] = JEMALLOC_BENCHMARK if asked.benchmark else JEMALLOC
    elif asked.memory_allocator == "auto":
        wanted |= GLIBC
    if asked.omp_runtime == "intel":
        preload.append(_found("intel", ("libiomp5.so",)) or _missing("intel", "libiomp5.so"))
        wanted |= INTEL_OPENMP
    for name in [name for name in wanted if here.get(name, wanted[name]) != wanted[name]]:
        notes.add(f"{name}={here[name]} is set and stays; it would be {wanted.pop(name)}")
    loaded = list(filter(None, here.get("LD_PRELOAD", "").replace(" ", ":").split(":")))
    names = {Path(library).name for library in loaded}
    added = [library for library in preload if Path(library).name not in names]
    return wanted | ({"LD_PRELOAD": ":".join([*added, *loaded])} if added else {})


def _allocator(asked: str, notes: "_Notes") -> str | None:
    if asked == "default":
        return None
    if asked != "auto":
        return _found(asked, ALLOCATORS[asked]) or _missing(asked, ALLOCATORS[asked][0])
    for name, patterns in ALLOCATORS.items():
        if found := _found(name, patterns):
            return found
    names = " nor ".join(ALLOCATORS)
    kept = "the C library's, which keeps large blocks"
    notes.add(f"neither {names} is installed: memory is {kept} ({PACKAGES['tcmalloc']})")
    return None


def _found(name: str, patterns: Sequence[str]) -> str | None:
    """The first library of that name where libraries are."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    system = ("/usr/local/lib", "/usr/local/lib64", f"/usr/lib/{multiarch}", "/usr/lib64")
    folders = (f"{sys.prefix}/lib", str(Path.home() / ".local/lib"), *system, "/usr/lib")
    files = (f for d in folders for p in patterns for f in sorted(Path(d).glob(p)) if f.is_file())
    return next(map(str, files), None)


def _missing(name: str, file: str) -> NoReturn:
    raise OptionError(f"{name} ({file})", "no such library", f"Install it: {PACKAGES[name]}.")


def _line(instance: Instance) -> str:
    settings = [f"{name}={value}" for name, value in instance.settings.items()]
    nodes = cores.text(instance.nodes)
    on = f"cores {cores.text(instance.cores)}, memory of node {nodes}"
    log = f", log {instance.log}" if instance.log else ""
    return f"{on}{log}: {shlex.join([*settings, *instance.command])}"


@dataclass
class _Notes:
    """What the user should know, each once."""

    said: list[str] = field(default_factory=list)

    def add(self, note: str) -> None:
        if note not in self.said:
            self.said.append(note)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says of an option that is not carried why."""
        refused = [name for name in REFUSED if name in message.replace("_", "-")]
        if refused:
            message = f"{refused[0]} is not carried. {REFUSED[refused[0]]}"
        super().error(message)


if __name__ == "__main__":
    main()
