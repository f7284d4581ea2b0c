"""The `forward` of an optimized model: compiled code for prompts in chunks and for decoding."""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ipex_inductor import compat
from ipex_inductor.llm import beam_table, buckets, config_settings, families
from ipex_inductor.llm.cache_pool import CachePool
from ipex_inductor.llm.families import Family
from ipex_inductor.llm.steps import Steps, modes

log = logging.getLogger("IPEX")

CACHE_NAMES = ("past_key_values", "cache", "cache_params")
TOKENS = ("input_ids", "inputs_embeds")
MASK, KEEP = "attention_mask", "logits_to_keep"

# Arguments that `forward` may have beside tokens while its prompt is padded. They hold one entry a
# token, or are no tensors.
PADDABLE = frozenset({*TOKENS, *CACHE_NAMES, MASK, KEEP, "position_ids", "cache_position"})

# Results with one entry a token that are not cut back to the prompt's length.
RECORDED = ("output_attentions", "output_hidden_states", "output_router_logits")


class CompiledForward:
    """Calls of one model's `forward`, by compiled code where a cache or no cache allows it.

    Copies and pickles keep the model and its family. Their code is compiled again at first use.

    Args:
        model: the model, whose attribute `forward` this becomes.
        family: the row of the model's family.
        drops: release plain weights that compiled code reads packed.
    """

    def __init__(self, model: Any, family: Family, drops: bool = False) -> None:
        self.model, self.family, self.drops = model, family, drops
        self.own = vars(model).get("forward")  # a hook of another package, called instead
        self._start()

    def _start(self) -> None:
        self.pool = CachePool()
        self.steps = Steps(self.eager, self.drops)
        self.reasons: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        keys = ("model", "family", "own", "drops")
        return {key: getattr(self, key) for key in keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    @property
    def eager(self) -> Callable[..., Any]:
        """Return the forward that the model had."""
        own: Callable[..., Any] = self.own or type(self.model).forward.__get__(self.model)
        return own

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the model's own forward: `generate` reads it."""
        return inspect.signature(self.eager)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the arguments of its own forward."""
        if torch.compiler.is_compiling() or compat.is_traced_by_others() or self.model.training:
            return self.eager(*args, **kwargs)
        kwargs = self._keep_last_logits(kwargs)
        arguments = self._bind(args, kwargs)
        name = next((n for n in CACHE_NAMES if arguments.get(n) is not None), "")
        if self.family.is_eager:
            return self._call_eagerly(self.family.reason, args, kwargs)
        if not name:
            return self.steps.call_whole(args, kwargs)
        return self._call_with_cache(arguments, arguments[name])

    def _keep_last_logits(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return `kwargs` with the last token's logits alone, if the config says so."""
        is_on = config_settings.is_on(self.model.config, config_settings.LAST_LOGITS)
        if not is_on or kwargs.get("labels") is not None:
            return kwargs
        return {KEEP: 1, **kwargs} if KEEP in self._parameters else kwargs

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.eager).parameters)

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        named = zip(self._parameters, args, strict=False) if args else ()
        return {**dict(named), **kwargs}

    def _call_with_cache(self, arguments: dict[str, Any], cache: Any) -> Any:
        from ipex_inductor.llm import caches

        if not caches.is_pooled(cache):
            reason = "its cache is none of the pool's: leave it to generate, or make it static"
            return self._call_eagerly(reason, (), arguments)
        own = caches.decoder_part(cache)
        tokens = tokens_of(arguments)
        if tokens is None:
            return self._call_eagerly("it has no tokens", (), arguments)
        if self.pool.current is None or tokens.shape[1] > 1:
            # For a single token `generate` has reserved room, so a GPU is not waited for.
            own.reserve(own.count_tokens() + tokens.shape[1])
        if tokens.shape[1] == 1 and own.prompt_length:
            return self._decode(arguments, cache)
        output = self._prefill(arguments, cache, tokens)
        if not own.prompt_length:
            own.prompt_length = tokens.shape[1]
            config = self.model.config.get_text_config(decoder=True)
            if own.table is None and beam_table.is_useful(config, own):
                own.attach_table()
        return output

    def _call_eagerly(self, reason: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if reason not in self.reasons:
            self.reasons.add(reason)
            log.info("%s runs eagerly: %s", type(self.model).__name__, reason)
        return self.eager(*args, **kwargs)

    def _decode(self, arguments: dict[str, Any], cache: Any) -> Any:
        leases = self.pool.current
        own = () if leases is None else (leases.checked, leases.runs_alone, leases.chooses)
        output = self.steps.call(widen_mask(arguments, cache), shape_of_cache(cache), *own)
        if output is None:
            return self._call_eagerly("it has too many graphs already", (), arguments)
        return output

    def _prefill(self, arguments: dict[str, Any], cache: Any, tokens: Tensor) -> Any:
        """Compute a prompt in chunks of few lengths, or eagerly if it cannot be padded."""
        reason = self.why_not_padded(arguments, cache) or self._why_not_cut(tokens.shape[1])
        if reason:
            return self._call_eagerly(reason, (), arguments)
        if not cache.is_allocated:
            self._allocate(arguments, cache)
        if not cache.is_allocated:
            return self._call_eagerly("the prompt leaves some caches without memory", (), arguments)
        arguments = widen_mask(self._with_mask(arguments, tokens), cache)
        live = int(cache.get_seq_length())
        pieces = buckets.split_into_chunks(tokens.shape[1])
        output, logits = None, []
        for first, length in pieces:
            piece = Chunk(first, length, tokens.shape[1])
            rows = buckets.round_chunk(length)
            if live + first + rows > cache.ceiling:
                rows = length
            output = self.steps.call(piece.arguments(arguments, rows), shape_of_cache(cache))
            if output is None:
                cache.trim(live)
                return self._call_eagerly("it has too many graphs already", (), arguments)
            cache.trim(live + first + length)
            logits.append(piece.select_logits(output.logits, arguments))
        if output is not None:
            output.logits = logits[-1] if len(logits) == 1 else torch.cat(logits, 1)
        return output

    def _with_mask(self, arguments: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
        """Return the arguments with a mask that hides nothing where there is none.

        A model that makes one itself reads the number of tokens so far, which breaks the graph.
        """
        if MASK not in self.__signature__.parameters or arguments.get(MASK) is not None:
            return arguments
        return {**arguments, MASK: tokens.new_ones((tokens.shape[0], 1), dtype=torch.long)}

    def why_not_padded(self, arguments: Mapping[str, Any], cache: Any) -> str:
        """Return why a prompt cannot be computed in padded chunks, "" if it can."""
        if not hasattr(cache, "is_attention_alone"):
            return "prompts: the decoder of an encoder-decoder begins with a few tokens"
        if not cache.is_attention_alone:
            return "prompts: its layers hold states that padding would change"
        others = [n for n, v in arguments.items() if isinstance(v, Tensor) and n not in PADDABLE]
        if others:
            return f"prompts: they come with {', '.join(others)}"
        if isinstance(arguments.get(KEEP), Tensor):
            return f"prompts: {KEEP} is a tensor"
        config = self.model.config
        if not arguments.get("return_dict", getattr(config, "return_dict", True)):
            return "prompts: return_dict is off"
        recorded = [n for n in RECORDED if arguments.get(n, getattr(config, n, False))]
        return f"prompts: {recorded[0]} is on" if recorded else ""

    def _why_not_cut(self, length: int) -> str:
        """Return why a prompt of `length` tokens cannot be computed in chunks, "" if it can."""
        if length <= buckets.LARGEST_CHUNK:
            return ""
        config = self.model.config.get_text_config(decoder=True)
        reason = families.why_not_cut(self.family, config)
        return f"prompts of over {buckets.LARGEST_CHUNK} tokens: {reason}" if reason else ""

    def cache_key(self) -> tuple[Any, ...]:
        """Return what dtypes and devices of cached tensors follow from, beside the model's code."""
        param = next(self.model.parameters())
        return (*modes()[2:], param.dtype, param.device)

    def _allocate(self, arguments: dict[str, Any], cache: Any) -> None:
        """Let the model allocate the layers of `cache` in a short eager call, and learn them."""
        tokens = tokens_of(arguments)
        assert tokens is not None
        length = min(tokens.shape[1], buckets.SMALLEST_CHUNK)
        chunk = Chunk(0, length, tokens.shape[1])
        with torch.inference_mode(False), torch.no_grad():
            self.eager(**chunk.arguments(widen_mask(arguments, cache), length))
            cache.reset()
        if cache.is_allocated:
            self.pool.learn_layout(self.cache_key(), cache.layouts())


@dataclass(frozen=True)
class Chunk:
    """`length` tokens of a prompt of `whole` tokens, from the token `first` on."""

    first: int
    length: int
    whole: int

    def arguments(self, arguments: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Return the model's arguments for this chunk, padded to `rows` tokens by its last one."""
        chunk = {name: self._part(name, value, rows) for name, value in arguments.items()}
        keep = chunk.get(KEEP)
        if isinstance(keep, int):
            tokens = tokens_of(chunk)
            assert tokens is not None
            chunk[KEEP] = self._kept_rows(keep, rows, tokens.device)
        return chunk

    def _kept_rows(self, keep: int, rows: int, device: torch.device) -> Tensor:
        """Return the rows whose logits are computed: the kept ones, and copies of the last.

        As many as a power of two, so few graphs differ by it alone.
        """
        kept = self._count_kept_tokens(keep)
        count = min(rows, 1 << (kept - 1).bit_length())
        index = torch.arange(self.length - kept, self.length - kept + count, device=device)
        return index.clamp_(max=self.length - 1)

    def _count_kept_tokens(self, keep: int) -> int:
        """Return the number of tokens of this chunk whose logits are kept, at least one."""
        if keep == 0:
            return self.length
        behind = self.whole - self.first - self.length
        return min(self.length, max(1, keep - behind))

    def _part(self, name: str, value: Any, rows: int) -> Any:
        if name == MASK and isinstance(value, Mapping):
            return {key: self._part(name, each, rows) for key, each in value.items()}
        if not isinstance(value, Tensor):
            return value
        if name in TOKENS:
            return self._rows(value, 1, rows)
        if name == "position_ids":
            return self._rows(value, value.dim() - 1, rows)
        if name == "cache_position":
            part = value[self.first : self.first + self.length]
            return part[0] + torch.arange(rows, device=part.device, dtype=part.dtype)
        if name == MASK and value.dim() == 4:
            return self._rows(value, 2, rows)
        return value

    def _rows(self, value: Tensor, dim: int, rows: int) -> Tensor:
        """Return the tokens of this chunk, followed by copies of its last one."""
        if value.shape[dim] != self.whole:
            return value
        index = torch.arange(rows, device=value.device).clamp_(max=self.length - 1)
        return value.index_select(dim, index + self.first)

    def select_logits(self, logits: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Return the logits that an unpadded call has of this chunk, [batch, tokens, words]."""
        keep = arguments.get(KEEP, 0)
        if not isinstance(keep, int):
            return logits
        behind = self.whole - self.first - self.length
        kept = 0 if keep and keep <= behind else self._count_kept_tokens(keep)
        return logits[:, :kept]


def tokens_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor [batch, tokens, ...] that a call of `forward` reads its tokens from."""
    names = ("decoder_input_ids", "decoder_inputs_embeds", *TOKENS)
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def shape_of_cache(cache: Any) -> tuple[Any, ...]:
    """Return what compiled code depends on of a cache."""
    from ipex_inductor.llm import caches

    own = caches.decoder_part(cache)
    encoder = cache.cross_attention_cache.ceiling if own is not cache else 0
    return own.ceiling, encoder, own.layouts(), own.table is not None


def widen_mask(arguments: dict[str, Any], cache: Any) -> dict[str, Any]:
    """Return the arguments with a mask [batch, tokens so far] filled up to the cache's ceiling.

    Tokens behind the last one are hidden by the causal mask, so their entries have no effect.
    """
    from ipex_inductor.llm import caches

    own = caches.decoder_part(cache)
    mask = arguments.get(MASK)
    if own is not cache or not isinstance(mask, Tensor) or mask.dim() != 2:
        return arguments
    missing = own.ceiling - mask.shape[1]
    if missing <= 0 or own.layers == []:
        return arguments
    return {**arguments, MASK: torch.nn.functional.pad(mask, (0, missing), value=1)}
