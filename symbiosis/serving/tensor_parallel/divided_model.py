"""Cuts a model down to one rank's part, in place. Each layer keeps plain tensors of its share, and modules whose results are parts of sums have the
ranks add them up."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.client.layers.virt_experts import original_of
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import ConfigError
from symbiosis.serving.tensor_parallel.collectives import Collectives
from symbiosis.serving.tensor_parallel.division import Division
from symbiosis.serving.tensor_parallel.shares import Ranges, taken, widened

COUNTS = ("num_heads", "num_attention_heads")  # by which attention knows how many heads it has,
SHARED_COUNTS = ("num_key_value_heads", "num_kv_heads")  # ... and of keys and values


class SumsOverRanks:
    """A module whose results are parts of sums; a mixin."""

    symbiosis_ranks: Collectives
    symbiosis_what: str

    def forward(self, *args: Any, **named: Any) -> Any:
        made = super().forward(*args, **named)  # type: ignore[misc]
        if isinstance(made, tuple):
            return self.symbiosis_ranks.sum(made[0], self.symbiosis_what), *made[1:]
        return self.symbiosis_ranks.sum(made, self.symbiosis_what)


class HasSomeTokens:
    """An embedding of some of the vocabulary's tokens; a mixin."""

    symbiosis_ranks: Collectives
    symbiosis_tokens: range

    def forward(self, ids: Tensor) -> Tensor:
        mine = self.symbiosis_tokens
        is_mine = (ids >= mine.start) & (ids < mine.stop)
        rows: Tensor = super().forward((ids - mine.start).clamp(0, len(mine) - 1))  # type: ignore[misc]
        return self.symbiosis_ranks.sum(rows.masked_fill(~is_mine.unsqueeze(-1), 0), "embedding")


_kinds: dict[tuple[type, type], type] = {}


