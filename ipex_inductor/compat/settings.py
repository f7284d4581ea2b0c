"""Settings of torch and Inductor: names, types, changes from the defaults."""

import functools
from collections.abc import Callable, Mapping
from typing import Any


@functools.cache
def inductor_option_types() -> Mapping[str, type | None]:
    """Return every option of Inductor with its type, None where any value is accepted.

    As in torch.compile, a type with parameters (`list[str]`, `X | None`) is not checked.
    """
    from torch._inductor import config

    def checkable(name: str) -> type | None:
        kind = config.get_type(name)  # type: ignore[attr-defined]  # a module made into a class
        return kind if isinstance(kind, type) and not hasattr(kind, "__origin__") else None

    return {name: checkable(name) for name in config.get_config_copy()}


def mode_options(mode: str) -> dict[str, Any]:
    """Return Inductor's option values for a `torch.compile` mode."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


# Options that name passes of users; not every version has all.
USERS_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


def as_pass_list(value: Any) -> list[Callable[..., Any]]:
    """Return a custom-pass option as a list: 2.11 takes one pass or None, later also lists."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def uuids_of(passes: list[Callable[..., Any]]) -> list[str] | None:
    """Return the uuids of a user's passes in Inductor's caches; None if one has no uuid."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    uuids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in passes]
    return None if None in uuids else list(map(str, uuids))


def inductor_changes() -> dict[str, Any]:
    """Return Inductor's options that differ from torch's defaults, if Inductor digests them."""
    from torch._inductor import config

    entries: dict[str, Any] = config._config  # type: ignore[attr-defined]
    prefixes = ["_", *getattr(config, "_cache_config_ignore_prefix", [])]
    changes = config._get_dict(ignored_prefixes=prefixes, skip_default=True)  # type: ignore[attr-defined]
    # The dict also contains options that were set and restored.
    return {n: v for n, v in changes.items() if n not in _CACHES and v != entries[n].default}


_CACHES = frozenset(  # whether caches are on changes no code
    {"autotune_local_cache", "bundled_autograd_cache", "force_disable_caches", "fx_graph_cache"}
    | {"fx_graph_remote_cache", "bundle_triton_into_fx_graph_cache"}
)


def caches_forbidden() -> bool:
    """Return whether the user forbade Inductor to cache anything."""
    from torch._inductor import config

    return bool(config.force_disable_caches)


def why_no_graph_cache() -> str:
    """Return the setting that stops Inductor from caching graphs, "" if it caches them."""
    from torch._inductor import config

    if config.force_disable_caches:
        return "Inductor's force_disable_caches is set"
    return "" if config.fx_graph_cache else "Inductor's fx_graph_cache is off"


def any_host(gm: Any) -> dict[str, Any]:
    """Return options that make Inductor's keys for a GPU-only graph equal on all hosts.

    The keys contain the host's g++ (CXX), though it compiles nothing of the graph, and the class of
    each parameter, which a fake one does not have: that annotation is removed from the graph.
    """
    from torch._inductor import config

    for node in gm.graph.find_nodes(op="placeholder"):
        node.type = None
    gm.recompile()
    unread = getattr(config, "_cache_config_ignore_prefix", [])
    return {"_cache_config_ignore_prefix": [*unread, "cpp.cxx"]}


def register_log() -> None:
    """Make `ipex` a short name of our log in `torch._logging.set_logs(modules={"ipex": level})`.

    TORCH_LOGS is parsed while torch is imported, before us, and takes an unknown name for a
    module's: `TORCH_LOGS="+ipex_inductor"`.
    """
    from torch._logging._internal import register_log as register

    register("ipex", "ipex_inductor")
