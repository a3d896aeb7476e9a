"""What an adapter does at each layer, read from its weights. These kinds are computed for all rows of a step together:

    LoRA         y = W x + s B A x              (also rsLoRA, ranks and alphas by module, biases, fan_in_fan_out)
    DoRA         y = g W x + s g B A x          g = magnitude / |W + s B A|, row by row
    VeRA         y = W x + b B d A x            A and B of all layers alike, b and d vectors
    IA3          y = l W x,  or  W (l x)

PEFT's own layers compute all others (`peft_layers.py`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.client.weights.dora import row_norms
from symbiosis.client.weights.remote_weight import RemoteWeight
from symbiosis.errors import AdapterError
from symbiosis.kernels.adapter_rows import PlacedAdapter
from symbiosis.kernels.file_rows import Source
from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.lora.adapter_files import PREFIX, AdapterWeights, in_parallel
from symbiosis.serving.lora.classification import ClassificationHead
from symbiosis.text import shown

HARMLESS = {  # of a LoRA's configuration: what is read here, and what changes nothing when it is served
    "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "library_name",
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "bias", "use_rslora", "use_dora",
    "lora_bias", "init_lora_weights", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core", "runtime_config", "qalora_group_size",
    "ensure_weight_tying",
}  # fmt: skip
CHOICE = (  # of a configuration: what chooses layers
    "target_modules", "exclude_modules", "modules_to_save", "target_parameters", "layers_to_transform", "layers_pattern",
)  # fmt: skip
REWRITES = ("pissa", "olora", "corda", "loftq", "lora_ga", "milora")


@dataclass(slots=True, frozen=True, eq=False)
class Part:
    """What an adapter does at one layer: `y = (x * before) Wᵀ * gain + shift + (x downᵀ) up`. Each is a matrix of rows; a vector is a
    matrix of one row."""

    down: Tensor | None = None  # [R, K]
    up: Tensor | None = None  # [R, N]
    before: Tensor | None = None
    gain: Tensor | None = None
    shift: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.down, self.up, self.before, self.gain, self.shift) if t is not None]

    def to(self, device: str) -> "Part":
        each = (self.down, self.up, self.before, self.gain, self.shift)
        return Part(*(None if t is None else t.to(device) for t in each))


@dataclass(slots=True, frozen=True, eq=False)
class OwnTensor:
    """A tensor of PEFT's layers that belongs to the adapter. Its values lie in the host's memory, and in pages while it is resident."""

    places: list[tuple[dict[str, Any], str]]  # of modules: where they keep it, and under which name
    values: Tensor

    def put(self, values: Tensor) -> None:
        """Have the layers use these values."""
        for held, name in self.places:
            is_parameter = isinstance(held[name], nn.Parameter)
            held[name] = nn.Parameter(values, requires_grad=False) if is_parameter else values


@dataclass(slots=True, frozen=True, eq=False, kw_only=True, weakref_slot=True)
class LoadedAdapter(Adapter):
    """An adapter with its weights in host memory. Its parts are computed together with those of other adapters, its layers by PEFT."""

    parts: dict[str, Part] = field(default_factory=dict)
    layers: dict[str, nn.Module] = field(default_factory=dict)
    own: list[OwnTensor] = field(default_factory=list)  # what the layers hold that is not the base's
    packed: Any = None  # the numbers of its parts, as a GPU's kernels take them; the parts then only tell shapes
    # where its parts lie, of one that was published and that no GPU's kernels compute
    held: dict[str, PlacedAdapter] | None = None
    prompt: Tensor | None = None  # [virtual, width]: embeddings in front of every prompt
    prefix: tuple[tuple[Tensor, Tensor], ...] = ()  # by layer: keys and values [virtual, heads * size]
    head: ClassificationHead | None = None  # of one that classifies


def without_numbers(adapter: LoadedAdapter) -> LoadedAdapter | None:
    """Return what is kept of an adapter that is let go, so that its numbers can be read again without a look at anything else; None
    if it cannot be read so."""
    packed = None if adapter.packed is None else adapter.packed.without_numbers()
    return None if packed is None else replace(adapter, packed=packed)


@dataclass(slots=True, frozen=True)
class Base:
    """The model that adapters belong to."""

    model: nn.Module
    modules: Mapping[str, nn.Module]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> "Base":
        return cls(model, dict(model.named_modules()), dtype)


class NotFused(Exception):
    """This adapter is computed by PEFT's own layers."""


