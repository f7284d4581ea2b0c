"""Lowerings: each `ipex::` op to its kernel, one file a family; whose kernel Inductor's ops get.

Inductor's registry of lowerings is global, so only our own ops are ever registered here.
"""

import functools


def register(sycl: bool = False) -> None:
    """Tell Inductor how to lower every `ipex::` op.

    `sycl`: have those for kernels in SYCL run some; a graph from the cache may call them too.
    """
    _register()
    if sycl:
        from ipex_inductor.lowerings.sycl import register as kernels

        kernels()


@functools.cache
def _register() -> None:
    from ipex_inductor.lowerings import (
        blocked,
        conv,
        conv_many,
        conv_templates,
        conv_weight,
        few_rows,
        foreach,
        kept,
        linear,
        moments,
        persistent,
        pool,
        short_attention,
        shortcut,
        streamed,
        winograd,
    )

    blocked.register()
    conv.register()
    conv_many.register()
    conv_templates.register()
    conv_weight.register()
    few_rows.register()
    foreach.register()
    kept.register()
    linear.register()
    moments.register()
    persistent.register()
    pool.register()
    short_attention.register()
    shortcut.register()
    streamed.register()
    winograd.register()
