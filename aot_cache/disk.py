"""System calls of the kernel cache, in one place so that tests can make the k-th one fail."""

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
