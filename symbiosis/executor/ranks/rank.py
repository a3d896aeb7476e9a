"""One rank's process: loads its part of the model, and serves it until the service ends or is gone.

What it hears first is an `Order`. What the rank says goes to stdout, as lines of JSON.
"""

import hashlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import BinaryIO

import msgspec
import torch
from torch import nn

from symbiosis.base import procs
from symbiosis.base.logs import name_process, set_up_logging
from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.executor.daemon import guard_process, serve_store, shared_gpu
from symbiosis.executor.model.checkpoint import PACKED_BITS, located, weight_files
from symbiosis.executor.model.load import load_model, structure
from symbiosis.executor.model.quantisation import read_config, told_bits
from symbiosis.executor.model.sample import sample_of
from symbiosis.executor.model.store import OnGpus, Store, check_patterns, config_json, entries, served_entries
from symbiosis.executor.model.stripes import StripedModel
from symbiosis.executor.observe.log import log
from symbiosis.executor.observe.pages import Pages
from symbiosis.executor.options import Options
from symbiosis.executor.ranks.descriptor_exchange import Exchange
from symbiosis.executor.ranks.orders import Order, Ready
from symbiosis.executor.ranks.partition import SizedTensor, whole_layers
from symbiosis.executor.ranks.rendezvous import Rendezvous
from symbiosis.transport.local.striped_weights import mapped, opened

NOT_MAPPED = "no client maps weights that lie in parts on several GPUs, so --share-weights does nothing here: their products are calls"
FOR_CLIENTS = 512  # descriptors, at least


def main() -> None:
    """Run the rank that was ordered, and exit with 2 if what the user asked for cannot be."""
    said = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is written to stdout, by NCCL for one, is for the log
    order = msgspec.json.decode(procs.heard, type=Order)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # while it loads; a rank that serves drains
    try:
        ranks = Rendezvous.at(order.file, order.rank, len(order.options.places))
        run(order, ranks, lambda store, port: tell_service(said, order, store, port), ("127.0.0.1", 0))
    except SymbiosisError as error:
        for line in str(error).splitlines():
            print(f"error: rank {order.rank}: {line}", file=sys.stderr)
        sys.exit(2)


def tell_service(said: BinaryIO, order: Order, store: Store, port: int | None) -> None:
    """Tell the service that clients can join this rank."""
    part = store.striped[order.rank].fileno() if store.striped else None
    told = Ready(len(store.served()), store.nbytes, port, part, store.fingerprint)
    said.write(msgspec.json.encode(told) + b"\n")
    said.flush()


def run(
    order: Order, ranks: Rendezvous, ready: Callable[[Store, int | None], None], pages_at: tuple[str, int | None]
) -> None:
    """Load this rank's part, and serve it.

    Args:
        ranks: Where it meets the others.
        ready: Told of the store and the port of this rank's pages when clients can join.
        pages_at: Host and port of the pages, if the options ask for them; port 0 is any.
    """
    options = order.options.of_rank(order.rank)
    torch.set_flush_denormal(True)  # before torch starts threads that compute for this one
    name_process(f"rank {order.rank}")
    set_up_logging(options.log_format)
    tell_what_is_not_mapped(order)
    guard_process(strangers=options.key is not None)
    with shared_gpu(options):
        if options.on_gpu:
            torch.cuda.set_device(options.device)  # for whatever names no device
        host, at = pages_at
        shown = None if options.metrics_port is None or at is None else Pages(host, at)
        store = store_of(order, options, ranks)
        serve_store(store, options, shown, lambda _: ready(store, shown.port if shown else None))


def tell_what_is_not_mapped(order: Order) -> None:
    """Log, for all ranks once, that clients map no weights though the user has asked for that."""
    options = order.options
    if options.share_weights and options.shard == "fsdp" and options.on_gpu and order.rank == 0:
        log(logging.WARNING, NOT_MAPPED)


def store_of_layers(order: Order, options: Options, ranks: Rendezvous) -> Store:
    """Load the layers that this rank holds. The rest of the model stays on the meta device."""
    whole = structure(order.model, options.dtype)
    check_patterns(whole, options.serve)
    quantize, serve = options.quantize, options.serve
    bits = PACKED_BITS[quantize] if quantize else told_bits(read_config(located(order.model)))
    held = whole_layers(parts_of(whole, bits, serve), options.all_shares)
    elsewhere = [key for key, holder in held.items() if holder != order.rank]
    log(logging.INFO, "loading", tensors=len(held) - len(elsewhere), of=len(held))
    model = load_model(order.model, options.dtype, options.device, elsewhere, quantize, serve)
    ranks.agree_on_values(sample_of(weight_files(located(order.model))))
    return Store(model, serve, options.integers, ranks)


def agreed(order: Order, options: Options, ranks: Rendezvous) -> StripedModel:
    """Return the model that all ranks hold parts of. Raises `ConfigError` if they have read different ones."""
    check_patterns(structure(order.model, options.dtype), options.serve)
    striped = StripedModel(order.model, options.dtype)
    ranks.agree(config_json(striped.model), striped.manifest)
    ranks.agree_on_values(sample_of(weight_files(located(order.model))))
    return striped


