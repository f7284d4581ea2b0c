"""Where our files live, and whether that folder is ours alone.

Judged by owner and mode bits, because root passes every `os.access`. Nothing is created before
`ensure` is called.
"""

import grp
import itertools
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ipex_inductor.errors import OptionError

RECORDS = "autotune"  # the folder in it for records of timings
_MAX_LINKS = 40  # as in the Linux kernel


@dataclass(frozen=True)
class HomeState:
    """What is known about a folder, with the `reason` when it must not be used.

    `private`: no other user can write it or put another in its place. A missing folder is judged
    by what `ensure` would make of it.
    """

    path: Path
    exists: bool
    writable: bool
    private: bool
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Whether entries may be read from it and written to it."""
        return self.writable and self.private


def home() -> Path:
    """$IPEX_HOME, else `ipex_inductor` in $XDG_CACHE_HOME, else in ~/.cache; need not exist."""
    try:
        if own := os.environ.get("IPEX_HOME"):
            return Path(own).expanduser().absolute()
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG specification has a relative path ignored.
        root = cache if cache.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        todo = "Set IPEX_HOME to an absolute path."
        raise OptionError("a user with a home folder", str(error), todo) from None
    return root / "ipex_inductor"


def state(path: Path, probe: bool = False, layer: bool = False) -> HomeState:
    """Judge `path` without changing it; `probe` also tries a temporary file inside it.

    A `layer` is only read, and so may be root's.
    """
    path = path.absolute()
    shared = _why_shared(path, {0, os.geteuid()} if layer else {os.geteuid()})
    # Never write into a folder that somebody else may have put there.
    unwritable = _why_unwritable(path, probe and not shared)
    reason = shared or unwritable
    return HomeState(path, os.path.lexists(path), not unwritable, not shared, reason)


def ensure(path: Path | None = None) -> HomeState:
    """Create the folder (default: `home()`) with mode 0700 if it is missing, then judge it.

    Never raises for what the disk says: a folder that cannot be made comes back with the reason.
    """
    found = state(path or home())
    if found.exists or not found.usable:
        return found
    missing = itertools.takewhile(lambda p: not p.exists(), (found.path, *found.path.parents))
    try:
        for folder in reversed(list(missing)):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        reason = f"{found.path} cannot be created: {error.strerror}"
        return replace(found, writable=False, reason=reason)
    return state(found.path)


def _why_shared(path: Path, owners: set[int]) -> str:
    """How another user could write `path` or replace it, "" when none can."""
    try:
        for step in _steps(path.parent):
            if reason := _ancestor_risk(step, os.lstat(step)):
                return reason
        return _folder_risk(path, os.lstat(path), owners)
    except FileNotFoundError:
        return ""  # from here down `ensure` creates everything itself
    except OSError as error:
        return f"{path} cannot be judged: {error.strerror}"


def _folder_risk(path: Path, found: os.stat_result, owners: set[int]) -> str:
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link; name the folder itself"
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if found.st_uid not in owners:
        return f"{path} belongs to uid {found.st_uid}, not to you (uid {os.geteuid()})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} has mode {_octal(found)}: others can write it; chmod 700 it"
    return ""


def _ancestor_risk(path: Path, found: os.stat_result) -> str:
    # Whoever owns / can replace everything anyway; in a user namespace that is an unmapped uid.
    if found.st_uid not in {0, os.geteuid(), os.lstat("/").st_uid}:
        return f"{path}, above the folder, belongs to uid {found.st_uid}"
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return ""  # a link has no mode of its own; in a sticky folder only owners rename
    group = found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid)
    if group or found.st_mode & stat.S_IWOTH:
        return f"{path}, above the folder, has mode {_octal(found)}: others can replace the folder"
    return ""


def _is_private_group(gid: int) -> bool:
    """Whether `gid` is the one-member group that many distributions give each user (umask 002)."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    own = user.pw_gid == gid and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}


def _steps(path: Path) -> Iterator[Path]:
    """Every folder and link the kernel passes on the way to `path`, `path` included."""
    here, todo, links = Path("/"), list(reversed(path.parts[1:])), 0
    yield here
    while todo:
        part = todo.pop()
        if part == "..":
            here = here.parent
            continue
        here /= part
        yield here
        if here.is_symlink() and (links := links + 1) <= _MAX_LINKS:
            target = here.parent / os.readlink(here)
            here, todo = Path("/"), [*todo, *reversed(target.parts[1:])]


def _why_unwritable(path: Path, probe: bool) -> str:
    """Why no file can be made in `path` (or no `path` in its nearest parent), "" when one can."""
    nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
    try:
        found = os.stat(nearest)
        if not stat.S_ISDIR(found.st_mode):
            return f"{nearest} is not a folder"
        if os.statvfs(nearest).f_flag & os.ST_RDONLY:
            return f"{nearest} is on a read-only file system"
        if not _mode_allows(found):
            return f"{nearest} has mode {_octal(found)}: you cannot write it"
        if probe and nearest == path:
            tempfile.NamedTemporaryFile(dir=path, prefix=".probe").close()
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror}"
    return ""


def _mode_allows(found: os.stat_result) -> bool:
    """Whether the mode bits give this process write and search permission."""
    if found.st_uid == os.geteuid():
        need = stat.S_IWUSR | stat.S_IXUSR
    elif found.st_gid in {os.getegid(), *os.getgroups()}:
        need = stat.S_IWGRP | stat.S_IXGRP
    else:
        need = stat.S_IWOTH | stat.S_IXOTH
    return found.st_mode & need == need


def _octal(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):04o}"
