"""Several embedding bags as one module; two of them update their tables during the backward."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim.bf16_split import join, split


class EmbeddingSpec(NamedTuple):
    """One table; `weight` [num_embeddings, embedding_dim] is shared, or drawn where it is None."""

    num_embeddings: int
    embedding_dim: int
    pooling_mode: str
    dtype: torch.dtype
    weight: Tensor | None
    sparse: bool
    include_last_offset: bool


class MergedEmbeddingBag(nn.Module):
    """N embedding bags of one width, dtype and pooling ("sum" or "mean"), looked up in one call.

    Gradients are dense unless a table asks for sparse ones. Raises `ArgumentError` where the tables
    differ, or are of a kind that the merged module does not have (max pooling, `padding_idx`,
    `max_norm`, `scale_grad_by_freq`).
    """

    def __init__(self, embedding_specs: Sequence[EmbeddingSpec]) -> None:
        super().__init__()
        first = _agreed(embedding_specs)
        self.n_tables = len(embedding_specs)
        self.embedding_dim = first.embedding_dim
        self.pooling_mode = first.pooling_mode
        self.include_last_offset = first.include_last_offset
        self.sparse = any(spec.sparse for spec in embedding_specs)
        self.weights = nn.ParameterList(map(_weight, embedding_specs))

    @classmethod
    def from_embeddingbag_list(
        cls, tables: Sequence[nn.EmbeddingBag], *args: Any, **kwargs: Any
    ) -> Self:
        """The tables of these modules, sharing their memory; further arguments go to the class."""
        return cls([_spec(table) for table in tables], *args, **kwargs)

    def forward(self, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[Tensor]:
        """Rows and bags of each table, as `nn.EmbeddingBag` takes them: N tensors [B, D].

        In the tables' dtype; under autocast in autocast's, as what follows computes in it.
        """
        if not len(indices) == len(offsets) == self.n_tables:
            came = f"{len(indices)} indices and {len(offsets)} offsets"
            todo = "Pass one tensor of each a table."
            raise ArgumentError(f"{self.n_tables} indices and offsets", came, todo)
        kind = {
            "mode": self.pooling_mode,
            "sparse": self.sparse,
            "include_last_offset": self.include_last_offset,
        }
        bags = zip(indices, self.weights, offsets, strict=True)
        return [_autocast(F.embedding_bag(*bag, **kind)) for bag in bags]  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Pooling, and the rows and width of every table."""
        tables = ", ".join(f"{len(w)}x{self.embedding_dim}" for w in self.weights)
        return f"{self.pooling_mode}, {tables}"


class MergedEmbeddingBagWithCat(MergedEmbeddingBag):
    """The bags behind a dense feature, in one tensor."""

    def forward(  # type: ignore[override]
        self, indices: Sequence[Tensor], offsets: Sequence[Tensor], dense_feature: Tensor
    ) -> Tensor:
        """`dense_feature` [B, E] and the N bags: [B, E + N * D]."""
        return torch.cat([dense_feature, *super().forward(indices, offsets)], 1)


