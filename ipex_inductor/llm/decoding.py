"""The loop of `generate` that chooses one token a step, greedily or by sampling.

`_sample` of transformers prepares all arguments of the model anew for each token, with a mask
[batch, 1, 1, ceiling], and waits for the device before the next step. Here transformers prepares
the first step, and later steps change the token and its position alone. A GPU is ahead of the end
by at most `LAG` steps, whose tokens are dropped.
"""

import copy
import importlib
import inspect
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipex_inductor.llm import greedy
from ipex_inductor.llm.forward import MASK, widen_mask

log = logging.getLogger("IPEX")

LAG = 4  # steps that a GPU may compute beyond the last one that the host knows to be unfinished

# Arguments of `generate` that choose another loop, or that a loop of others does not receive.
OTHERS = (
    "assistant_model",
    "custom_generate",
    "synced_gpus",
    "tokenizer",
    "assistant_tokenizer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)

# Tensors that a call may have beside the tokens: all others may change from step to step.
KNOWN = frozenset({MASK, "position_ids", "inputs_embeds"})
MODES = ("greedy_search", "sample")
COUNTED = frozenset({"position_ids"})  # one more in each step
TOKEN = "input_ids"
CALLER = "_prefix_allowed_tokens_fn"  # attribute of the processor that calls a function of the user


class Decoding:
    """The loop of one call of `generate`, given to it as `custom_generate`.

    Args:
        kwargs: the arguments of that call.
    """

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        self._streamer = kwargs.get("streamer")
        self.reason = "it has not run"  # "" once a text was decoded here

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode as the loop of transformers for this configuration does."""
        streamer = model_kwargs.pop("streamer", self._streamer)
        own = [input_ids, logits_processor, stopping_criteria, generation_config]
        self.reason = why_not(model, generation_config, stopping_criteria, model_kwargs)
        if self.reason:
            log_reason(model, self.reason)
            return type(model)._sample(model, *own, streamer=streamer, **model_kwargs)
        with model._optimize_model_for_decode():
            tokens = Text(input_ids, logits_processor, stopping_criteria, generation_config)
            is_heard = has_hooks(model) or not (streamer is None or is_own(streamer))
            model.forward.pool.current.runs_alone = tokens.runs_alone and not is_heard
            return run(model, tokens, generation_config, streamer, model_kwargs)


def why_not_begun(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why a call of `generate` is left to the loops of transformers, "" if it is not."""
    utils = generation_utils()
    mixin, names = utils.GenerationMixin, tuple(inspect.signature(type(model).generate).parameters)
    prepare = inspect.signature(mixin.prepare_inputs_for_generation).parameters
    needed = ("_prefill", "_optimize_model_for_decode")
    if not all(hasattr(mixin, name) for name in needed) or "next_sequence_length" not in prepare:
        return "this version of transformers has no step for the prompt alone"
    if "custom_generate" not in names:
        return "its generate takes no loop of others"
    arguments = {**dict(zip(names[1:], args, strict=False)), **kwargs}
    if given := [name for name in OTHERS if arguments.get(name)]:
        return f"{given[0]} is given"
    if (mode := find_mode(model, arguments)) not in MODES:
        return f"{mode} is a loop of its own"
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return "processes may have to agree on the end" if group else ""


def log_reason(model: Any, reason: str) -> None:
    """Log why a call of `generate` runs in the loops of transformers."""
    log.info("%s decodes by transformers: %s", type(model).__name__, reason)


def find_mode(model: Any, arguments: Mapping[str, Any]) -> str:
    """Return the name of the loop that these arguments of `generate` choose."""
    config = copy.copy(model.generation_config)
    own = arguments.get("generation_config")
    settings = {} if own is None else {k: v for k, v in vars(own).items() if v is not None}
    given = {**settings, **arguments}
    vars(config).update((name, value) for name, value in given.items() if hasattr(config, name))
    mode: str = config.get_generation_mode().value
    return mode


def why_not(
    model: Any, config: Any, stopping_criteria: Any, model_kwargs: Mapping[str, Any]
) -> str:
    """Return why the loop is left to transformers, "" if it is not."""
    from ipex_inductor.llm import caches

    if config.return_dict_in_generate:
        return "results of each step are asked for"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    mixin = generation_utils().GenerationMixin
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        if getattr(type(model), name) is not getattr(mixin, name):
            return f"its {name} is its own"
    if hasattr(type(model), "create_masks_for_generate"):
        return "its masks are its own"
    if model.forward.family.is_eager:
        return "it runs eagerly"
    cache: Any = model_kwargs.get("past_key_values")
    if not caches.is_pooled(cache) or not cache.is_attention_alone:
        return "its cache is none of the pool's, or holds states"
    mask = model_kwargs.get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return "its mask is no matrix"
    tensors = [name for name, value in model_kwargs.items() if isinstance(value, Tensor)]
    if unknown := [name for name in tensors if name not in KNOWN]:
        return f"it reads {unknown[0]}"
    return "" if stopping_criteria.max_length is not None else "its length has no bound"


class Text:
    """The tokens of a batch, and what chooses the next ones.

    Args:
        prompt: [batch, tokens].
        logits_processor: changes the logits of the next tokens.
        stopping_criteria: tell which texts end; with a `max_length`.
        config: the generation config.
    """

    def __init__(
        self, prompt: Tensor, logits_processor: Any, stopping_criteria: Any, config: Any
    ) -> None:
        self._process, self._criteria = logits_processor, stopping_criteria
        self._samples = config.do_sample
        self.length, self.limit = prompt.shape[1], stopping_criteria.max_length
        room = max(self.limit, self.length + 1)
        self._ids = prompt.new_empty((prompt.shape[0], room))
        self._ids[:, : self.length] = prompt
        self._unfinished = prompt.new_ones(prompt.shape[0])
        pad = config._pad_token_tensor
        ends = any(hasattr(each, "eos_token_id") for each in stopping_criteria)
        self._pad = pad.to(prompt.device) if ends else None
        self._draws = Draws(prompt.device) if config.do_sample else None

    @property
    def ids(self) -> Tensor:
        """Return all tokens so far, [batch, length]."""
        return self._ids[:, : self.length].contiguous()

    @property
    def lag(self) -> int:
        """Return the steps that may be computed in vain, 0 unless all of them can be undone."""
        is_undone = self._draws is None or self._draws.can_rewind
        return LAG if self._ids.device.type != "cpu" and self._is_own and is_undone else 0

    @property
    def runs_alone(self) -> bool:
        """Return whether choosing a token runs no code of the caller."""
        return self._is_own and not any(hasattr(each, CALLER) for each in self._parts())

    @property
    def _is_own(self) -> bool:
        return all(map(is_own, self._parts()))

    def _parts(self) -> list[Any]:
        return [*self._process, *self._criteria]

    @property
    def is_most_likely(self) -> bool:
        """Return whether the next tokens are the most likely ones by the logits as they are."""
        return not self._samples and not self._process

    def append(self, logits: Tensor | None, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose a token for each text.

        Args:
            logits: [batch, words].
            chosen: the tokens [batch] if they are chosen already; then without logits.

        Returns:
            The tokens [batch], and whether all texts have ended, a scalar.
        """
        if chosen is None:
            assert logits is not None
            chosen = self._choose(logits)
        tokens = chosen.to(self._ids.device)
        if self._pad is not None:
            tokens = torch.where(self._unfinished.bool(), tokens, self._pad)
        self._ids[:, self.length] = tokens
        self.length += 1
        if self._draws is not None:
            self._draws.record(self.length)
        self._unfinished = self._unfinished & ~self._criteria(self.ids, None)
        return tokens, self._unfinished.max() == 0

    def _choose(self, logits: Tensor) -> Tensor:
        logits = logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
        scores = self._process(self.ids, logits)
        if self._samples:
            return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        return torch.argmax(scores, dim=-1)

    def take_tokens(self, length: int) -> Tensor:
        """Return the first `length` tokens, and undo the drawing of all others."""
        if self._draws is not None:
            self._draws.rewind(length)
        return self._ids[:, :length].clone()


class Draws:
    """The state of the random generator of a device behind each token.

    Args:
        device: the device of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        generators = getattr(torch.get_device_module(device), "default_generators", ())
        self._generator: Any = generators[device.index or 0] if generators else None
        self._offsets: dict[int, int] = {}

    @property
    def can_rewind(self) -> bool:
        """Return whether the generator counts its numbers."""
        return self._generator is not None and hasattr(self._generator, "set_offset")

    def record(self, length: int) -> None:
        """Remember the state behind the token that made a text of this length."""
        if self.can_rewind:
            self._offsets[length] = self._generator.get_offset()

    def rewind(self, length: int) -> None:
        """Go back to the state at this length, unless others have drawn numbers since."""
        last = max(self._offsets, default=length)
        if last > length and self._offsets[last] == self._generator.get_offset():
            self._generator.set_offset(self._offsets[length])


class Flag(NamedTuple):
    """The end of a step, on its way to the host."""

    length: int
    is_over: Tensor
    tokens: Tensor
    event: Any


class Ends:
    """Ends of steps, read by the host at most `lag` steps late.

    Args:
        lag: steps; 0 waits for each one.
        streamer: receives the tokens of every step up to the end, in order.
    """

    def __init__(self, lag: int, streamer: Any) -> None:
        self._lag, self._streamer = lag, streamer
        self._flags: deque[Flag] = deque()
        self.length: int | None = None  # of the text at its end, once it is known

    def push(self, length: int, is_over: Tensor, tokens: Tensor) -> None:
        """Add a step that made texts of `length` tokens; read those that are due."""
        event = None
        if self._lag:
            event = torch.Event(device=is_over.device)
            is_over = _copy_to_host(is_over)
            tokens = tokens if self._streamer is None else _copy_to_host(tokens)
            event.record()
        self._flags.append(Flag(length, is_over, tokens, event))
        self._read_flags(self._lag)

    def finish(self) -> None:
        """Read all steps."""
        self._read_flags(0)
        if self._streamer is not None:
            self._streamer.end()

    def _read_flags(self, left: int) -> None:
        while len(self._flags) > left and self.length is None:
            flag = self._flags.popleft()
            if flag.event is not None:
                flag.event.synchronize()
            if self._streamer is not None:
                self._streamer.put(flag.tokens.cpu())
            if bool(flag.is_over):
                self.length = flag.length


def _copy_to_host(value: Tensor) -> Tensor:
    """Return a copy that is complete once an event behind it is."""
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return host.copy_(value, non_blocking=True)


class Step:
    """One step of decoding, by arguments that transformers prepared for the first one.

    Args:
        model: the model.
        ids: all tokens, of which the last one is computed, [batch, length].
        model_kwargs: arguments of the model, as behind the prompt.
        chooses: whether the most likely tokens are chosen.
    """

    def __init__(
        self, model: Any, ids: Tensor, model_kwargs: Mapping[str, Any], chooses: bool
    ) -> None:
        self._model, self._leases = model, model.forward.pool.current
        # A hook receives the model's output.
        self._chooses = chooses and not has_hooks(model) and model.device.type in greedy.DEVICES
        arguments = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
        arguments[MASK] = model_kwargs[MASK].to(model.device)
        self._arguments = widen_mask(arguments, model_kwargs["past_key_values"])

    def __call__(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Compute one token of each text.

        Args:
            tokens: [batch].

        Returns:
            The logits [batch, words], or the next tokens if the step has chosen them.
        """
        arguments = self._arguments
        arguments[TOKEN] = tokens[:, None].to(self._model.device)
        self._leases.chooses = self._chooses
        try:
            output = self._model(**arguments, return_dict=True)
        finally:  # other calls of the model, as by a streamer, return logits
            self._leases.chooses = False
        for name in COUNTED.intersection(arguments):
            arguments[name] = arguments[name] + 1
        return (None, output) if isinstance(output, Tensor) else (output.logits[:, -1], None)


def is_own(part: Any) -> bool:
    """Return whether a streamer, processor or criterion is of a class of transformers."""
    return type(part).__module__.startswith("transformers.")


def has_hooks(model: Any) -> bool:
    """Return whether functions of the caller run before or behind each call of the model."""
    of_all = torch.nn.modules.module
    return any(
        (
            *(model._forward_pre_hooks, model._forward_hooks),
            *(of_all._global_forward_pre_hooks, of_all._global_forward_hooks),
        )
    )


def run(model: Any, text: Text, config: Any, streamer: Any, model_kwargs: dict[str, Any]) -> Tensor:
    """Compute the prompt and all tokens behind it; return them, [batch, tokens]."""
    is_first = not config.is_assistant
    output = model._prefill(text.ids, config, model_kwargs, is_first_iteration=is_first)
    ends, step = Ends(text.lag, streamer), None
    logits, chosen = output.logits[:, -1], None
    while True:
        tokens, is_over = text.append(logits, chosen)
        ends.push(text.length, is_over, tokens)
        if ends.length is not None or text.length >= text.limit:
            break
        if step is None:
            model_kwargs = model._update_model_kwargs_for_generation(output, model_kwargs)
            step = Step(model, text.ids, model_kwargs, text.is_most_likely)
        logits, chosen = step(tokens)
    ends.finish()
    return text.take_tokens(ends.length or text.length)


def generation_utils() -> Any:
    """Return the module of transformers that holds `generate`."""
    return importlib.import_module("transformers.generation.utils")
