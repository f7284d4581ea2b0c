"""Ops of ours on the GPU here: a problem by its line, and its calls held against fp64."""

import torch

from ipex_inductor.autotune import measure
from ipex_inductor.autotune.measure import Candidate
from ipex_inductor.lowerings.problem import settings, shapes
from ipex_inductor.lowerings.tune import compiling, tuner
from ipex_inductor.target import device


def problem_here(line):
    """That of the line, on this GPU as it is set."""
    known = str(device.current("cuda")), settings.settings_of("cuda")
    (problem,) = shapes.problems([line], *known)
    return problem


def verify(problem, calls):
    """Each through Inductor: no farther off than torch's own may be, and laid out as its result."""
    trial = tuner._trial(problem, torch.device("cuda"))
    for call in calls:
        run = compiling.compile_choice(problem, call.choice, trial.inputs)
        found = measure.verify_candidate(Candidate(call.choice, run), trial.judge, trial.inputs)
        assert isinstance(found, float), (call.choice, found.reason)
