"""A pytest plugin that runs each of others' tests three times: unsplit, wrapped, and wrapped with reads allowed.

Loaded by scripts/compat_suites.py (`-p _suites_plugin`). Every model that a test loads or gives to PEFT is wrapped, and served by an executor
of its own, in this process. What the outermost module returns, and the gradients after each backward pass, are kept in order
and compared, bit by bit, with those of the unsplit run. One line of JSON for each test goes to $SYMBIOSIS_SUITES_OUT.
"""

import copy
import json
import os
import random
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy
import peft
import pytest
import torch
from _pytest.runner import runtestprotocol
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import symbiosis
from symbiosis.client.remote_weight import remote_weights
from symbiosis.errors import SymbiosisError, WrapError

WAYS = ("unsplit", "wrapped", "reads")
CLOSE = 1e-4  # float32 sums in another order, after some steps of training, of the largest value; for methods computed in another way
TOLD = (
    "remote weight",
    "shared base weight",
)  # how refusals name a weight, also where torch puts them into an error of its own


@dataclass
class Attempt:
    """One way of one test: what it computed, and how it ended."""

    way: str
    seen: list[Tensor | str] = field(default_factory=list)
    tops: dict[int, nn.Module] = field(default_factory=dict)
    executors: list[symbiosis.Executor] = field(default_factory=list)
    served: int = 0
    error: BaseException | None = None
    skipped: bool = False
    reformulated: bool = False


now: Attempt | None = None
_depth = threading.local()
_main = threading.get_ident()


# ---------------------------------------------------------------- three runs of a test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    unsplit = _attempt(item, "unsplit", item.parent)
    result: dict[str, Any] = {"test": item.nodeid}
    if unsplit.skipped or unsplit.error is not None:
        result["not_here"] = "skipped" if unsplit.skipped else _brief(unsplit.error)
    else:
        for way in WAYS[1:]:
            result[way] = _judged(_attempt(item, way, item.parent), unsplit)
    with Path(os.environ["SYMBIOSIS_SUITES_OUT"]).open("a") as out:
        out.write(json.dumps(result) + "\n")
    item.session._setupstate.teardown_exact(nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _attempt(item: Any, way: str, keep: Any) -> Attempt:
    """`keep`: whose fixtures are not torn down."""
    global now
    now = Attempt(way)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    if hasattr(item, "_initrequest"):
        item._initrequest()
    try:
        runtestprotocol(item, nextitem=keep, log=False)
        return now
    finally:
        for executor in now.executors:
            executor.close()
        now.tops.clear()
        now = None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if now is not None and report.outcome != "passed" and call.excinfo is not None:
        now.skipped = report.skipped
        now.error = now.error or call.excinfo.value


# ---------------------------------------------------------------- wrapping


def split(model: Any) -> Any:
    """The model, wrapped, unless this run is unsplit, it is wrapped or adapted already, or has nothing to serve."""
    if now is None or now.way == "unsplit" or not isinstance(model, nn.Module) or threading.get_ident() != _main:
        return model
    modules = list(model.modules())
    if any(isinstance(module, BaseTunerLayer) for module in modules) or next(remote_weights(model), None) is not None:
        return model
    executor = symbiosis.Executor(copy.deepcopy(model), allow_read=now.way == "reads", policy="immediate")
    try:
        symbiosis.wrap(model, executor.endpoint)
    except WrapError:  # nothing to serve: convolutions, heads, tied weights
        executor.close()
        return model
    now.executors.append(executor)
    now.served += 1
    return model


def _patch_loading() -> None:
    load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    @wraps(load)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return split(load(cls, *args, **kwargs))

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment, method-assign]
    for cls in (peft.PeftModel, peft.PeftMixedModel):
        cls.__init__ = _with_split_model(cls.__init__)  # type: ignore[method-assign]


