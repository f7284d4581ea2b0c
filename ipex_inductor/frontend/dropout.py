"""Replacement of dropouts by `nn.Identity`, which is faster in inference."""

from torch import nn

from ipex_inductor.frontend.flow import has_hooks
from ipex_inductor.frontend.folding import replace_module
from ipex_inductor.frontend.notes import Notes

KNOB = "replace_dropout_with_identity"
DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def replace_dropout(model: nn.Module, notes: Notes) -> None:
    """Replace each dropout below `model`; its probability stays readable as `.p`."""
    for name, module in list(model.named_modules()):
        if type(module) not in DROPOUTS or module is model:
            continue
        if module.training:
            notes.record_rejected(KNOB, "it is in training mode", name)
        elif has_hooks(module):
            notes.record_rejected(KNOB, "it has hooks", name)
        else:
            identity = nn.Identity().eval()
            identity.p = module.p  # code of users' reads it
            replace_module(model, module, identity)
            notes.record_applied(KNOB, where=name)
