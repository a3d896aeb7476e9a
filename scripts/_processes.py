"""What the benchmarks share: executors and clients as processes of their own, checkpoints, and LoRA clients to run in them."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from symbiosis.base.procs import exit_at, python
from symbiosis.demo import processes
from symbiosis.demo.processes import START_S, STOP_S

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

AGAIN = "again"
LAST_CHARACTERS = 10_000  # of an executor's log
RESULT_S = 600.0  # the longest wait for an answer
TOGETHER_S = 0.3  # from the order to the common start of several processes
VOCABULARY = 2048
QUIET = {
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONSAFEPATH": "1",  # what multiprocessing starts imports nothing from the working directory
}


def prepare(threads: int, once: Sequence[str] = ()) -> None:
    """Settings that processes inherit; and an end by SIGTERM is one by an exception, so that all is cleaned up. The modules `once` are
    imported once, for all workers, which share their memory then: where a disk is slow, eight workers need a minute to import torch."""
    exit_at(signal.SIGTERM)
    os.environ.update(QUIET, OMP_NUM_THREADS=str(threads))
    if once:
        multiprocessing.set_start_method("forkserver")
        multiprocessing.set_forkserver_preload(list(once))


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- executors


@contextmanager
def executor(model: Path, threads: int, *options: str) -> Iterator[processes.Participant]:
    """The daemon, in a process of its own, with `threads` threads; ready when this yields, gone when it ends."""
    with (
        tempfile.TemporaryDirectory() as folder,
        processes.executor(Path(folder), str(model), *options, threads=threads) as child,
    ):
        try:
            yield child
        except Exception:
            progress(f"with this executor, which has written:\n{child.log[-LAST_CHARACTERS:]}")
            raise
        finally:
            child.still_runs()  # or says why not


@contextmanager
def server(folder: Path, model: str, *options: str) -> Iterator[str]:
    """`symbiosis serve`, in a process of its own; the URL of its API. What it writes lies in the folder."""
    words = python("-m", "symbiosis", "serve", model, "--port", "0", "--memory", "1GiB", *options)
    log = folder / "server.log"
    with log.open("wb") as written:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=written, text=True)
        assert process.stdout
        try:
            if not (line := process.stdout.readline()):
                raise SystemExit(log.read_text()[-LAST_CHARACTERS:])
            yield line.partition(" at ")[2].partition(",")[0].strip()
        finally:
            process.terminate()
            process.wait(60)


# ---------------------------------------------------------------- clients


class Worker:
    """An object that lives in a process of its own: `begin` builds it, then `send` it a method call, take the `result` later. `again`
    builds another one in its place.
    """

    def __init__(self, kind: Callable[..., Any]) -> None:
        once = multiprocessing.get_start_method() == "forkserver"
        context: Any = multiprocessing.get_context("forkserver" if once else "spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, kind, os.sched_getaffinity(0)), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def begin(self, *args: Any) -> None:
        self._pipe.send(args)

    def send(self, method: str, *args: Any) -> None:
        self._pipe.send((method, args))

    def result(self, timeout: float = RESULT_S) -> Any:
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"process {self.pid} did not answer within {timeout:g} s")
        try:
            done, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"process {self.pid} died") from None
        if not done:
            raise RuntimeError(f"process {self.pid} failed:\n{value}")
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.send(method, *args)
        return self.result()

    def again(self, *args: Any) -> None:
        """Build another object, once the old one is gone."""
        self.call(AGAIN, *args)

    def hang_up(self) -> None:
        """The process ends when it has answered."""
        self._pipe.close()

    def end(self, timeout: float) -> None:
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _live(pipe: "Connection", kind: Callable[..., Any], cores: set[int]) -> None:
    """Build the object, then answer calls until the parent closes its end."""
    os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        thing = kind(*pipe.recv())
        pipe.send((True, None))
        while True:
            method, arguments = pipe.recv()
            if method == AGAIN:
                del thing
                gc.collect()
                thing = kind(*arguments)
                pipe.send((True, None))
            else:
                pipe.send((True, getattr(thing, method)(*arguments)))
    except (EOFError, BrokenPipeError):
        return
    except Exception:
        pipe.send((False, traceback.format_exc()))


@contextmanager
def workers(kind: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[list[Worker]]:
    """One worker for each tuple of arguments, all ready when this yields and gone when it ends."""
    with idle_workers(kind, len(arguments)) as started:
        for worker, args in zip(started, arguments, strict=True):
            worker.begin(*args)
        for worker in started:
            worker.result(START_S)
        yield started


@contextmanager
def idle_workers(kind: Callable[..., Any], count: int) -> Iterator[list[Worker]]:
    """So many that import what they need, and wait for `begin`; gone when this ends."""
    started: list[Worker] = []
    try:
        for _ in range(count):
            started.append(Worker(kind))
        yield started
    finally:
        for worker in started:
            worker.hang_up()
        for worker in started:
            worker.end(STOP_S / len(started))


@contextmanager
def same_cores(count: int) -> Iterator[None]:
    """Processes that are started in the block share so many cores, for comparing those that take turns: else one has a better core than
    another for as long as they live."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(ours)[-count:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def together(them: Sequence[Worker], method: str, *args: Any, meanwhile: Callable[[], Any] | None = None) -> list[Any]:
    """`method(start, *args)` in all of them, `start` being one moment for all; their results."""
    start = time.monotonic() + TOGETHER_S
    for worker in them:
        worker.send(method, start, *args)
    if meanwhile is not None:
        meanwhile()
    return [worker.result() for worker in them]


