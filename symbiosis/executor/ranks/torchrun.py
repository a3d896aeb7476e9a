"""Ranks that torch's own launcher starts: `torchrun --nproc-per-node 2 --no-python symbiosis-executor MODEL ...`, on several hosts with `--hosts`.

The launcher stands in for the service: it says which rank a process is, brings the store by which they meet, and when one dies it ends all, and
starts them again as often as it was told to (`--max-restarts`).
"""

import os
import sys

import msgspec

from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.executor.options import Options
from symbiosis.executor.preflight import check
from symbiosis.executor.ranks.orders import Order, Ready
from symbiosis.executor.ranks.service import ready_line
from symbiosis.protocol.endpoints import LAST_PORT


def is_launched() -> bool:
    """Whether the launcher has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launched_options(options: Options) -> Options:
    """Return the options of the whole service, which has as many ranks as were launched."""
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks // here != max(1, len(options.hosts)):
        raise ConfigError(
            f"torchrun has started ranks on {ranks // here} hosts: --hosts must name as many, for clients"
        )
    if options.ranks not in (None, ranks):
        raise ConfigError(f"--ranks {options.ranks}, and torchrun has started {ranks}: leave out --ranks")
    if options.mps:
        raise ConfigError(
            "--mps would start a daemon for one rank only: start nvidia-cuda-mps-control -d before torchrun"
        )
    if options.metrics_port and options.metrics_port + here - 1 > LAST_PORT:
        raise ConfigError(
            f"--metrics-port {options.metrics_port}: rank K of a host has its pages at that port + K, and there are {here} ranks: choose {LAST_PORT + 1 - here} or less"
        )
    devices = f"0-{here - 1}" if options.device == "cuda" and options.devices is None else options.devices
    return msgspec.structs.replace(options, ranks=ranks, devices=devices)


def serve(options: Options) -> None:
    """Serve as the rank that this process is, until SIGTERM or SIGINT."""
    from symbiosis.executor.model.store import Store
    from symbiosis.executor.ranks.rank import run
    from symbiosis.executor.ranks.rendezvous import Rendezvous, launched_store

    options = launched_options(options)
    store, rank = launched_store()
    ranks = Rendezvous(store, rank, len(options.places))
    local = rank % options.ranks_on_a_host
    ranks.forget("ready")
    if local == 0:
        ranks.forget("checked")
        check(options)  # while nobody listens on this host
        ranks.note("checked")
    ranks.wait_for("checked", rank - local)
    port = None if options.metrics_port is None else options.metrics_port + local * bool(options.metrics_port)

    def ready(held: Store, _: int | None) -> None:
        told = [Ready(layers, nbytes) for layers, nbytes in ranks.all_ready(len(held.served()), held.nbytes)]
        if rank == 0:
            print(ready_line(options.model or "", options, told), flush=True)

    try:
        run(Order(options.model or "", options, rank, ""), ranks, ready, (options.metrics_host, port))
    except SymbiosisError as error:
        for line in str(error).splitlines():
            print(f"error: rank {rank}: {line}", file=sys.stderr)
        sys.exit(2)