def _with_split_model(init: Any) -> Any:
    @wraps(init)
    def with_split_model(self: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        if now is not None:
            now.reformulated |= _is_reformulated(peft_config)
        init(self, split(model), peft_config, *args, **kwargs)

    return with_split_model


def _is_reformulated(config: Any) -> bool:
    """Methods that a split model computes in another order, as docs/architecture.md and scripts/compat_peft.py say."""
    kinds = {"SHIRA", "SUPERTUNING", "HRA", "GLORA", "MISS"}
    kind = getattr(config, "peft_type", "")
    return (
        getattr(kind, "value", kind) in kinds
        or bool(getattr(config, "use_dora", False))
        or bool(getattr(config, "target_parameters", None))
        or getattr(config, "bias", "none") != "none"
        or "niter" in str(getattr(config, "init_lora_weights", ""))
    )


# ---------------------------------------------------------------- what is compared


def _patch_seeing() -> None:
    call, backward = nn.Module.__call__, Tensor.backward

    def seen_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if now is None or threading.get_ident() != _main:
            return call(self, *args, **kwargs)
        depth = _depth.value = getattr(_depth, "value", 0) + 1
        try:
            output = call(self, *args, **kwargs)
        finally:
            _depth.value = depth - 1
        if depth == 1:
            now.tops[id(self)] = self
            now.seen += [t.detach().clone() for t in tree_leaves(_values(output)) if isinstance(t, Tensor)]
        return output

    def seen_backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = backward(self, *args, **kwargs)
        if now is not None:
            for top in now.tops.values():
                for name, parameter in top.named_parameters():
                    if parameter.grad is not None:
                        now.seen += [name, parameter.grad.detach().clone()]
        return result

    nn.Module.__call__ = seen_call  # type: ignore[method-assign, assignment]
    Tensor.backward = seen_backward  # type: ignore[method-assign, assignment]


def _values(output: Any) -> Any:
    return dict(output) if isinstance(output, dict) else output


def _judged(got: Attempt, expected: Attempt) -> dict[str, Any]:
    """Outcome and detail of one way."""
    if got.error is not None:
        kind = "refused" if _is_ours(got.error) else "unclear"
        return {"kind": kind, "why": _brief(got.error)}
    if not got.served:
        return {"kind": "nothing to serve", "why": ""}
    if len(got.seen) != len(expected.seen):
        return {"kind": "silent", "why": f"{len(got.seen)} values instead of {len(expected.seen)}"}
    worst = max((_difference(a, b) for a, b in zip(got.seen, expected.seen, strict=True)), default=0.0)
    if worst == 0.0:
        return {"kind": "equal", "why": ""}
    kind = "close" if worst <= CLOSE and got.reformulated else "silent"
    return {"kind": kind, "why": f"differs by {worst:.1e} of the largest value"}


def _difference(got: Tensor | str, expected: Tensor | str) -> float:
    """0.0 only if all bits are equal."""
    if isinstance(got, str) or isinstance(expected, str):
        return 0.0 if isinstance(got, str) and got == expected else float("inf")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if got.is_sparse or _bits(got) == _bits(expected):
        return 0.0
    apart = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(apart) if apart.isfinite() else float("inf")


def _bits(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _is_ours(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, SymbiosisError) or any(told in str(error) for told in TOLD):
            return True
        error = error.__cause__ or error.__context__
    return False


def _brief(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"[:400]


# ---------------------------------------------------------------- packages that the tests import and hardly use


def _stand_in(name: str) -> None:
    """For names that are imported and compared with; dunders are asked for by whoever looks through all modules."""

    def attribute(wanted: str) -> type:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return type(wanted, (), {})

    module = types.ModuleType(name)
    module.__getattr__ = attribute  # type: ignore[method-assign, assignment]
    sys.modules.setdefault(name, module)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    try:
        import diffusers  # noqa: F401
    except ImportError:
        _stand_in("diffusers")
    assert symbiosis.wrap and symbiosis.Executor  # imported now, before a test runs
    _patch_loading()
    _patch_seeing()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every n-th test: $SYMBIOSIS_SUITES_SHARD is "number/of"."""
    number, _, of = os.environ.get("SYMBIOSIS_SUITES_SHARD", "0/1").partition("/")
    items[:] = items[int(number) :: int(of)]