def store_of_parts(order: Order, options: Options, ranks: Rendezvous) -> Store:
    """Load this rank's part of every tensor, and map the parts of all."""
    striped = agreed(order, options, ranks)
    if order.parts:
        files = list(map(opened, order.parts))
    else:
        part = striped.part(options.all_shares, order.rank)
        digest = digest_of(options.all_shares, part.phases, striped.digest)
        exchange, mine = Exchange(), part.seal()
        exchange.hold(order.rank, digest, [mine.fileno()])
        others = ranks.parts(exchange, digest)
        files = [mine if rank == order.rank else reader(others[rank]) for rank in range(ranks.ranks)]
    held = mapped(striped.manifest, [file.fileno() for file in files])
    store = Store(striped.fill(held), options.serve, options.integers)
    store.rank, store.ranks, store.striped = order.rank, ranks.ranks, files
    store.nbytes = os.fstat(files[order.rank].fileno()).st_size
    return store


def reader(descriptors: list[int]) -> BinaryIO:
    """Return the file with a rank's part."""
    (descriptor,) = descriptors
    return os.fdopen(descriptor, "rb", buffering=0)


def digest_of(*what: object) -> str:
    """Return a digest of all tensors and how they are cut, in which all ranks must agree."""
    return hashlib.sha256(repr(what).encode()).hexdigest()


def store_of_device_parts(order: Order, options: Options, ranks: Rendezvous) -> Store:
    """Load this rank's part of every tensor to its GPU, unless another rank has kept it, and map the parts of all."""
    from symbiosis.transport.cuda import gpu_stripes
    from symbiosis.transport.cuda.driver import device_name, exported, imported

    device = torch.device(options.device)
    must_reach_each_other(order.options.places)
    striped = agreed(order, options, ranks)
    layout = gpu_stripes.RunLayout(striped.manifest, options.all_shares, striped.tied)
    must_have_descriptors(len(layout.runs))
    if kept := ranks.kept_by_others():
        digest, mine = kept
        handles = {order.rank: [imported(descriptor) for descriptor in mine]}
    else:
        part = gpu_stripes.DevicePart(layout, order.rank, device)
        striped.read(part)
        handles, digest = {order.rank: part.sealed()}, digest_of(options.all_shares, striped.digest)
        mine = [exported(handle) for handle in handles[order.rank]]
    exchange = Exchange()
    exchange.hold(order.rank, digest, mine)
    for rank, theirs in ranks.parts(exchange, digest).items():
        exchange.hold(rank, digest, theirs)
        handles[rank] = [imported(descriptor) for descriptor in theirs]
    held, tensors = gpu_stripes.mapped(layout, handles, device)
    store = Store(striped.fill(tensors, device), options.serve, options.integers)
    store.rank, store.ranks = order.rank, ranks.ranks
    cuts = {number: layout.cuts(number) for number in layout.begins}
    names = ranks.names(device_name(device))
    begins = layout.first_outputs(store.manifest)
    store.on_gpus = OnGpus(names, cuts, begins, gather_bytes(store, options.gather_buffers))
    store.nbytes = sum(run.nbytes for run in layout.of_rank(order.rank))
    return store


def gather_bytes(store: Store, wanted: int) -> int:
    """Return the bytes of the buffers, or raise `ConfigError` if they could not hold one weight and the next."""
    matrices = (store.weights[n].nbytes for n, layer in enumerate(store.manifest) if layer.kind in ("linear", "conv1d"))
    least = 2 * max(matrices, default=0)
    if 0 < wanted < least:
        raise ConfigError(f"--gather-buffers {wanted} holds no two of the largest weights: give {least} bytes or more")
    return wanted


def must_have_descriptors(runs: int) -> None:
    """Raise `ConfigError` unless this process may keep a descriptor of each run, and others for its clients."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if runs + FOR_CLIENTS > limit:
        raise ConfigError(
            f"--shard fsdp keeps {runs} descriptors open on GPUs, and this process may have {limit} in all: allow more (ulimit -Hn), or use --shard layers"
        )


def must_reach_each_other(places: Sequence[str]) -> None:
    """Raise `ConfigError` unless each GPU can read the memory of every other."""
    for here, there in permutations(set(places), 2):
        if not torch.cuda.can_device_access_peer(here, there):
            raise ConfigError(f"{here} cannot read the memory of {there}, as --shard fsdp needs: use --shard layers")


def store_of(order: Order, options: Options, ranks: Rendezvous) -> Store:
    """Load what this rank holds."""
    if options.shard == "layers":
        return store_of_layers(order, options, ranks)
    return (store_of_device_parts if options.on_gpu else store_of_parts)(order, options, ranks)


def parts_of(model: nn.Module, bits: float | None = None, serve: Sequence[str] = ()) -> list[SizedTensor]:
    """Return the tensors of a model, which needs no weights, as the partition takes them. With `bits`, what these patterns `serve` is packed in so
    many bits a value."""
    packed = {entry.key for entry in served_entries(model, serve)} if bits else set()
    keys: dict[int, str] = {}
    parts = []
    for entry in entries(model):
        first = keys.setdefault(id(entry.tensor), entry.key)
        tied_to = first if first != entry.key else ""
        nbytes = int(entry.tensor.numel() * bits) // 8 if bits and entry.key in packed else entry.tensor.nbytes
        parts.append(SizedTensor(entry.key, entry.key.rpartition(".")[0], nbytes, tied_to))
    return parts
