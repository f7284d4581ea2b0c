"""Entries shared over a network, by any protocol that fsspec knows: file, s3, gs, http ...

A remote that does not answer in time, or fails, costs that once and is not used again by this
process. Its entries are verified like any others: by key and digest.
"""

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ipex_inductor.aot_cache.entry import LIMIT
from ipex_inductor.aot_cache.log_once import say

TIMEOUT = 10.0  # s for one entry

_T = TypeVar("_T")


class Remote:
    """The entries below a URL; with `write_back`, entries compiled here are also uploaded.

    `options` are fsspec's for the protocol (endpoint, profile, ...). `why_dead`: why the remote is
    no longer used, "" if it is.
    """

    def __init__(
        self, url: str, write_back: bool = False, timeout: float = TIMEOUT, **options: Any
    ) -> None:
        self.label, self.origin = url, f"the remote {url}"
        self.write_back = write_back
        self._timeout = timeout
        self._options = options
        self._opened: tuple[int, Any, str] | None = None  # process, file system, folder in it
        self.why_dead = ""

    def read(self, name: str) -> bytes | None:
        """Return the bytes under a name, None if there are none or the remote is dead."""
        return self._call(lambda: self._fetch(name))

    def write(self, name: str, data: bytes) -> bool:
        """Upload an entry if `write_back` is set; return whether it was uploaded."""
        return self.write_back and self._call(lambda: self._put(name, data)) is not None

    def _fetch(self, name: str) -> bytes | None:
        """Return the bytes of an entry, None if it is missing or larger than an entry may be."""
        files, folder = self._open()
        path = f"{folder}/{name}"
        try:
            size = files.info(path)["size"] or 0  # checked first: an entry must fit into memory
            if size > LIMIT:
                say(f"{path} in {self.label} is not fetched: {size} bytes are no entry")
                return None
            return bytes(files.cat_file(path))
        except FileNotFoundError:
            return None

    def _put(self, name: str, data: bytes) -> bool:
        """Upload an entry; create the folder if the protocol needs one."""
        files, folder = self._open()
        try:
            files.pipe_file(f"{folder}/{name}", data)
        except FileNotFoundError:  # of protocols that have folders
            files.makedirs(folder, exist_ok=True)
            files.pipe_file(f"{folder}/{name}", data)
        return True

    def _open(self) -> tuple[Any, str]:
        """Return the file system of this process: fsspec's must not be used after a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            self._opened = os.getpid(), *url_to_fs(self.label, **self._options)
        return self._opened[1], self._opened[2].rstrip("/")

    def _call(self, call: Callable[[], _T]) -> _T | None:
        """Run a call in a thread; return None, and mark the remote dead, if it fails."""
        if self.why_dead:
            return None
        answer: queue.SimpleQueue[_T | Exception | None] = queue.SimpleQueue()
        threading.Thread(target=_answer, args=(call, answer), daemon=True).start()
        try:
            result = answer.get(timeout=self._timeout)
        except queue.Empty:
            result = TimeoutError(f"no answer in {self._timeout:g} s")
        if isinstance(result, Exception):
            self.why_dead = f"{result or type(result).__name__}"
            say(f"{self.label} is not asked again by this process: {self.why_dead}")
            return None
        return result


def _answer(call: Callable[[], _T | None], answer: "queue.SimpleQueue[Any]") -> None:
    """Put the result of a call, or its exception, into a queue."""
    try:
        answer.put(call())
    except Exception as error:  # whatever a protocol's library raises
        answer.put(error)
