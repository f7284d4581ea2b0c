"""Kernel-noted writes to memory, by asynchronous write protection (Linux 6.7 and later).

A protected page is written as any other, after one fault of about a microsecond that ends its
protection. `PAGEMAP_SCAN`, which `weights.cpp` calls, then reports it as written. See
`Documentation/admin-guide/mm/userfaultfd.rst` and `pagemap.rst` of the kernel. Writes of other
processes, to shared memory or to a mapped file, and writes of devices are not noted.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import sys
import weakref
from dataclasses import dataclass

PAGE = mmap.PAGESIZE
LEAST = 4 * PAGE  # bytes; comparing less is as fast as querying the kernel
MOST_RANGES = 8192  # each may be two mappings more, of which a process has some 65,000
# Of the kernel's headers (uapi/linux/userfaultfd.h, fs.h, mman.h), as older ones lack most of it.
SYSCALLS = {"x86_64": 323, "aarch64": 282}  # userfaultfd
USER_MODE_ONLY = 1  # the mode of processes without privileges
API, API_WRITE_PROTECT_ASYNC = 0xAA, 1 << 15
REGISTER_WRITE_PROTECT, WRITE_PROTECT = 1 << 1, 1
WIPE_ON_FORK = 18


def ioctl_number(direction: int, kind: int, number: int, word_count: int) -> int:
    """Return the number of an ioctl whose argument is a structure of `word_count` int64."""
    return direction << 30 | 8 * word_count << 16 | kind << 8 | number


UFFDIO_API = ioctl_number(3, 0xAA, 0x3F, 3)
UFFDIO_REGISTER = ioctl_number(3, 0xAA, 0x00, 4)
UFFDIO_UNREGISTER = ioctl_number(2, 0xAA, 0x01, 2)
UFFDIO_WRITEPROTECT = ioctl_number(3, 0xAA, 0x06, 3)
PAGEMAP_SCAN = ioctl_number(3, ord("f"), 16, 12)
SCAN_WATCHED, SCAN_WRITTEN = 1 << 0, 1 << 1


class UnwatchableError(OSError):
    """The kernel does not note writes to memory for this process."""


class WatchedPages:
    """Whole pages of memory whose writes are noted as long as this object lives."""

    def __init__(self, kernel: "Kernel", begin: int, size: int) -> None:
        self.kernel, self.begin, self.size = kernel, begin, size
        if _is_any(self, SCAN_WATCHED):  # as pages of a weight that shares them
            self._register()  # writes that its other users have not queried yet show here, too
        else:
            self.protect()

    def protect(self) -> None:
        """Note writes from now on; earlier ones no longer show.

        Raises `UnwatchableError` for memory of a kind that the kernel does not watch.
        """
        self._register()
        self.kernel.ioctl(UFFDIO_WRITEPROTECT, self.begin, self.size, WRITE_PROTECT)

    def _register(self) -> None:
        """Have the kernel watch; pages not watched before show as written."""
        self.kernel.ioctl(UFFDIO_REGISTER, self.begin, self.size, REGISTER_WRITE_PROTECT, 0)

    def __del__(self) -> None:
        with contextlib.suppress(UnwatchableError):  # as the memory is no longer mapped
            self.kernel.ioctl(UFFDIO_UNREGISTER, self.begin, self.size)


@dataclass(frozen=True)
class Kernel:
    """The kernel's service for this process.

    Attributes:
        faults: file descriptor of userfaultfd.
        pagemap: address of the descriptor of `/proc/self/pagemap` as int64; 0 in a forked process,
            in which nothing is watched.
    """

    faults: int
    pagemap: int
    _page: mmap.mmap  # holds the descriptor
    _watched: "weakref.WeakValueDictionary[tuple[int, int], WatchedPages]"

    def watch(self, address: int, size: int) -> WatchedPages | None:
        """Return the watched whole pages inside of `size` bytes; None if they are not worth it.

        Writes that have not been queried yet still show. Raises `UnwatchableError` for memory of a
        kind that the kernel does not watch.
        """
        begin = -(-address // PAGE) * PAGE
        inside = (address + size) // PAGE * PAGE - begin
        if inside < LEAST:
            return None
        if len(self._watched) >= MOST_RANGES:
            raise UnwatchableError(0, f"{MOST_RANGES} ranges are watched, the most there may be")
        pages = self._watched.get((begin, inside))
        if pages is None:
            pages = WatchedPages(self, begin, inside)
            self._watched[begin, inside] = pages
        return pages

    def is_of_this_process(self) -> bool:
        """Return whether this process opened it; a forked one must not use it."""
        return bool(ctypes.c_int64.from_address(self.pagemap).value)

    def ioctl(self, number: int, *arguments: int) -> None:
        """Call userfaultfd; raise `UnwatchableError` if it refuses."""
        if not self.is_of_this_process():
            raise UnwatchableError(0, "it concerns the process that this one was forked from")
        _ioctl(self.faults, number, *arguments)


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)  # Windows has none
    library.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
    return library


def _ioctl(file: int, number: int, *arguments: int) -> int:
    result = int(_libc().ioctl(file, number, (ctypes.c_uint64 * len(arguments))(*arguments)))
    if result < 0:
        raise UnwatchableError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


_opened: Kernel | None = None


def kernel() -> Kernel | None:
    """Return the kernel's service for this process, None if it offers none.

    A forked process may be refused what its parent had, for example by its limit of open files.
    """
    global _opened
    if why_not():
        return None
    if _opened is None or not _opened.is_of_this_process():
        try:
            _opened = _open()
        except OSError:
            return None
    return _opened


@functools.cache
def why_not() -> str:
    """Return why the kernel notes no writes for this process; "" if it does."""
    if not sys.platform.startswith("linux") or platform.machine() not in SYSCALLS:
        return f"needs Linux on {' or '.join(SYSCALLS)}"
    global _opened
    try:
        _opened = _open()
        _check(_opened)
    except OSError as error:
        return f"needs Linux 6.7 or later that allows userfaultfd ({error.strerror})"
    return ""


def _open() -> Kernel:
    with contextlib.ExitStack() as files:  # closed if anything fails
        flags = os.O_CLOEXEC | os.O_NONBLOCK | USER_MODE_ONLY
        faults = int(_libc().syscall(SYSCALLS[platform.machine()], flags))
        if faults < 0:
            raise UnwatchableError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        files.callback(os.close, faults)
        _ioctl(faults, UFFDIO_API, API, API_WRITE_PROTECT_ASYNC, 0)
        page = mmap.mmap(-1, PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(WIPE_ON_FORK)
        descriptor = ctypes.c_int64.from_buffer(page)
        descriptor.value = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        files.pop_all()
    watched: weakref.WeakValueDictionary[tuple[int, int], WatchedPages]
    watched = weakref.WeakValueDictionary()
    return Kernel(faults, ctypes.addressof(descriptor), page, watched)


def is_written(pages: WatchedPages) -> bool:
    """Return whether any of `pages` was written since they were last protected."""
    return _is_any(pages, SCAN_WRITTEN)


def _is_any(pages: WatchedPages, category: int) -> bool:
    """Return whether any of `pages` has a category of `PAGEMAP_SCAN`."""
    region = (ctypes.c_uint64 * 3)()  # a page_region
    region_address, end = ctypes.addressof(region), pages.begin + pages.size
    file = ctypes.c_int64.from_address(pages.kernel.pagemap).value
    sizes = 8 * 12, 0, pages.begin, end, 0, region_address, 1, 1
    return bool(_ioctl(file, PAGEMAP_SCAN, *sizes, 0, category, 0, category))


def _check(kernel: Kernel) -> None:
    """Raise `UnwatchableError` unless writes of this process and of system calls show."""
    memory = mmap.mmap(-1, LEAST + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(first)
    pages = kernel.watch(address, LEAST + PAGE)
    assert pages is not None
    shown = [is_written(pages)]
    memory[PAGE] = 1
    shown.append(is_written(pages))
    pages.protect()
    shown.append(is_written(pages))
    with open("/dev/zero", "rb", buffering=0) as file:
        file.readinto(memoryview(memory)[2 * PAGE : 2 * PAGE + 1])
    shown.append(is_written(pages))
    if shown != [False, True, False, True]:
        raise UnwatchableError(0, "writes did not show in a trial")
