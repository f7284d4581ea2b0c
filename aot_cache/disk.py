"""The system calls of the kernel cache: one place, so that tests can make the k-th of them fail."""

from fcntl import flock
from os import (
    close,
    fstat,
    fsync,
    listdir,
    lstat,
    open,
    pread,
    read,
    rename,
    unlink,
    utime,
    write,
)
from time import time

__all__ = [
    "close",
    "flock",
    "fstat",
    "fsync",
    "listdir",
    "lstat",
    "open",
    "pread",
    "read",
    "rename",
    "time",
    "unlink",
    "utime",
    "write",
]
