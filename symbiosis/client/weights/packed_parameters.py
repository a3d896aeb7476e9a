"""What a client knows of weights that its executor holds packed: by packed parameters of its own, or by packing floats as the executor did."""

import torch
from torch import Tensor

from symbiosis.client.layers.layer_plan import ParameterSite, parameter_of
from symbiosis.errors import Code, WrapError
from symbiosis.kernels.of_bitsandbytes import packed_of
from symbiosis.kernels.packed import CODES, PackedWeight
from symbiosis.kernels.packing import FORMATS, pack
from symbiosis.protocol import Layer
from symbiosis.transport.tensors import TORCH_DTYPE

SAME_EVERYWHERE = ("int8", "fp8")  # formats whose scales are the same wherever floats are packed


def check_same_packed(packed: PackedWeight, layer: Layer) -> None:
    """Check that the client's packed weight is the executor's."""
    if packed.format != layer.packed:
        theirs = f"packed as {layer.packed}" if layer.packed else "whole"
        advice = f"start it with --quantize {packed.format}, or with" if packed.format in FORMATS else "start it with"
        raise WrapError(
            f"{layer.name}: this model's weights are packed as {packed.format}, the executor's are {theirs}: {advice} the quantised "
            "checkpoint, or load this model without a quantization_config",
            Code.WRONG_MODEL,
        )
    if layer.packed_digest not in (packed.digest(), packed.digest(CODES)):
        raise WrapError(
            f"{layer.name}: the packed weights differ from the executor's: this is another checkpoint or revision, or it was packed "
            "otherwise",
            Code.WRONG_MODEL,
        )


def dtype_of_rows(place: ParameterSite, layer: Layer) -> torch.dtype:
    """Return the dtype of the rows that a parameter multiplies: for packed ones, that in which their layer computes."""
    parameter = parameter_of(place)
    if packed_of(parameter) is None:
        return parameter.dtype
    return getattr(place.owner, "compute_dtype", None) or TORCH_DTYPE[layer.dtype]


def known_weight(tensor: Tensor, layer: Layer, wire: torch.dtype | None) -> Tensor:
    """Return the weight by which the executor multiplies rows of the dtype `wire` (None: the layer's), as this client knows it without asking.
    Raises `WrapError` if it knows only a part."""
    if not layer.packed:
        return tensor.detach()
    packed = packed_of(tensor)
    if packed is None and layer.packed in SAME_EVERYWHERE:
        packed = pack(tensor.detach().cpu(), layer.packed)
        is_known = packed.digest(CODES) == layer.packed_digest
    else:
        is_known = packed is not None and packed.digest() == layer.packed_digest
    if packed is None or not is_known:
        raise WrapError(
            f"{layer.name}: privacy= and verify= test answers by this model's weights, and do not know all that the executor multiplies by, "
            f"which it has packed as {layer.packed}: let it serve the checkpoint that bitsandbytes has written of this model, or use "
            "--quantize int8 or fp8"
        )
    return packed.whole(wire or TORCH_DTYPE[layer.dtype])
