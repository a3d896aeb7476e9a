"""How much of a model lies in the host's memory while its weights are loaded to GPUs, from the headers of its files. It loads no torch.

A tensor that stays as it is stored goes from the file's mapping to the GPU, and needs no memory here. One that is cast needs its cast form. Matrices
of experts are stacked by transformers: on the host, unless they go to the GPU one by one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from symbiosis.base.dtypes import DTYPE_BITS
from symbiosis.executor.model.checkpoint import AT_ONCE, header, nbytes_of
from symbiosis.executor.options import Options

EXPERTS = ".experts."
LOADERS = 4  # threads of transformers, each with one tensor at a time
STORED = {"float32": "F32", "float": "F32", "float64": "F64", "double": "F64", "float16": "F16", "half": "F16"}
STORED |= {"bfloat16": "BF16"}


def loading_nbytes(files: Sequence[Path], options: Options) -> int:
    """Return the most bytes that all processes of this host hold here while they load the weights to their GPUs."""
    cast, stacked = Counter[str](), Counter[str]()  # the bytes of each tensor, and of all experts of a layer together
    for file in files:
        for name, tensor in header(file)[0].items():
            nbytes = nbytes_of(tensor.dtype, tensor.shape, DTYPE_BITS.get(options.dtype or ""))
            if EXPERTS in name:
                stacked[name.partition(EXPERTS)[0]] += nbytes
            if options.dtype and "F" in tensor.dtype and tensor.dtype != STORED[options.dtype]:
                cast[name] = nbytes
    copied = stacked | {name: nbytes for name, nbytes in cast.items() if EXPERTS not in name}
    if len(options.places) == 1:
        return sum(copied.values())
    if options.shard == "fsdp":
        return options.ranks_on_a_host * _at_most(copied, AT_ONCE, 1)
    return options.ranks_on_a_host * _at_most(cast, 0, LOADERS)


def _at_most(sizes: Mapping[str, int], least: int, at_once: int) -> int:
    """Return the most bytes of so many tensors at a time, or of all that fit into `least`."""
    largest = max(sizes.values(), default=0)
    return min(sum(sizes.values()), max(least, at_once * largest))
