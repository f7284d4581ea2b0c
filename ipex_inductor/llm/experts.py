"""A gated MLP of several experts, of which a router picks a few for each token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.errors import ArgumentError

Route = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Routing:
    """Settings of the choice of experts.

    Args:
        topk_group: number of groups that experts are picked from.
        num_expert_group: number of groups of experts.
        custom_routing_function: returns weights and experts, [tokens, top_k] each, for
            (hidden states, logits, top_k, renormalize). Other arguments have no effect beside it.
        scoring_func: "softmax" or "sigmoid", which turns logits into scores.
        e_score_correction_bias: [experts], added to scores for the choice alone.
    """

    topk_group: int | None = None
    num_expert_group: int | None = None
    custom_routing_function: Route | None = None
    scoring_func: str = "softmax"
    e_score_correction_bias: Tensor | None = None

    def pick(
        self, hidden: Tensor, logits: Tensor, top_k: int, renormalize: bool, grouped: bool
    ) -> tuple[Tensor, Tensor]:
        """Return weights and indices of the experts of each token, [tokens, top_k] each.

        Args:
            hidden: [tokens, width], for a routing function of the caller.
            logits: [tokens, experts].
            top_k: experts of a token.
            renormalize: divide the weights of a token by their sum.
            grouped: pick `topk_group` groups first, then experts inside of them.

        Raises:
            ArgumentError: for an unknown scoring function, or groups that do not go together.
        """
        if self.custom_routing_function is not None:
            return self.custom_routing_function(hidden, logits, top_k, renormalize)
        if self.scoring_func not in SCORES:
            came = f"scoring_func={self.scoring_func!r}"
            raise ArgumentError(f"scoring_func of {', '.join(SCORES)}", came, "Pass one of them.")
        scores = SCORES[self.scoring_func](logits.float())
        bias = self.e_score_correction_bias
        ranks = scores if bias is None else scores + bias.float()
        if grouped:
            ranks = self._hide_groups(ranks)
        chosen = ranks.topk(top_k, -1).indices
        weights = scores.gather(-1, chosen)
        return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), chosen

    def _hide_groups(self, ranks: Tensor) -> Tensor:
        """Return `ranks` with all but the best groups at minus infinity.

        A group ranks by its best expert, with a correction bias by the sum of its best two.

        Raises:
            ArgumentError: for numbers of groups that do not go together.
        """
        groups, best = self.num_expert_group, self.topk_group
        experts = ranks.shape[-1]
        if not groups or not best or experts % groups or best > groups:
            raise ArgumentError(
                f"num_expert_group that divides {experts} experts, and topk_group up to it",
                f"num_expert_group={groups}, topk_group={best}",
                "Pass both, or use_grouped_topk=False.",
            )
        grouped = ranks.view(len(ranks), groups, -1)
        count = 1 if self.e_score_correction_bias is None else min(2, experts // groups)
        chosen = grouped.topk(count, -1).values.sum(-1).topk(best, -1).indices
        hidden = torch.ones(ranks.shape[0], groups, dtype=torch.bool, device=ranks.device)
        hidden.scatter_(1, chosen, value=False)
        return grouped.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(-2)


class GatedMLPMOE(nn.Module):
    """The sum of W2 (silu(W1 x) * W3 x) of each token's experts, by their weights.

    Args:
        W13: [experts, 2 * inner, width], W1 above W3; W1 alone if `W3` is given.
        W2: [experts, width, inner].
        W3: [experts, inner, width], None if `W13` holds it.
        use_prepack: accepted; compiled code packs weights by itself.

    Raises:
        ArgumentError: for shapes that do not go together.
    """

    def __init__(
        self, W13: Tensor, W2: Tensor, W3: Tensor | None = None, use_prepack: bool = True
    ) -> None:
        super().__init__()
        rows = W2.shape[2] * (2 if W3 is None else 1)
        shapes = {tuple(W13.shape), (len(W2), rows, W2.shape[1])}
        if W3 is not None:
            shapes.add(tuple(W3.shape))
        if len(shapes) > 1:
            third = "" if W3 is None else f", W3 {list(W3.shape)}"
            came = f"W13 {list(W13.shape)}, W2 {list(W2.shape)}{third}"
            expected = "W13 [experts, rows, width] and W2 [experts, width, inner]"
            raise ArgumentError(expected, came, "Rows are 2 * inner, or inner with W3.")
        self.W13, self.W2, self.W3 = W13, W2, W3

    def forward(
        self,
        hidden_states: Tensor,
        use_grouped_topk: bool,
        top_k: int,
        router_logits: Tensor,
        renormalize: bool,
        *routing: Any,
        **words: Any,
    ) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden_states: [..., width].
            use_grouped_topk: pick groups of experts first.
            top_k: experts of a token.
            router_logits: [..., experts].
            renormalize: divide the weights of a token by their sum.
            routing: fields of `Routing`, in its order.
            words: fields of `Routing` by their names.

        Raises:
            ArgumentError: for a routing that cannot be met.
        """
        x = hidden_states.flatten(0, -2)
        logits = router_logits.flatten(0, -2)
        method = Routing(*routing, **words)
        weights, chosen = method.pick(x, logits, top_k, renormalize, use_grouped_topk)
        return self._run_experts(x, weights, chosen).view_as(hidden_states)

    def _run_experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sort tokens by their experts, so that each expert is one GEMM, and add up the results."""
        places = chosen.flatten().argsort(stable=True)
        tokens = places // chosen.shape[1]
        counts = F.one_hot(chosen.flatten(), len(self.W2)).sum(0)
        ends = counts.cumsum(0).int()
        gate = F.grouped_mm(x[tokens], self.W13.mT, offs=ends)
        if self.W3 is None:
            gate, up = gate.chunk(2, -1)
        else:
            up = F.grouped_mm(x[tokens], self.W3.mT, offs=ends)
        out = F.grouped_mm((F.silu(gate) * up), self.W2.mT, offs=ends)
        scaled = out.float() * weights.flatten()[places].unsqueeze(-1)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return total.index_add_(0, tokens, scaled).to(x.dtype)
