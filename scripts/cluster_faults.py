"""A cluster whose processes are killed and frozen at random, under 50 streams and two trainers. On this host, with the demo model.

    python scripts/cluster_faults.py --quick                  # 5 faults
    python scripts/cluster_faults.py --quick --backend ray    # the same on two nodes of Ray, which are processes of this host
    python scripts/cluster_faults.py                          # 30 faults; a quarter of an hour on two cores

Three servers, two executors and a front end. Each of 50 clients reads greedy streams, one after the other, until the faults are over; each text must
be the one that PEFT's `generate()` makes alone, and its count of tokens, too. Two trainers find their executor by the model's name; one maps
its weights, the other calls for every product. Both end with the adapters of training without a cluster, bit for bit. A fault is SIGKILL or SIGSTOP to a server, its process that speaks HTTP, or an executor; on Ray also
to an actor that has started one. Before the next one there is a server that is ready, and an executor. At last `cluster up` itself is killed (not on Ray, which ends all
then): the streams that are under way end as they would have, and no process is left. On Ray the trainers go to one executor of their own
node, and to another by `tcp://`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from _processes import progress
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import symbiosis
from symbiosis.base.procs import python
from symbiosis.base.reporting import Report, print_table
from symbiosis.cluster.controller.local_process import descendants
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.protocol.cluster_state import Member, told_by

NAME = "faults"
FILE = """
name: faults
backend: {backend}
port: 0
frozen_s: 5
models:
  demo:
    executors: 2
    servers: 3
    executor: {{batch-invariant: true}}
    server: {{memory: 128MiB, max-batch: 32}}
"""
KINDS = ("server", "server", "HTTP of a server", "executor")
ON_RAY = (*KINDS, "actor of a server", "actor of an executor")
ADAPTERS = (None, "python", "shout", "whisper")
PROMPTS = (
    "def average(numbers):",
    "class Tree:",
    "import os\n\ndef",
    "for name in names:\n    ",
    "The return value is",
)
TOKENS = 200
READY_S, TEXT_S = 240.0, 300.0


def texts() -> dict[tuple[str | None, str], str]:
    """What each adapter makes of each prompt, alone."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    found = {}
    for adapter in ADAPTERS:
        model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, DEMO_MODEL / "adapters" / adapter)
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            told = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)[0, ids.shape[1] :]
            found[adapter, prompt] = tokenizer.decode(told, skip_special_tokens=True)
    return found


# ---------------------------------------------------------------- streams


