"""`from_executor`: a client model without a checkpoint, from what the executor tells at the join.

The structure is built on the meta device. What is served becomes remote; non-persistent buffers are computed by the
model's own code; embeddings, norms and whatever else is the client's own come from the executor, by name: in memory that the
clients of a host share until they change it, where there is such, else by reading.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from symbiosis.client.remote_weight import RemoteWeight
from symbiosis.client.session import CALL_S, PATIENCE_S, Session
from symbiosis.client.wrap import attach, priority_of
from symbiosis.config import default_endpoints
from symbiosis.errors import Code, WrapError
from symbiosis.protocol import Op


def from_executor(
    endpoint: str | Sequence[str] | None = None,
    *,
    timeout: float = CALL_S,
    patience: float = PATIENCE_S,
    wait: float = 0.0,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    layers: Sequence[str] | str | None = None,
    priority: str | None = None,
    exact: bool = True,
    **config: Any,
) -> nn.Module:
    """A wrapped model of the executor's kind; no checkpoint, and no base weights in this process's memory. (What hides or proves
    something needs the weights: `privacy` and `verify` are for `wrap` only.)

    Args:
        endpoint, timeout, patience, wait, layers, priority, exact: as for `wrap`.
        dtype: What the client computes in; default: what the executor holds.
        device: Where the client's own tensors live.
        config: Changes to the model's configuration, such as `attn_implementation="eager"`.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo") as executor:
    ...     model = symbiosis.from_executor(executor.endpoint)
    ...     str(symbiosis.report(model)).startswith("wrapped")
    True
    """
    waits = {"timeout": timeout, "patience": patience, "wait": wait}
    session = Session(endpoint or default_endpoints(), priority_of(priority), exact=exact, **waits)  # type: ignore[arg-type]
    try:
        model = _structure(session, config)
        attach(model, session, [layers] if isinstance(layers, str) else layers, torch.device(device))
        _fill(model, session, torch.device(device))
    except BaseException:
        session.close()
        raise
    model.eval()
    if dtype is not None:
        model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    return model


def _structure(session: Session, changes: dict[str, Any]) -> nn.Module:
    """The model, its parameters on the meta device, its buffers computed."""
    welcome = session.welcome
    content = json.loads(welcome.config)
    if "model_type" not in content:
        raise WrapError(
            f"{session.endpoint} serves a {welcome.model_class}, not a transformers model: use wrap instead"
        )
    attention = {key: changes.pop(key) for key in ("attn_implementation", "experts_implementation") if key in changes}
    config = transformers.AutoConfig.for_model(**content)
    if unknown := sorted(name for name in changes if not hasattr(config, name)):
        raise WrapError(
            f"from_executor knows no {', '.join(unknown)}, nor does the configuration of {welcome.model_class}"
            + (": wrap a model from a checkpoint for that" if {"privacy", "verify"} & {*unknown} else "")
        )
    config = transformers.AutoConfig.for_model(**{**content, **changes})
    model_class = getattr(transformers, welcome.model_class, None)
    if model_class is None:
        raise WrapError(
            f"transformers {transformers.__version__} has no {welcome.model_class}: install another release"
        )
    held = getattr(torch, next(layer.dtype for layer in welcome.manifest if layer.kind != "client"))
    with torch.device("meta"):
        model: nn.Module = model_class._from_config(config, dtype=held, **attention)
    return model


def _fill(model: nn.Module, session: Session, device: torch.device) -> None:
    """Real memory for everything that is the client's own."""
    for module in model.modules():
        computed = {name: b for name, b in module._buffers.items() if b is not None and b.device.type == "meta"}
        for name, buffer in computed.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if computed:
            _compute_buffers(model, module)
    own = _Own(session, device)
    numbers = {layer.name: index for index, layer in enumerate(session.manifest)}
    filled: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            full = f"{path}.{name}" if path else name
            number = numbers.get(full, numbers.get(path) if name == "weight" else None)
            wanted = (
                tensor is not None
                and not isinstance(tensor, RemoteWeight)
                and name not in module._non_persistent_buffers_set
            )
            if wanted and number is not None:
                _put(module, name, number, own, filled)
    model.tie_weights()  # type: ignore[operator]
    for module in model.modules():
        weight, bias = getattr(module, "weight", None), module._parameters.get("bias")
        if isinstance(weight, RemoteWeight) and bias is not None and weight.handle.layer.bias:
            weight.handle.bias = bias.detach().clone()
    missing = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if missing:
        raise WrapError(
            f"the executor has no {missing[0]} (and {len(missing) - 1} more): it serves another architecture",
            Code.WRONG_MODEL,
        )


class _Own:
    """Values of what is the client's own, by number: in shared memory where there is such, else read."""

    def __init__(self, session: Session, device: torch.device) -> None:
        self._session, self._device, self._shared = session, device, session.shared()
        self._given: set[int] = set()

    def __call__(self, number: int) -> Tensor:
        value = self._shared.get(number)
        if value is None:
            dtype = getattr(torch, self._session.manifest[number].dtype)
            return self._session.call(Op.READ, number, dtype=dtype).to(self._device)
        if id(value) in self._given:  # equal tensors lie there once, but who changes one does not mean the other
            return value.to(self._device, copy=True)
        self._given.add(id(value))
        return value.to(self._device)


def _put(module: nn.Module, name: str, number: int, own: _Own, filled: dict[int, nn.Parameter]) -> None:
    if name in module._buffers:
        module._buffers[name] = own(number)
        return
    old = module._parameters[name]
    assert old is not None
    if id(old) not in filled:
        filled[id(old)] = nn.Parameter(own(number), requires_grad=False)
    module._parameters[name] = filled[id(old)]


def _compute_buffers(model: nn.Module, module: nn.Module) -> None:
    """What the model's own initialisation puts into this module's buffers; its parameters are filled afterwards."""
    with torch.no_grad():
        model._init_weights(module)  # type: ignore[operator]
