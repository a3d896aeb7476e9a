"""Runs the demo: three programs share one base, and what they computed is compared with plain transformers and PEFT."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.text import Text

from symbiosis.base.folders import temporary_folder
from symbiosis.base.procs import exit_at
from symbiosis.base.reporting import Report
from symbiosis.cli.top import size_of, snapshot
from symbiosis.client.session import Session
from symbiosis.demo.compare import Comparison, compare
from symbiosis.demo.display import display
from symbiosis.demo.enlarge import enlarge
from symbiosis.demo.processes import Participant, ProcessError, clients, executor
from symbiosis.errors import ConfigError
from symbiosis.executor.observe.snapshot import Snapshot

LOOK_EVERY_S = 0.25
CLIENTS_S = 900.0  # the longest that the clients may take together
ENOUGH_LEARNT = 0.01  # by this, in nats per byte, the trainer's loss on held-out text must fall
TRAINER, WRITERS = "trainer", ("writer 1", "writer 2")
BAR = 40  # characters


@dataclass
class DemoResults:
    """The results of a demo."""

    clients: dict[str, dict[str, Any]]
    executor: Snapshot
    comparisons: list[Comparison]
    texts: dict[str, str]

    @property
    def identical(self) -> bool:
        return all(comparison.identical for comparison in self.comparisons)

    @property
    def shared_bytes(self) -> int:
        """The memory of all processes."""
        return self.executor.rss_bytes + sum(client["rss_bytes"] for client in self.clients.values())

    @property
    def copied_bytes(self) -> int:
        """What the programs would take with a copy of the base each, and without an executor."""
        base = self.executor.weights_bytes
        return sum(client["rss_bytes"] - client["base_bytes"] + base for client in self.clients.values())


def run(layers: int, steps: int, tokens: int, keep: Path | None) -> int:
    """Run the whole demo. Return 0 if split and unsplit are identical and the trainer has learned."""
    exit_at(signal.SIGTERM)
    transformers.utils.logging.disable_progress_bar()
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    begun = time.monotonic()
    with folders(keep) as (temporary, folder):
        outcome = split_and_compare(console, temporary, folder, layers, steps, tokens)
        found = report(outcome, time.monotonic() - begun)
        (folder / "report.json").write_text(json.dumps(found.told()))
    for line in summary(outcome):
        console.print(Text(line), soft_wrap=True)
    return 0 if found.holds else 1


@contextmanager
def folders(keep: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of the base and the socket, whose path must be short, and that of adapters and logs."""
    with temporary_folder("symbiosis-demo-") as temporary:
        folder = keep or temporary
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
        yield temporary, folder


def split_and_compare(
    console: Console, temporary: Path, folder: Path, layers: int, steps: int, tokens: int
) -> DemoResults:
    """Start the executor, let a trainer and two writers use it at once, and then compare it with the unsplit model."""
    base, endpoint = temporary / "base", f"local://{temporary}/executor.sock"
    adapter = folder / "lora"
    console.print("Making the base: the bundled model, enlarged ...")
    enlarge(base, layers)
    # On one machine clients would map the weights and make hardly a call: here calls are to be seen
    with executor(folder, str(base), "--listen", endpoint, "--no-share-weights") as daemon:
        console.print(Text(daemon.lines[0].replace(f"{temporary}/", "")))
        states, figures = train_and_generate(console, daemon, endpoint, adapter, folder, steps, tokens)
        console.print("Computing the same with plain transformers and PEFT ...")
        comparisons, texts = compare(endpoint, base, adapter)
    return DemoResults(states, figures, comparisons, texts)


