"""Where the weights of a model fit: on this machine, on one of its GPUs, or on several (`symbiosis doctor --model`). It loads no torch."""

from collections.abc import Mapping, Sequence

from symbiosis.base.dtypes import DTYPE_BITS
from symbiosis.base.memory import free_memory
from symbiosis.base.problems import Finding
from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import PACKED_BITS, located, weight_files, weights_nbytes
from symbiosis.executor.model.quantisation import check_format, read_config, told_quantisation
from symbiosis.executor.preflight import free_gpu_memory, visible_gpus
from symbiosis.server.launch.footprint import EXECUTOR

BESIDE = (
    1 / 16
)  # of a device's free memory, for products and for what clients bring; on the host, an executor's process comes on top


def room_for(model: str) -> Finding:
    """Say where the weights of a model fit, as they are stored or in half as many bits."""
    try:
        folder = located(model)
        config = read_config(folder)
        check_format(model, config)
        is_quantised = told_quantisation(config) is not None
        files = weight_files(folder)
        if not files:
            return Finding(
                "FAIL", "room", f"there are no *.safetensors of {model}", "Name a checkpoint's folder, or a hub id"
            )
        stored = weights_nbytes(files)
        half = stored if is_quantised else weights_nbytes(files, DTYPE_BITS["bfloat16"])
        packed = {} if is_quantised else {how: weights_nbytes(files, quantize=how) for how in PACKED_BITS}
    except ConfigError as error:
        return Finding("FAIL", "room", str(error))
    gpus = [free_gpu_memory(f"cuda:{number}") or 0 for number in range(len(visible_gpus() or ()))]
    return fits(model, stored, min(stored, half), free_memory(), gpus, packed)


def fits(model: str, stored: int, half: int, host: int, gpus: Sequence[int], packed: Mapping[str, int] = {}) -> Finding:
    """Say where so many bytes fit, or `half` of them, or what is left of them when they are `packed` in a format: on the host, and on GPUs with so
    many free bytes each.

    >>> fits("m", 10 << 30, 5 << 30, 64 << 30, [8 << 30, 8 << 30]).text
    'm has 10.0 GiB of weights; free: host 64.0, cuda:0 8.0, cuda:1 8.0 GiB. It fits on: --device cpu; --devices 0,1 (5.0, 5.0 GiB)'
    """
    free = [("host", host), *((f"cuda:{number}", nbytes) for number, nbytes in enumerate(gpus))]
    told = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in free)
    text = f"{model} has {_gib(stored)} GiB of weights; free: {told} GiB"
    if ways := ways_for(stored, host, gpus):
        return Finding("ok", "room", f"{text}. It fits on: {'; '.join(ways)}")
    if ways := ways_for(half, host, gpus):
        return Finding("warn", "room", f"{text}. It fits nowhere", f"With --dtype bfloat16 it does: {'; '.join(ways)}")
    for format, nbytes in packed.items():
        if ways := ways_for(nbytes, host, ()):
            return Finding("warn", "room", f"{text}. It fits nowhere", f"With --quantize {format} it does: {ways[0]}")
    return Finding(
        "FAIL", "room", f"{text}. It fits nowhere", "End what else runs here, or take a smaller model or more devices"
    )


def ways_for(needed: int, host: int, gpus: Sequence[int]) -> list[str]:
    """Return the options by which so many bytes fit: on the host, on the emptiest GPU, and on as few GPUs as hold them together."""
    room = [int(nbytes * (1 - BESIDE)) for nbytes in gpus]
    ways = ["--device cpu"] if needed + EXECUTOR <= host * (1 - BESIDE) else []
    order = sorted(range(len(room)), key=lambda number: -room[number])
    if order and needed <= room[order[0]]:
        ways.append(f"--device cuda:{order[0]}")
    for count in range(2, len(order) + 1):
        chosen = sorted(order[:count])
        if needed <= sum(room[number] for number in chosen):
            ways.append(_several(needed, chosen, room))
            break
    return ways


def _several(needed: int, chosen: Sequence[int], room: Sequence[int]) -> str:
    """Return the options for these GPUs: equal shares if those fit, else shares by their room."""
    count, total = len(chosen), sum(room[number] for number in chosen)
    equal = needed / count <= min(room[number] for number in chosen)
    parts = [needed / count if equal else needed * room[number] / total for number in chosen]
    shares = "" if equal else f" --shares {','.join(f'{room[number] / 2**30:.1f}' for number in chosen)}"
    return f"--devices {','.join(map(str, chosen))}{shares} ({', '.join(map(_gib, parts))} GiB)"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f}"
