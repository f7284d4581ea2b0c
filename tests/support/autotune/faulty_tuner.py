"""A tuner with choices among Inductor's that are wrong, or do harm: `python faulty_tuner.py`.

But for those that are named.
"""

import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch

from ipex_inductor import compat
from ipex_inductor.autotune import space
from ipex_inductor.autotune.record import Choice
from ipex_inductor.lowerings.tune import compiling, tuner
from ipex_inductor.lowerings.tune.compiling import Begun


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


class Later:
    """Does `harm` at its call number `call`."""

    def __init__(self, call, harm):
        self.left, self.harm = call, harm

    def __call__(self, right, inputs):
        self.left -= 1
        result = right(inputs)
        return self.harm(result) if self.left < 0 else result


def one_element_off(right, inputs):
    result = right(inputs)
    result.view(-1)[-1] += 0.01 * result.abs().max()
    return result


def everywhere_a_little(right, inputs):
    result = right(inputs)
    return result + 4e-7 * result.abs().max() * result.sign()


def writes(right, inputs):
    result = right(inputs)
    inputs[0].view(-1)[0] += 1
    return result


def hang(*_):
    time.sleep(3600)


def refuse(*_):
    raise RuntimeError("invalid configuration argument\nand so on, for pages")


def break_device(*_):
    raise torch.AcceleratorError("an illegal memory access was encountered", 700)


class Compiling:
    """Does `harm` as it compiles, and is right."""

    def __init__(self, harm):
        self.harm_compiling = harm

    def __call__(self, right, inputs):
        return right(inputs)


# What each does, and the words of the reason it is to be out for; in the order they are tried.
HARM = {
    "one element off": (one_element_off, "wrong by 0.0"),
    "everywhere a little": (everywhere_a_little, "on average where"),
    "nan": (lambda right, inputs: right(inputs) * float("nan"), "wrong by nan"),
    "zero": (lambda right, inputs: right(inputs) * 0, "wrong by 1"),
    "transposed": (lambda right, inputs: right(inputs).mT.contiguous().mT, "its stride is"),
    "half": (lambda right, inputs: right(inputs).half(), "its dtype is torch.float16"),
    "a row less": (lambda right, inputs: right(inputs)[1:], "its shape is"),
    "writes": (writes, "it writes its inputs"),
    "refuses": (refuse, "RuntimeError: invalid configuration argument"),
    "breaks the device": (break_device, "it ended with 1"),
    "crashes": (lambda *_: crash(), "it crashed with SIGSEGV"),
    "exits": (lambda *_: os._exit(7), "it ended with 7"),
    "hangs": (hang, "it hung: nothing happened for"),
    "refuses to compile": (Compiling(refuse), "it does not compile: RuntimeError: invalid config"),
    "crashes its compiler": (Compiling(crash), "it crashed with SIGSEGV"),
    "hangs its compiler": (Compiling(hang), "it hung: nothing happened for"),
    "crashes in the race": (Later(20, lambda _: crash()), "it crashed with SIGSEGV"),
    "wrong after the race": (Later(20, lambda result: result * 0), "wrong by 1"),
}
HANGS = [name for name in HARM if name.startswith("hangs")]
CHOICES = {name: Choice("library", f"planted.{name}") for name in HARM}
for _choice in CHOICES.values():
    space.register("library", _choice.name)


class Workers:
    """Compilers, each of which takes a moment for a choice; in company if there are several."""

    def __init__(self):
        self.pool = ProcessPoolExecutor(2)

    def compiled(self, harm):
        """Begins, and gives what waits for it."""
        if compat.compilers() == 1:
            harm()
            return int
        try:
            return self.pool.submit(harm).result
        except BrokenProcessPool:  # by whoever was there before
            self.pool = ProcessPoolExecutor(2)
            return self.pool.submit(harm).result


def moment():
    time.sleep(0.2)  # so that whoever crashes a compiler has company


def plant():
    offered, begun = compiling.list_candidates, compiling.start_choice
    workers = Workers()
    usual = []  # lowered once: that takes longer than all that is done to it

    def with_harm(problem, inputs):
        graph, real = offered(problem, inputs)
        usual[:] = [graph.run]
        planted = (choice for name, choice in CHOICES.items() if name not in sys.argv[1:])
        return graph, replace(real, choices=(*planted, *real.choices))

    def harmful(problem, choice, inputs):
        name = choice.name.removeprefix("planted.")
        if name not in HARM:
            return begun(problem, choice, inputs)
        harm = HARM[name][0]
        wait = workers.compiled(getattr(harm, "harm_compiling", moment))
        return Begun(lambda given: harm(usual[0], given), wait, ())

    compiling.list_candidates, compiling.start_choice = with_harm, harmful


if __name__ == "__main__":
    plant()
    tuner.main()
