"""A pytest plugin that runs each of others' tests four times: unsplit, wrapped, with reads allowed, and with mapped weights.

Loaded by scripts/compat_suites.py (`-p _suites_plugin`). Every model that a test loads or gives to PEFT is wrapped, and served by an executor
of its own, in this process. What the outermost module returns, and the gradients after each backward pass, are kept in order
and compared, bit by bit, with those of the unsplit run. One line of JSON for each test goes to $SYMBIOSIS_SUITES_OUT.
"""

import copy
import itertools
import json
import os
import random
import re
import sys
import tempfile
import threading
import types
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import jinja2
import numpy
import peft
import pytest
import torch
from _pytest.runner import runtestprotocol
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import GenerationMixin, PreTrainedModel

import symbiosis
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_sum import RemoteSum
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import SymbiosisError, WrapError

WAYS = ("wrapped", "reads", "mapped")
NOISE = 1e-6  # of the largest of all values: a gradient that is zero but for roundings, some of float32's
CLOSE = 1e-4  # float32 sums in another order, after some steps of training, of the largest value; for methods computed in another way
# the least eps of a type of half the width; what a sum of such numbers may be off by, in theirs
HALF, ROUNDINGS = 1e-4, 4
# how refusals name a weight, also where torch puts them into an error of its own
TOLD = ("remote weight", "shared base weight")
OUR_NAMES = "Virt[A-Z]"  # of classes, where a test expects torch's in a message
Seen = Tensor | str


@dataclass
class Attempt:
    """One way of one test: what it computed, and how it ended."""

    way: str
    seen: list[Seen] = field(default_factory=list)
    tops: dict[int, nn.Module] = field(default_factory=dict)
    executors: list[symbiosis.Executor] = field(default_factory=list)
    served: int = 0
    error: BaseException | None = None
    skipped: bool = False
    reformulated: bool = False
    # of what was seen, what follows from the first token that was generated
    sampled: set[int] = field(default_factory=set)
    generating: int = 0  # the number of its next step
    partial: bool = False  # a state dict was made that has only what the client owns


now: Attempt | None = None
_depth = threading.local()
_sockets, _numbers = tempfile.TemporaryDirectory(prefix="suites-"), itertools.count()
_main = threading.get_ident()


# ---------------------------------------------------------------- the runs of a test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    Path(os.environ["SYMBIOSIS_SUITES_UNDER_WAY"]).write_text(item.nodeid)
    _given(item)
    unsplit = _attempt(item, "unsplit", item.parent)
    result: dict[str, Any] = {"test": item.nodeid}
    if unsplit.skipped or unsplit.error is not None:
        result["not_here"] = "skipped" if unsplit.skipped else _brief(unsplit.error)
    else:
        for way in WAYS:
            result[way] = _judged(_attempt(item, way, item.parent), unsplit)
    with Path(os.environ["SYMBIOSIS_SUITES_OUT"]).open("a") as out:
        out.write(json.dumps(result) + "\n")
    item.session._setupstate.teardown_exact(nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _given(item: Any) -> None:
    """Keep a test's arguments as they are now: PEFT writes into lists of names."""
    item.given = copy.deepcopy(getattr(item, "callspec", None) and item.callspec.params)


def _attempt(item: Any, way: str, keep: Any) -> Attempt:
    """`keep`: whose fixtures are not torn down."""
    global now
    now = Attempt(way)
    _seed()
    if item.given:
        item.callspec.params.update(copy.deepcopy(item.given))
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


def _seed() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a traceback for each kind of device: 5 ms
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    random.seed(0)
    numpy.random.seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> None:
    """Fixtures of a class or a file are made in its first attempt only: what they draw must not show in what follows."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _seed()


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
    executor = _executor(model, now.way)
    try:
        symbiosis.wrap(model, executor.endpoint)
    except WrapError:  # nothing to serve: convolutions, heads, tied weights
        executor.close()
        return model
    now.executors.append(executor)
    now.served += 1
    return model


def _executor(model: nn.Module, way: str) -> symbiosis.Executor:
    """One that serves a copy of the model. Its matrices lie where the model's own do, because where one begins decides roundings."""
    matrices = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters() if p.dim() > 1}
    served = copy.deepcopy(model, matrices)
    if way != "mapped":
        return symbiosis.Executor(served, allow_read=way == "reads", policy="immediate")
    socket = f"local://{_sockets.name}/{next(_numbers)}"
    return symbiosis.Executor(served, listen=[socket], share_weights=True, policy="immediate")


