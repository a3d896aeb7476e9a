"""What happens when a program calls `SomeClass.from_pretrained(...)`: whether the model shares an executor's layers, and why not."""

import os
import sys
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from symbiosis.client.optimizer_checks import refuse_to_train_whole
from symbiosis.client.session import Session
from symbiosis.client.shared_load import SharedLoad
from symbiosis.errors import SymbiosisError
from symbiosis.run import kept_remote
from symbiosis.run.outcome import end_dry_run, left_alone, shared
from symbiosis.run.settings import Settings

# By endpoint. They end with their models.
_sessions: "weakref.WeakValueDictionary[tuple[str, ...], Session]" = weakref.WeakValueDictionary()
_unreached: dict[tuple[str, ...], str] = {}


def load(
    cls: Any, original: Callable[..., Any], name_or_path: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    settings: Settings,
) -> Any:  # fmt: skip
    """Return what `original`, the `from_pretrained` of `cls`, returns; its frozen layers are the executor's, if it has them.

    Says what it did by `outcome.shared` or `outcome.left_alone`.
    """
    begun = time.monotonic()
    if settings.verdict:
        _end_where_a_model_computes(settings)
    session, why = _join(settings.endpoint) if (why := _why_not(kwargs)) is None else (None, why)
    if session is None:
        left_alone(name_or_path, why, settings)
        return original(name_or_path, *args, **kwargs)
    refused: list[str] = []

    def refuse(why: str) -> None:
        refused.append(why)
        left_alone(name_or_path, why, settings)

    sharing = SharedLoad(cls, session, refuse, _as_dtype, settings.require)
    with sharing.under_way():
        loaded = original(name_or_path, *args, **kwargs)
    if not refused:
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        refuse_to_train_whole(model)
        kept_remote.watch(model, name_or_path)
        shared(name_or_path, model, session.endpoint, sharing.not_loaded, time.monotonic() - begun)
    return loaded


def _join(endpoint: tuple[str, ...]) -> tuple[Session | None, str]:
    """Return the session that all models of this process share, or why there is none. That is not tried again: nobody wants to wait twice."""
    session = _sessions.get(endpoint)
    if session is None and endpoint not in _unreached:
        try:
            session = Session(endpoint, exact=True, share=True, wait=None)
            session.welcome  # noqa: B018 (which joins)
            _sessions[endpoint] = session
        except SymbiosisError as error:
            session, _unreached[endpoint] = None, str(error)
    return session, _unreached.get(endpoint, "")


def _why_not(kwargs: dict[str, Any]) -> str | None:
    """Return why a program's call cannot share, as far as that is known before anything is loaded."""
    if "unsloth" in sys.modules:
        return (
            "Unsloth's kernels read the weights of each layer, which the executor holds: train with PEFT or TRL alone"
        )
    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3 divides the weights among processes: with an executor there is nothing to divide, so do without it, by DDP"
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" or "FSDP_CPU_RAM_EFFICIENT_LOADING" in os.environ:
        return "FSDP divides the weights among processes: with an executor there is nothing to divide, so use DDP (accelerate launch --multi_gpu)"
    if divided := [name for name in ("tp_plan", "tp_size", "distributed_config", "device_mesh") if kwargs.get(name)]:
        return (
            f"{divided[0]} divides its weights among processes: with an executor, let each process have a whole model"
        )
    return None


@cache
def _end_where_a_model_computes(settings: Settings) -> None:
    """Let a dry run load all models that the program works with, and end there."""

    def end(module: nn.Module, _: Any) -> None:
        if isinstance(module, PreTrainedModel):
            end_dry_run(settings)

    register_module_forward_pre_hook(end)


def _as_dtype(dtype: str) -> str:
    """Return what to write for a dtype, in the program that this is. Those that build on others come first."""
    short = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    options = {
        "llamafactory": f"LLaMA-Factory: {short}: true" if short else f"LLaMA-Factory: infer_dtype: {dtype}",
        "axolotl": f"axolotl: {short}: true" if short else "axolotl: bf16: false",
        "swift": f"swift: --torch_dtype {dtype}",
        "trl": f"TRL's commands: --dtype {dtype}",
    }
    option = next((f" ({option})" for program, option in options.items() if program in sys.modules), "")
    return f"dtype=torch.{dtype}{option}"
