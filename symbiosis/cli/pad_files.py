"""`symbiosis pads`: makes a tenant's pads for one model from the public weights, layer by layer."""

import os
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symbiosis.base.keystream import keystream, new_key
from symbiosis.base.layer_selection import head_names, is_in
from symbiosis.client.privacy.fixed_point import INTEGERS
from symbiosis.client.privacy.masked_session import checked_bits, checked_count
from symbiosis.client.privacy.pad_layout import Contents, Effect, PadStream, laid_out, row_checksums
from symbiosis.client.privacy.pads import PadFile
from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import path_of
from symbiosis.executor.model.load import load_config, load_model, structure, torch_dtype
from symbiosis.executor.model.quantisation import shown_method, told_quantisation
from symbiosis.kernels.integers import modular_product, quantise
from symbiosis.transport.fingerprint import digest

ROWS = 1024  # pads whose effects are computed at once
Group = list[str]


def make(
    name: str, tokens: int, file: Path, bits: int = 8, training: bool = False, dtype: str | None = None
) -> Contents:
    """Write `tokens` pads for every layer of the model that a client with `Pads(file)` has computed elsewhere."""
    checked_bits(bits)
    checked_count("--tokens", tokens, 1)
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent} for {file.name}: make it first")
    if file.exists():
        raise ConfigError(f"{file} exists: pads must not be used twice, so choose another name or remove it")
    part = file.with_name(f"{file.name}.part")
    if part.exists():
        raise ConfigError(
            f"{part} exists: remove it, unless another symbiosis pads is still writing it (if not, one was killed)"
        )
    if quantised := told_quantisation(load_config(name).to_dict()):
        raise ConfigError(
            f"pads are made from whole weights, and those of {name!r} are quantised by {shown_method(quantised)}: make them from the checkpoint of "
            "floats, and serve that"
        )
    folder = path_of(name) or Path(name)
    weights = Weights(name, folder, dtype)
    model = structure(name, weights.dtype)
    streams = [PadStream(False, 0, tuple(Effect(layer, "", 0, 0) for layer in group)) for group in input_groups(model)]
    contents = Contents(new_key(), bits, tokens, tuple(_measured(streams, model, weights, training)))
    contents = laid_out(contents)
    free = disk_usage(file.parent).free
    if contents.nbytes > free:
        raise ConfigError(
            f"{file} would have {contents.nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: make fewer --tokens"
        )
    try:
        PadFile.create(part, contents)
    except OSError as error:
        raise ConfigError(f"cannot write {part}: {error.strerror}") from None
    try:
        _fill(part, contents, model, weights)
        _publish(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return contents


def _publish(part: Path, file: Path) -> None:
    """Give the file its own name when it is complete, so that it is so even after the power has failed."""
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.rename(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Weights:
    """The matrices of a checkpoint, by their layers' names. Each is read when it is asked for."""

    def __init__(self, name: str, folder: Path, dtype: str | None) -> None:
        self._dtype = torch_dtype(dtype) if dtype else None
        self._files = {key: file for file in sorted(folder.glob("*.safetensors")) for key in _keys(file)}
        self._model: nn.Module | None = None
        self._name = name
        self.dtype = dtype

    def __getitem__(self, layer: str) -> Tensor:
        key = f"{layer}.weight"
        if self._model is None and key not in self._files:  # from the hub, or the class gives its tensors other names
            self._model = load_model(self._name, self.dtype)
        if self._model is not None:
            return self._model.get_parameter(key).detach()
        with safe_open(self._files[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor.to(self._dtype or tensor.dtype)


def _keys(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def masked_layers(model: Any) -> dict[str, nn.Module]:
    """Return every linear layer except the heads."""
    heads = head_names(model)
    return {name: m for name, m in model.named_modules() if type(m) in (nn.Linear, Conv1D) and not is_in(name, heads)}


def input_groups(model: Any) -> list[Group]:
    """Return the layers in groups that take the same tensor, as a run without values shows. A layer that does not run is alone."""
    layers = masked_layers(model)
    taken: dict[str, int] = {}
    inputs: list[Tensor] = []

    def note(name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs.append(given[0])  # kept, so that no other tensor gets its identity
            taken.setdefault(name, id(given[0]))

        return hook

    handles = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            model(input_ids=torch.ones(1, 4, dtype=torch.int64, device="meta"))
    except Exception:  # whatever a model needs besides ids: pads for each layer alone are as good, and more to compute
        taken.clear()
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[Any, Group] = {}
    for name in layers:
        groups.setdefault(taken.get(name, name), []).append(name)
    return list(groups.values())


def _measured(streams: list[PadStream], model: nn.Module, weights: Weights, training: bool) -> Iterator[PadStream]:
    """Return the streams, with their widths and the digests of their weights."""
    from rich.progress import track

    for stream in track(streams, "reading the weights", transient=True):
        effects, width = [], 0
        for effect in stream.effects:
            weight = weights[effect.layer]
            width, out = _operand(model, effect.layer, weight).shape
            effects.append(Effect(effect.layer, digest(weight), out, 0))
        yield PadStream(False, width, tuple(effects))
        if training:
            yield from (PadStream(True, e.width, (Effect(e.layer, e.digest, width, 0),)) for e in effects)


def _operand(model: nn.Module, layer: str, weight: Tensor) -> Tensor:
    """Return the matrix that rows are multiplied by."""
    return weight if isinstance(model.get_submodule(layer), Conv1D) else weight.t()


def _fill(file: Path, contents: Contents, model: nn.Module, weights: Weights) -> None:
    """Read each weight once more, and multiply all pads of its layer by it."""
    from rich.progress import Progress

    by_layer: dict[str, list[tuple[int, PadStream, Effect]]] = {}
    for number, stream in enumerate(contents.streams):
        for effect in stream.effects:
            by_layer.setdefault(effect.layer, []).append((number, stream, effect))
    with Progress(transient=True) as progress, file.open("r+b") as out:
        task = progress.add_task("computing pads", total=len(by_layer) * contents.tokens)
        for layer, places in by_layer.items():
            digits_DKN, _ = quantise(_operand(model, layer, weights[layer]), contents.bits)
            for number, stream, effect in places:
                w_DKN = digits_DKN.transpose(1, 2) if stream.gradient else digits_DKN
                out.seek(effect.start)
                checksums = []
                for first in range(0, contents.tokens, ROWS):
                    rows = min(ROWS, contents.tokens - first)
                    pads_TK = keystream(contents.key, (rows, stream.width), INTEGERS[contents.bits], number, first)
                    effects_TN = modular_product(pads_TK, w_DKN)
                    out.write(effects_TN.numpy().data)
                    checksums.append(row_checksums(effects_TN))
                    progress.advance(task, rows / len(places))
                out.write(torch.cat(checksums).numpy().data)
