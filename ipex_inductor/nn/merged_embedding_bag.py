"""Several embedding bags as one module; two variants update their tables during the backward."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipex_inductor.errors import ArgumentError
from ipex_inductor.optim.bf16_split import join, split


class EmbeddingSpec(NamedTuple):
    """One table; `weight` [num_embeddings, embedding_dim] is shared, or random if None."""

    num_embeddings: int
    embedding_dim: int
    pooling_mode: str
    dtype: torch.dtype
    weight: Tensor | None
    sparse: bool
    include_last_offset: bool


class MergedEmbeddingBag(nn.Module):
    """N embedding bags of one width, dtype and pooling ("sum" or "mean"), looked up in one call.

    Gradients are dense unless a table asks for sparse ones.

    Raises:
        ArgumentError: if the tables differ, or are of an unsupported kind (max pooling,
            `padding_idx`, `max_norm`, `scale_grad_by_freq`).
    """

    def __init__(self, embedding_specs: Sequence[EmbeddingSpec]) -> None:
        super().__init__()
        first = _check_uniform(embedding_specs)
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
        """Return a module that shares the tables of these modules.

        Further arguments go to the class.
        """
        return cls([_spec(table) for table in tables], *args, **kwargs)

    def forward(self, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[Tensor]:
        """Return the pooled bags of each table: N tensors [B, D].

        They are in the tables' dtype; under autocast in its dtype, as the next ops compute in it.

        Args:
            indices: row indices of each table, as `nn.EmbeddingBag` takes them.
            offsets: begins of the bags of each table.
        """
        if not len(indices) == len(offsets) == self.n_tables:
            received = f"{len(indices)} indices and {len(offsets)} offsets"
            advice = "Pass one tensor of each a table."
            raise ArgumentError(f"{self.n_tables} indices and offsets", received, advice)
        kind = {
            "mode": self.pooling_mode,
            "sparse": self.sparse,
            "include_last_offset": self.include_last_offset,
        }
        bags = zip(indices, self.weights, offsets, strict=True)
        return [_autocast(F.embedding_bag(*bag, **kind)) for bag in bags]  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Return pooling, and the rows and width of every table."""
        tables = ", ".join(f"{len(w)}x{self.embedding_dim}" for w in self.weights)
        return f"{self.pooling_mode}, {tables}"


class MergedEmbeddingBagWithCat(MergedEmbeddingBag):
    """The merged bags, concatenated after a dense feature."""

    def forward(  # type: ignore[override]
        self, indices: Sequence[Tensor], offsets: Sequence[Tensor], dense_feature: Tensor
    ) -> Tensor:
        """Return `dense_feature` [B, E] and the N bags concatenated: [B, E + N * D]."""
        return torch.cat([dense_feature, *super().forward(indices, offsets)], 1)


