"""Runs the demo: starts all processes, shows what they do, and compares the results with plain transformers and PEFT."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from symbiosis.base.folders import temporary_folder
from symbiosis.base.reporting import Report, print_table
from symbiosis.cli.top import size_of, snapshot
from symbiosis.client.session import Session
from symbiosis.demo.compare import Comparison, compare
from symbiosis.demo.display import display
from symbiosis.demo.processes import Participant, ProcessError, clients, executor, exit_at_sigterm
from symbiosis.demo.tasks import PROMPT, TASKS
from symbiosis.errors import ConfigError
from symbiosis.executor.observe.snapshot import Snapshot

LOOK_EVERY_S = 0.25
CLIENTS_S = 900.0  # the longest that the clients may take together
ENOUGH_LEARNT = 0.01  # by this, in nats per byte, each trainer's loss on held-out text must fall
GENERATOR = "text"
JOINED = (
    "While several clients ran, their calls were joined (mean batch): such a product may differ by its rounding from the unsplit one, "
    "unless the executor is started with --batch-invariant."
)


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


def run(steps: int, tokens: int, keep: Path | None) -> int:
    """Run the whole demo. Return 0 if split and unsplit are identical and both trainers have learned."""
    exit_at_sigterm()
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    begun = time.monotonic()
    with folders(keep) as (sockets, folder):
        outcome = split_and_compare(console, f"local://{sockets}/executor.sock", folder, steps, tokens)
    show(console, outcome)
    return report(outcome, time.monotonic() - begun).finish()


@contextmanager
def folders(keep: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of the socket, whose path must be short, and that of adapters and logs."""
    with temporary_folder("symbiosis-demo-") as temporary:
        folder = keep or temporary
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from None
        yield temporary, folder


def split_and_compare(console: Console, endpoint: str, folder: Path, steps: int, tokens: int) -> DemoResults:
    """Start the executor, let two trainers and a generator use it at once, and then compare it with the unsplit model."""
    adapters = {name: folder / name for name in TASKS}
    # On one machine clients would map the weights and make hardly a call: here calls are to be seen
    with executor(folder, "demo", "--listen", endpoint, "--no-share-weights") as daemon:
        console.print(Text(daemon.lines[0]))
        states, figures = train_and_generate(console, daemon, endpoint, adapters, folder, steps, tokens)
        console.print("Computing the same with plain transformers and PEFT ...")
        comparisons, texts = compare(endpoint, adapters)
    return DemoResults(states, figures, comparisons, texts)


def train_and_generate(
    console: Console,
    daemon: Participant,
    endpoint: str,
    adapters: dict[str, Path],
    folder: Path,
    steps: int,
    tokens: int,
) -> tuple[dict[str, dict[str, Any]], Snapshot]:
    """Return the last event of every client, and the executor's figures when all were done."""
    titles = {**{name: task.title for name, task in TASKS.items()}, GENERATOR: "The base model writes"}
    goals = {**dict.fromkeys(TASKS, steps), GENERATOR: tokens}
    session, deadline = Session(endpoint, observer=True, patience=5.0), time.monotonic() + CLIENTS_S
    with (
        clients(commands(endpoint, adapters, steps, tokens), folder) as children,
        display(console, titles, goals) as shown,
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


def commands(endpoint: str, adapters: dict[str, Path], steps: int, tokens: int) -> dict[str, list[str]]:
    """Return the clients' command lines, after `python`."""
    module = ["-m", "symbiosis.demo.trainer", "--endpoint", endpoint, "--steps", str(steps)]
    trainers = {name: [*module, "--out", str(folder), name] for name, folder in adapters.items()}
    generator = ["-m", "symbiosis.demo.generator", "--endpoint", endpoint, "--tokens", str(tokens)]
    return {**trainers, GENERATOR: generator}


def show(console: Console, outcome: DemoResults) -> None:
    """Print the processes, the texts, and the verdict."""
    executor = outcome.executor
    sizes = size_of(executor.rss_bytes), size_of(executor.weights_bytes)
    rows = [("executor", *sizes, f"{executor.mean_batch:.2f}", "", "")]
    for name, state in outcome.clients.items():
        losses = f"{state['held_out_before']:.3f} -> {state['held_out_after']:.3f}" if "held_out_after" in state else ""
        sizes = size_of(state["rss_bytes"]), size_of(state["base_bytes"])
        rows.append((name, *sizes, f"{state['mean_batch']:.2f}", f"{state['tokens_per_s']:.0f}", losses))
    print_table(("process", "memory", "base model", "mean batch", "tokens/s", "held-out loss"), rows)
    console.print(f"\nWhat the base model and both adapters make of {PROMPT!r}:", markup=False)
    for name, text in outcome.texts.items():
        console.print(Text.assemble((f"  {name:<5}", "bold"), text.rstrip().replace("\n", "\n       ")))
    console.print()
    print_table(
        ("split against unsplit", "values", "same bits", "greatest difference"),
        [(f"{c.model} {c.what}", c.values, "yes" if c.identical else "NO", c.difference) for c in outcome.comparisons],
        "The adapters over the executor, alone now, and with plain transformers and PEFT in one process (float32)",
    )
    console.print(f"identical: {'yes' if outcome.identical else 'NO'}", style="bold")
    console.print(f"{JOINED}\n")


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
    found.figure("clients", {name: {k: v for k, v in c.items() if k != "text"} for name, c in outcome.clients.items()})
    found.figure("texts", outcome.texts)
    found.figure("comparisons", [asdict(comparison) for comparison in outcome.comparisons])
    found.bar("identical", float(outcome.identical), ">=", 1.0)
    for name in TASKS:
        state = outcome.clients[name]
        found.bar(f"{name}_held_out_loss_fell", state["held_out_before"] - state["held_out_after"], ">=", ENOUGH_LEARNT)
    return found
