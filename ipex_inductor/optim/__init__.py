"""Optimizers: master weights for low-precision training, fused steps, Lamb and Lars.

Weight averaging: code that reads parameters, as `torch.optim.swa_utils.AveragedModel` does, sees
low precision, which loses small differences. State dicts hold fp32, so average an fp32 twin:
`twin = copy.deepcopy(model); averaged = AveragedModel(twin)` before `optimize`, and after a step
`twin.load_state_dict(model.state_dict()); averaged.update_parameters(twin)`.
"""

from ipex_inductor.optim.fused import FusedStep, fuse_step
from ipex_inductor.optim.masters import attach_master_weights, cast_for_inference
from ipex_inductor.optim.optimizers._lamb import Lamb
from ipex_inductor.optim.optimizers._lars import Lars, create_optimizer_lars
from ipex_inductor.optim.scaler import GradScaler
from ipex_inductor.optim.tables import FUSED_OPTIMIZERS, SPLIT_OPTIMIZERS

__all__ = [
    "FUSED_OPTIMIZERS",
    "SPLIT_OPTIMIZERS",
    "FusedStep",
    "GradScaler",
    "Lamb",
    "Lars",
    "attach_master_weights",
    "cast_for_inference",
    "create_optimizer_lars",
    "fuse_step",
]
