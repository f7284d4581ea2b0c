"""Measure on many machines: a Ray cluster whose workers hold one device each.

Ray places the workers and reports lost ones; their problems go to other workers. The results are
records, which the caller stores, so an interrupted run continues with the problems without any.
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
TRIES = 3  # attempts at one problem whose workers are lost


class Worker:
    """An actor on each device: one measuring process, reused for the next problem."""

    def __init__(self, command: Sequence[str]) -> None:
        self._child = Child(command)

    def tune(self, problem: bytes, seconds: float) -> tuple[bytes, str]:
        """Return a record and "", or b"" and the reason why there is none.

        Problem and record are passed as canonical JSON, so that both ends may have different
        versions.
        """
        try:
            return encode(self._child.tune(decode_problem(problem), seconds)), ""
        except Refused as refused:
            return b"", str(refused)


def measure_problems(
    problems: Sequence[Problem],
    budget: float,
    command: Sequence[str],
    *,
    gpus: int,
    cpus: int,
    address: str | None = None,
) -> Iterator[Tuned]:
    """Yield a record for each problem, or the reason why there is none, in order of completion.

    Args:
        problems: the problems to measure.
        budget: seconds for all of them.
        command: the command line that starts a measuring process.
        gpus: GPUs of one machine that each worker takes.
        cpus: cores that each worker takes if `gpus` is 0.
        address: the Ray cluster; None for the one of this process, or a new one on this machine.

    Raises:
        MissingPackageError: if Ray is not installed.
        ArgumentError: if no machine has enough GPUs or cores.
    """
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    try:
        yield from _spread(ray, deque(problems), time.monotonic() + budget, command, gpus, cpus)
    finally:
        if started:
            ray.shutdown()


def spread(
    jobs: Sequence[Job], work: Callable[[Job], Result], address: str | None = None
) -> Iterator[tuple[Job, Result | str]]:
    """Run `work` on each job, on one core of the cluster each; yield results as they finish.

    An exception of `work` is yielded as text. A job whose machine is lost runs on another one.
    Raises `MissingPackageError` if Ray is not installed.

    Args:
        jobs: the arguments of `work`.
        work: the function to run.
        address: the Ray cluster; None for the one of this process, or a new one on this machine.
    """
    ray = _ray()
    started = not ray.is_initialized()
    if started:
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
                lines = str(error.cause).strip().splitlines() or [""]
                yield job, f"{type(error.cause).__name__}: {lines[0]}"
            except ray.exceptions.RayError as error:
                yield job, f"the worker was lost {TRIES} times: {type(error).__name__}"
    finally:
        if started:
            ray.shutdown()


def _spread(
    ray: Any,
    waiting: deque[Problem],
    deadline: float,
    command: Sequence[str],
    gpus: int,
    cpus: int,
) -> Iterator[Tuned]:
    """Distribute the problems over workers and yield the results as they finish.

    Args:
        ray: the `ray` module.
        waiting: the problems, consumed from the left.
        deadline: the `time.monotonic` after which no problem is started.
        command: the command line that starts a measuring process.
        gpus: GPUs of each worker.
        cpus: cores of each worker if `gpus` is 0.
    """
    kind = ray.remote(num_gpus=gpus, num_cpus=0 if gpus else cpus)(Worker)
    idle = [kind.remote(command) for _ in range(min(_room(ray, gpus, cpus), len(waiting)))]
    working: dict[Any, tuple[Any, Problem]] = {}
    lost: Counter[bytes] = Counter()
    while waiting or working:
        while waiting and idle and (seconds := deadline - time.monotonic()) > 0:
            worker, problem = idle.pop(), waiting.popleft()
            working[worker.tune.remote(encode(problem), seconds)] = worker, problem
        if not working:
            yield from ((p, SPENT) for p in waiting)
            return
        (done, *_), _ = ray.wait(list(working), num_returns=1)
        worker, problem = working.pop(done)
        try:
            record, reason = ray.get(done)
        except ray.exceptions.RayError as error:
            # The machine may be gone with its worker: other workers go on, and without any, a new
            # worker waits until Ray can place it.
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
    """Return how many workers fit into the cluster, each on one machine.

    Raises `ArgumentError` if none fits.
    """
    name, size = ("GPU", gpus) if gpus else ("CPU", cpus)
    nodes = [node["Resources"].get(name, 0) for node in ray.nodes() if node["Alive"]]
    count = sum(int(amount // size) for amount in nodes)
    if not count:
        available = ", ".join(f"{amount:g}" for amount in nodes) or "no machine"
        raise ArgumentError(
            f"machines with {size} {name}s for Ray", available, "Add or resize nodes."
        )
    return count


def _ray() -> Any:
    """Return the `ray` module; raise `MissingPackageError` if it is not installed."""
    if find_spec("ray") is None:
        advice = 'Run: pip install "ipex-inductor[ray]"'
        raise MissingPackageError("ray, for --engine ray", "no such package", advice)
    import ray

    return ray
