"""One rank's process: loads its part of the model, and serves it until the service ends or is gone.

Its first line of stdin is an `Order`. stdin stays open for as long as the service lives; what the rank says goes to stdout, as lines of JSON.
"""

import logging
import os
import signal
import sys
import threading

import msgspec
import torch
from torch import nn

from symbiosis.config import Options
from symbiosis.errors import SymbiosisError
from symbiosis.executor.daemon import guard_process, serve_store, shared_gpu
from symbiosis.executor.model.load import load_model, structure
from symbiosis.executor.model.store import Store, check_patterns, entries
from symbiosis.executor.model.stripes import StripedModel
from symbiosis.executor.observe.log import log
from symbiosis.executor.observe.pages import Pages
from symbiosis.executor.ranks.board import Ranks
from symbiosis.executor.ranks.orders import Order, Ready
from symbiosis.executor.ranks.partition import Part, whole_layers
from symbiosis.executor.server import Server
from symbiosis.logs import name_process, set_up_logging
from symbiosis.transport.local.striped_weights import opened


def main() -> None:
    """Run the rank that stdin orders, and exit with 2 if what the user asked for cannot be."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # noqa: PTH123  (a thread that waits at a buffer could not be ended)
        order = msgspec.json.decode(stdin.readline(), type=Order)
    threading.Thread(target=_end_with_the_service, name="symbiosis-service", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # while it loads; a rank that serves drains
    try:
        run(order)
    except SymbiosisError as error:
        for line in str(error).splitlines():
            print(f"error: rank {order.rank}: {line}", file=sys.stderr)
        sys.exit(2)


def _end_with_the_service() -> None:
    """Drain when the service is gone: its end of stdin is closed then, however it ended."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def run(order: Order) -> None:
    """Load this rank's part, and serve it."""
    options = order.options.of_rank(order.rank)
    torch.set_flush_denormal(True)  # before torch starts threads that compute for this one
    name_process(f"rank {order.rank}")
    set_up_logging(options.log_format)
    guard_process(strangers=options.key is not None)
    with shared_gpu(options):
        if options.on_gpu:
            torch.cuda.set_device(options.device)  # for whatever names no device
        pages = None if options.metrics_port is None else Pages("127.0.0.1", 0)
        ranks = Ranks.at(order.file, order.rank, len(options.places))
        store = STORES[options.shard](order, options, ranks)

        def ready(server: Server) -> None:
            part = store.striped[order.rank].fileno() if store.striped else None
            told = Ready(len(store.served()), store.nbytes, pages.port if pages else None, part)
            sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
            sys.stdout.buffer.flush()

        serve_store(store, options, pages, ready)


def store_of_layers(order: Order, options: Options, ranks: Ranks) -> Store:
    """Load the layers that this rank holds. The rest of the model stays on the meta device."""
    whole = structure(order.model, options.dtype)
    check_patterns(whole, options.serve)
    held = whole_layers(parts_of(whole), options.all_shares)
    elsewhere = [key for key, holder in held.items() if holder != order.rank]
    log(logging.INFO, "loading", tensors=len(held) - len(elsewhere), of=len(held))
    model = load_model(order.model, options.dtype, options.device, elsewhere)
    return Store(model, options.serve, options.integers, ranks)


def store_of_parts(order: Order, options: Options, ranks: Ranks) -> Store:
    """Load this rank's part of every tensor, and map the parts of all."""
    check_patterns(structure(order.model, options.dtype), options.serve)
    striped = StripedModel(order.model, options.dtype)
    if order.parts:
        files = list(map(opened, order.parts))
    else:
        part = striped.part(options.all_shares, order.rank)
        files = ranks.files(part.seal(), part.phases)
    store = Store(striped.fill(files), options.serve, options.integers)
    store.rank, store.ranks, store.striped = order.rank, ranks.ranks, files
    store.nbytes = os.fstat(files[order.rank].fileno()).st_size
    return store


STORES = {"layers": store_of_layers, "fsdp": store_of_parts}


def parts_of(model: nn.Module) -> list[Part]:
    """Return the tensors of a model, which needs no weights, as the partition takes them."""
    keys: dict[int, str] = {}
    parts = []
    for entry in entries(model):
        first = keys.setdefault(id(entry.tensor), entry.key)
        tied_to = first if first != entry.key else ""
        parts.append(Part(entry.key, entry.key.rpartition(".")[0], entry.tensor.nbytes, tied_to))
    return parts
