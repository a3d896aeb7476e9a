"""Checks an executor's options before torch is imported or a weight is read, and reports everything that is wrong at once."""

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from symbiosis.base import requirements
from symbiosis.base.curve_keys import Keyring
from symbiosis.base.dtypes import DTYPE_BITS
from symbiosis.base.folders import check_caches
from symbiosis.base.hosts import listener_at
from symbiosis.base.memory import free_memory
from symbiosis.base.ownership import check_socket, make_folder, resolved
from symbiosis.base.problems import problems_of, refuse
from symbiosis.errors import ConfigError
from symbiosis.executor import mps
from symbiosis.executor.model.checkpoint import (
    MODEL,
    check_whole,
    hub_is_out_of_reach,
    located,
    path_of,
    weight_files,
    weights_nbytes,
)
from symbiosis.executor.model.host_room import loading_nbytes
from symbiosis.executor.model.quantisation import check_format, read_config, shown_method, told_quantisation
from symbiosis.executor.observe.log import AuditLog
from symbiosis.executor.options import Options
from symbiosis.protocol.endpoints import is_loopback, of_rank, open_to_others, parts_of

DEVICE = re.compile(r"cpu(?::0)?|cuda(?::(\d+))?")
SMALLER = "end what else runs there, or choose a smaller model"
LONGEST_SOCKET = 107  # bytes that the path of a Unix socket may have


def check(options: Options) -> str:
    """Return the model's name, or raise `ConfigError` with a line for each thing that is wrong."""
    requirements.check()
    with ExitStack() as held:  # ports stay taken until all are, so that two options cannot want the same one
        refuse(problems_of(CHECKS, options, held))
    assert options.model is not None
    return options.model


def check_model(options: Options, held: ExitStack) -> None:
    if options.model is None:
        raise ConfigError(f"no model: symbiosis-executor MODEL, or `model:` in a --config file. {MODEL}")
    folder = located(options.model)
    check_quantised(options, read_config(folder))
    files = weight_files(folder)
    if files:
        for file in files if not options.serve else ():  # patterns are checked with torch, and go first
            check_whole(file)
        bits = DTYPE_BITS.get(options.dtype or "")
        needed = weights_nbytes(files, bits, options.integers, options.quantize) // max(1, len(options.hosts))
        less = fewer_bits(files, options.dtype)
        if not options.on_gpu:
            check_room(options.model, needed, free_memory(), "this machine", f"{SMALLER}{less}")
            return
        check_room(
            options.model, loading_nbytes(files, options), free_memory(), "this machine", SMALLER, "to be loaded"
        )
        check_gpus(options, needed, less)
    elif path_of(options.model) or hub_is_out_of_reach():
        how = (
            ", and a distributed checkpoint, which `symbiosis convert` makes them of"
            if (folder / ".metadata").is_file()
            else ""
        )
        raise ConfigError(f"cannot load the weights of {options.model!r} (only *.safetensors are read): there are none in {folder}{how}")  # fmt: skip


