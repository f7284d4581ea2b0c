"""`ipex.llm.generation`: the names of IPEX's search loops, as calls of a model's `generate`.

transformers 5 has no loops of these signatures. Each function may be bound to a model.
"""

from typing import Any

from torch import Tensor


def hf_greedy_search(self: Any, input_ids: Tensor, **words: Any) -> Any:
    """Return what `self.generate` finds by the likeliest token each."""
    return self.generate(input_ids, **{"do_sample": False, "num_beams": 1, **words})


def hf_sample(self: Any, input_ids: Tensor, **words: Any) -> Any:
    """Return what `self.generate` draws."""
    return self.generate(input_ids, **{"do_sample": True, "num_beams": 1, **words})


def hf_beam_search(self: Any, input_ids: Tensor, num_beams: int = 4, **words: Any) -> Any:
    """Return what `self.generate` finds by beams."""
    return self.generate(input_ids, **{"do_sample": False, "num_beams": num_beams, **words})


def hf_beam_sample(self: Any, input_ids: Tensor, num_beams: int = 4, **words: Any) -> Any:
    """Return what `self.generate` draws by beams."""
    return self.generate(input_ids, **{"do_sample": True, "num_beams": num_beams, **words})
