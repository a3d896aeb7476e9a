"""`from_executor`: a client model without a checkpoint, made of what the executor tells at the join.

The structure is built on the meta device. Served weights become remote, and the model's own code computes non-persistent buffers.
Embeddings, norms and everything else that the client holds for itself come from the executor, by name: from memory that all clients of a
host share until they change it, or by reading where there is no such memory.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import GenerationConfig

from symbiosis.base.memory import whole_memory
from symbiosis.client import arguments
from symbiosis.client.connection.reconnect import CALL_S, PATIENCE_S
from symbiosis.client.executor_config import told_class, told_config, told_generation
from symbiosis.client.model_device import place_beside
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.client.wrap import attach
from symbiosis.errors import Code, WrapError
from symbiosis.protocol import FLOATS, Op, Welcome
from symbiosis.protocol.endpoints import default_endpoints
from symbiosis.text import shown
from symbiosis.transport.tensors import TORCH_DTYPE

MANY = 1000  # parameters of a model that nobody else holds, at most
MOST_COMPUTED = 4 << 30  # bytes of buffers that a model computes by itself


def from_executor(
    endpoint: str | Sequence[str] | None = None,
    *,
    timeout: float = CALL_S,
    patience: float = PATIENCE_S,
    wait: float | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "auto",
    layers: Sequence[str] | str | None = None,
    priority: str | None = None,
    exact: bool = True,
    share: bool = True,
    **config: Any,
) -> nn.Module:
    """Return a wrapped model of the executor's kind, without a checkpoint and without base weights in this process's memory. (`privacy` and
    `verify` need those weights, so only `wrap` has them.) All of it is frozen: an optimizer that has nothing else to train is refused at its
    first step.

    Args:
        endpoint, timeout, patience, wait, layers, priority, exact, share: as for `wrap`.
        dtype: What the client computes in, `torch.bfloat16` or `"bfloat16"`; default, and "auto": what the executor holds.
        device: Where the client's own tensors live; default, and "auto": on the executor's GPU, if that is one of this host, else on the CPU. What the model computes for itself (rotary frequencies, masks) is computed as by
            `from_pretrained(..., device_map=device)`: on the CPU, and copied there; under `with torch.device(device)` on that device.
        config: Changes to the model's configuration, such as `attn_implementation="eager"`.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo") as executor:
    ...     model = symbiosis.from_executor(executor.endpoint)
    ...     str(symbiosis.report(model)).startswith("wrapped")
    True
    """
    waits = {"patience": patience, "timeout": timeout, "wait": arguments.wait(wait)}
    return built(endpoint, waits, dtype, device, layers, priority, exact, share, **config)


def built(
    endpoint: str | Sequence[str] | None,
    waits: dict[str, Any],
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "auto",
    layers: Sequence[str] | str | None = None,
    priority: str | None = None,
    exact: bool = True,
    share: bool = True,
    **config: Any,
) -> nn.Module:
    """Return the model that `from_executor` returns. `waits`: how long a session waits for what."""
    patterns, chosen = arguments.patterns(layers), arguments.dtype(dtype)
    place = None if device == "auto" else arguments.device(device)
    endpoint = default_endpoints() if endpoint is None else endpoint
    how, share = arguments.priority(priority), arguments.flag("share", share)
    session = Session(endpoint, how, exact=exact, share=share, **waits)
    try:
        place = place or place_beside(session.welcome, session.endpoint)
        model = _structure(session, config)
        attach(model, session, patterns, place)
        _fill(model, session, place)
    except BaseException:
        session.close()
        raise
    model.eval()
    return model if chosen is None else model.to(chosen)


def _structure(session: Session, changes: dict[str, Any]) -> nn.Module:
    """Build the model with its parameters on the meta device and its buffers computed."""
    welcome = replace(session.welcome, manifest=session.manifest)
    implementations = ("attn_implementation", "experts_implementation")
    chosen = {key: changes.pop(key) for key in implementations if key in changes}
    config = told_config(welcome, changes, session.endpoint)
    model_class = told_class(welcome.model_class, config, session.endpoint)
    served = [layer for layer in welcome.manifest if layer.kind != "client" and layer.dtype in FLOATS]
    if not served:
        raise WrapError(f"{session.endpoint} does not serve any layer of a model")
    try:
        with torch.device("meta"), _no_more_than(MANY + 2 * len(welcome.manifest)):
            model: nn.Module = model_class._from_config(config, dtype=TORCH_DTYPE[served[0].dtype], **chosen)
    except (WrapError, ImportError):
        raise
    except Exception as error:  # whatever transformers makes of it
        text = shown(f"{type(error).__name__} {error}")
        raise WrapError(
            f"transformers cannot build a {welcome.model_class} from what {session.endpoint} sends: {text}"
        ) from error
    _must_fit(model, welcome, session.endpoint)
    if isinstance(generation := getattr(model, "generation_config", None), GenerationConfig):
        model.generation_config = told_generation(generation)  # type: ignore[assignment]
    return model


@contextmanager
def _no_more_than(modules: int) -> Iterator[None]:
    """Refuse a model of more modules than this, while this thread builds it in the block."""
    left, thread = modules, threading.get_ident()

    def count(module: nn.Module, name: str, part: object) -> None:
        nonlocal left
        left -= threading.get_ident() == thread
        if left < 0:
            raise WrapError(
                "the configuration that the executor sends describes a model with many more layers than it serves"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _must_fit(model: nn.Module, welcome: Welcome, where: str) -> None:
    """Raise, before anything is allocated, unless the executor's tensors have the model's shapes and this host has room for the
    client's own."""
    held = {layer.name: layer for layer in welcome.manifest}
    own: dict[str, int] = {}
    missing = set(held)
    for name, tensor in model.state_dict(keep_vars=True).items():
        layer = held.get(name) or held.get(name.removesuffix(".weight"))
        if layer is None:
            continue
        missing.discard(layer.name)
        if layer.shape != tuple(tensor.shape):
            raise WrapError(
                f"{where} holds {layer.name} of {layer.shape}, and describes a model where it is {tuple(tensor.shape)}",
                Code.WRONG_MODEL,
            )
        if layer.kind == "client":
            own[layer.name] = tensor.nbytes
    if missing:
        raise WrapError(
            f"{where} holds {min(missing)}{f' and {len(missing) - 1} more' if missing - {min(missing)} else ''}, which the model that it "
            "describes does not have: its configuration is not enough to build it here. Wrap a model from a checkpoint instead",
            Code.WRONG_MODEL,
        )
    computed = sum(b.nbytes for b in model.buffers()) - sum(b.nbytes for n, b in model.named_buffers() if n in own)
    if computed > MOST_COMPUTED or sum(own.values()) > whole_memory():
        raise WrapError(
            f"{where} describes a model in which {(computed + sum(own.values())) / 2**30:.3g} GiB are the client's own: more than "
            "there is room for"
        )


def _fill(model: nn.Module, session: Session, device: torch.device) -> None:
    """Give real memory to everything that the client holds for itself."""
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
    """The values of the client's own tensors, by number: from shared memory if there is such, else read."""

    def __init__(self, session: Session, device: torch.device) -> None:
        self._session, self._device, self._shared = session, device, session.commons()
        self._given: set[int] = set()

    def __call__(self, number: int) -> Tensor:
        value = self._shared.get(number)
        if value is None:
            layer = self._session.manifest[number]
            dtype = TORCH_DTYPE.get(layer.dtype)
            if dtype is None:
                raise WrapError(
                    f"{layer.name} has dtype {layer.dtype}, which cannot be sent: wrap a model from a checkpoint"
                )
            return self._session.holder(number).call(Op.READ, number, dtype=dtype).to(self._device)
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
    """Fill this module's buffers by the model's own initialisation. Its parameters are filled afterwards."""
    with torch.no_grad():
        model._init_weights(module)  # type: ignore[operator]
