"""Symbiosis: one frozen base model, shared by any number of transformers/PEFT programs."""

from sys import platform as _platform

TYPE_CHECKING = False  # for them it is true; `typing` takes a third of the time that Python needs to start

if _platform != "linux":
    raise ImportError(
        f"Symbiosis runs on Linux, and this is {_platform}: it needs sealed memory, eventfds and the peer credentials of sockets. "
        "On Windows use WSL 2, on macOS a Linux container or virtual machine"
    )

__version__ = "0.1.0"

_WHERE = {
    "wrap": "symbiosis.client.wrap",
    "unwrap": "symbiosis.client.unwrap",
    "stats": "symbiosis.client.wrap",
    "report": "symbiosis.client.wrap",
    "from_executor": "symbiosis.client.from_executor",
    "capture": "symbiosis.client.capture",
    "offload_cache": "symbiosis.offload.cache",
    "Noise": "symbiosis.client.privacy.noise",
    "Pads": "symbiosis.client.privacy.pads",
    "Split": "symbiosis.client.privacy.split",
    "SymbiosisCallback": "symbiosis.client.trainer_callback",
    "publish": "symbiosis.serving.lora.publish",
    "rollout": "symbiosis.training.rollout",
    "fuse": "symbiosis.training.fused.fuse",
    "unfuse": "symbiosis.training.fused.fuse",
    "Executor": "symbiosis.executor.embedded",
    "SymbiosisError": "symbiosis.errors",
}
_PACKAGES = ("serving", "training")  # with public names of their own
__all__ = [
    "Executor",
    "Noise",
    "Pads",
    "Split",
    "SymbiosisCallback",
    "SymbiosisError",
    "capture",
    "from_executor",
    "fuse",
    "offload_cache",
    "publish",
    "report",
    "rollout",
    "stats",
    "unfuse",
    "unwrap",
    "wrap",
]

if TYPE_CHECKING:
    from typing import Any

    from symbiosis import serving as serving
    from symbiosis import training as training
    from symbiosis.client.capture import capture
    from symbiosis.client.from_executor import from_executor
    from symbiosis.client.privacy.noise import Noise
    from symbiosis.client.privacy.pads import Pads
    from symbiosis.client.privacy.split import Split
    from symbiosis.client.trainer_callback import SymbiosisCallback
    from symbiosis.client.unwrap import unwrap
    from symbiosis.client.wrap import report, stats, wrap
    from symbiosis.errors import SymbiosisError
    from symbiosis.executor.embedded import Executor
    from symbiosis.offload.cache import offload_cache
    from symbiosis.serving.lora.publish import publish
    from symbiosis.training.fused.fuse import fuse, unfuse
    from symbiosis.training.rollout import rollout


def __getattr__(name: str) -> "Any":
    """Import a name when it is used, so that `import symbiosis` is cheap and `--help` needs no torch."""
    if name not in _WHERE and name not in _PACKAGES:
        raise AttributeError(f"module 'symbiosis' has no attribute {name!r}")
    import importlib

    if name != "SymbiosisError":
        from symbiosis.base import requirements

        requirements.check()
    if name in _PACKAGES:
        return importlib.import_module(f"symbiosis.{name}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names for completion, before anything has been imported."""
    return sorted({*globals(), *__all__, *_PACKAGES})