def _mix_in(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Change a module's class to a subclass of both."""
    kind = type(module)
    if (mixin, kind) not in _kinds:
        _kinds[mixin, kind] = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
    module.__class__ = _kinds[mixin, kind]


def structure_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model that has the same tensors.

    >>> linear = nn.Linear(2, 2)
    >>> structure_of(linear).weight is linear.weight
    True
    """
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def cut(model: nn.Module, division: Division, collectives: Collectives, device: torch.device) -> None:
    """Cut a model down to the part of this rank, on its device. Its weights may be remote, where they are mapped; afterwards none is."""
    rank, modules = collectives.rank, dict(model.named_modules())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    is_tied = head.weight is embedding.weight
    made: dict[int, nn.Parameter] = {}  # by the whole tensor's id
    for name, module in modules.items():
        remote = [leaf for leaf, each in module._parameters.items() if isinstance(each, RemoteWeight)]
        values = {leaf: _values(each) for leaf, each in module._parameters.items() if each is not None}
        if (layer := division.layers.get(name)) is not None:
            values = _of_linear(module, values, layer.by, layer.of_ranks[rank], rank)
        elif (experts := division.experts.get(name)) is not None:
            values = _of_experts(module, values, experts.inner[rank], experts.alternate, rank)
        elif module is embedding:
            values["weight"] = taken(values["weight"], 0, (division.vocabulary[rank],))
        for leaf, value in values.items():
            whole = id(module._parameters[leaf])
            if whole not in made:
                made[whole] = nn.Parameter(value.contiguous().to(device), requires_grad=False)
            module._parameters[leaf] = made[whole]
        if remote:
            module.__class__ = original_of(module)
            module._state_dict_hooks.clear()
    for name in division.attentions:
        _tell_heads(modules[name], division, rank, device)
    model.to(device)  # buffers
    _mix_in(embedding, HasSomeTokens, symbiosis_ranks=collectives, symbiosis_tokens=division.vocabulary[rank])
    embedding.num_embeddings, embedding.padding_idx = len(division.vocabulary[rank]), None
    if is_tied:
        head.weight = embedding.weight
    for name, what in division.sums.items():
        _mix_in(modules[name], SumsOverRanks, symbiosis_ranks=collectives, symbiosis_what=what)
    widths = [len(of[0]) for of in next(d for n, d in division.layers.items() if modules[n] is head).of_ranks]

    def gather(module: nn.Module, args: Any, made: Any) -> Any:
        made.logits = collectives.gather(made.logits, widths, "head")
        return made

    model.register_forward_hook(gather)


def _values(parameter: nn.Parameter) -> Tensor:
    """Return the values of a weight; of a remote one, those that are mapped."""
    if not isinstance(parameter, RemoteWeight):
        return parameter.detach()
    handle = parameter.handle
    mapped = handle.session.mapped
    values = None if mapped is None else mapped.weights.get(handle.index)
    if values is None or (values.dtype, values.shape) != (parameter.dtype, parameter.shape) or not values.is_cpu:
        raise ConfigError(
            f"ranks take their parts of {handle.layer.name} from weights that they map, which this executor does not offer: it must be on a "
            "CPU of this host, at local://, and share its weights as they are"
        )
    return values


def _of_linear(module: nn.Module, values: dict[str, Tensor], by: str, ranges: Ranges, rank: int) -> dict[str, Tensor]:
    """Return a rank's part of a linear layer. Of one that is divided by its inputs, the first rank adds the bias."""
    is_conv, weight, bias = isinstance(module, Conv1D), values["weight"], values.get("bias")
    dim = 0 if (by == "outputs") != is_conv else 1
    made = {"weight": taken(weight, dim, ranges)}
    if bias is not None:
        made["bias"] = taken(bias, 0, ranges) if by == "outputs" else bias if rank == 0 else torch.zeros_like(bias)
    sizes: Any = module
    if is_conv:
        sizes.nx, sizes.nf = made["weight"].shape
    else:
        sizes.out_features, sizes.in_features = made["weight"].shape
    return made


def _of_experts(module: Any, values: dict[str, Tensor], inner: range, alternate: bool, rank: int) -> dict[str, Tensor]:
    """Return a rank's part of stacked experts."""
    up, down = values["gate_up_proj"], values["down_proj"]
    if alternate:  # gpt-oss
        both: Ranges = (widened(inner, 2),)
        made = values | {"gate_up_proj": taken(up, 2, both), "down_proj": taken(down, 1, (inner,))}
        made["gate_up_proj_bias"] = taken(values["gate_up_proj_bias"], 1, both)
        if rank:
            made["down_proj_bias"] = torch.zeros_like(values["down_proj_bias"])
    else:
        half = up.shape[1] // 2
        both = (inner, range(half + inner.start, half + inner.stop))
        made = values | {"gate_up_proj": taken(up, 1, both), "down_proj": taken(down, 2, (inner,))}
    for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
        if hasattr(module, name):
            setattr(module, name, len(inner))
    return made


def _tell_heads(module: Any, division: Division, rank: int, device: torch.device) -> None:
    """Tell attention how many heads it has."""
    query, shared = len(division.heads.query[rank]), len(division.heads.shared[rank])
    counts = dict.fromkeys(COUNTS, query) | dict.fromkeys(SHARED_COUNTS, shared)
    counts |= {"num_key_value_groups": query // shared, "split_size": query * division.head_size}
    for name, count in counts.items():
        if hasattr(module, name):
            setattr(module, name, count)
    if isinstance(config := getattr(module, "config", None), object) and config is not None:
        module.config = copy.copy(config)
        module.config.num_attention_heads, module.config.num_key_value_heads = query, shared
    if isinstance(sinks := getattr(module, "sinks", None), nn.Parameter):
        mine = taken(sinks.detach(), 0, (division.heads.query[rank],))
        module.sinks = nn.Parameter(mine.contiguous().to(device), requires_grad=False)
