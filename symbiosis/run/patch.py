"""Puts `symbiosis run` into transformers' loader: a program's `SomeClass.from_pretrained(...)` becomes `loading.load`."""

import functools
import sys
import threading
from types import MethodType, ModuleType
from typing import Any

from symbiosis.run import hook

_thread = threading.local()


def change(module: ModuleType) -> None:
    """Replace `PreTrainedModel.from_pretrained` of `transformers.modeling_utils`."""
    original = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        load = MethodType(original, cls)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if getattr(_thread, "loads", False) or not hook.is_on() or caller.startswith("symbiosis."):
            return load(pretrained_model_name_or_path, *args, **kwargs)  # a part of a model; or what an executor holds
        _thread.loads = True
        try:
            return _shared(cls, load, pretrained_model_name_or_path, args, kwargs)
        finally:
            _thread.loads = False

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _shared(cls: Any, original: Any, name: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from symbiosis.run.loading import load
    from symbiosis.run.settings import from_environment

    return load(cls, original, name, args, kwargs, from_environment())
