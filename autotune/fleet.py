"""Measuring on many machines: a Ray cluster whose workers hold one device each.

Ray places the workers and says which are lost, whose problems go to others. What comes back are
records, which the caller keeps, so that a run that ended early goes on with what has none.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

from ipex_inductor.autotune.child import SPENT, Child, Refused, Tuned
from ipex_inductor.autotune.record import Problem, decode, decode_problem, encode
from ipex_inductor.errors import ArgumentError, MissingPackageError

Job = TypeVar("Job")
Result = TypeVar("Result")
TRIES = 3  # of one problem that workers are lost with


class Worker:
    """What runs on each device: a measuring process, kept for the next problem."""

    def __init__(self, command: Sequence[str]) -> None:
        self._child = Child(command)

    def tune(self, problem: bytes, seconds: float) -> tuple[bytes, str]:
        """A record, or the reason why there is none; as bytes, whatever versions both ends have."""
        try:
            return encode(self._child.tune(decode_problem(problem), seconds)), ""
        except Refused as refused:
            return b"", str(refused)


def measured(
    problems: Sequence[Problem],
    budget: float,
    command: Sequence[str],
    *,
    gpus: int,
    cpus: int,
    address: str | None = None,
) -> Iterator[Tuned]:
    """A record for each problem, or a reason, in the order they are done.

    A worker takes so many GPUs, or cores where that is 0, of a machine of the cluster at `address`
    (None: the one this process belongs to, or one of this machine alone). Raises
    `MissingPackageError` without Ray, `ArgumentError` if no machine has that much.
    """
    ray = _ray()
    begun = not ray.is_initialized()
    if begun:
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    try:
        yield from _spread(ray, deque(problems), time.monotonic() + budget, command, gpus, cpus)
    finally:
        if begun:
            ray.shutdown()


def spread(
    jobs: Sequence[Job], work: Callable[[Job], Result], address: str | None = None
) -> Iterator[tuple[Job, Result | str]]:
    """`work` of each job, on a core of the cluster each, in the order they are done; or why not.

    `address` and what is raised are as for `measured`. A job whose machine is lost goes to another.
    """
    ray = _ray()
    begun = not ray.is_initialized()
    if begun:
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    try:
        task = ray.remote(num_cpus=1, max_retries=TRIES - 1)(work)
        waiting = {task.remote(job): job for job in jobs}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            job = waiting.pop(done)
            try:
                yield job, ray.get(done)
            except ray.exceptions.RayTaskError as error:
                said = str(error.cause).strip().splitlines() or [""]
                yield job, f"{type(error.cause).__name__}: {said[0]}"
            except ray.exceptions.RayError as error:
                yield job, f"the worker was lost {TRIES} times: {type(error).__name__}"
    finally:
        if begun:
            ray.shutdown()


def _spread(
    ray: Any,
    waiting: deque[Problem],
    deadline: float,
    command: Sequence[str],
    gpus: int,
    cpus: int,
) -> Iterator[Tuned]:
    kind = ray.remote(num_gpus=gpus, num_cpus=0 if gpus else cpus)(Worker)
    idle = [kind.remote(command) for _ in range(min(_room(ray, gpus, cpus), len(waiting)))]
    working: dict[Any, tuple[Any, Problem]] = {}
    lost: Counter[bytes] = Counter()
    while waiting or working:
        while waiting and idle and (left := deadline - time.monotonic()) > 0:
            worker, problem = idle.pop(), waiting.popleft()
            working[worker.tune.remote(encode(problem), left)] = worker, problem
        if not working:
            yield from ((p, SPENT) for p in waiting)
            return
        (done, *_), _ = ray.wait(list(working), num_returns=1)
        worker, problem = working.pop(done)
        try:
            record, reason = ray.get(done)
        except ray.exceptions.RayError as error:
            # Its place may be gone with its machine: the others go on, and if there are none, a
            # new one waits for a place.
            idle += [kind.remote(command)] if not (idle or working) else []
            lost[encode(problem)] += 1
            if lost[encode(problem)] < TRIES:
                waiting.append(problem)
            else:
                yield problem, f"the worker was lost {TRIES} times: {type(error).__name__}"
        else:
            idle.append(worker)
            yield problem, decode(record) if record else reason


def _room(ray: Any, gpus: int, cpus: int) -> int:
    """How many workers the cluster has room for; each must fit into one machine."""
    name, size = ("GPU", gpus) if gpus else ("CPU", cpus)
    nodes = [node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]]
    count = sum(int(have // size) for have in nodes)
    if not count:
        came = ", ".join(f"{have:g}" for have in nodes) or "no machine"
        raise ArgumentError(f"machines with {size} {name}s for Ray", came, "Add or resize nodes.")
    return count


def _ray() -> Any:
    if find_spec("ray") is None:
        todo = 'Run: pip install "ipex-inductor[ray]"'
        raise MissingPackageError("ray, for --engine ray", "no such package", todo)
    import ray

    return ray
