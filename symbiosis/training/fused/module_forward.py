"""What stands in a module's instance as its `forward`, and goes back to that of its class."""

import inspect
from typing import Any

from torch import nn
from torch._C import _functorch, _is_tracing, _len_torch_dispatch_stack
from torch.compiler import is_compiling


class ModuleForward:
    """The `forward` of one module. Can be copied and pickled with it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's class makes of it."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The arguments of the module's class, for which Trainer and `generate` look."""
        return inspect.signature(type(self.module).forward.__get__(self.module))


def put(forward: ModuleForward) -> None:
    vars(forward.module)["forward"] = forward


def take_back(module: nn.Module) -> None:
    """Let a module compute by its class again."""
    if isinstance(vars(module).get("forward"), ModuleForward):
        del vars(module)["forward"]


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module computes by anything but its class."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def has_hooks(module: nn.Module) -> bool:
    """Whether something else happens when a module is called: weights are gathered, say."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def is_watched() -> bool:
    """Whether a compiler, a tracer, a dispatch mode or torch.func records torch's operations: then it should see those of the module itself."""
    return (
        is_compiling() or _is_tracing() or _len_torch_dispatch_stack() > 0 or bool(_functorch.peek_interpreter_stack())
    )
