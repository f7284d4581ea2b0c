"""Where our files live, and when that folder is refused (cache.md R9)."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from ipex_inductor.aot_cache import cache_root
from ipex_inductor.errors import OptionError

pytestmark = pytest.mark.unit

FOREIGN = 65534
MODES = (0o700, 0o755, 0o750, 0o770, 0o775, 0o777, 0o1777)
PARENTS = {"ok": 0o755, "world-writable": 0o777, "sticky": 0o1777}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "above" / "home"
    path.mkdir(parents=True)
    path.chmod(0o700)
    path.parent.chmod(0o755)
    return path


def chown(path, uid):
    try:
        os.chown(path, uid, -1)
    except PermissionError:
        pytest.skip("only root can give a folder away")


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"IPEX_HOME": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"IPEX_HOME": "~/b"}, "/h/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/ipex_inductor"),
        ({"XDG_CACHE_HOME": "relative"}, "/h/.cache/ipex_inductor"),
        ({"XDG_CACHE_HOME": "", "IPEX_HOME": ""}, "/h/.cache/ipex_inductor"),
        ({}, "/h/.cache/ipex_inductor"),
    ],
)
def test_home_is_the_first_of_the_three(monkeypatch, env, expected):
    for name in ("IPEX_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/h", **env}.items():
        monkeypatch.setenv(name, value)
    assert cache_root.home() == Path(expected)


def test_a_relative_home_is_made_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPEX_HOME", "mine")
    assert cache_root.home() == tmp_path / "mine"
    assert list(tmp_path.iterdir()) == []


def test_no_home_at_all_says_what_to_set(monkeypatch):
    monkeypatch.setenv("IPEX_HOME", "~no_such_user_here/x")
    with pytest.raises(OptionError, match="Set IPEX_HOME to an absolute path"):
        cache_root.home()


@pytest.mark.parametrize("parent", PARENTS)
@pytest.mark.parametrize("bits", MODES, ids=oct)
@pytest.mark.parametrize("owner", ["self", "other"])
def test_private_means_no_other_uid_can_write_or_replace_it(folder, owner, bits, parent):
    folder.chmod(bits)
    folder.parent.chmod(PARENTS[parent])
    if owner == "other":
        chown(folder, FOREIGN)
    found = cache_root.state(folder)
    assert found.private == (owner == "self" and not bits & 0o022 and parent in {"ok", "sticky"}), (
        found.reason
    )
    assert found.exists
    assert (found.reason == "") == found.usable


def test_the_reason_names_folder_mode_and_owner(folder):
    folder.chmod(0o777)
    assert cache_root.state(folder).reason == (
        f"{folder} has mode 0777: others can write it; chmod 700 it"
    )
    chown(folder, FOREIGN)
    assert cache_root.state(folder).reason == (
        f"{folder} belongs to uid {FOREIGN}, not to you (uid {os.geteuid()})"
    )


def test_a_foreign_folder_above_is_refused(folder):
    chown(folder.parent, FOREIGN)
    found = cache_root.state(folder)
    assert not found.private
    assert found.reason == f"{folder.parent}, above the folder, belongs to uid {FOREIGN}"


def test_a_missing_home_under_a_world_writable_folder_is_refused(folder):
    folder.parent.chmod(0o777)
    found = cache_root.ensure(folder / "x" / "y")
    assert (found.exists, found.private) == (False, False)
    assert not (folder / "x").exists()


def test_group_writable_above_is_fine_for_a_private_group_only(folder, monkeypatch):
    folder.parent.chmod(0o775)
    monkeypatch.setattr(cache_root, "_is_private_group", lambda gid: True)
    assert cache_root.state(folder).private
    monkeypatch.setattr(cache_root, "_is_private_group", lambda gid: False)
    assert "has mode 0775: others can replace the folder" in cache_root.state(folder).reason


@pytest.mark.parametrize(
    ("primary", "name", "members", "private"),
    [
        (7, "me", [], True),
        (7, "me", ["me"], True),
        (7, "me", ["me", "you"], False),
        (7, "users", [], False),
        (8, "me", [], False),
    ],
)
def test_a_private_group_is_ones_own_and_has_no_other_member(
    monkeypatch, primary, name, members, private
):
    user = SimpleNamespace(pw_name="me", pw_gid=primary)
    monkeypatch.setattr(cache_root.pwd, "getpwuid", lambda uid: user)
    group = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(cache_root.grp, "getgrgid", lambda gid: group)
    assert cache_root._is_private_group(7) == private


def test_an_unknown_group_is_not_private():
    assert not cache_root._is_private_group(4242424)


def test_a_symlinked_home_is_refused(folder):
    link = folder.parent / "link"
    link.symlink_to(folder)
    found = cache_root.state(link)
    assert (found.exists, found.private) == (True, False)
    assert found.reason == f"{link} is a symbolic link; name the folder itself"
    assert cache_root.ensure(link) == found


def test_a_dangling_symlink_is_refused_and_not_followed(folder):
    link = folder.parent / "link"
    link.symlink_to(folder / "nowhere")
    found = cache_root.ensure(link)
    assert found.exists
    assert "is a symbolic link" in found.reason
    assert not (folder / "nowhere").exists()


def test_a_link_above_is_followed_and_what_it_points_to_is_judged(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to("above/../above")
    assert cache_root.state(link / "home").usable
    folder.parent.chmod(0o777)
    assert cache_root.state(link / "home").reason.startswith(f"{folder.parent}, above the folder")


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    found = cache_root.ensure(tmp_path / "a" / "home")
    assert not found.usable
    assert "Too many levels of symbolic links" in found.reason


def test_a_regular_file_is_refused(folder):
    file = folder / "file"
    file.write_text("mine")
    found = cache_root.ensure(file)
    assert (found.exists, found.writable, found.private) == (True, False, False)
    assert found.reason == f"{file} is not a folder"
    assert file.read_text() == "mine"


def test_a_home_below_a_file_is_refused(folder):
    (folder / "file").write_text("")
    found = cache_root.ensure(folder / "file" / "home")
    assert not found.usable
    assert "Not a directory" in found.reason


def test_a_fifo_does_not_block(folder):
    os.mkfifo(folder / "fifo")
    assert cache_root.state(folder / "fifo", probe=True).reason.endswith("is not a folder")


def test_read_only_is_private_but_not_writable(folder):
    folder.chmod(0o555)
    found = cache_root.state(folder)
    assert (found.exists, found.writable, found.private) == (True, False, True)
    assert found.reason == f"{folder} has mode 0555: you cannot write it"


def test_missing_below_read_only_is_not_created(folder):
    folder.chmod(0o555)
    found = cache_root.ensure(folder / "x" / "home")
    assert (found.exists, found.writable, found.private) == (False, False, True)
    assert found.reason == f"{folder} has mode 0555: you cannot write it"
    assert list(folder.iterdir()) == []


def test_a_read_only_mount_is_not_writable(folder, monkeypatch):
    real = os.statvfs

    def read_only(path):
        values = list(real(path)[:10])
        values[8] |= os.ST_RDONLY
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", read_only)
    assert cache_root.state(folder).reason == f"{folder} is on a read-only file system"


def test_probe_really_writes_and_leaves_nothing(folder, monkeypatch):
    assert cache_root.state(folder, probe=True).usable
    assert list(folder.iterdir()) == []

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_root.tempfile, "NamedTemporaryFile", full)
    assert cache_root.state(folder).usable
    assert cache_root.state(folder, probe=True).reason == (
        f"{folder} cannot be written: No space left on device"
    )


def test_probe_never_writes_into_a_folder_of_others(folder, monkeypatch):
    folder.chmod(0o777)
    monkeypatch.setattr(cache_root.tempfile, "NamedTemporaryFile", pytest.fail)
    assert not cache_root.state(folder, probe=True).usable


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077], ids=oct)
def test_ensure_makes_it_and_what_is_above_0700(folder, umask):
    path = folder / "a" / "b" / "home"
    assert cache_root.state(path) == cache_root.HomeState(
        path, exists=False, writable=True, private=True
    )
    before = os.umask(umask)
    try:
        found = cache_root.ensure(path)
    finally:
        os.umask(before)
    assert found == cache_root.HomeState(path, exists=True, writable=True, private=True)
    assert [mode(p) for p in (path, path.parent, path.parent.parent)] == [0o700] * 3


def test_ensure_leaves_an_existing_folder_as_it_is(folder):
    folder.chmod(0o750)
    assert cache_root.ensure(folder).usable
    assert mode(folder) == 0o750


def test_ensure_reports_what_mkdir_says(folder, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(Path, "mkdir", full)
    found = cache_root.ensure(folder / "x")
    assert not found.usable
    assert found.reason == f"{folder / 'x'} cannot be created: Disk quota exceeded"


def test_ensure_judges_again_what_somebody_else_made_first(folder, monkeypatch):
    """In a sticky folder another user may win the race for the name."""
    real = Path.mkdir

    def squat(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self.chmod(0o777)

    monkeypatch.setattr(Path, "mkdir", squat)
    assert not cache_root.ensure(folder / "x").private


def test_asking_creates_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("IPEX_HOME", str(tmp_path / "home"))
    cache_root.state(cache_root.home(), probe=True)
    assert list(tmp_path.iterdir()) == []
    assert cache_root.ensure().path == tmp_path / "home"
    assert mode(tmp_path / "home") == 0o700


@pytest.mark.parametrize("bits", range(8))
def test_mode_bits_of_the_right_class_decide(folder, bits):
    """One digit each for owner, group and others: only the owner's may count for our folder."""
    for other in (0, 5):
        folder.chmod(bits << 6 | other << 3 | other)
        assert cache_root.state(folder).writable == (bits & 0o3 == 0o3)


def test_steps_name_every_folder_and_link_on_the_way(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "l").symlink_to(tmp_path / "m")
    (tmp_path / "m").symlink_to("n")
    (tmp_path / "n").symlink_to("./a/../a")
    steps = list(cache_root._steps(tmp_path / "l" / "b"))
    assert steps[0] == Path("/")
    passed = [p for p in steps if tmp_path in p.parents]
    names = [str(p.relative_to(tmp_path)) for p in passed]
    assert names == ["l", "m", "n", "a", "a", "a/b"]
