"""The `symbiosis-executor` process: loads a model, serves it, drains on SIGTERM."""

import ctypes
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import torch
import transformers

from symbiosis.base.logs import set_up_logging
from symbiosis.base.memory import free_memory, look_at_what_is_new, rss_bytes
from symbiosis.base.procs import when_told_to_end, while_needed
from symbiosis.executor import mps
from symbiosis.executor.gpu.headroom import headroom_bytes
from symbiosis.executor.loop import ExecutorLoop
from symbiosis.executor.model.checkpoint import path_of, weight_files
from symbiosis.executor.model.load import load_model, structure
from symbiosis.executor.model.store import Store, check_patterns
from symbiosis.executor.observe.log import log
from symbiosis.executor.observe.pages import Pages
from symbiosis.executor.observe.prometheus import PrometheusCollector
from symbiosis.executor.options import Options
from symbiosis.transport.cuda.words import FIRST_SEGMENT

M_MMAP_THRESHOLD = -3
LARGE_BLOCK = 1 << 20
LOADING_EVERY_S = 5.0
WITHOUT_MPS = (
    "CUDA MPS does not serve this executor: it and the clients on its GPU run by turns. A small call then took about 300 us "
    "in our measurements, and 40 to 60 with MPS. Start the executor with --mps"
)
WITHOUT_GPU = "this executor computes on the CPU, and a GPU of this machine is not used: --device cuda uses it"


def serve(model_name: str, options: Options) -> None:
    """Serve until SIGTERM or SIGINT. Calls that have arrived by then are still answered."""
    torch.set_flush_denormal(True)  # before torch starts threads that compute for this one
    set_up_logging(options.log_format)
    guard_process(strangers=options.key is not None)
    with shared_gpu(options):
        load_and_serve(model_name, options)


def guard_process(strangers: bool) -> None:
    """Forbid core dumps, which would hold what clients sent, and raise the limit of descriptors. With `strangers`, return large blocks
    of memory to the system at once, so that their data do not stay in this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if strangers:
        with suppress(OSError, AttributeError):  # only the GNU C library has it
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


@contextmanager
def shared_gpu(options: Options) -> Iterator[None]:
    """Run CUDA MPS for the block, if the options ask for it; else warn if a GPU has to do without."""
    if options.mps:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # while loading, too: stop MPS
        with mps.running() as pipes:
            log(logging.INFO, mps.how_to_join(pipes))
            yield
        return
    if options.on_gpu and mps.state(mps.places()[0]) is not mps.PipesState.SERVES:
        log(logging.WARNING, WITHOUT_MPS)
    if not options.on_gpu and torch.cuda.is_available():
        log(logging.WARNING, WITHOUT_GPU)
    yield


def load_and_serve(model_name: str, options: Options) -> None:
    """Load the model and serve it, and print one line when it is ready. Before the weights are loaded, check what `preflight` could not
    check without torch."""
    pages = pages_of(options)
    if options.serve:
        check_patterns(structure(model_name), options.serve)
    with loading(model_name):
        model = load_model(model_name, options.dtype, options.device, (), options.quantize, options.serve)
        store = Store(model, options.serve, options.integers)
        del model  # so that the store lets go of a tensor when it moves it

    def ready(server: ExecutorLoop) -> None:
        endpoints = " ".join(listener.url for listener in server.listeners)
        print(ready_line(model_name, len(store.served()), store.nbytes, endpoints), flush=True)

    serve_store(store, options, pages, ready)


@contextmanager
def loading(model_name: str) -> Iterator[None]:
    """Show that weights are being loaded: by the bar of transformers on a terminal, otherwise by a line in the log every few seconds."""
    path = path_of(model_name)
    if path is None or sys.stderr.isatty():  # the hub's files come with a bar of their own
        yield
        return
    transformers.utils.logging.disable_progress_bar()
    total, begun, loaded = sum(file.stat().st_size for file in weight_files(path)), monotonic(), threading.Event()

    def tell() -> None:
        while not loaded.wait(LOADING_EVERY_S):
            log(
                logging.INFO,
                "loading",
                seconds=round(monotonic() - begun),
                memory_mib=rss_bytes() >> 20,
                weights_mib=total >> 20,
            )

    thread = threading.Thread(target=tell, name="loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loaded.set()
        thread.join()


def pages_of(options: Options) -> Pages | None:
    """Return the pages of `--metrics-port`, which are up while the executor starts."""
    if options.metrics_port is None:
        return None
    pages = Pages(options.metrics_host, options.metrics_port)
    log(logging.INFO, "pages", health=pages.url("/health"), metrics=pages.url("/metrics"))
    return pages


def ready_line(model_name: str, layers: int, nbytes: int, endpoints: str) -> str:
    return f"symbiosis-executor ready: {model_name} ({layers} layers, {nbytes / 2**20:.0f} MiB) at {endpoints}"


def serve_store(store: Store, options: Options, pages: Pages | None, ready: Callable[[ExecutorLoop], None]) -> None:
    """Serve these weights until SIGTERM or SIGINT. `ready` is called when clients are answered, unless it is to end by then."""
    if options.workers > (cores := len(os.sched_getaffinity(0))):
        log(logging.WARNING, "more workers than cores: they take turns", workers=options.workers, cores=cores)
    if options.shares_weights:
        store.share_weights()
    look_at_what_is_new()
    server = ExecutorLoop(store, options)
    log(logging.INFO, "memory", **memory_plan(store, options))
    when_told_to_end(server.drain)
    while_needed(server.retire)
    if options.audit_log:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # each line goes to the file that lies there by then
    server.listen(options.listen)
    if pages:
        pages.show(server, PrometheusCollector(server.snapshot))
    server.run(lambda: None if server.dispatch.draining else ready(server))
    log(logging.INFO, "stopped", calls=sum(totals.calls for totals in server.ledger.totals.values()))


def memory_plan(store: Store, options: Options) -> dict[str, int]:
    """Return, in MiB, what the weights take, what a session may come to take of the host's memory, and what is free there. For a GPU,
    add what the executor keeps for its products, what is left for other programs, and the least that each client on it brings for its
    calls."""
    nbytes = {"weights": store.nbytes, "session_at_most": 2 * options.max_call_bytes, "free": free_memory()}
    if store.on_gpu:
        left, gpu_bytes = torch.cuda.mem_get_info(options.device)
        kept = headroom_bytes(store.shapes, options.max_batch_tokens, gpu_bytes)
        if store.gather_bytes:
            nbytes["gather_buffers"] = store.gather_bytes
        nbytes |= {"gpu_headroom": kept, "gpu_free": max(0, left - kept), "gpu_session_at_least": FIRST_SEGMENT}
    return {f"{name}_mib": value >> 20 for name, value in nbytes.items()} | {"sessions": options.max_sessions}
