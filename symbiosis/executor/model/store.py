"""The frozen layers of one base model: which are served, under which names, and the matrix that each op multiplies by."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import prod
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from symbiosis.base.keystream import KEY_BYTES, keystream
from symbiosis.base.layer_names import modules_in_base, parameter_in_base
from symbiosis.base.layer_selection import choose, head_names, is_in, matches
from symbiosis.errors import CallError, Code, ConfigError
from symbiosis.executor.model.packed_tensor import PackedTensor
from symbiosis.kernels.integers import quantise, warm
from symbiosis.kernels.of_bitsandbytes import dtype_of, packed_of
from symbiosis.kernels.operand import cast, matrix_of, whole_part
from symbiosis.kernels.packed import CODES, PackedWeight
from symbiosis.protocol import ELSEWHERE, MAX_DIM, WEIGHT_BITS, Call, Layer, Op, View, outputs_of
from symbiosis.transport.fingerprint import digest, model_fingerprint
from symbiosis.transport.local import packed_file, shared_weights
from symbiosis.transport.tensors import CPU, DTYPE_NAME, TORCH_DTYPE

SERVED_KINDS = ("linear", "conv1d", "tensor", "embedding")


class Board(Protocol):
    """What a rank needs of the others of its service."""

    rank: int
    ranks: int

    def complete(self, config: str, manifest: list[Layer]) -> list[Layer]:
        """Return the manifest with the digests of all tensors, of which it has those that this rank holds."""
        ...


class Entry(NamedTuple):
    """One parameter or persistent buffer: the layer's name and kind, the tensor, its bias, its name in the model's state dict, and what
    holds it if it is packed: then the tensor is on the meta device."""

    name: str
    kind: str
    tensor: Tensor
    bias: Tensor | None
    key: str
    packed: PackedWeight | None = None


class OnGpus(NamedTuple):
    """What is known of tensors that lie in parts in the memory of several GPUs: the names of these, by rank; at which bytes of a tensor another
    rank's part begins, by number; with which output of a layer the part of each rank does, in the order of ranks; and how many bytes this rank
    may take to gather weights."""

    names: tuple[str, ...] = ()
    cuts: Mapping[int, Sequence[int]] = {}
    begins: Mapping[int, tuple[int, ...]] = {}
    gather_bytes: int = 0


class Store:
    """The tensors of a base model, by layer index. Weights are never changed and never copied per client. One that lies on the meta device
    is held by another rank of the service, or `packed` here.

    Served by default: every linear and Conv1D weight and every tensor of experts' matrices, but no head (`choice`). A head's
    gradient shows the labels, tasks train it, and where it is tied to the embedding the client holds it anyway.
    """

    def __init__(
        self,
        model: nn.Module,
        serve: Sequence[str] = (),
        integers: Sequence[int] = (),
        board: Board | None = None,
    ) -> None:
        """`board`: where the ranks of a service tell each other the digests of what they hold."""
        model.requires_grad_(False)
        self.config_json = config_json(model)
        self.model_class = type(model).__name__
        self.weights: list[Tensor] = []
        self.biases: list[Tensor | None] = []
        self.packed: dict[int, PackedWeight] = {}
        self.manifest: list[Layer] = []
        found = list(entries(model))
        chosen = _choose(found, serve, head_names(model))
        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(_digest, found))
        for entry, sha in zip(found, digests, strict=True):
            kind = entry.kind if entry.name in chosen else "client"
            self._add(entry, kind, entry.bias if kind in ("linear", "conv1d") else None, sha)
        self.rank, self.ranks = (0, 1) if board is None else (board.rank, board.ranks)
        if board is not None:
            self.manifest = board.complete(self.config_json, self.manifest)
        self.fingerprint = model_fingerprint(self.config_json, self.manifest)
        self.device = next((weight.device for weight in self.held), CPU)
        self.nbytes = sum({part.data_ptr(): part.nbytes for part in self.held}.values())
        self._largest = max((prod(layer.shape[-2:]) for layer in self.served()), default=1)
        self.striped: Sequence[BinaryIO] = ()  # the files of all ranks, if every tensor lies in parts in them
        self.on_gpus: OnGpus | None = None  # if every tensor lies in parts in the memory of several GPUs
        self._commons: BinaryIO | None = None
        self.files: list[BinaryIO] = []  # hold the served weights if clients may map them
        self.on_gpu = self.device.type == "cuda"
        self.matrix = lru_cache(maxsize=16384)(self._matrix)
        self._digits = {(layer, bits): self._quantised(layer, bits) for layer in self._matrices() for bits in integers}
        if integers:  # imports what grows seeds, which takes milliseconds, before anybody waits
            keystream(bytes(KEY_BYTES), (1, 1), TORCH_DTYPE["int32"])
        for digits_DKN in {digits.shape: digits for digits in self._digits.values() if digits.is_cuda}.values():
            warm(digits_DKN)

    def _add(self, entry: Entry, kind: str, bias: Tensor | None, sha: str) -> None:
        weight = entry.tensor.detach().contiguous()
        self.weights.append(weight)
        self.biases.append(bias)
        shape, dtype = tuple(weight.shape), DTYPE_NAME.get(weight.dtype, str(weight.dtype))
        packed = entry.packed
        if packed is not None:
            self.packed[len(self.manifest)] = packed
        elif weight.is_meta:
            kind = ELSEWHERE
        how = ("", "") if packed is None else (packed.format, packed.digest(CODES) if packed.source else sha)
        self.manifest.append(Layer(entry.name, kind, shape, dtype, sha, bias is not None, *how))

    @property
    def held(self) -> list[Tensor]:
        """The tensors that lie here, and at no other rank. Do not keep them: the store lets go of each when it moves."""
        parts = [part for packed in self.packed.values() for part in packed.parts.values()]
        return [weight for weight in self.weights if not weight.is_meta] + parts

    @property
    def shapes(self) -> list[Tensor]:
        """The weights that lie here; packed ones without their values, on the meta device."""
        return [weight for number, weight in enumerate(self.weights) if number in self.packed or not weight.is_meta]

    @property
    def shard(self) -> str:
        """How the ranks of a service share the model, as the option says it; "" if there is one."""
        if self.ranks == 1:
            return ""
        return "fsdp" if self.striped or self.on_gpus else "layers"

    @property
    def gather_bytes(self) -> int:
        """The bytes of buffers for weights that are gathered from other GPUs."""
        return self.on_gpus.gather_bytes if self.on_gpus else 0

    def commons(self) -> BinaryIO:
        """Return the file with the tensors that every client holds for itself, which clients of this host and this process share."""
        if self._commons is None:
            self._commons = shared_weights.publish(self.manifest, self._phase, self.weights.__getitem__)
            if not self.on_gpu:
                for number, tensor in shared_weights.taken(self.manifest, self._commons.fileno()).items():
                    self.weights[number] = tensor
                self.matrix.cache_clear()
        return self._commons

    def commons_files(self) -> Sequence[BinaryIO]:
        """Return the file, or the files of all ranks, from which clients of this host take what they hold for themselves."""
        return self.striped if self.striped and self.files else [self.commons()]

    def share_weights(self) -> None:
        """Move the served weights into memory that clients may map, as this process does, and nobody can change: one sealed file, or a
        few pieces of a GPU's memory. They move one by one, so that there is never a second copy of more than one tensor, or one piece."""
        if self.files or self.on_gpus:
            return
        if self.striped:
            self.files = [*self.striped]
            return
        nothing = Tensor()

        def moved(number: int) -> Tensor:
            weight, self.weights[number] = self.weights[number], nothing
            return weight

        if self.on_gpu:
            served = self._share_on_gpu(moved)
        else:
            self.files = [shared_weights.publish(self.manifest, self._phase, moved, served=True)]
            served = shared_weights.taken(self.manifest, self.files[0].fileno(), served=True)
        for number, weight in served.items():
            self.weights[number] = weight
        if self.packed and self.on_gpu:
            from symbiosis.transport.cuda import packed_pieces

            files, self.packed = packed_pieces.publish(self.manifest, self.packed, self.device)
            self.files += files
        elif self.packed:
            self.files.append(packed_file.publish(self.packed))
            self.packed = packed_file.taken(self.manifest, self.files[-1].fileno())
        self.matrix.cache_clear()

    def close_files(self) -> None:
        """Let go of the files. What is mapped stays mapped, here and at clients."""
        for file in (*self.files, *self.striped, *([self._commons] if self._commons else [])):
            file.close()

    def _share_on_gpu(self, moved: Callable[[int], Tensor]) -> dict[int, Tensor]:
        from symbiosis.transport.cuda import weights

        pieces, served = weights.publish(self.manifest, self.device, moved)
        self.files = [os.fdopen(piece.fd(), "rb", buffering=0) for piece in pieces]
        return served

    def _phase(self, number: int) -> int:
        return shared_weights.phase(self.weights[number])

    def served(self) -> list[Layer]:
        return [layer for layer in self.manifest if layer.kind in SERVED_KINDS]

    def _matrices(self) -> list[int]:
        """Return the numbers of the served linear and Conv1D layers."""
        return [number for number, layer in enumerate(self.manifest) if layer.kind in ("linear", "conv1d")]

    def _quantised(self, layer: int, bits: int) -> Tensor:
        matrix = matrix_of(self.whole(layer), self.manifest[layer].transposes(Op.FORWARD), None)
        return quantise(matrix, bits)[0]

    def offers(self, layer: int, bits: int) -> bool:
        """Whether integers can be multiplied by this layer's weights of so many bits."""
        return (layer, bits) in self._digits

    def linear_weights(self) -> list[Tensor]:
        """Return the weights of the served linear layers, without those of Conv1D layers."""
        return [
            weight
            for weight, layer in zip(self.weights, self.manifest, strict=True)
            if layer.kind == "linear" and not layer.packed
        ]

    def _matrix(self, layer: int, op: Op, view: View | None) -> Tensor:
        """Return the matrix that `op` multiplies rows by: a view of the weight, in its own dtype. Of a packed one it has no values, but shape
        and strides."""
        weight = self.weights[layer]
        if view is not None:
            _check_view(weight, view)
        return matrix_of(weight, self.manifest[layer].transposes(op), view)

    def multiplications(self, rows: int) -> int:
        """Return the multiplications of so many rows by the largest served matrix."""
        return rows * self._largest

    def operand(self, layer: int, op: Op, view: View | None, dtype: str, part: tuple[Any, ...] = (...,)) -> Tensor:
        """Return `matrix`, or a part of it, cast to the dtype of the call as autocast would, for one product. For integers, return its
        digits."""
        if dtype in WEIGHT_BITS and op.traits.of_whole_layers:
            digits_DKN = self._digits[layer, WEIGHT_BITS[dtype]]
            return (digits_DKN if op.traits.by_transpose else digits_DKN.transpose(1, 2))[part]
        matrix, wanted = self.matrix(layer, op, view), TORCH_DTYPE[dtype]
        if part != (...,):
            matrix = matrix[part]
        if layer in self.packed:
            return whole_part(self.packed[layer], matrix, self.weights[layer], wanted)
        return matrix if matrix.dtype is wanted else cast(matrix, wanted)

    def whole(self, layer: int) -> Tensor:
        """Return a weight, made whole if it is packed."""
        weight, packed = self.weights[layer], self.packed.get(layer)
        return weight if packed is None else packed.whole(weight.dtype).view(weight.shape)

    def rows(self, layer: int, index: Tensor) -> Tensor:
        """Return some rows of a weight, in its own dtype."""
        packed = self.packed.get(layer)
        return self.weights[layer][index] if packed is None else packed.rows(self.weights[layer].dtype, index)

    def bias(self, layer: int, dtype: str) -> Tensor | None:
        bias = self.biases[layer]
        return None if bias is None else bias.to(TORCH_DTYPE[dtype])

    def biases_of(self, call: Call) -> list[Tensor | None]:
        """Return the bias of each layer, or None for each if the call does not ask for them."""
        if not call.bias:
            return [None] * len(call.layers)
        biases = [self.bias(layer, call.dtype) for layer in call.layers]
        outputs = None if call.view is None else outputs_of(self.manifest[call.layer], call.view)
        return biases if outputs is None else [None if bias is None else bias[outputs] for bias in biases]


