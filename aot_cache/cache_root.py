"""Location of the cache folder, and checks that no other user can write or replace it.

The checks use owner and mode bits, because root passes every `os.access`. Nothing is created
before `ensure` is called.
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
    """State of a folder, with the `reason` when it must not be used.

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
        """Return whether entries may be read from the folder and written to it."""
        return self.writable and self.private


def home() -> Path:
    """Return $IPEX_HOME, else `ipex_inductor` in $XDG_CACHE_HOME, else in ~/.cache.

    The folder need not exist. Raises `OptionError` if there is no home folder.
    """
    try:
        if configured := os.environ.get("IPEX_HOME"):
            return Path(configured).expanduser().absolute()
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG specification has a relative path ignored.
        root = cache if cache.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        advice = "Set IPEX_HOME to an absolute path."
        raise OptionError("a user with a home folder", str(error), advice) from None
    return root / "ipex_inductor"


def state(path: Path, probe: bool = False, layer: bool = False) -> HomeState:
    """Return the state of `path` without changing it; `probe` also tries a temporary file in it.

    A `layer` is read-only and may belong to root.
    """
    path = path.absolute()
    shared = _why_shared(path, {0, os.geteuid()} if layer else {os.geteuid()})
    # Never write into a folder that another user may have put there.
    unwritable = _why_unwritable(path, probe and not shared)
    reason = shared or unwritable
    return HomeState(path, os.path.lexists(path), not unwritable, not shared, reason)


def ensure(path: Path | None = None) -> HomeState:
    """Create the folder (default: `home()`) with mode 0700 if it is missing, then check it.

    Never raises for disk errors: a folder that cannot be created is returned with the reason.
    """
    before = state(path or home())
    if before.exists or not before.usable:
        return before
    missing = itertools.takewhile(lambda p: not p.exists(), (before.path, *before.path.parents))
    try:
        for folder in reversed(list(missing)):
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        reason = f"{before.path} cannot be created: {error.strerror}"
        return replace(before, writable=False, reason=reason)
    return state(before.path)


def _why_shared(path: Path, owners: set[int]) -> str:
    """Return how another user could write or replace `path`, "" if none can."""
    try:
        for step in _steps(path.parent):
            if reason := _ancestor_risk(step, os.lstat(step)):
                return reason
        return _folder_risk(path, os.lstat(path), owners)
    except FileNotFoundError:
        return ""  # from here down `ensure` creates everything itself
    except OSError as error:
        return f"{path} cannot be judged: {error.strerror}"


def _folder_risk(path: Path, status: os.stat_result, owners: set[int]) -> str:
    """Return why the folder itself is not private to one of `owners`, "" if it is."""
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link; name the folder itself"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a folder"
    if status.st_uid not in owners:
        return f"{path} belongs to uid {status.st_uid}, not to you (uid {os.geteuid()})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} has mode {_octal(status)}: others can write it; chmod 700 it"
    return ""


def _ancestor_risk(path: Path, status: os.stat_result) -> str:
    """Return how another user could replace a folder below `path`, "" if none can."""
    # The owner of / can replace everything anyway; in a user namespace it is an unmapped uid.
    if status.st_uid not in {0, os.geteuid(), os.lstat("/").st_uid}:
        return f"{path}, above the folder, belongs to uid {status.st_uid}"
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & stat.S_ISVTX:
        return ""  # a link has no mode of its own; in a sticky folder only owners rename
    group = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    if group or status.st_mode & stat.S_IWOTH:
        return f"{path}, above the folder, has mode {_octal(status)}: others can replace the folder"
    return ""


def _is_private_group(gid: int) -> bool:
    """Return whether `gid` is the user's one-member group, common where the umask is 002."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    is_primary = user.pw_gid == gid and group.gr_name == user.pw_name
    return is_primary and set(group.gr_mem) <= {user.pw_name}


def _steps(path: Path) -> Iterator[Path]:
    """Yield every folder and link the kernel passes on the way to `path`, `path` included."""
    folder, pending, links = Path("/"), list(reversed(path.parts[1:])), 0
    yield folder
    while pending:
        part = pending.pop()
        if part == "..":
            folder = folder.parent
            continue
        folder /= part
        yield folder
        if folder.is_symlink() and (links := links + 1) <= _MAX_LINKS:
            target = folder.parent / os.readlink(folder)
            folder, pending = Path("/"), [*pending, *reversed(target.parts[1:])]


def _why_unwritable(path: Path, probe: bool) -> str:
    """Return why no file can be made in `path` or its nearest parent, "" if one can."""
    nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
    try:
        status = os.stat(nearest)
        if not stat.S_ISDIR(status.st_mode):
            return f"{nearest} is not a folder"
        if os.statvfs(nearest).f_flag & os.ST_RDONLY:
            return f"{nearest} is on a read-only file system"
        if not _mode_allows(status):
            return f"{nearest} has mode {_octal(status)}: you cannot write it"
        if probe and nearest == path:
            tempfile.NamedTemporaryFile(dir=path, prefix=".probe").close()
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror}"
    return ""


def _mode_allows(status: os.stat_result) -> bool:
    """Return whether the mode bits give this process write and search permission."""
    if status.st_uid == os.geteuid():
        need = stat.S_IWUSR | stat.S_IXUSR
    elif status.st_gid in {os.getegid(), *os.getgroups()}:
        need = stat.S_IWGRP | stat.S_IXGRP
    else:
        need = stat.S_IWOTH | stat.S_IXOTH
    return status.st_mode & need == need


def _octal(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"
