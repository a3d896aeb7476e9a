"""How much memory the processes of a server or a cluster take, on the host and on each GPU, from the files of weights and the options. It loads no torch.

What an idle process has for itself was measured (`Private_Dirty`): with Python 3.11, torch 2.13 and transformers 5 on CPUs; on GPUs with torch 2.11
on an H200, after products in float32 and bfloat16. `tests/process/test_prometheus.py` holds the former to what a cluster takes."""

from collections import Counter
from collections.abc import Iterator, Mapping

from symbiosis.base.dtypes import DTYPE_BITS
from symbiosis.executor.model.checkpoint import located, weight_files, weights_nbytes
from symbiosis.executor.options import Options
from symbiosis.executor.preflight import needed_on
from symbiosis.serving.serve_options import SHARE, ServeOptions

MIB = 1 << 20
HOST = "this machine"
EXECUTOR, ENGINE, HTTP, FRONT, CLUSTER = 285 * MIB, 310 * MIB, 50 * MIB, 24 * MIB, 48 * MIB
LIBRARIES = 190 * MIB  # files of torch and others, once for all processes
WITH_CUDA = 400 * MIB  # more on the host, in each process that uses a GPU
CONTEXT = 720 * MIB  # on the GPU, for each such process

Footprint = Counter[tuple[str, str]]  # bytes by place and by what they are for: ("cuda:0", "weights")


def of_host(front_ends: int) -> Footprint:
    """Return what there is once, and the front ends."""
    return Footprint({(HOST, "processes"): LIBRARIES + CLUSTER + front_ends * FRONT})


def of_executor(options: Options) -> Footprint:
    """Return what an executor takes: its weights lie there once for it and for all programs that map them."""
    found = Footprint({(HOST, "processes"): len(options.places) * EXECUTOR})
    nbytes = weights_nbytes(
        weight_files(located(str(options.model))),
        DTYPE_BITS.get(options.dtype or ""),
        options.integers,
        options.quantize,
    )
    if not options.on_gpu:
        found[HOST, "weights"] = nbytes
        return found
    for device, part in needed_on(options, nbytes).items():
        found[_gpu(device), "weights"] += part
        _use_gpu(found, device)
    return found


def of_server(options: ServeOptions, executor: Options, free: Mapping[str, int] | None = None) -> Footprint:
    """Return what a server takes beside its executor when all its pages are in use.

    Args:
        free: By place, what its options name a share of. Without it, only sizes count.
    """
    found = Footprint({(HOST, "processes"): max(1, len(options.places)) * ENGINE + HTTP})
    place = HOST
    if executor.on_gpu:
        place = _gpu(executor.places[0])
        _use_gpu(found, place)
    for where, size in ((place, options.memory_size), (HOST, options.adapter_memory_size)):
        size = SHARE if size is None else size
        found[where, "pages"] += int(size if size >= 1 else size * (free or {}).get(where, 0))
    return found


def _use_gpu(found: Footprint, device: str) -> None:
    found[HOST, "processes"] += WITH_CUDA
    found[_gpu(device), "processes"] += CONTEXT


def _gpu(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def lacking(what: str, found: Footprint, free: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each place that has not enough for what is to run there."""
    for place, room in free.items():
        if total(found, place) > room:
            yield (
                f"{what} need {told(found, place)}, and {place} has {room / 2**30:.1f} GiB free: give servers less `memory` and `adapter-memory`, "
                "start fewer processes, end what else runs there, or choose a smaller model"
            )


def told(found: Footprint, place: str) -> str:
    """Return what is taken of a place, for people.

    >>> told(of_host(1), HOST)
    '0.3 GiB (processes 0.3)'
    """
    parts = {what: nbytes for (where, what), nbytes in found.items() if where == place and nbytes}
    sizes = ", ".join(f"{what} {nbytes / 2**30:.1f}" for what, nbytes in parts.items())
    return f"{sum(parts.values()) / 2**30:.1f} GiB ({sizes})"


def total(found: Footprint, place: str) -> int:
    return sum(nbytes for (where, _), nbytes in found.items() if where == place)


def places(found: Footprint) -> list[str]:
    return list(dict.fromkeys(where for where, _ in found))
