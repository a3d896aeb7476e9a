"""The names that a base model gives its layers, whatever PEFT, compilers and others have put around them. Wrappers are recognised by
their types and not by their names, because a base may have modules of the same names."""

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

# Modules that stand in the place of one of theirs: the name they give it, and where their classes come from.
STAND_INS = {
    "base_model": ("peft.peft_model", "peft.mixed_model"),
    "model": ("peft.tuners.",),
    "base_layer": ("peft.",),
    "original_module": ("peft.",),
    "module": ("torch.nn.parallel.", "torch.optim.swa_utils", "deepspeed."),
    "_orig_mod": ("torch._dynamo.",),
    "_fsdp_wrapped_module": ("torch.distributed.",),
    "_checkpoint_wrapped_module": ("torch.distributed.",),
}


def modules_in_base(root: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield every module as often as it is reached: its path, its name in the base model, and the module itself.

    >>> inner = nn.ModuleDict({"module": nn.Linear(2, 2)})  # a name like any other
    >>> [(path, name) for path, name, _ in modules_in_base(nn.DataParallel(inner))]
    [('', ''), ('module', ''), ('module.module', 'module')]
    """
    return _walk(root, "", "")


def _walk(module: nn.Module, path: str, name: str) -> Iterator[tuple[str, str, nn.Module]]:
    yield path, name, module
    for child_name, child in module._modules.items():
        if child is not None:
            inner = name if _stands_for(module, child_name) else _join(name, child_name)
            yield from _walk(child, _join(path, child_name), inner)


def parameter_in_base(name: str, module: nn.Module, leaf: str) -> str:
    """Return the name of a parameter of the module `name`."""
    return name if isinstance(module, ParametrizationList) and leaf == "original" else _join(name, leaf)


def _stands_for(module: nn.Module, child: str) -> bool:
    if child == "parametrizations":
        lists = list(module._modules[child].children())  # type: ignore[union-attr]
        return bool(lists) and all(isinstance(each, ParametrizationList) for each in lists)
    origins = STAND_INS.get(child)
    return origins is not None and any(kind.__module__.startswith(origins) for kind in type(module).__mro__)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