def check_quantised(options: Options, config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the weights are quantised, or to be quantised, in a way that cannot be served."""
    check_format(str(options.model), config)
    told = told_quantisation(config)
    if told and options.quantize:
        raise ConfigError(f"--quantize {options.quantize}: the weights of {options.model!r} are quantised by {shown_method(told)} already: leave it out")  # fmt: skip
    if (told or options.quantize) and len(options.places) > 1 and (options.shard != "layers" or options.on_gpu):
        raise ConfigError(
            f"quantised weights are divided over ranks of a CPU by --shard layers only, so far: serve {options.model!r} so, or on one device, where it "
            "needs a half or a quarter of the memory"
        )


def needed_on(options: Options, nbytes: int) -> dict[str, int]:
    """Return the bytes on each device, if the weights have so many in all: its part of them, and what its ranks gather.

    >>> needed_on(Options(devices="0,2", shares=(3.0, 1.0)), 1000)
    {'cuda:0': 750, 'cuda:2': 250}
    """
    found: dict[str, int] = {}
    here = slice(options.ranks_on_a_host)  # other hosts' devices are theirs
    shares = options.all_shares[here]
    for device, share in zip(options.places[here], shares, strict=True):
        found[device] = found.get(device, 0) + int(nbytes * share / sum(shares)) + options.gather_buffers
    return found


def check_gpus(options: Options, nbytes: int, less: str) -> None:
    """Raise `ConfigError` if a GPU has no room for its part of so many bytes, and what is gathered there."""
    needed = needed_on(options, nbytes)
    free = {device: room for device in needed if (room := free_gpu_memory(device)) is not None}
    more = ""
    if len(needed) > 1 and sum(needed.values()) <= sum(free.values()):
        more = ", or give it less by --shares"
    elif len(visible_gpus() or ()) > len(needed):
        more = ", or name more --devices"
    for device, room in free.items():
        check_room(str(options.model), needed[device], room, device, f"{SMALLER}{more}{less}")


def fewer_bits(files: list[Path], dtype: str | None) -> str:
    """Return the advice to serve weights in half as many bits, if that would help."""
    helps = dtype is None and weights_nbytes(files, DTYPE_BITS["bfloat16"]) < weights_nbytes(files)
    return ", or --dtype bfloat16" if helps else ""


def check_room(model: str, needed: int, free: int, where: str, advice: str = SMALLER, why: str = "") -> None:
    """Raise `ConfigError` if the weights do not fit into the free memory. `why`: for what they need it, if not to be served."""
    if needed > free:
        need = " ".join(filter(None, [f"{needed / 2**30:.1f} GiB", why]))
        raise ConfigError(
            f"the weights of {model!r} need {need}, and {where} has {free / 2**30:.1f} GiB free: {advice}"
        )


def check_endpoints(options: Options, held: ExitStack) -> None:
    """Check that each endpoint is valid and free."""
    ranks = len(options.places)
    if ranks > 1 and (unknown := [url for url in options.listen if url.endswith((":0", ":*"))]):
        raise ConfigError(
            f"cannot listen at {unknown[0]} with {ranks} ranks: name a port, because rank K answers at PORT + K"
        )
    listen, problems = list[str](), list[str]()
    for url in options.listen:
        try:
            parts_of(url)
            listen += [of_rank(url, rank) for rank in range(options.ranks_on_a_host)]
        except ConfigError as error:
            problems.append(f"cannot listen at {url}: {error}")
    for url in dict.fromkeys(listen):
        if listen.count(url) > 1 and not url.endswith((":0", ":*")):
            problems.append(f"cannot listen at {url} twice")
        scheme, address = parts_of(url)
        problems += problems_of([SCHEMES[scheme]], address, options, held)
    refuse(problems)


def check_inproc(address: str, options: Options, held: ExitStack) -> None:
    raise ConfigError(
        f"cannot listen at inproc://{address}: only the executor's own process could reach it. Use local:// or tcp://, or an executor "
        "in your program: symbiosis.Executor(model)"
    )


def check_local(address: str, options: Options, held: ExitStack) -> None:
    """Check the path of a Unix socket, and make its folder as the listener would."""
    path, where = Path(address), f"cannot listen at local://{address}:"
    if len(os.fsencode(path)) > LONGEST_SOCKET:
        raise ConfigError(f"{where} the path has more than {LONGEST_SOCKET} bytes")
    try:
        make_folder(resolved(path.parent), shared=True)
    except ConfigError as error:
        raise ConfigError(f"{where} {error}") from None
    check_socket(path)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{where} you may not write to {path.parent}")


def check_tcp(address: str, options: Options, held: ExitStack) -> None:
    """Check that a host and port are this machine's and free, and open to other machines only with keys."""
    import zmq

    where = f"cannot listen at tcp://{address}:"
    if "?" in address:
        raise ConfigError(f"{where} what comes after ? is for clients. Here keys are given by --key and --tenants")
    if options.key is None and not is_loopback(address):
        raise ConfigError(open_to_others(address))
    context = held.enter_context(zmq.Context())  # leaving it waits until the port is free again
    listener = held.enter_context(context.socket(zmq.ROUTER))
    try:
        listener.bind(f"tcp://{address}")
    except zmq.ZMQError as error:
        raise ConfigError(f"{where} {error}") from None


SCHEMES = {"inproc": check_inproc, "local": check_local, "tcp": check_tcp}


def check_metrics(options: Options, held: ExitStack) -> None:
    if options.metrics_port:
        try:
            held.enter_context(listener_at(options.metrics_host, options.metrics_port))
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics at {options.metrics_host}:{options.metrics_port}: {error}"
            ) from None


