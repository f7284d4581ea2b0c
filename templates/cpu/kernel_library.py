"""Libraries of C++ kernels for CPUs: built once, stored in the kernel cache, called by address."""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ipex_inductor.aot_cache.key import Pairs, pairs
from ipex_inductor.target.device import architecture
from ipex_inductor.templates.build.cpp import NotBuiltError, load, ship, why_not_taken

Settings = dict[str, int]


@functools.cache
def list_instructions() -> frozenset[str]:
    """Return the instruction sets of this CPU that Linux lists."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(flags.split())


class KernelLibrary:
    """A library that is built at its first call, for the CPU of that call.

    Args:
        name: of the kernels, in the cache and of the thread that builds them.
        source: returns the C++ for some settings.
        variants: returns settings to try in turn; all CPUs of the target architecture have what the
            last ones need.
    """

    def __init__(
        self,
        name: str,
        source: Callable[[Settings], str],
        variants: Callable[[], Sequence[Settings]],
    ) -> None:
        self.name = name
        self._source, self._variants = source, variants
        self.library = functools.cache(self._load)
        self.why_not = functools.cache(self._find_reason)
        self.begin = functools.cache(self._start_thread)
        self._why_not_taken = functools.cache(self._check_source)

    def _load(self) -> ctypes.CDLL:
        """Return the library, built at the first call. Raises `NotBuiltError`."""
        *special, common = self._variants()
        for settings in special:
            try:
                return load(*self._recipe(settings), with_torch=True)
            except NotBuiltError:
                continue
        return load(*self._recipe(common), with_torch=True)

    def _recipe(self, settings: Settings) -> tuple[Callable[[], str], Pairs]:
        """Return a function that returns the source, and the name in the cache."""
        problem = pairs({"template": f"{self.name} kernels", **settings})
        return functools.partial(self._source, settings), problem

    def ship(self) -> None:
        """Store the library in the cache for others with the target CPU, as `cpp.ship` does."""
        ship(*self._recipe(self._variants()[-1]), with_torch=True)

    def _start_thread(self) -> None:
        """Start to build the library in another thread; others wait for its entry in the cache."""
        thread = threading.Thread(
            target=self.why_not, name=f"ipex {self.name} kernels", daemon=True
        )
        thread.start()

    def _find_reason(self) -> str | None:
        """Return why there is no library here, None if there is."""
        try:
            self.library()
        except NotBuiltError as error:
            return str(error)
        return None

    def why_not_in_cpp(self) -> str | None:
        """Return why the compiler does not accept the kernels for the target CPU, None if it does.

        It must be GCC, and support that CPU's bf16.
        """
        return self._why_not_taken(architecture())

    def _check_source(self, arch: str) -> str | None:
        return why_not_taken(self._source(self._variants()[-1]), arch)

    def address(self, name: str) -> int:
        """Return the address of a function of the library, for C++. Raises `NotBuiltError`."""
        function_address = ctypes.cast(self.library()[name], ctypes.c_void_p).value
        assert function_address is not None
        return function_address
