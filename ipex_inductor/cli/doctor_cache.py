"""The checks of `doctor` that concern the kernel cache: our home, and all else that is asked."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from ipex_inductor.aot_cache import cache_root, trust, use
from ipex_inductor.aot_cache.bundle import open_bundle
from ipex_inductor.aot_cache.folder import Folder
from ipex_inductor.aot_cache.quota import quota_of
from ipex_inductor.aot_cache.remote import Remote
from ipex_inductor.aot_cache.store import default_folder
from ipex_inductor.aot_cache.survey import survey
from ipex_inductor.cli.cache_shared import size
from ipex_inductor.cli.findings import Finding
from ipex_inductor.errors import ArgumentError, BundleError, KeyFileError, UntrustedError

_T = TypeVar("_T")


def _home() -> Finding:
    found = cache_root.state(cache_root.home(), probe=True)
    if not found.private:
        return "fail", found.reason, "fix that, or set IPEX_HOME to a folder of your own"
    if not found.writable:
        return "warn", found.reason, "set IPEX_HOME to a writable folder, or every start is cold"
    if not found.exists:
        return "ok", f"{found.path}, made on first use", ""
    mode = found.path.stat().st_mode & 0o7777
    return "ok", f"{found.path}, yours, mode {mode:04o}", ""


def _entries() -> Finding:
    if text := os.environ.get("IPEX_AOT_QUOTA", ""):
        try:
            quota_of(text)
        except ArgumentError as error:
            return "warn", f"IPEX_AOT_QUOTA={text} is not used", f"expected {error.expected}"
    at, quota = default_folder(), use.quota()
    judged = cache_root.state(at)
    if not judged.exists:
        return "ok", f"none yet, {size(quota)} may be kept", ""
    if not judged.usable:
        return "fail", judged.reason, "fix that: until then nothing is kept"
    found = list(survey(Folder(at, "ours")))
    held = sum(each.file.size for each in found)
    detail = f"{len(found)} in {at}, {size(held)} of {size(quota)}"
    if bad := sum(bool(each.why) for each in found):
        return "warn", f"{detail}; {bad} are not used", "`ipex-inductor cache verify` names them"
    return "ok", detail, ""


def _layers() -> Finding:
    return _each("IPEX_AOT_LAYERS", use.layers(), _layer)


def _layer(path: Path) -> Finding:
    judged = cache_root.state(path, layer=True)
    if not judged.exists:
        return "warn", f"{path} is not there", "make it, or take it out of IPEX_AOT_LAYERS"
    if not judged.private:
        return "warn", judged.reason, "a layer is used if only you or root can write it"
    return "ok", str(path), ""


def _bundles() -> Finding:
    named = os.environ.get("IPEX_AOT_BUNDLES", "").split(os.pathsep)
    return _each("IPEX_AOT_BUNDLES", [Path(path) for path in named if path], _bundle)


def _bundle(path: Path) -> Finding:
    try:
        found = open_bundle(path, accepts=False)
    except (BundleError, UntrustedError) as error:
        return "warn", f"{error.came}; expected {error.expected}", error.todo
    return "ok", f"{found.origin}, {len(found.manifest.entries)} entries", ""


def _remotes() -> Finding:
    return _each("IPEX_AOT_REMOTES", use.remotes(), _remote)


def _remote(remote: Remote) -> Finding:
    remote.read("asked by doctor")  # nobody has that; what counts is whether it says so
    if remote.why_dead:
        todo = "check the URL and the credentials, and that fsspec's package for it is installed"
        return "warn", f"{remote.label}: {remote.why_dead}", todo
    return "ok", f"{remote.label} answers" + ", written to as well" * remote.write_back, ""


def _trusted() -> Finding:
    try:
        names = list(trust.trusted())
    except (UntrustedError, KeyFileError) as error:
        return "fail", error.came, error.todo
    return "ok", ", ".join(names) or "none; signed bundles need `ipex-inductor cache trust add`", ""


def _each(variable: str, named: Iterable[_T], check: Callable[[_T], Finding]) -> Finding:
    """The findings of all as one, as bad as the worst."""
    found = [check(each) for each in named]
    if not found:
        return "ok", f"none; {variable} names them", ""
    worst = max((status for status, _, _ in found), key=("ok", "warn", "fail").index)
    todo = dict.fromkeys(todo for _, _, todo in found if todo)
    return worst, "; ".join(detail for _, detail, _ in found), "; ".join(todo)


CACHE_CHECKS: Mapping[str, Callable[[], Finding]] = {
    "cache folder": _home,
    "cache entries": _entries,
    "cache layers": _layers,
    "cache bundles": _bundles,
    "cache remotes": _remotes,
    "trusted keys": _trusted,
}
