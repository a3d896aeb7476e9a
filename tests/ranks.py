"""Ranks of a service within the test's process: each has its part of a model, and a thread that serves it."""

import copy
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from symbiosis.executor.loop import ExecutorLoop
from symbiosis.executor.model import stripes
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import load_options
from symbiosis.executor.ranks import rank as rank_module
from symbiosis.executor.ranks.orders import Order
from symbiosis.executor.ranks.partition import whole_layers
from symbiosis.executor.ranks.rank import parts_of, store_of
from symbiosis.executor.ranks.rendezvous import Rendezvous
from symbiosis.protocol.endpoints import of_rank


def part_of(model: nn.Module, rank: int, shares: Sequence[float]) -> nn.Module:
    """A copy of a model in which only what this rank holds has memory."""
    part = copy.deepcopy(model)
    held = whole_layers(parts_of(model), shares)
    for path, module in part.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and held.get(f"{path}.{name}".lstrip("."), rank) != rank:
                where = module._parameters if name in module._parameters else module._buffers
                where[name] = (
                    nn.Parameter(tensor.to("meta"), False) if name in module._parameters else tensor.to("meta")
                )
    return part


_one_loads = Lock()


def _one_by_one(load: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """While transformers builds a model it changes classes, for all threads: those of ranks that are processes do not meet."""

    def locked(*arguments: object) -> nn.Module:
        with _one_loads:
            return load(*arguments)

    return locked


for _module in (rank_module, stripes):
    for _name in ("load_model", "structure"):
        setattr(_module, _name, _one_by_one(getattr(_module, _name)))


@contextmanager
def ranks_of(
    model: nn.Module | Path | Sequence[Path], url: str, shares: Sequence[float] = (1.0, 1.0), **words: object
) -> Iterator[list[ExecutorLoop]]:
    """Serve a model at `url` by so many ranks: one that is here by its layers, a checkpoint's, or one for each rank, as `shard` says."""
    board, ranks = HashStore(), len(shares)

    def make(rank: int) -> ExecutorLoop:
        hosts: Any = words.get("hosts", ())  # a rank on each
        there = f"{url}?hosts={','.join(hosts)}" if hosts else url
        options = load_options(
            {
                "listen": [of_rank(there, rank, 0, hosts).partition("?")[0]],
                "ranks": ranks,
                "shares": tuple(shares),
                **words,
            }
        )
        others = Rendezvous(board, rank, ranks)
        if not isinstance(model, nn.Module):
            store = store_of(
                Order(str(model if isinstance(model, Path) else model[rank]), options, rank, ""), options, others
            )
        else:
            store = Store(part_of(model, rank, shares), options.serve, (), others)
        if options.shares_weights:
            store.share_weights()
        return ExecutorLoop(store, options)

    with ThreadPoolExecutor() as pool:
        servers = list(pool.map(make, range(ranks)))
    threads = [Thread(target=server.run, args=[lambda: None], daemon=True) for server in servers]
    for server, thread in zip(servers, threads, strict=True):
        server.listen(server.options.listen)
        thread.start()
    try:
        yield servers
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.drain()
            thread.join(30)


def free_port(*hosts: str) -> int:
    """A port that nobody listens at on these addresses of this machine."""
    with ExitStack() as held:
        first = held.enter_context(socket.create_server((hosts[0], 0)))
        port = int(first.getsockname()[1])
        for host in hosts[1:]:
            held.enter_context(socket.create_server((host, port)))
        return port
