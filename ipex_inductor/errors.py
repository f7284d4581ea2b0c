"""Typed errors that state what was expected, what was received, and what to do about it."""


class IpexError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, expected: str, came: str, todo: str) -> None:
        super().__init__(f"expected {expected}; got {came}. {todo}")
        self.expected, self.came, self.todo = expected, came, todo


class OptionError(IpexError, ValueError):
    """An unknown option, mode or environment variable, or a value of the wrong type."""


class ArgumentError(IpexError, TypeError):
    """An argument of a kind that a function of this package cannot take."""


class MissingPackageError(IpexError, ImportError):
    """An optional package that a function needs is not installed."""


class NotCarriedError(IpexError, AttributeError):
    """A name of IPEX that does not resolve here; the message names a replacement or a reason."""


class NotCarriedImportError(IpexError, ModuleNotFoundError):
    """`NotCarriedError` for a module, or a name that is imported from one."""


class AlreadyImportedError(IpexError, RuntimeError):
    """The real `intel_extension_for_pytorch` is loaded, so this package cannot replace it."""


class UnsupportedTorchError(IpexError, RuntimeError):
    """The installed torch is older than anything this package can work with."""


class CompilerNotFoundError(IpexError, RuntimeError):
    """No working C++ compiler, which every CPU graph needs."""


class DeviceError(IpexError, RuntimeError):
    """A device that has no storage or no code generator (for example `meta`)."""


class SyclError(IpexError, RuntimeError):
    """SYCL is not usable, or not for this; `log` is the output of a compiler or driver, if any."""

    def __init__(self, expected: str, came: str, todo: str, log: str = "") -> None:
        super().__init__(expected, came, todo)
        self.log = log


class SyclAbsentError(SyclError):
    """SYCL is not usable on this machine: a package, a compiler or a device is missing."""


class SyclCompileError(SyclError):
    """A kernel that a compiler or a driver rejected, crashed on, or did not finish."""


class SyclDeviceError(SyclError):
    """A kernel that a device cannot run, or that failed on it."""


class CoresError(IpexError, ValueError):
    """Cores or NUMA nodes that do not exist, or that this process may not use."""


class ThreadsError(IpexError, RuntimeError):
    """Threads that cannot be pinned to cores: no Linux, or no OpenMP under torch."""


class TargetError(IpexError, LookupError):
    """A device architecture that neither this machine nor the target table knows."""


class KeyFileError(IpexError, ValueError):
    """A file that holds no Ed25519 key, or a private key that others can read."""


class BundleError(IpexError, ValueError):
    """A bundle of kernels that is truncated, changed, or no bundle."""


class UntrustedError(BundleError):
    """A bundle without trust: no signature, an unknown key, or a place others can write."""


class OlderBundleError(BundleError):
    """A bundle older than one that was accepted under this name and key."""


class PackageError(IpexError, LookupError):
    """No package in a bundle was made for the torch and the CPU of this process."""


class PassError(IpexError, RuntimeError):
    """A graph pass failed: the graph is compiled by plain Inductor instead."""


class DroppedWeightError(IpexError, RuntimeError):
    """A graph must repack a weight whose plain data is released (option `drop_plain_weights`)."""


class FamiliarError(IpexError):
    """An error whose message starts with the text that IPEX raised and programs test for."""

    def __init__(self, text: str, expected: str, came: str, todo: str) -> None:
        super().__init__(expected, came, todo)
        self.args = (f"{text}: expected {expected}; got {came}. {todo}",)


class PhaseError(FamiliarError, AssertionError):
    """An optimizer for a model in eval mode, or none for a model in training mode."""


class LevelError(FamiliarError, RuntimeError):
    """An optimization level that does not exist."""


class MixedDevicesError(FamiliarError, DeviceError):
    """A model whose parameters lie on devices of several types."""


class WrappedModelError(IpexError, TypeError):
    """A model that is wrapped already: DDP, FSDP, torch.compile."""


class QuantizationError(IpexError, ValueError):
    """A model, a calibration or a scheme that cannot be quantized."""


class SummaryFileError(IpexError, ValueError):
    """A file of scales that is missing, torn, foreign, or of another model."""


class CheckpointError(IpexError, ValueError):
    """A checkpoint of quantized weights that is missing, torn, foreign, or of another model."""
