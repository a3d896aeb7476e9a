"""How a model is divided over ranks, told by the names of its layers.

Layers divided by their outputs (q, k, v; gate, up; the head) see whole rows, and each rank computes some columns. Layers divided by their inputs
(o; down) see those columns, and each rank computes a part of every sum: the ranks add these up behind the module that the layer is in. Norms
and routers are whole on each rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import ConfigError
from symbiosis.offload.logit_check import text_config
from symbiosis.serving.tensor_parallel.shares import HeadShares, Ranges, shares, widened

Role = Literal["query", "shared", "packed", "packed by head", "output", "up", "packed up", "down"]
ROLES: dict[str, Role] = {  # by the end of a layer's name
    "q_proj": "query", "k_proj": "shared", "v_proj": "shared",
    "qkv_proj": "packed", "attn.c_attn": "packed", "query_key_value": "packed by head",
    "o_proj": "output", "out_proj": "output", "attn.c_proj": "output", "attention.dense": "output",
    "gate_proj": "up", "up_proj": "up", "mlp.c_fc": "up", "fc_in": "up", "fc1": "up", "dense_h_to_4h": "up",
    "gate_up_proj": "packed up",
    "down_proj": "down", "mlp.c_proj": "down", "fc_out": "down", "fc2": "down", "dense_4h_to_h": "down",
}  # fmt: skip
OF_ATTENTION = ("query", "shared", "packed", "packed by head", "output")
ALIGNED = 16  # bytes: torch's grouped products want the rows of experts' matrices to begin at multiples of these
INSTEAD = (
    "Serve it on one device; or, if none has the room, let ranks hold whole layers (symbiosis-executor MODEL --devices 0-3) and serve over "
    "them (--executor URL)"
)


@dataclass(frozen=True, slots=True)
class DividedLayer:
    """Which of a layer's outputs, or of its inputs, each rank has."""

    by: Literal["outputs", "inputs"]
    whole: int
    of_ranks: tuple[Ranges, ...]


@dataclass(frozen=True, slots=True)
class DividedExperts:
    """Which columns of the experts' inner rows each rank has, in matrices that are stacked."""

    inner: tuple[range, ...]
    alternate: bool  # the columns of gate and up follow one another by turns, and matrices are [inputs, outputs]


@dataclass(frozen=True, slots=True)
class Division:
    """What each rank has of a model."""

    ranks: int
    heads: HeadShares
    head_size: int
    vocabulary: tuple[range, ...]
    layers: dict[str, DividedLayer] = field(default_factory=dict)
    experts: dict[str, DividedExperts] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)  # modules that return parts of sums, and of what
    attentions: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, ranks: int) -> "Division":
        """Divide a whole model. Nothing of it is changed. Raises `ConfigError` if it cannot be divided so.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=10)
        >>> made = Division.of(LlamaForCausalLM(LlamaConfig(**sizes)), ranks=2)
        >>> made.layers["model.layers.0.mlp.up_proj"].of_ranks
        ((range(0, 24),), (range(24, 48),))
        >>> made.layers["model.layers.0.self_attn.o_proj"].by, made.sums["model.layers.0.self_attn"]
        ('inputs', 'attention')
        """
        return _Divider(model, ranks).division