def fused_parts(weights: AdapterWeights, base: Base, max_rank: int, lies_at_once: bool = True) -> dict[str, Part]:
    """Return what an adapter does at each layer. Raises `NotFused` if it is of no kind that is known here.

    Args:
        lies_at_once: Each matrix lies in memory of its own, row by row; else it may be a view of the file's contents.
    """
    read = {"LORA": _lora, "VERA": _vera, "IA3": _ia3}.get(weights.config["peft_type"])
    if read is None:
        raise NotFused
    parts = {}
    for name, part in read(weights, base, max_rank).items():
        each = (part.down, part.up, part.before, part.gain, part.shift)
        cast = [None if t is None else t.detach().to(base.dtype) for t in each]
        if lies_at_once:
            cast = [None if t is None else t.clone(memory_format=torch.contiguous_format) for t in cast]
        parts[name] = Part(*cast)
    return parts


# ---------------------------------------------------------------- names and shapes


def by_module(weights: AdapterWeights, base: Base, leaves: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each layer, by their names within it. Raises `NotFused` if there are other tensors."""
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in weights.tensors.items():
        leaf = next((leaf for leaf in leaves if name.endswith("." + leaf)), None)
        if leaf is None:
            raise NotFused
        module = name.removeprefix(PREFIX).removesuffix("." + leaf)
        if module not in base.modules:
            raise AdapterError(
                f"it adapts {shown(module)}, which {type(base.model).__name__} does not have: it is for another base"
            )
        found[module][leaf] = tensor
    return found


def _shape(module: nn.Module) -> tuple[int, int]:
    """Return how many outputs and inputs a linear layer has."""
    if isinstance(module, Conv1D):
        return module.nf, module.nx
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    raise NotFused


def _check(module: str, leaf: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise AdapterError(
            f"{leaf} of {module} is {_by(tensor.shape)}, and this base needs {_by(shape)}: the adapter is for a base of another size"
        )


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def check_complete(config: dict[str, Any], base: Base, adapted: Collection[str]) -> None:
    """Check that there are weights for every layer that the configuration names, and for no other: PEFT would leave those out, and compute
    something else. It checks the rest itself."""
    from peft.tuners.tuners_utils import check_target_module_exists

    targets = config.get("target_modules")
    if targets in (None, "all-linear"):
        return
    choice = SimpleNamespace(**{name: config.get(name) for name in CHOICE})
    try:
        left = [name for name in adapted if not check_target_module_exists(choice, name)]
    except Exception as error:  # whatever PEFT says to values of odd types
        raise AdapterError(
            f"PEFT does not take its configuration: {type(error).__name__}: {shown(str(error))}"
        ) from None
    if left:
        raise AdapterError(
            f"it has weights for {left[0]}, and {len(left)} such layers, which its adapter_config.json does not choose (target_modules, "
            "exclude_modules, layers_to_transform): PEFT would leave them out. Correct it, or save the adapter again"
        )
    if config.get("exclude_modules") or config.get("layers_to_transform") is not None or not targets:
        return
    if isinstance(targets, str):
        named = [name for name in base.modules if re.fullmatch(targets, name)]
    else:
        named = [n for n in base.modules if any(n == t or n.endswith("." + t) for t in targets)]
        if lost := [t for t in targets if not any(n == t or n.endswith("." + t) for n in named)]:
            raise AdapterError(f"its target module {shown(str(lost[0]))} is nowhere in {type(base.model).__name__}")
    if missing := [name for name in named if name not in adapted]:
        raise AdapterError(f"it has no weights for {missing[0]}, and {len(missing)} such layers: save it again")


# ---------------------------------------------------------------- LoRA and DoRA


LORA = ("lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector", "lora_magnitude_vector.weight")
BIAS = ("base_layer.bias", "bias")


def _lora(weights: AdapterWeights, base: Base, max_rank: int) -> dict[str, Part]:
    config = weights.config
    if any(value for name, value in config.items() if name not in HARMLESS):
        raise NotFused
    refuse_rewritten(config)
    biased = config.get("bias", "none") != "none"
    layers = by_module(weights, base, LORA + (BIAS if biased else ()))
    asks = config.get("use_dora") or any(
        isinstance(getattr(base.modules[n], "bias", None), RemoteWeight) for n in layers
    )
    nbytes = 0 if asks else sum(t.nbytes for t in weights.tensors.values())  # an executor is asked by one thread
    read = partial(_low_rank, config=config, base=base, max_rank=max_rank)
    parts = dict(zip(layers, in_parallel(read, layers.items(), nbytes), strict=True))
    check_complete(config, base, {name for name, of in layers.items() if "lora_A.weight" in of})
    return parts


def refuse_rewritten(config: dict[str, Any]) -> None:
    """Refuse methods that change the base's weights before they train, because the adapter fits only those changed weights."""
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(REWRITES):
        raise AdapterError(
            f"it was trained with init_lora_weights={shown(init)!r}, which changes the base's weights: convert it with save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...), see PEFT's documentation"
        )


def _low_rank(layer: tuple[str, dict[str, Tensor]], config: dict[str, Any], base: Base, max_rank: int) -> Part:
    name, of = layer
    module = base.modules[name]
    bias: Tensor | None = getattr(module, "bias", None)
    own = None if bias is None else bias.detach().float().cpu()
    trained = of.get("base_layer.bias", of.get("bias"))
    if trained is not None and (own is None or own.shape != trained.shape):
        raise AdapterError(f"it has a bias for {name}, where this base has none of its size: it is for another base")
    if "lora_A.weight" not in of and "lora_B.weight" not in of:
        return Part(shift=None if own is None or trained is None else (trained.float() - own)[None])
    if not {"lora_A.weight", "lora_B.weight"} <= of.keys():
        raise AdapterError(f"of {name} it has only one of lora_A and lora_B: save it again")
    a_RK, b_NR = of["lora_A.weight"], of["lora_B.weight"]
    rank = int(_by_pattern(name, config.get("rank_pattern"), config.get("r", 8)))
    if a_RK.dim() == b_NR.dim() == 2 and len(a_RK) == b_NR.shape[1] != rank:
        raise AdapterError(
            f"its tensors at {name} are of rank {len(a_RK)}, and its adapter_config.json says {rank}: correct r or rank_pattern there"
        )
    check_low_rank(name, module, a_RK, b_NR, max_rank, rank)
    scaling, gain = _scaling(name, config, rank), None
    if config.get("use_dora"):
        gain = _dora_gain(name, of, module, a_RK.float(), b_NR.float(), scaling)
    up = _scaled(b_NR, scaling, base.dtype) if gain is None else scaling * gain[:, None] * b_NR.float()
    shift = of["lora_B.bias"].float() * scaling if "lora_B.bias" in of else None
    if own is not None and (
        trained is not None or gain is not None
    ):  # the gain has been applied to the base's own bias, too
        ours = (own if trained is None else trained.float()) - (own if gain is None else gain * own)
        shift = ours if shift is None else ours + shift
    one_row = [None if each is None else each[None] for each in (gain, shift)]
    return Part(down=a_RK, up=up.t(), gain=one_row[0], shift=one_row[1])


def check_low_rank(
    name: str, module: nn.Module, a_RK: Tensor, b_NR: Tensor, max_rank: int, rank: int | None = None
) -> None:
    """Check that a layer's two matrices fit the base's."""
    outputs, inputs = _shape(module)
    rank = len(a_RK) if rank is None else rank
    if rank > max_rank:
        raise AdapterError(
            f"its rank is {rank} at {name}, and this server takes {max_rank} at most: start it with a larger max_rank (--max-rank)"
        )
    _check(name, "lora_A", a_RK, (rank, inputs))
    _check(name, "lora_B", b_NR, (outputs, rank))


def _scaling(name: str, config: dict[str, Any], rank: int) -> float:
    alpha = float(_by_pattern(name, config.get("alpha_pattern"), config.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def sources_of(parts: dict[str, Part], weights: AdapterWeights) -> list[Source] | None:
    """Return where the matrices of these parts lie in the file of these weights, or None if they are not simply those of a LoRA."""
    sources: list[Source] = []
    for name, part in parts.items():
        if part.down is None or part.up is None or len(part.tensors) != 2:
            return None
        scales = 1.0, _scaling(name, weights.config, len(part.down))
        for which, matrix, scale in zip("AB", (part.down, part.up), scales, strict=True):
            tensor = weights.tensors.get(f"{PREFIX}{name}.lora_{which}.weight")
            place = None if tensor is None else weights.place_of(tensor)
            if tensor is None or place is None:
                return None
            rows, columns = matrix.shape
            sources.append(Source(place, tensor.dtype, rows, columns, scale, is_transposed=which == "B"))
    return sources


def _scaled(b_NR: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return the matrix scaled, in float32 unless the dtype that it will have holds it just as well: powers of two change no digits."""
    if scaling == 1.0:
        return b_NR
    is_exact = b_NR.dtype == dtype and abs(math.frexp(scaling)[0]) == 0.5
    return b_NR * scaling if is_exact else b_NR.float() * scaling


def _by_pattern(name: str, patterns: Any, default: Any) -> Any:
    """Look a layer up in a table of patterns, as PEFT does: the first pattern that matches the end of the name counts."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _dora_gain(
    name: str, of: dict[str, Tensor], module: nn.Module, a_RK: Tensor, b_NR: Tensor, scaling: float
) -> Tensor:
    """Return the magnitudes over the norms of the rows of `W + s B A`."""
    magnitude = of.get("lora_magnitude_vector", of.get("lora_magnitude_vector.weight"))
    if magnitude is None:
        raise AdapterError(f"it is a DoRA, and has no lora_magnitude_vector of {name}: save it again")
    _check(name, "lora_magnitude_vector", magnitude, (len(b_NR),))
    weight: Tensor = module.weight  # type: ignore[assignment]
    if isinstance(weight, RemoteWeight):
        mapped = weight.handle.session.mapped
        values = None if mapped is None else mapped.weights.get(weight.handle.index)
        is_whole = values is not None and (values.dtype, values.shape) == (weight.dtype, weight.shape)
        if values is None or not is_whole or not values.is_cpu:
            norms = row_norms(module, a_RK.to(weight.device), b_NR.to(weight.device), scaling, weight.dtype)
            return magnitude.float() / norms.float().cpu()
        weight = values
    weight = weight.detach().float().cpu()
    weight = weight.t() if isinstance(module, Conv1D) else weight
    return magnitude.float() / torch.linalg.norm(weight + scaling * (b_NR @ a_RK), dim=1)


# ---------------------------------------------------------------- VeRA and IA3


def _vera(weights: AdapterWeights, base: Base, max_rank: int) -> dict[str, Part]:
    tensors = dict(weights.tensors)
    a, b = (tensors.pop(f"base_model.vera_{which}", None) for which in "AB")
    if a is None or b is None or weights.config.get("modules_to_save"):
        raise NotFused
    if (rank := len(a)) > max_rank:
        raise AdapterError(
            f"its rank is {rank}, and this server takes {max_rank} at most: start it with a larger max_rank (--max-rank)"
        )
    layers = by_module(AdapterWeights(weights.config, tensors), base, ("vera_lambda_b", "vera_lambda_d"))
    check_complete(weights.config, base, layers)
    parts = {}
    for name, of in layers.items():
        outputs, inputs = _shape(base.modules[name])
        if len(of) != 2:
            raise AdapterError(f"of {name} it has only one of vera_lambda_b and vera_lambda_d: save it again")
        _check(name, "vera_lambda_b", of["vera_lambda_b"], (outputs,))
        _check(name, "vera_lambda_d", of["vera_lambda_d"], (rank,))
        if a.shape[1] < inputs or b.shape != (max(len(b), outputs), rank):
            raise AdapterError(f"its projections are too small for {name}: it is for another base")
        down = of["vera_lambda_d"].float()[:, None] * a[:, :inputs].float()
        parts[name] = Part(down=down, up=(of["vera_lambda_b"].float()[:, None] * b[:outputs].float()).t())
    return parts


def _ia3(weights: AdapterWeights, base: Base, max_rank: int) -> dict[str, Part]:
    if weights.config.get("modules_to_save"):
        raise NotFused
    layers = by_module(weights, base, ("ia3_l",))
    check_complete(weights.config, base, layers)
    feedforward = weights.config.get("feedforward_modules") or []
    parts = {}
    for name, of in layers.items():
        outputs, inputs = _shape(base.modules[name])
        if is_named(name, feedforward):
            _check(name, "ia3_l", of["ia3_l"], (1, inputs))
            parts[name] = Part(before=of["ia3_l"])
        else:
            _check(name, "ia3_l", of["ia3_l"], (outputs, 1))
            parts[name] = Part(gain=of["ia3_l"].t())
    return parts


def is_named(name: str, targets: Any) -> bool:
    """Whether a list of modules, or a pattern, names this one, read as PEFT reads it."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith("." + target) for target in targets)