def _check_view(weight: Tensor, view: View) -> None:
    if not 1 <= len(view.size) <= MAX_DIM:
        raise CallError(Code.BAD_VIEW, f"a view has 1 to {MAX_DIM} dimensions, not {len(view.size)}")
    last = view.offset + sum((n - 1) * s for n, s in zip(view.size, view.stride, strict=True))
    if 0 in view.size or last >= weight.numel():
        raise CallError(Code.BAD_VIEW, f"view {tuple(view)} reaches beyond a weight of shape {tuple(weight.shape)}")


def config_json(model: nn.Module) -> str:
    """Return the configuration of a model as JSON."""
    config = getattr(model, "config", None)
    return str(config.to_json_string(use_diff=False)) if isinstance(config, PreTrainedConfig) else "{}"


def _digest(entry: Entry) -> str:
    if entry.packed is not None:
        return entry.packed.source or entry.packed.digest()
    return "" if entry.tensor.is_meta else digest(entry.tensor)


def entries(model: nn.Module) -> Iterator[Entry]:
    """Yield every parameter and persistent buffer. A layer goes by its module's dotted name."""
    seen: set[str] = set()
    persistent = model.state_dict(keep_vars=True)
    for path, module_name, module in modules_in_base(model):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            full, key = parameter_in_base(module_name, module, name), f"{path}.{name}".lstrip(".")
            if tensor is None or key not in persistent or full in seen:
                continue
            seen.add(full)
            kind = _kind(module, name, tensor)
            if packed_of(tensor) is not None and isinstance(module, nn.Linear):
                kind = "linear"
            bias = getattr(module, "bias", None) if kind in ("linear", "conv1d") else None
            layer = module_name if kind in ("linear", "conv1d", "embedding") else full
            packed = tensor.packed if isinstance(tensor, PackedTensor) else packed_of(tensor)
            shown = (
                tensor if packed is None else torch.empty(packed.shape, dtype=dtype_of(tensor, model), device="meta")
            )
            yield Entry(layer, kind, shown, None if bias is None else bias.detach().clone(), key, packed)