def train_and_generate(
    console: Console,
    daemon: Participant,
    endpoint: str,
    adapter: Path,
    folder: Path,
    steps: int,
    tokens: int,
) -> tuple[dict[str, dict[str, Any]], Snapshot]:
    """Return the last event of every client, and the executor's figures when all were done."""
    goals = {TRAINER: steps, **dict.fromkeys(WRITERS, tokens)}
    session, deadline = Session(endpoint, observer=True, patience=5.0), time.monotonic() + CLIENTS_S
    with (
        clients(commands(endpoint, adapter, steps, tokens), folder) as children,
        display(console, goals) as shown,
    ):
        running = [True]
        while any(running):
            if time.monotonic() > deadline:
                raise ProcessError(f"the clients did not finish within {CLIENTS_S:g} s")
            time.sleep(LOOK_EVERY_S)
            running = [child.still_runs() for child in children]
            daemon.still_runs()  # or says why not
            if all(child.ready for child in children):
                for child in children:
                    child.start()
            figures = snapshot(session)
            shown.show(children, figures)
        states = {child.name: child.state for child in children}
    session.close()
    return states, figures


def commands(endpoint: str, adapter: Path, steps: int, tokens: int) -> dict[str, list[str]]:
    """Return the clients' command lines, after `python`."""
    common = ["--endpoint", endpoint]
    writer = ["-m", "symbiosis.demo.writer", *common, "--tokens", str(tokens)]
    trainer = ["-m", "symbiosis.demo.trainer", *common, "--steps", str(steps), "--out", str(adapter)]
    return {TRAINER: trainer, **{name: [*writer, "--seed", str(seed)] for seed, name in enumerate(WRITERS)}}


def summary(outcome: DemoResults) -> Iterator[str]:
    """Yield the lines that tell what sharing was good for."""
    base = size_of(outcome.executor.weights_bytes)
    shared, copied = outcome.shared_bytes, outcome.copied_bytes
    largest = max(shared, copied)
    yield ""
    yield f"Memory of three programs, with a base of {base}:"
    yield f"  one base, shared  {'#' * round(BAR * shared / largest):<{BAR}}  {size_of(shared)}"
    yield f"  a copy for each   {'#' * round(BAR * copied / largest):<{BAR}}  {size_of(copied)}, and {base} more for each further one"
    state = outcome.clients[TRAINER]
    yield (
        f"The trainer: {state['done']} steps, {state['tokens_per_s']:.0f} tokens/s, loss on held-out text "
        f"{state['held_out_before']:.3f} -> {state['held_out_after']:.3f}"
    )
    for name in WRITERS:
        state = outcome.clients[name]
        yield f"{name.capitalize()}: {state['done']} tokens, {state['tokens_per_s']:.0f} a second, {state['mean_batch']:.2f} calls a product"
    yield f"With the adapter: {outcome.texts['lora']!r}"
    same = sum(comparison.identical for comparison in outcome.comparisons)
    yield (
        f"Bits, alone and against plain PEFT: {same} of {len(outcome.comparisons)} equal "
        "(logits, tokens and gradients of the base and of the adapter)"
    )


def report(outcome: DemoResults, seconds: float) -> Report:
    """Return all figures and bars, for programs."""
    found = Report("demo")
    executor = outcome.executor
    found.figure("seconds", round(seconds, 1))
    found.figure(
        "executor",
        {
            "rss_bytes": executor.rss_bytes, "weights_bytes": executor.weights_bytes, "calls": executor.calls,
            "rows": executor.rows, "mean_batch": executor.mean_batch, "batch_sizes": executor.batch_sizes,
        },
    )  # fmt: skip
    found.figure("shared_bytes", outcome.shared_bytes)
    found.figure("copied_bytes", outcome.copied_bytes)
    found.figure("clients", {name: {k: v for k, v in c.items() if k != "text"} for name, c in outcome.clients.items()})
    found.figure("texts", outcome.texts)
    found.figure("comparisons", [asdict(comparison) for comparison in outcome.comparisons])
    found.bar("identical", float(outcome.identical), ">=", 1.0)
    state = outcome.clients[TRAINER]
    found.bar("held_out_loss_fell", state["held_out_before"] - state["held_out_after"], ">=", ENOUGH_LEARNT)
    return found