class _UpdatedInBackward(MergedEmbeddingBag):
    """Tables that are updated as soon as their gradient is computed, which is then dropped.

    Gradients are sparse: a step costs what the rows it touches cost. bf16 tables keep the lower
    half of an fp32 weight in `trail<n>`. The trails and the optimizer's state are buffers, and zero
    if a loaded state lacks them.
    """

    def __init__(self, embedding_specs: Sequence[EmbeddingSpec]) -> None:
        super().__init__(embedding_specs)
        _check_updatable([w.dtype for w in self.weights])
        self.sparse = True
        for number, weight in enumerate(self.weights):
            trail = torch.zeros_like(weight, dtype=torch.int16)
            self.register_buffer(f"trail{number}", trail if _is_split(weight) else None)
        self._register_hooks()
        self.register_load_state_dict_post_hook(_watch_again)  # type: ignore[no-untyped-call]

    def to_bfloat16_train(self) -> None:
        """Convert each weight to bf16 for the lookup, with the bits that bf16 drops in a buffer."""
        for number, weight in enumerate(self.weights):
            if not _is_split(weight):
                top, bottom = split(weight.detach().float())
                self.weights[number] = nn.Parameter(top)
                setattr(self, f"trail{number}", bottom)
        self._register_hooks()

    def _step(self, rows: Tensor, values: Tensor, gradient: Tensor, number: int) -> Tensor:
        """Return the updated `values` of the rows of a table.

        Args:
            rows: indices of the rows that have gradients.
            values: current values of the rows.
            gradient: gradient of the rows.
            number: index of the table.
        """
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

    def _register_hooks(self) -> None:
        """Register the update hooks of all tables, again when parameters may have been replaced."""
        for handle in getattr(self, "_handles", ()):
            handle.remove()
        hooks = (_update_hook(self, number) for number in range(self.n_tables))
        self._handles = [
            weight.register_post_accumulate_grad_hook(hook)
            for weight, hook in zip(self.weights, hooks, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register_hooks()

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            if f"{prefix}{name}" not in state:
                state[f"{prefix}{name}"] = torch.zeros_like(buffer)
        super()._load_from_state_dict(state, prefix, metadata, strict, *lists)


class MergedEmbeddingBagWithSGD(_UpdatedInBackward):
    """Tables with SGD in their backward: w -= lr * (g + weight_decay * w).

    Only rows that were looked up decay. Tables are fp32, fp64 or (split) bf16.

    Raises:
        ArgumentError: for other dtypes, and for a negative `lr` or `weight_decay`.
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

    `s` is the buffer `sum<n>`. Tables are fp32, fp64 or (split) bf16.

    Raises:
        ArgumentError: for other dtypes, and for a negative `lr` or `eps`.
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
        received = " and ".join(name for name, is_set in unusual.items() if is_set)
        advice = "Keep this table an nn.EmbeddingBag of its own."
        raise ArgumentError(
            "embedding bags that only look up and pool", f"one with {received}", advice
        )
    rows, width = table.weight.shape
    weight, last = table.weight.detach(), table.include_last_offset
    return EmbeddingSpec(rows, width, table.mode, weight.dtype, weight, table.sparse, last)


def _check_uniform(specs: Sequence[EmbeddingSpec]) -> EmbeddingSpec:
    """Return the first table; raise unless all share width, pooling, dtype and form of offsets."""
    fields = ("embedding_dim", "pooling_mode", "dtype", "include_last_offset")
    kinds = {tuple(getattr(spec, name) for name in fields) for spec in specs}
    if len(kinds) != 1:
        received = "; ".join(sorted(map(str, kinds))) or "no table"
        advice = "Merge tables of one kind, and others separately."
        raise ArgumentError(f"tables of one {', '.join(fields)}", received, advice)
    if specs[0].pooling_mode not in ("sum", "mean"):
        advice = "Keep tables pooled otherwise as nn.EmbeddingBag."
        raise ArgumentError("pooling 'sum' or 'mean'", repr(specs[0].pooling_mode), advice)
    return specs[0]


def _weight(spec: EmbeddingSpec) -> nn.Parameter:
    if spec.weight is not None:
        return nn.Parameter(spec.weight)
    return nn.Parameter(torch.randn(spec.num_embeddings, spec.embedding_dim, dtype=spec.dtype))


def _check_updatable(dtypes: Sequence[torch.dtype]) -> None:
    if not set(dtypes) <= {torch.float32, torch.float64, torch.bfloat16}:
        advice = "Make fp32 tables, then to_bfloat16_train() where memory counts."
        raise ArgumentError("tables of float32, float64 or bfloat16", str(dtypes[0]), advice)


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ArgumentError(f"{name} of 0 or more", str(value), "Give its absolute value.")


def _is_split(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16


def _update_hook(module: _UpdatedInBackward, number: int) -> Any:
    """Return a hook that updates a table once its gradient is computed.

    It holds only a weak reference to the module.
    """
    update = weakref.WeakMethod(module._update)

    def hook(weight: Tensor) -> None:
        if method := update():
            method(number, weight)

    return hook


def _watch_again(module: _UpdatedInBackward, _: Any) -> None:
    module._register_hooks()
