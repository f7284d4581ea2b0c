"""Checks of `doctor` for the kernel cache: our own folder, layers, bundles, remotes and keys."""

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
from ipex_inductor.cli.cache.shared import size
from ipex_inductor.cli.doctor.findings import Finding
from ipex_inductor.errors import ArgumentError, BundleError, KeyFileError, UntrustedError

_T = TypeVar("_T")


def _home() -> Finding:
    state = cache_root.state(cache_root.home(), probe=True)
    if not state.private:
        return "fail", state.reason, "fix that, or set IPEX_HOME to a folder of your own"
    if not state.writable:
        return "warn", state.reason, "set IPEX_HOME to a writable folder, or every start is cold"
    if not state.exists:
        return "ok", f"{state.path}, made on first use", ""
    mode = state.path.stat().st_mode & 0o7777
    return "ok", f"{state.path}, yours, mode {mode:04o}", ""


def _entries() -> Finding:
    if text := os.environ.get("IPEX_AOT_QUOTA", ""):
        try:
            quota_of(text)
        except ArgumentError as error:
            return "warn", f"IPEX_AOT_QUOTA={text} is not used", f"expected {error.expected}"
    cache_dir, quota = default_folder(), use.quota()
    state = cache_root.state(cache_dir)
    if not state.exists:
        return "ok", f"none yet, {size(quota)} may be kept", ""
    if not state.usable:
        return "fail", state.reason, "fix that: until then nothing is kept"
    entries = list(survey(Folder(cache_dir, "ours")))
    held = sum(entry.file.size for entry in entries)
    detail = f"{len(entries)} in {cache_dir}, {size(held)} of {size(quota)}"
    if bad := sum(bool(entry.why) for entry in entries):
        return "warn", f"{detail}; {bad} are not used", "`ipex-inductor cache verify` names them"
    return "ok", detail, ""


def _layers() -> Finding:
    return _join_findings("IPEX_AOT_LAYERS", use.layers(), _layer)


def _layer(path: Path) -> Finding:
    state = cache_root.state(path, layer=True)
    if not state.exists:
        return "warn", f"{path} is not there", "make it, or take it out of IPEX_AOT_LAYERS"
    if not state.private:
        return "warn", state.reason, "a layer is used if only you or root can write it"
    return "ok", str(path), ""


def _bundles() -> Finding:
    named = os.environ.get("IPEX_AOT_BUNDLES", "").split(os.pathsep)
    return _join_findings("IPEX_AOT_BUNDLES", [Path(path) for path in named if path], _bundle)


def _bundle(path: Path) -> Finding:
    try:
        bundle = open_bundle(path, accepts=False)
    except (BundleError, UntrustedError) as error:
        return "warn", f"{error.came}; expected {error.expected}", error.todo
    return "ok", f"{bundle.origin}, {len(bundle.manifest.entries)} entries", ""


def _remotes() -> Finding:
    return _join_findings("IPEX_AOT_REMOTES", use.remotes(), _remote)


def _remote(remote: Remote) -> Finding:
    remote.read("asked by doctor")  # no such entry exists; only whether the remote answers counts
    if remote.why_dead:
        advice = "check the URL and the credentials, and that fsspec's package for it is installed"
        return "warn", f"{remote.label}: {remote.why_dead}", advice
    return "ok", f"{remote.label} answers" + ", written to as well" * remote.write_back, ""


def _check_trusted_keys() -> Finding:
    try:
        names = list(trust.trusted_keys())
    except (UntrustedError, KeyFileError) as error:
        return "fail", error.came, error.todo
    return "ok", ", ".join(names) or "none; signed bundles need `ipex-inductor cache trust add`", ""


def _join_findings(variable: str, named: Iterable[_T], check: Callable[[_T], Finding]) -> Finding:
    """Return the findings of all items as one, with the worst status."""
    findings = [check(item) for item in named]
    if not findings:
        return "ok", f"none; {variable} names them", ""
    worst = max((status for status, _, _ in findings), key=("ok", "warn", "fail").index)
    advice = dict.fromkeys(advice for _, _, advice in findings if advice)
    return worst, "; ".join(detail for _, detail, _ in findings), "; ".join(advice)


CACHE_CHECKS: Mapping[str, Callable[[], Finding]] = {
    "cache folder": _home,
    "cache entries": _entries,
    "cache layers": _layers,
    "cache bundles": _bundles,
    "cache remotes": _remotes,
    "trusted keys": _check_trusted_keys,
}