def _patch_loading() -> None:
    load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    @wraps(load)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return split(load(cls, *args, **kwargs))

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment, method-assign]
    for cls in (peft.PeftModel, peft.PeftMixedModel):
        cls.__init__ = _with_split_model(cls.__init__)  # type: ignore[method-assign]
        cls.add_adapter = _noting_the_method(cls.add_adapter)  # type: ignore[method-assign]
    Session.call = _noting_transposed_rows(Session.call)  # type: ignore[method-assign]
    RemoteSum.__init__ = _noting(RemoteSum.__init__)  # type: ignore[method-assign]  # W + delta: two products, not one


def _with_split_model(init: Any) -> Any:
    @wraps(init)
    def with_split_model(self: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        if now is not None:
            now.reformulated |= _is_reformulated(peft_config, now.way)
        init(self, split(model), peft_config, *args, **kwargs)

    return with_split_model


def _noting_the_method(add: Any) -> Any:
    @wraps(add)
    def add_adapter(self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
        if now is not None:
            now.reformulated |= _is_reformulated(peft_config, now.way)
        return add(self, adapter_name, peft_config, *args, **kwargs)

    return add_adapter


def _noting(function: Any) -> Any:
    """What calls it is computed in another way than unsplit, unless values are at hand."""

    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if now is not None and now.way == "wrapped":
            now.reformulated = True
        return function(*args, **kwargs)

    return noted


def _noting_transposed_rows(call: Any) -> Any:
    """Rows are sent one after another: where torch would have multiplied a transposed matrix, it rounds otherwise."""

    @wraps(call)
    def noted(self: Any, op: Any, layer: int, *payload: Any, **options: Any) -> Any:
        strided = any(isinstance(part, Tensor) and not part.is_contiguous() for part in payload)
        if now is not None and now.way == "wrapped" and strided:
            now.reformulated = True
        return call(self, op, layer, *payload, **options)

    return noted


def _is_reformulated(config: Any, way: str) -> bool:
    """Methods that a split model computes in another order, as docs/architecture.md and scripts/compat_peft.py say. Where its values are at
    hand, these are sums with trained biases only, and none where the client makes its products itself."""
    if way != "wrapped":
        return way == "reads" and getattr(config, "bias", "none") != "none"
    kinds = {"SHIRA", "SUPERTUNING", "HRA", "GLORA", "MISS"}
    kind = getattr(config, "peft_type", "")
    return (
        getattr(kind, "value", kind) in kinds
        or bool(getattr(config, "use_dora", False))
        or bool(getattr(config, "target_parameters", None))
        or getattr(config, "bias", "none") != "none"
        or "niter" in str(getattr(config, "init_lora_weights", ""))
        or getattr(config, "psoft_svd", "") == "lowrank"
    )


# ---------------------------------------------------------------- what is compared


def _patch_seeing() -> None:
    call, backward, state_dict = nn.Module.__call__, Tensor.backward, nn.Module.state_dict
    generate = GenerationMixin.generate

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
            before = len(now.seen)
            now.seen += [t.detach().clone() for t in tree_leaves(_values(output)) if isinstance(t, Tensor)]
            now.sampled.update(range(before, len(now.seen)) if now.generating > 1 else ())
            now.generating += now.generating > 0
        return output

    def seen_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if now is not None:
            now.generating = 1
        try:
            return generate(self, *args, **kwargs)
        finally:
            if now is not None:
                now.generating = 0

    def seen_backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = backward(self, *args, **kwargs)
        if now is not None:
            for top in now.tops.values():
                for name, parameter in top.named_parameters():
                    if parameter.grad is not None:
                        now.seen += [name, parameter.grad.detach().clone()]
        return result

    def seen_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if now is not None and now.way == "wrapped" and next(remote_weights(self), None) is not None:
            now.partial = True
        return state_dict(self, *args, **kwargs)

    GenerationMixin.generate = seen_generate  # type: ignore[method-assign, assignment]
    nn.Module.state_dict = seen_state_dict  # type: ignore[method-assign, assignment]
    nn.Module.__call__ = seen_call  # type: ignore[method-assign, assignment]
    Tensor.backward = seen_backward  # type: ignore[method-assign, assignment]


def _values(output: Any) -> Any:
    return dict(output) if isinstance(output, dict) else output


def _judged(got: Attempt, expected: Attempt) -> dict[str, Any]:
    """Outcome and detail of one way."""
    if got.error is not None:
        kind = "refused" if _is_ours(got.error) else "unclear"
        if kind == "unclear" and re.search(OUR_NAMES, str(got.error)):
            kind = "named"
        if kind == "unclear" and got.partial and isinstance(got.error, AssertionError | KeyError):
            kind = "partial"
        return {"kind": kind, "why": _brief(got.error)}
    if not got.served:
        return {"kind": "nothing to serve", "why": ""}
    # A token may be another one for a rounding, and then so is all that follows.
    mine, theirs = (_before_sampling(a) if got.reformulated else a.seen for a in (got, expected))
    if len(mine) != len(theirs):
        return {"kind": "silent", "why": f"{len(mine)} values instead of {len(theirs)}"}
    worst, where = _worst(mine, theirs, 0.0)
    if worst == 0.0:
        return {"kind": "equal", "why": ""}
    if got.reformulated:
        largest = max((float(t.abs().max()) for t in theirs if _is_measured(t)), default=0.0)
        worst, where = _worst(mine, theirs, NOISE * largest)
    kind = "close" if worst <= _close(theirs) and got.reformulated else "silent"
    return {"kind": kind, "why": f"differs by {worst:.1e} of the largest value of {where}"}


def _before_sampling(attempt: Attempt) -> list[Seen]:
    return [value for number, value in enumerate(attempt.seen) if number not in attempt.sampled]


def _worst(got: list[Seen], expected: list[Seen], noise: float) -> tuple[float, str]:
    """The largest difference, and of what: a parameter's gradient comes behind its name."""
    worst, where, name = 0.0, "", ""
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        apart = _difference(a, b, noise)
        if apart > worst:
            worst, where = apart, f"the gradient of {name}" if name else f"value {number} of {len(got)}"
        name = b if isinstance(b, str) else ""
    return worst, where


def _close(seen: list[Seen]) -> float:
    """What sums in another order may differ by: of numbers of half the width, some of their own roundings."""
    coarsest = max((torch.finfo(t.dtype).eps for t in seen if _is_measured(t)), default=0.0)  # type: ignore[union-attr]
    return max(CLOSE, ROUNDINGS * coarsest) if coarsest > HALF else CLOSE


def _is_measured(value: Seen) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not value.is_sparse and value.numel() > 0


def _difference(got: Seen, expected: Seen, noise: float) -> float:
    """Of the largest value; 0.0 only if all bits are equal, or nothing is further apart than `noise`."""
    if isinstance(got, str) or isinstance(expected, str):
        return 0.0 if isinstance(got, str) and got == expected else float("inf")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if got.is_sparse or _bits(got) == _bits(expected):
        return 0.0
    apart = (got.double() - expected.double()).abs().max()
    if apart <= noise:
        return 0.0
    apart = apart / expected.double().abs().max()
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
    module.__spec__ = ModuleSpec(name, None)
    module.__version__ = "0"  # type: ignore[attr-defined]
    module.__getattr__ = attribute  # type: ignore[method-assign, assignment]
    sys.modules.setdefault(name, module)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    for name in ("datasets", "diffusers"):
        try:
            import_module(name)
        except ImportError:
            _stand_in(name)
    assert symbiosis.wrap and symbiosis.Executor  # imported now, before a test runs
    jinja2.Template = cache(jinja2.Template)  # type: ignore[misc]  # PEFT writes a model card whenever it saves: a seventh of the time
    _patch_loading()
    _patch_seeing()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those of the shard $SYMBIOSIS_SUITES_SHARD, "number/of", of which there is no result yet.

    A shard is drawn by names: neighbours, and tests that stand equally far apart, are often of one model or method."""
    number, _, of = os.environ["SYMBIOSIS_SUITES_SHARD"].partition("/")
    out = Path(os.environ["SYMBIOSIS_SUITES_OUT"])
    had = {json.loads(line)["test"] for line in out.read_text().splitlines()} if out.exists() else set()
    mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % int(of) == int(number)]
    items[:] = [item for item in mine if item.nodeid not in had]
    if utils := sys.modules.get("tests.testing_utils"):
        utils._HUB_MODEL_ACCESSES = _EveryModel()  # type: ignore[attr-defined]


class _EveryModel(dict[str, int]):
    """The models that PEFT's tests have asked the hub for already: all, so that they ask the cache only."""

    def __contains__(self, model: object) -> bool:
        return True

    def __missing__(self, model: str) -> int:
        return 0