class _Divider:
    """Divides one model."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self._model, self._ranks = model, ranks
        config = text_config(model)
        self._query: int = _told(config, "num_attention_heads")
        self._shared: int = getattr(config, "num_key_value_heads", None) or self._query
        self._size: int = getattr(config, "head_dim", None) or _told(config, "hidden_size") // self._query
        if getattr(config, "kv_lora_rank", None) is not None:
            self._refuse("its attention is latent: it has no keys and values by heads")
        try:
            heads = HeadShares.of(self._query, self._shared, ranks)
        except ValueError as error:
            self._refuse(str(error))
        vocabulary = shares(model.get_input_embeddings().weight.shape[0], ranks)  # type: ignore[operator]
        self.division = Division(ranks, heads, self._size, vocabulary)
        self._divide()

    def _divide(self) -> None:
        made, modules = self.division, dict(self._model.named_modules())
        layers_of = {
            f"{name}.{n}" for name, each in modules.items() if isinstance(each, nn.ModuleList) for n in range(len(each))
        }
        for name, module, role in _roles(modules):
            parent = name.rpartition(".")[0]
            outputs, inputs = _shape(module)
            if role in ("output", "down"):
                if parent in layers_of:
                    self._refuse(f"{name} lies in no module of its own, whose results could be added up")
                made.layers[name] = DividedLayer("inputs", inputs, self._inputs(name, role, inputs))
                made.sums[parent] = "attention" if role == "output" else "mlp"
            else:
                made.layers[name] = DividedLayer("outputs", outputs, self._outputs(name, role, outputs))
            if role == "output":
                made.attentions.append(parent)
        for name, module in modules.items():
            if (experts := self._experts(module)) is not None:
                made.experts[name], made.sums[name] = experts, "experts"
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(head, nn.Linear):
            self._refuse("its head is no linear layer")
        made.layers[next(name for name, each in modules.items() if each is head)] = DividedLayer(
            "outputs", made.vocabulary[-1].stop, tuple((each,) for each in shares(head.weight.shape[0], self._ranks))
        )
        self._check(modules)

    def _outputs(self, name: str, role: Role, outputs: int) -> tuple[Ranges, ...]:
        """Return which outputs of a layer each rank has."""
        if role == "up":
            return tuple((each,) for each in shares(outputs, self._ranks))
        if role == "packed up":
            half = outputs // 2
            return tuple((each, range(half + each.start, half + each.stop)) for each in shares(half, self._ranks))
        query, shared, size = self._query, self._shared, self._size
        width = {
            "query": query, "shared": shared, "packed": query + 2 * shared, "packed by head": 3 * query
        }[role] * size  # fmt: skip
        if outputs != width:
            self._refuse(f"{name} has {outputs} outputs, and {width} would be those of its heads")
        of_ranks = []
        for q, k in zip(self.division.heads.query, self.division.heads.shared, strict=True):
            if role == "packed":
                starts = query * size, (query + shared) * size
                of_ranks.append((widened(q, size), *(widened(k, size, start) for start in starts)))
            elif role == "packed by head":
                of_ranks.append((widened(q, 3 * size),))
            else:
                of_ranks.append((widened(q if role == "query" else k, size),))
        return tuple(of_ranks)

    def _inputs(self, name: str, role: Role, inputs: int) -> tuple[Ranges, ...]:
        """Return which inputs of a layer each rank has."""
        if role == "down":
            return tuple((each,) for each in shares(inputs, self._ranks))
        if inputs != self._query * self._size:
            self._refuse(f"{name} has {inputs} inputs, and {self._query * self._size} would be those of its heads")
        return tuple((widened(each, self._size),) for each in self.division.heads.query)

    def _experts(self, module: nn.Module) -> DividedExperts | None:
        up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
        if up is None or down is None or up.dim() != 3:
            return None
        alternate = module._parameters.get("gate_up_proj_bias") is not None
        inner = down.shape[1] if alternate else down.shape[2]
        return DividedExperts(shares(inner, self._ranks, ALIGNED // up.dtype.itemsize), alternate)

    def _check(self, modules: dict[str, nn.Module]) -> None:
        """Refuse what names do not tell: layers that divide nothing, and norms over all heads."""
        if len(self.division.attentions) != text_config(self._model).num_hidden_layers:
            self._refuse("not all of its layers have attention whose projections are known by name")
        widths = {self._query * self._size, self._shared * self._size}
        for parent in self.division.attentions:
            for name, child in modules[parent].named_modules():
                if f"{parent}.{name}" in self.division.layers or not name:
                    continue
                sizes = {p.shape[-1] for p in child._parameters.values() if p is not None}
                if self._size not in sizes and sizes & widths:
                    self._refuse(f"{parent}.{name} is a norm over all heads, of which a rank has some")

    def _refuse(self, why: str) -> None:
        raise ConfigError(f"{type(self._model).__name__} cannot be divided over {self._ranks} ranks: {why}. {INSTEAD}")


def _roles(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module, Role]]:
    """Yield the linear layers that have a role."""
    for name, module in modules.items():
        if isinstance(module, nn.Linear | Conv1D):
            parts = name.split(".")
            role = ROLES.get(parts[-1]) or ROLES.get(".".join(parts[-2:]))
            if role is not None:
                yield name, module, role


def _shape(module: Any) -> tuple[int, int]:
    """Return how many outputs and inputs a linear layer has."""
    return (module.nf, module.nx) if isinstance(module, Conv1D) else (module.out_features, module.in_features)


def _told(config: Any, name: str) -> int:
    if (number := getattr(config, name, None)) is None:
        raise ConfigError(
            f"a {config.model_type} model does not tell its {name}: it cannot be divided over ranks. {INSTEAD}"
        )
    return int(number)