class Reader:
    """One client: it reads streams until it is told to stop, and compares their texts."""

    def __init__(self, url: str, seed: int, wanted: dict[tuple[str | None, str], str]) -> None:
        self._parts, self._chance, self._wanted = urlsplit(url), random.Random(seed), wanted
        self.counts, self.wrong = Counter[str](), list[str]()

    async def run(self, over: threading.Event) -> None:
        while not over.is_set():
            adapter, prompt = self._chance.choice(list(self._wanted))
            try:
                async with asyncio.timeout(TEXT_S):
                    found, tokens = await self._read(adapter or "demo", prompt)
            except (OSError, EOFError, ValueError, LookupError) as error:
                self.counts["broken"] += 1
                self.wrong.append(f"{time.strftime('%X')} {adapter}, {prompt!r}: {type(error).__name__}: {error}")
                continue
            wanted = self._wanted[adapter, prompt]
            self.counts["streams"] += 1
            self.counts["tokens"] += tokens
            if found != wanted:
                self.counts["other text"] += 1
                self.wrong.append(f"{adapter}, {prompt!r}: {found!r} and not {wanted!r}")
            if tokens > TOKENS:
                self.counts["tokens twice"] += 1

    async def _read(self, model: str, prompt: str) -> tuple[str, int]:
        """The text of one stream, and its number of tokens by its usage and by its log probabilities, which agree."""
        body = {
            "model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True, "logprobs": 0,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        text, scored, used, done = "", 0, 0, False
        try:
            async for line in reader:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    used = (event.get("usage") or {}).get("completion_tokens", used)
                    for choice in event["choices"]:
                        text += choice["text"]
                        scored += len((choice["logprobs"] or {"tokens": ()})["tokens"])
        finally:
            writer.close()
        if not done:
            raise EOFError("the stream broke off")
        if scored != used:
            raise ValueError(f"{scored} tokens came, and the usage says {used}")
        return text, used


# ---------------------------------------------------------------- trainers


def train(endpoint: str | None, seed: int, steps: int, pause: float, output: Path) -> None:
    """Train an adapter, over a cluster or alone, and save what it is in the end."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    if endpoint is not None:
        symbiosis.wrap(model, endpoint, timeout=8, patience=300, share=seed == 1)
    torch.manual_seed(seed)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    chance = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, 256, (2, 32), generator=chance)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        time.sleep(pause)
    torch.save({name: p.detach() for name, p in model.named_parameters() if p.requires_grad}, output)


@contextlib.contextmanager
def trainers(steps: int, pause: float, folder: Path) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Two programs that train over the cluster."""
    code = "import sys; from pathlib import Path; import cluster_faults as c; c.train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    started = [
        subprocess.Popen(
            python("-c", code, f"symbiosis://{NAME}/demo", str(seed), str(steps), str(pause), str(folder / f"{seed}.pt")),
            env={**os.environ, "PYTHONPATH": paths},
        )
        for seed in (1, 2)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


# ---------------------------------------------------------------- faults


def ready(kind: str) -> list[Member]:
    return [each for each in told_by(NAME).of_kind(kind) if each.state == "ready"]


def wait_until_ready(servers: int) -> None:
    deadline = time.monotonic() + READY_S
    while len(ready("server")) < servers or len(ready("executor")) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {READY_S:g} s there are {told_by(NAME).members}")
        time.sleep(0.1)


def do_harm(chance: random.Random, backend: str) -> str:
    """Kill or freeze one process that works; say which."""
    kind = chance.choice(ON_RAY if backend == "ray" else KINDS)
    one = chance.choice(ready("executor" if "executor" in kind else "server"))
    pids = [one.pid]
    if kind == "HTTP of a server":
        pids = list(descendants(one.pid))[-1:]
    elif kind.startswith("actor"):
        pids = [int(Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[1])]
    number = chance.choice((signal.SIGKILL, signal.SIGSTOP))
    for pid in pids:
        os.kill(pid, number)
    return f"{number.name} {kind}"


@contextlib.contextmanager
def nodes() -> Iterator[None]:
    """Two nodes of Ray, which are processes of this host. The cluster, and the trainers, are at home on the first one."""
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        started.add_node(num_cpus=4)
        os.environ["RAY_ADDRESS"] = started.address
        yield
    finally:
        started.shutdown()


@contextlib.contextmanager
def cluster(folder: Path, backend: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run the cluster; its address, and the process of `cluster up`."""
    file = folder / "faults.yaml"
    file.write_text(FILE.format(backend=backend))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            python("-m", "symbiosis", "cluster", "up", str(file)),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout
            line = process.stdout.readline()
            if not line:
                raise RuntimeError((folder / "log").read_text())
            yield line.split(" at ")[1].strip(), process
        finally:
            process.terminate()
            process.wait(120)


def kill_it_under(readers: list[Reader], up: "subprocess.Popen[str]") -> list[int]:
    """Kill `cluster up` while each reader reads a stream, and return the processes that are left when all are read and it has had its time."""
    pids, over = [each.pid for each in told_by(NAME).members], threading.Event()

    async def read() -> None:
        await asyncio.gather(*(reader.run(over) for reader in readers))

    reading = threading.Thread(target=lambda: asyncio.run(read()))
    reading.start()
    time.sleep(1.0)
    over.set()  # each reads its stream to the end, and no other one
    up.kill()
    reading.join()
    deadline = time.monotonic() + READY_S
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def run(faults: int, streams: int, backend: str, folder: Path, report: Report) -> None:
    progress("texts, alone")
    wanted = texts()
    over, chance, done = threading.Event(), random.Random(1), Counter[str]()
    steps, pause = 40 + 20 * faults, 0.25
    with (
        nodes() if backend == "ray" else contextlib.nullcontext(),
        cluster(folder, backend) as (url, up),
        trainers(steps, pause, folder) as training,
    ):
        readers = [Reader(url, seed, wanted) for seed in range(streams)]

        async def read() -> None:
            await asyncio.gather(*(reader.run(over) for reader in readers))

        reading = threading.Thread(target=lambda: asyncio.run(read()))
        reading.start()
        try:
            for number in range(faults):
                wait_until_ready(2)
                time.sleep(chance.uniform(1.0, 4.0))
                what = do_harm(chance, backend)
                done[what] += 1
                progress(f"fault {number + 1} of {faults}: {what}")
                time.sleep(1.0)
            wait_until_ready(3)
        finally:
            over.set()
            reading.join()
        progress("trainers")
        statuses = [process.wait(1200) for process in training]
        left = list[int]()
        if backend == "local":
            progress("SIGKILL cluster up")
            left = kill_it_under(readers, up)
            done["SIGKILL cluster up"] += 1
    counts = sum((reader.counts for reader in readers), Counter[str]())
    wrong = [line for reader in readers for line in reader.wrong]
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    if wrong:
        print((folder / "log").read_text(), file=sys.stderr)
    alone = [folder / f"alone-{seed}.pt" for seed in (1, 2)]
    for seed, file in zip((1, 2), alone, strict=True):
        train(None, seed, steps, 0.0, file)
    same = [
        status == 0 and equal(folder / f"{seed}.pt", file)
        for seed, file, status in zip((1, 2), alone, statuses, strict=True)
    ]
    print_table(["fault", "times"], [[name, count] for name, count in sorted(done.items())])
    report.figure("streams", counts["streams"])
    report.figure("tokens", counts["tokens"])
    report.bar("kills and freezes", done.total(), ">=", faults)
    report.bar("processes that outlive the cluster", len(left), "<=", 0)
    report.bar("streams that were read", counts["streams"], ">=", streams)
    for name in ("broken", "other text", "tokens twice"):
        report.bar(f"streams: {name}", counts[name], "<=", 0)
    report.bar("trainers whose adapters are bit-equal", sum(same), ">=", 2)


def equal(one: Path, other: Path) -> bool:
    found, wanted = torch.load(one, weights_only=True), torch.load(other, weights_only=True)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 faults and 10 streams")
    parser.add_argument("--backend", choices=("local", "ray"), default="local", help="where executors and servers run")
    arguments = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    report = Report("cluster_faults")
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(*((5, 10) if arguments.quick else (30, 50)), arguments.backend, Path(folder), report)
        except BaseException:
            if (log := Path(folder) / "log").is_file():
                print(log.read_text()[-5000:], file=sys.stderr)
            raise
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
