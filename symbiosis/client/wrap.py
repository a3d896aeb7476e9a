"""`wrap`: turn a model's frozen layers into proxies.

What is replaced is found by name (`layer_plan`) and checked by shape, dtype and digest. Everything is checked before anything is changed.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from symbiosis.base.layer_selection import head_names, is_in
from symbiosis.client import arguments
from symbiosis.client.connection.reconnect import CALL_S, PATIENCE_S
from symbiosis.client.layers.layer_plan import ParameterSite, WrapReport, base_model, parameter_of, plan_wrap
from symbiosis.client.layers.virt_experts import proxy_of
from symbiosis.client.optimizer_checks import refuse_to_train_nothing
from symbiosis.client.privacy.masked_session import Plain, Privacy, PrivateSession
from symbiosis.client.privacy.noise import Noise
from symbiosis.client.privacy.verify import Proofs
from symbiosis.client.session import Session
from symbiosis.client.state_dict import complete, put_in_remote, say_what_is_left_out
from symbiosis.client.stats import Stats
from symbiosis.client.weights.data_assignment import guard_data
from symbiosis.client.weights.packed_parameters import check_same_packed, dtype_of_rows, known_weight
from symbiosis.client.weights.peft_methods import support_peft_methods
from symbiosis.client.weights.remote_view import Handle
from symbiosis.client.weights.remote_weight import RemoteWeight, remote_weights
from symbiosis.client.wrap_warnings import warn_of_differences, warn_of_heads, warn_when_trained
from symbiosis.errors import Code, WrapError
from symbiosis.kernels.of_bitsandbytes import packed_of
from symbiosis.protocol import Layer
from symbiosis.protocol.endpoints import default_endpoints
from symbiosis.transport.fingerprint import digest
from symbiosis.transport.tensors import DTYPE_NAME

logger = logging.getLogger("symbiosis")
Model = TypeVar("Model", bound=nn.Module)
Plan = list[tuple[list[ParameterSite], int]]

DECODES = "_optimize_model_for_decode"  # the method that transformers' `generate` decodes within


def wrap(
    model: Model,
    endpoint: str | Sequence[str] | None = None,
    *,
    timeout: float = CALL_S,
    patience: float = PATIENCE_S,
    wait: float | None = None,
    layers: Sequence[str] | str | None = None,
    priority: str | None = None,
    exact: bool = True,
    privacy: Privacy | str | None = None,
    verify: bool = False,
    share: bool = True,
) -> Model:
    """Let an executor compute the frozen layers of `model`. In place; before or after `get_peft_model`.

    Threads may share the model. Those that would wait for each other's calls get connections of their own while they call (16 in a
    process at most, and a quarter of what the executor allows a tenant), so their calls can meet in a batch as those of several
    programs do. With `privacy` or `verify`, and where the executor lets no more in, one thread at a time makes a call.

    Args:
        endpoint: The executor's URL, or those of several that serve the same model: when the one in use is lost, ends or
            does not answer in time, the next one goes on. `symbiosis://MODEL` names those of a cluster, wherever they are.
            Else `$SYMBIOSIS_ENDPOINT`, else this host's default socket.
        timeout: Seconds that one call may take before it is sent again; default: `$SYMBIOSIS_CALL_TIMEOUT_S`, else 120.
        patience: Seconds that an executor may be away, when `wrap` is called or later, before that raises; default:
            `$SYMBIOSIS_PATIENCE_S`, else 60. After two seconds the log says what is waited for, and why.
        wait: Not needed any more: seconds for the first wait alone, instead of `patience`.
        layers: Patterns of layer names (`"model.layers.*"`), or of those that stay here (`"!*.o_proj"`); default: every layer that
            the executor serves.
        priority: "decode", "prefill" or "train" for all calls; default: as it follows from each call.
        exact: Whether gradients are to be the unsplit model's, bit for bit. Without it the gradients of layers that share
            their input (q/k/v, gate/up) are one call instead of several, and are added in another order; and methods that change
            mapped weights are computed by their terms, which rounds otherwise.
        privacy: What the executor's operator must not see: `symbiosis.Split(OTHER_ENDPOINT)` or `symbiosis.Pads(FILE)` hide
            everything but lengths and times, `symbiosis.Noise()` (or "noise") only obscures; default: nothing is hidden.
        verify: Whether every answer is tested by a secret projection, so that a wrong one is an error.
        share: Whether to map the weights of an executor of this user at `local://`, which then computes only what a call is good for;
            if it offers that. With `privacy` or `verify` they never are.

    >>> from transformers import AutoModelForCausalLM
    >>> import symbiosis
    >>> from symbiosis.executor.model.load import DEMO_MODEL
    >>> model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    >>> with symbiosis.Executor("demo") as executor:
    ...     model = symbiosis.wrap(model, executor.endpoint)
    ...     symbiosis.stats(model).calls
    0
    """
    arguments.a_model(model, "wrap")
    patterns = arguments.patterns(layers)
    waits = {"timeout": timeout, "patience": patience, "wait": arguments.wait(wait)}
    words: dict[str, Any] = {
        "priority": arguments.priority(priority),
        "exact": exact,
        "share": arguments.flag("share", share),
        **waits,
    }
    session = _session(default_endpoints() if endpoint is None else endpoint, privacy, verify, **words)
    try:
        report = attach(model, session, patterns)
    except BaseException:
        session.close()
        raise
    logger.info("%s", report)
    return model


def attach(
    model: nn.Module,
    session: Session,
    patterns: Sequence[str] | None = None,
    device: torch.device | None = None,
    only: Collection[str] | None = None,
) -> WrapReport:
    """Plan, check, then change `model` so that `session` computes its served layers.

    `device` is where a model without weights (on meta) will live; there is nothing to check then. Of one that has some weights, `only` names
    the layers whose weights are the executor's.
    """
    if next(remote_weights(model), None) is not None:
        raise WrapError("this model is wrapped already: symbiosis.unwrap(model) first")
    plan, report = plan_wrap(model, session.manifest, patterns)
    if only is not None:
        plan = _without(plan, report, session.manifest, "other weights", lambda layer, _: layer.name in only)
    private = session if isinstance(session, PrivateSession) else None
    if private and session.welcome.is_part:
        raise WrapError(
            f"privacy= and verify= need an executor that holds all layers, and {session.endpoint} is a service whose ranks divide them"
        )
    if private:
        heads = head_names(base_model(model))
        plan = _without(plan, report, session.manifest, "private", partial(_can_be_masked, heads))
    if not plan:
        raise WrapError(_nothing_matches(session, patterns, report), Code.WRONG_MODEL)
    if device is None:
        for places, index in plan:
            check_same(places[0], session.manifest[index])
        warn_of_differences(model, session, report)
    if patterns is None:
        warn_of_heads(model, session, [place.own_name for places, _ in plan for place in places])
    if any(session.manifest[index].kind == "tensor" for _, index in plan):
        _gather_no_experts(model)
    support_peft_methods()
    guard_data()
    trainable = any(parameter_of(places[0]).requires_grad for places, _ in plan)
    _hand_over(plan, session, private, device)
    root = base_model(model)
    for used in {device} if device is not None else {parameter.device for parameter in root.parameters()}:
        for rank in session.ranks:
            rank.map_for(used)
    if trainable and device is None:
        warn_when_trained(root)
    refuse_to_train_nothing(root)
    if say_what_is_left_out not in root._state_dict_hooks.values():
        root.register_state_dict_post_hook(say_what_is_left_out)
    _ignore_in_ddp(model)
    model._symbiosis_report = report  # type: ignore[assignment]
    return report


def _hand_over(
    plan: Plan,
    session: Session,
    private: PrivateSession | None,
    device: torch.device | None,
) -> None:
    """Replace each weight by a remote one, of the session with the rank that holds the layer."""
    biases = {layer.name: layer.digest for layer in session.manifest if layer.name.endswith(".bias") and not private}
    for places, index in plan:
        if private:
            private.learn(index, known_weight(parameter_of(places[0]), session.manifest[index], private.level.wire))
        layer, frozen = session.manifest[index], not parameter_of(places[0]).requires_grad
        replace(places, Handle(session.holder(index), index, layer, is_frozen=frozen), biases, device)


def _without(
    plan: Plan,
    report: WrapReport,
    manifest: Sequence[Layer],
    reason: str,
    goes: Callable[[Layer, list[ParameterSite]], bool],
) -> Plan:
    """Return the plan without the layers of which `goes` says that they stay, and report those, with the reason."""
    kept: Plan = []
    for places, index in plan:
        layer = manifest[index]
        if goes(layer, places):
            kept.append((places, index))
        else:
            report.wrapped.remove(layer.name)
            report.kept[layer.name] = reason
    return kept


def _can_be_masked(heads: set[str], layer: Layer, places: list[ParameterSite]) -> bool:
    """Whether the rows of a layer can be masked: not those of embeddings and experts, nor of a head, whose gradient shows the labels."""
    return layer.kind in ("linear", "conv1d") and not any(is_in(place.own_name, heads) for place in places)


def _session(endpoint: str | Sequence[str], privacy: Privacy | str | None, verify: bool, **words: Any) -> Session:
    if not arguments.flag("verify", verify) and privacy is None:
        return Session(endpoint, **words)
    words["share"] = False  # whoever hides or proves something multiplies nothing by what it was given
    if isinstance(privacy, str):
        if privacy != "noise":
            raise WrapError(
                f"privacy={privacy!r}: write symbiosis.Split(ENDPOINT), symbiosis.Pads(FILE) or symbiosis.Noise()"
            )
        privacy = Noise()
    if isinstance(privacy, type):
        raise WrapError(f"privacy={privacy.__name__} is the class: write {privacy.__name__}(...), with what it needs")
    if privacy is not None and not hasattr(privacy, "level"):
        raise WrapError(
            f"privacy={privacy!r}: write symbiosis.Split(ENDPOINT), symbiosis.Pads(FILE) or symbiosis.Noise()"
        )
    return PrivateSession(endpoint, privacy or Plain(), Proofs() if verify else None, **words)


def check_same(place: ParameterSite, layer: Layer) -> None:
    """Check that the client's tensor is the executor's, bit for bit. If it is not, the client was built for another model."""
    tensor = parameter_of(place)
    if (packed := packed_of(tensor)) is not None:
        check_same_packed(packed, layer)
        return
    dtype = DTYPE_NAME.get(tensor.dtype)
    if dtype != layer.dtype:
        raise WrapError(
            f"{layer.name}: this model is {dtype}, the executor's is {layer.dtype}. Load the model with "
            f"dtype=torch.{layer.dtype} (cast it after wrap if you like), or start the executor with --dtype {dtype}",
            Code.WRONG_MODEL,
        )
    if tensor.device.type != "meta" and digest(tensor) != layer.digest:
        held = f" (The executor holds them as {layer.packed}: symbiosis.from_executor builds a model of them.)"
        raise WrapError(
            f"{layer.name}: the weights differ from the executor's. This model is another checkpoint or revision, "
            f"or something changed its weights (PiSSA, OLoRA and the like do at init: keep such layers with layers=){held if layer.packed else ''}",
            Code.WRONG_MODEL,
        )


def replace(
    places: list[ParameterSite], handle: Handle, biases: dict[str, str], device: torch.device | None = None
) -> None:
    """Put a remote weight where the real one was. `biases`: digests of those that the executor has."""
    old = parameter_of(places[0])
    handle.keeps_dtype = packed_of(old) is not None
    dtype = dtype_of_rows(places[0], handle.layer)
    parameter = nn.Parameter(RemoteWeight.whole(handle, dtype, device or old.device), requires_grad=False)
    for place in places:
        owner = place.owner
        owner._parameters[place.name] = parameter
        bias = owner._parameters.get("bias")
        if bias is not None and handle.layer.bias and biases.get(f"{handle.layer.name}.bias") == _digest_of(bias):
            handle.bias = bias.detach().clone()
        owner.__class__ = proxy_of(owner, handle.layer)
        owner.register_state_dict_post_hook(complete)
        owner.register_load_state_dict_pre_hook(put_in_remote)


def _digest_of(bias: Tensor) -> str:
    return "" if bias.device.type == "meta" else digest(bias)


def stats(model: nn.Module) -> Stats:
    """Return what this client has measured of its executor: calls, bytes, waits, batch sizes.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo") as executor:
    ...     symbiosis.stats(symbiosis.from_executor(executor.endpoint)).reconnects
    0
    """
    arguments.a_model(model, "stats")
    named = dict.fromkeys(weight.handle.session for weight in remote_weights(model))
    sessions = [one for session in named for one in ([session] if session.spread is None else session.spread.callers)]
    if not sessions:
        raise WrapError("this model is not wrapped: symbiosis.wrap(model) first")
    if len(sessions) == 1:
        return _stats_of(sessions[0])
    total = Stats()
    for session in sessions:
        total.add(_stats_of(session))
    return total


def _stats_of(session: Session) -> Stats:
    found = session.all_stats() if isinstance(session, PrivateSession) else session.stats.copy()
    for line in session.lines:  # the executor counts for the GPU
        found.batched_calls += line.batched
        found.reconnects += line.reconnects
    if session.mapped is not None:
        found.direct, found.direct_rows, _ = session.mapped.figures
    return found


def report(model: nn.Module) -> WrapReport:
    """Return what `wrap` did to the model.

    >>> import symbiosis
    >>> with symbiosis.Executor("demo") as executor:
    ...     print(symbiosis.report(symbiosis.from_executor(executor.endpoint)))
    wrapped 35/36 (kept: lm_head, not served)
    """
    arguments.a_model(model, "report")
    for module in model.modules():
        if found := module.__dict__.get("_symbiosis_report"):
            return found
    raise WrapError("this model is not wrapped: symbiosis.wrap(model) first")


def _nothing_matches(session: Session, patterns: Sequence[str] | None, report: WrapReport) -> str:
    served = [layer.name for layer in session.manifest if layer.kind != "client"]
    examples = ", ".join(served[:3]) + (", ..." if len(served) > 3 else "")
    told = f"{session.endpoint} serves layers of a {session.welcome.model_class} ({examples})"
    kept = [f"{name}: {reason}" for name, reason in report.kept.items() if name in served]
    if not kept:
        return f"{told}, but none of this model's: wrap the model that the executor serves, or start one for this model"
    more = f" and {len(kept) - 3} more" if len(kept) > 3 else ""
    chosen = "" if patterns is None else f" (layers={list(patterns)})"
    return f"{told}, but all that this model has of them stay with it{chosen}: {'; '.join(kept[:3])}{more}"


def _gather_no_experts(model: nn.Module) -> None:
    """Keep `generate` from gathering experts: `batched_mm` copies each token's expert weights, which would read them, while `grouped_mm`
    multiplies in place. On a GPU `generate` turns from the latter to the former while it decodes."""
    root = base_model(model)
    if hasattr(root, DECODES):
        setattr(root, DECODES, nullcontext)
    if getattr(getattr(root, "config", None), "_experts_implementation", None) == "batched_mm":
        root.set_experts_implementation("grouped_mm")  # type: ignore[operator]
        logger.warning("experts_implementation 'batched_mm' reads the experts' weights: set to 'grouped_mm'")


class _Remote:
    """The names of a model's remote weights at the moment of asking: PEFT moves them, and some become the client's own."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def __iter__(self) -> Iterator[str]:
        for name, parameter in self._root.named_parameters(remove_duplicate=False):
            if isinstance(parameter, RemoteWeight):
                yield from (f"{prefix}{name}" for prefix in ("", "base_model.model.", "base_model.", "model."))


def _ignore_in_ddp(model: nn.Module) -> None:
    """Tell DistributedDataParallel, under every prefix PEFT may give them, which parameters are not there to broadcast."""
    root = base_model(model)
    root._ddp_params_and_buffers_to_ignore = _Remote(root)  # type: ignore[assignment]
    model._ddp_params_and_buffers_to_ignore = root._ddp_params_and_buffers_to_ignore
