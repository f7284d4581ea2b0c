"""Processes that compile a model by one backend or the other, and say what was done for it."""

import json
import os
import subprocess
import sys

RUN = """
import gc, json, logging, os, sys, torch
from torch import nn
from torch._dynamo.utils import counters
told = json.loads(sys.argv[1])
launched, said, unpickled, collecting = [], [], [], []

def watch(event, args):
    if event == "subprocess.Popen":
        launched.append([str(a) for a in args[1]])
    if event == "pickle.find_class":
        unpickled.append(".".join(args))
        collecting.append(gc.isenabled())
sys.addaudithook(watch)

class Keep(logging.Handler):
    def emit(self, record):
        said.append([record.levelname, record.getMessage()])
log = logging.getLogger("ipex_inductor")
log.addHandler(Keep())
log.setLevel(logging.INFO)

class Model(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.linear, self.shift = nn.Linear(16, 16), shift
    def forward(self, x):
        y = (self.linear(x).sin() + 1.5).softmax(-1)
        return y if self.shift is None else (y @ y.t()).neg() + self.shift

torch.manual_seed(0)
x = torch.randn(4, 16)
outcomes, env = [], {}
for step in told["steps"]:
    torch.compiler.reset()
    model = Model(step.get("shift"))
    fn = torch.compile(model, backend=step["backend"], options=step.get("options"))
    grad = step.get("grad", False)
    with torch.set_grad_enabled(grad):
        y = fn(x)
        torch.testing.assert_close(y, model(x))
    if grad:
        y.square().sum().backward()
        found = model.linear.weight.grad.clone()
        model.linear.weight.grad = None
        model(x).square().sum().backward()
        torch.testing.assert_close(found, model.linear.weight.grad)
    from ipex_inductor.reporting import decisions
    outcomes.append([(e.subject, e.reason) for r in decisions.reports() for e in r.events
                     if e.kind == "cache"])
    folders = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
    env[step["backend"]] = [os.environ.get(name) for name in folders]
inductor, aot = counters["inductor"], counters["aot_autograd"]
print(json.dumps({
    "aot": [aot["autograd_cache_" + k] for k in ("hit", "miss")],
    "fx": [inductor["fxgraph_cache_" + k] for k in ("hit", "miss")],
    "built": [c for c in launched if any(a.endswith((".cpp", ".hpp", ".h")) for a in c)],
    "tried": [c for c in launched if "LoadLibrary" in " ".join(c)],
    "unpickled": unpickled, "collecting": collecting, "collects": gc.isenabled(),
    "outcomes": outcomes, "said": said, "env": env,
}))
"""

IPEX, TRAINED, INDUCTOR = (
    {"backend": "ipex", "options": {"strict": True}},
    {"backend": "ipex", "options": {"strict": True}, "grad": True},
    {"backend": "inductor"},
)


def start(base, *steps, **env):
    """A process that compiles; torch's usual folder is in `base`/tmp, our home is `base`/home."""
    (base / "tmp").mkdir(parents=True, exist_ok=True)
    ours = {"TMPDIR": str(base / "tmp"), "IPEX_HOME": str(base / "home")}
    caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    unset = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    inherited = {k: v for k, v in os.environ.items() if k not in unset}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps({"steps": steps})],
        env=inherited | ours | caches | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(base, *steps, **env):
    process = start(base, *steps, **env)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def outcome(done, step=0):
    ((subject, _),) = done["outcomes"][step]
    return subject