def check_keys(options: Options, held: ExitStack) -> None:
    if options.key is not None and options.tenants is not None:
        Keyring.open(options.key, options.tenants)


def check_audit_log(options: Options, held: ExitStack) -> None:
    if options.audit_log:
        AuditLog(Path(options.audit_log)).close()


def check_device(options: Options, held: ExitStack) -> None:
    """Check the devices with the driver's own tools, because asking CUDA would initialise it before MPS can be joined."""
    for device in dict.fromkeys(options.places):
        check_one_device(device, options.on_gpu)


def check_one_device(device: str, on_gpu: bool) -> None:
    """Raise `ConfigError` unless there is such a device."""
    found = DEVICE.fullmatch(device)
    if found is None:
        raise ConfigError(f"--device {device!r}: a device is cpu, cuda or cuda:NUMBER")
    if not on_gpu:
        return
    build = importlib.metadata.version("torch")
    if "+cpu" in build:
        raise ConfigError(f"--device {device!r}: torch {build} has no CUDA: install torch's CUDA build, or serve from the CPU")  # fmt: skip
    gpus = None if "+rocm" in build else visible_gpus()
    if gpus is not None and int(found[1] or 0) >= len(gpus):
        raise ConfigError(f"--device {device!r}: this process sees {len(gpus)} GPUs{' (CUDA_VISIBLE_DEVICES)' if _visible() is not None else ''}")  # fmt: skip


def check_compiled(options: Options, held: ExitStack) -> None:
    if options.on_gpu:
        check_caches()


def check_hosts(options: Options, held: ExitStack) -> None:
    if options.hosts and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ConfigError("--hosts is for ranks that torchrun starts on several hosts: torchrun --nnodes N --no-python symbiosis-executor ...")  # fmt: skip


def check_mps(options: Options, held: ExitStack) -> None:
    if (
        options.mps
        and shutil.which(mps.CONTROL) is None
        and all(mps.state(pipes) is mps.PipesState.ABSENT for pipes in mps.places())
    ):
        raise ConfigError(mps.NONE)  # fmt: skip


CHECKS = (
    check_model, check_endpoints, check_metrics, check_keys, check_audit_log, check_device, check_compiled, check_hosts,
    check_mps,
)  # fmt: skip


def visible_gpus() -> list[str] | None:
    """Return nvidia-smi's names of the GPUs that this process may use, or None if only CUDA could tell."""
    listed = _nvidia_smi("index")
    if listed is None:
        return None if _has_driver() else []
    named = _visible()
    return listed if named is None else [name for name in named.split(",") if name.strip() and not name.startswith("-")]


def free_gpu_memory(device: str) -> int | None:
    """Return the free memory of a GPU in bytes, or None if only CUDA could tell."""
    gpus, found = visible_gpus(), DEVICE.fullmatch(device)
    if not gpus or found is None or (number := int(found[1] or 0)) >= len(gpus):
        return None
    free = _nvidia_smi("memory.free", "--id", gpus[number].strip())
    return int(free[0]) << 20 if free and free[0].isdecimal() else None


def _visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _nvidia_smi(field: str, *more: str) -> list[str] | None:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", *more]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
