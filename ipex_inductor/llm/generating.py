"""`generate` of an optimized model: transformers' own, with caches leased from the pool."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ipex_inductor.llm import buckets, config_settings, decoding
from ipex_inductor.llm.forward import CACHE_NAMES, CompiledForward


class Generate:
    """The model's `generate`, inside of which caches are leased.

    Args:
        model: the model, whose attribute `generate` this becomes.
        forward: the model's compiled forward, which owns the pool.
    """

    def __init__(self, model: Any, forward: CompiledForward) -> None:
        self.model, self.forward = model, forward
        self._has_logged = False

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the signature of the model's own `generate`."""
        return inspect.signature(type(self.model).generate.__get__(self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens, with the arguments and results of the model's own `generate`.

        With `config.token_latency` the result is the tuple (result, seconds of each step).
        """
        if not self._has_logged:
            self._has_logged = True
            config_settings.log_replaced(self.model.config)
        if not config_settings.is_on(self.model.config, config_settings.LATENCY):
            return self._generate(args, kwargs)
        self.__signature__.bind_partial(*args, **kwargs)  # raises for arguments given twice
        named = {**self.__signature__.bind_partial(*args).arguments, **kwargs}
        times = config_settings.TokenTimes()
        named["stopping_criteria"] = [*(named.get("stopping_criteria") or ()), times]
        return self._generate((), named), times.seconds

    def _generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from ipex_inductor.llm import caches

        if reason := decoding.why_not_begun(self.model, args, kwargs):
            decoding.log_reason(self.model, reason)
        else:
            kwargs["custom_generate"] = decoding.Decoding(kwargs)
        with self.forward.pool.lease_scope() as leases:
            result = type(self.model).generate(self.model, *args, **kwargs)
            for value in walk_values(result):
                leases.keep_out(value)
                if caches.is_pooled(value):
                    caches.decoder_part(value).detach_table()
        return result


def walk_values(result: Any) -> Iterator[Any]:
    """Yield a result, and what mappings, lists and tuples in it hold."""
    yield result
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        for each in result:
            yield from walk_values(each)


class PrepareCache:
    """The model's `_prepare_cache_for_generation`, whose default cache is replaced by a leased one.

    Args:
        model: the model, whose attribute this becomes.
        forward: the model's compiled forward, which owns the pool.
    """

    def __init__(self, model: Any, forward: CompiledForward) -> None:
        self.model, self.forward = model, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the cache of one call of `generate`."""
        own = type(self.model)._prepare_cache_for_generation.__get__(self.model)
        call = inspect.signature(own).bind(*args, **kwargs).arguments
        model_kwargs = call["model_kwargs"]
        before = {name: id(value) for name, value in model_kwargs.items()}
        result = own(*args, **kwargs)
        for name, value in list(model_kwargs.items()):
            if before.get(name) != id(value):
                self._replace(name, value, call)
            elif name in CACHE_NAMES:
                self._reserve(value, call)
        return result

    def _reserve(self, cache: Any, call: Mapping[str, Any]) -> None:
        """Grow a cache of an earlier call once, for all tokens of this one."""
        from ipex_inductor.llm import caches

        if caches.is_pooled(cache):
            caches.decoder_part(cache).reserve(call["max_cache_length"] + 1)

    def _may_pad_encoder(self, settings: Any) -> bool:
        """Return whether the decoder's attention to the encoder is masked, and not recorded."""
        words = self.forward.__signature__.parameters
        is_text = getattr(self.model, "main_input_name", "") == "input_ids"
        return is_text and "attention_mask" in words and not settings.output_attentions

    def _replace(self, name: str, default: Any, call: Mapping[str, Any]) -> None:
        """Replace the cache `default` by one of the pool, if `generate` made it by default."""
        from ipex_inductor.llm import caches

        leases = self.forward.pool.current
        if leases is None or self.forward.family.is_eager or not caches.is_replaceable(default):
            return
        settings, model_kwargs = call["generation_config"], call["model_kwargs"]
        beams = settings.num_beams or 1
        batch = call["batch_size"] * max(beams, settings.num_return_sequences or 1)
        length = max(call["max_cache_length"] + 1, getattr(settings, "max_cache_len", None) or 0)
        ceiling = buckets.round_ceiling(length)
        encoder = None
        if caches.decoder_part(default) is not default:
            if self._may_pad_encoder(settings):
                pad_encoder(model_kwargs)
            encoder = model_kwargs["encoder_outputs"][0].shape[1]
        key = self.forward.cache_key()
        layouts = self.forward.pool.layout(key)

        def make() -> Any:
            config = self.model.config.get_text_config(decoder=True)
            cache = caches.new_cache(config, ceiling, beams, encoder)
            if layouts is not None and encoder is None:
                cache.allocate(batch, layouts)
            return cache

        cache = leases.take((batch, ceiling, encoder, key), make)
        own = caches.decoder_part(cache)
        own.beams, own.prompt_length = beams, 0
        if own is not cache:  # beams of one text attend to one output of the encoder
            cross = cache.cross_attention_cache
            cross.beams, cross.prompt_length = beams, encoder
        model_kwargs[name] = cache
        settings.disable_compile = True  # `forward` compiles itself


def pad_encoder(model_kwargs: dict[str, Any]) -> None:
    """Pad the encoder's output to one of few lengths, with a mask, so decoding has few graphs."""
    outputs = model_kwargs["encoder_outputs"]
    states = outputs[0]
    batch, length = states.shape[:2]
    missing = sum(buckets.round_chunk(part) for _, part in buckets.split_into_chunks(length))
    missing -= length
    if not hasattr(outputs, "last_hidden_state"):
        return
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = states.new_ones((batch, length), dtype=torch.long)
    outputs = copy.copy(outputs)
    outputs.last_hidden_state = torch.nn.functional.pad(states, (0, 0, 0, missing))
    model_kwargs["encoder_outputs"] = outputs
    model_kwargs["attention_mask"] = torch.nn.functional.pad(mask, (0, missing))