def _kind(module: nn.Module, name: str, tensor: Tensor) -> str:
    from transformers.pytorch_utils import Conv1D

    if not tensor.is_floating_point() or tensor.dtype not in DTYPE_NAME:
        return "client"
    if name == "weight" and tensor.dim() == 2:
        if isinstance(module, nn.Linear):
            return "linear"
        if isinstance(module, Conv1D):
            return "conv1d"
        if isinstance(module, nn.Embedding):
            return "embedding"
    matrices = tensor.dim() == 3 or (tensor.dim() == 2 and "bias" not in name)  # in a stack, or one below the other
    return "tensor" if matrices and "xpert" in type(module).__name__ else "client"


def served_entries(model: nn.Module, serve: Sequence[str]) -> list[Entry]:
    """Return the linear, Conv1D and expert weights that would be served. The model needs no weights."""
    found = list(entries(model))
    chosen = _choose(found, serve, head_names(model))
    return [entry for entry in found if entry.name in chosen and entry.kind != "embedding"]


def check_patterns(model: nn.Module, serve: Sequence[str]) -> None:
    """Raise `ConfigError` unless each pattern matches a layer. The model needs no weights."""
    _choose(list(entries(model)), serve, head_names(model))


def _choose(found: list[Entry], serve: Sequence[str], heads: set[str]) -> set[str]:
    possible = {entry.name: entry.kind for entry in found if entry.kind != "client"}
    for pattern in serve:
        if not matches(possible, [pattern.removeprefix("!")]):
            examples = ", ".join(sorted(possible)[:4])
            raise ConfigError(f"--serve {pattern!r} matches no layer. Names look like: {examples}")
    default = {name for name, kind in possible.items() if kind != "embedding" and not is_in(name, heads)}
    return choose(serve, {name: [name] for name in possible}, default)