class _UpdatedInBackward(MergedEmbeddingBag):
    """Tables that take their optimizer step as soon as their gradient is there, and keep none.

    Gradients are sparse: a step costs what the rows it touches cost. bf16 tables keep the lower
    half of an fp32 weight in `trail<n>`; that and the optimizer's state are buffers, and zero where
    a loaded state lacks them.
    """

    def __init__(self, embedding_specs: Sequence[EmbeddingSpec]) -> None:
        super().__init__(embedding_specs)
        _check_updatable([w.dtype for w in self.weights])
        self.sparse = True
        for number, weight in enumerate(self.weights):
            trail = torch.zeros_like(weight, dtype=torch.int16)
            self.register_buffer(f"trail{number}", trail if _is_split(weight) else None)
        self._watch()
        self.register_load_state_dict_post_hook(_watch_again)  # type: ignore[no-untyped-call]

    def to_bfloat16_train(self) -> None:
        """Keep each weight as bf16 for the lookup, and what bf16 cuts off beside it."""
        for number, weight in enumerate(self.weights):
            if not _is_split(weight):
                top, bottom = split(weight.detach().float())
                self.weights[number] = nn.Parameter(top)
                setattr(self, f"trail{number}", bottom)
        self._watch()

    def _step(self, rows: Tensor, values: Tensor, gradient: Tensor, number: int) -> Tensor:
        """The new `values` of these rows of a table."""
        raise NotImplementedError

    @torch.no_grad()
    def _update(self, number: int, weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        touched = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
        rows, trail = touched.indices()[0], getattr(self, f"trail{number}")
        values = weight[rows] if trail is None else join(weight[rows], trail[rows])
        values = self._step(rows, values, touched.values().to(values.dtype), number)
        if trail is not None:
            values, bottom = split(values)
            trail.index_copy_(0, rows, bottom)
        weight.index_copy_(0, rows, values)

    def _watch(self) -> None:
        """Have every table updated; called anew whenever parameters may have been replaced."""
        for handle in getattr(self, "_handles", ()):
            handle.remove()
        hooks = (_hook(self, number) for number in range(self.n_tables))
        self._handles = [
            weight.register_post_accumulate_grad_hook(hook)
            for weight, hook in zip(self.weights, hooks, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch()

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            if f"{prefix}{name}" not in state:
                state[f"{prefix}{name}"] = torch.zeros_like(buffer)
        super()._load_from_state_dict(state, prefix, metadata, strict, *lists)


class MergedEmbeddingBagWithSGD(_UpdatedInBackward):
    """Tables with SGD in their backward: w -= lr * (g + weight_decay * w).

    Only rows that were looked up decay. fp32, fp64 and (split) bf16 tables; `ArgumentError` for
    others and for a negative `lr` or `weight_decay`.
    """

    def __init__(
        self,
        embedding_specs: Sequence[EmbeddingSpec],
        lr: float = 0.01,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(embedding_specs)
        _check_not_negative(lr=lr, weight_decay=weight_decay)
        self.lr, self.weight_decay = lr, weight_decay

    def _step(self, rows: Tensor, values: Tensor, gradient: Tensor, number: int) -> Tensor:
        return values - self.lr * (gradient + self.weight_decay * values)


class MergedEmbeddingBagWithAdaGrad(_UpdatedInBackward):
    """Tables with Adagrad in their backward: s += g * g, w -= lr * g / (sqrt(s) + eps).

    `s` is the buffer `sum<n>`. fp32, fp64 and (split) bf16 tables; `ArgumentError` for others and
    for a negative `lr` or `eps`.
    """

    def __init__(
        self, embedding_specs: Sequence[EmbeddingSpec], lr: float = 0.01, eps: float = 1e-10
    ) -> None:
        super().__init__(embedding_specs)
        _check_not_negative(lr=lr, eps=eps)
        self.lr, self.eps = lr, eps
        for number, weight in enumerate(self.weights):
            exact = torch.float32 if _is_split(weight) else weight.dtype
            self.register_buffer(f"sum{number}", torch.zeros_like(weight, dtype=exact))

    def _step(self, rows: Tensor, values: Tensor, gradient: Tensor, number: int) -> Tensor:
        total = getattr(self, f"sum{number}")
        squares = total[rows] + gradient * gradient
        total.index_copy_(0, rows, squares.to(total.dtype))
        changed: Tensor = values - self.lr * gradient / (squares.sqrt() + self.eps)
        return changed


def _autocast(pooled: Tensor) -> Tensor:
    device = pooled.device.type
    if pooled.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return pooled
    return pooled.to(torch.get_autocast_dtype(device))


def _spec(table: nn.EmbeddingBag) -> EmbeddingSpec:
    unusual = {
        "padding_idx": table.padding_idx is not None,
        "max_norm": table.max_norm is not None,
        "scale_grad_by_freq": table.scale_grad_by_freq,
    }
    if any(unusual.values()):
        came = " and ".join(name for name, found in unusual.items() if found)
        todo = "Keep this table an nn.EmbeddingBag of its own."
        raise ArgumentError("embedding bags that only look up and pool", f"one with {came}", todo)
    rows, width = table.weight.shape
    weight, last = table.weight.detach(), table.include_last_offset
    return EmbeddingSpec(rows, width, table.mode, weight.dtype, weight, table.sparse, last)


def _agreed(specs: Sequence[EmbeddingSpec]) -> EmbeddingSpec:
    """The first table, when all share its width, pooling, dtype and form of offsets."""
    fields = ("embedding_dim", "pooling_mode", "dtype", "include_last_offset")
    kinds = {tuple(getattr(spec, name) for name in fields) for spec in specs}
    if len(kinds) != 1:
        came = "; ".join(sorted(map(str, kinds))) or "no table"
        todo = "Merge tables of one kind, and others separately."
        raise ArgumentError(f"tables of one {', '.join(fields)}", came, todo)
    if specs[0].pooling_mode not in ("sum", "mean"):
        todo = "Keep tables pooled otherwise as nn.EmbeddingBag."
        raise ArgumentError("pooling 'sum' or 'mean'", repr(specs[0].pooling_mode), todo)
    return specs[0]


def _weight(spec: EmbeddingSpec) -> nn.Parameter:
    if spec.weight is not None:
        return nn.Parameter(spec.weight)
    return nn.Parameter(torch.randn(spec.num_embeddings, spec.embedding_dim, dtype=spec.dtype))


def _check_updatable(dtypes: Sequence[torch.dtype]) -> None:
    if not set(dtypes) <= {torch.float32, torch.float64, torch.bfloat16}:
        todo = "Make fp32 tables, then to_bfloat16_train() where memory counts."
        raise ArgumentError("tables of float32, float64 or bfloat16", str(dtypes[0]), todo)


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ArgumentError(f"{name} of 0 or more", str(value), "Give its absolute value.")


def _is_split(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16


def _hook(module: _UpdatedInBackward, number: int) -> Any:
    """What a table runs once its gradient is there; it does not keep the module alive."""
    update = weakref.WeakMethod(module._update)

    def hook(weight: Tensor) -> None:
        if method := update():
            method(number, weight)

    return hook


def _watch_again(module: _UpdatedInBackward, _: Any) -> None:
    module._watch()
