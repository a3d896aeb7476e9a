"""What `symbiosis run` changes in the packages that load models, once they have been imported: transformers' `from_pretrained` becomes
`loading.load`, and engines that hold models by themselves are told of `symbiosis serve`."""

import functools
import sys
import threading
from types import MethodType, ModuleType
from typing import Any

from symbiosis.errors import ConfigError
from symbiosis.run.outcome import left_alone
from symbiosis.run.settings import from_environment
from symbiosis.run.switch import is_on

_thread = threading.local()
ENGINES = {  # by the module, which class takes the options of one, in which of its methods (the first that it has), and where the model's name is
    "vllm.engine.arg_utils": ("EngineArgs", ("create_engine_config",), "model"),
    "sglang.srt.server_args": ("ServerArgs", ("resolve_once", "__post_init__"), "model_path"),
}


def change(module: ModuleType) -> None:
    """Change a module that has just been imported."""
    if module.__name__ in ENGINES:
        _tell_engine(module, *ENGINES[module.__name__])
    else:
        _share(module.PreTrainedModel)


def _share(base: Any) -> None:
    """Replace `from_pretrained` of all models."""
    original = base.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        load = MethodType(original, cls)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_part = getattr(_thread, "loads", False)  # of a model that is being loaded
        if is_part or not is_on() or caller.startswith("symbiosis."):  # that is what an executor holds
            return load(pretrained_model_name_or_path, *args, **kwargs)
        _thread.loads = True
        try:
            return _load(cls, load, pretrained_model_name_or_path, args, kwargs)
        finally:
            _thread.loads = False

    base.from_pretrained = classmethod(from_pretrained)


def _load(cls: type, original: Any, name: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    settings = from_environment()
    try:
        from symbiosis.base import requirements

        requirements.check()
        from symbiosis.run.loading import load
    except (ImportError, AttributeError, ConfigError) as error:  # a package is missing, or too old
        left_alone(name, str(error), settings, ends=True)
        return original(name, *args, **kwargs)
    return load(cls, original, name, args, kwargs, settings)


def _tell_engine(module: ModuleType, kind: str, methods: tuple[str, ...], model: str) -> None:
    options = getattr(module, kind)
    method = next(name for name in methods if hasattr(options, name))
    original, engine = getattr(options, method), module.__name__.partition(".")[0]
    known: set[str] = set()

    @functools.wraps(original)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = str(getattr(self, model, engine))
        if name not in known:
            known.add(name)
            why = f"{engine} holds it by itself. `symbiosis serve` serves adapters of a shared base by the same API"
            left_alone(name, why, from_environment(), ends=True)
        return original(self, *args, **kwargs)

    setattr(options, method, told)