def wait_for(start: float) -> None:
    """Sleep until the clock that all processes of a machine share shows `start`."""
    time.sleep(max(0.0, start - time.monotonic()))


def cpu_seconds(pid: int) -> float:
    """What the process has used so far."""
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def pss_bytes(pid: int) -> int:
    """The process's share of physical memory: pages that n processes use count 1/n each."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])


# ---------------------------------------------------------------- models


def save_llama(folder: Path, hidden: int, layers: int, dtype: str = "float32", inner: int = 0) -> int:
    """A randomly initialised Llama as a checkpoint in `folder`, with MLPs of the width `inner`; the number of its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner or 11 * hidden // 4, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, vocab_size=VOCABULARY, max_position_embeddings=2048,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return model.num_parameters()


class Pace(NamedTuple):
    """The seconds of each step, and of all of it, prompts included. `early`: of steps before those, which do not count."""

    steps: list[float]
    elapsed: float
    early: Sequence[float] = ()


class LoraClient:
    """A LoRA program on a model that is split (with an endpoint) or not (with a checkpoint), in float32."""

    def __init__(self, source: str, rank: int, targets: tuple[str, ...]) -> None:
        import torch
        from peft import LoraConfig, get_peft_model

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        model = _split(source) if "://" in source else _unsplit(source)
        torch.manual_seed(0)
        self.model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets)))
        self.losses: list[float] = []
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def train(self, start: float, seconds: float, batch: int, length: int) -> Pace:
        """Steps from `start` on until `seconds` are over, at least one."""
        import torch

        ids = torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
        self.model.train()
        wait_for(start)
        steps: list[float] = []
        begun = now = time.perf_counter()
        while not steps or now - begun < seconds:
            self._optimizer.zero_grad()
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self._optimizer.step()
            self.losses.append(loss.item())
            before, now = now, time.perf_counter()
            steps.append(now - before)
        return Pace(steps, now - begun)

    def decode(self, start: float, seconds: float, batch: int, prompt: int, tokens: int) -> Pace:
        """Prompts and `tokens` greedy tokens each from `start` on until `seconds` are over. A step is one token of each."""
        import torch

        ids = torch.randint(3, VOCABULARY, (batch, prompt), generator=torch.Generator().manual_seed(2))
        self.model.eval()
        wait_for(start)
        steps: list[float] = []
        begun = now = time.perf_counter()
        with torch.no_grad():
            while not steps or now - begun < seconds:
                output = self.model(input_ids=ids, use_cache=True)
                now = time.perf_counter()
                for _ in range(tokens):
                    output = self.model(
                        input_ids=_next_token(output.logits), past_key_values=output.past_key_values, use_cache=True
                    )
                    before, now = now, time.perf_counter()
                    steps.append(now - before)
                    if now - begun >= seconds:
                        break
        return Pace(steps, now - begun)

    def losses_so_far(self) -> list[float]:
        return self.losses

    def leave(self) -> None:
        """Leave the executor, as a program that has ended does; the next call joins again."""
        from symbiosis.client.weights.remote_weight import remote_weights

        next(remote_weights(self.model)).handle.session.close()


def _split(endpoint: str) -> Any:
    import symbiosis

    return symbiosis.from_executor(endpoint, device="cpu")


def _unsplit(folder: str) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _next_token(logits: "Tensor") -> "Tensor":
    return logits[:, -1].argmax(-1, keepdim=True)
