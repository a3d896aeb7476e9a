"""The commands `symbiosis-executor` and `symbiosis`. Importing this, and `--help`, loads no torch."""

import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from symbiosis.base.memory import look_seldom
from symbiosis.build import build
from symbiosis.cli import cluster
from symbiosis.cli.commands import Given, InLines, ServeCommand, takes
from symbiosis.errors import ConfigError
from symbiosis.executor.options import Options, load_as, load_options
from symbiosis.protocol.endpoints import default_endpoints
from symbiosis.run.switch import SWITCH
from symbiosis.serving.serve_options import ServeOptions
from symbiosis.text import shown

# Plain help and errors: a wrong option is a line or two, and not a box.
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
executor_app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(cluster.app, name="cluster")


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(build())
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and end.")]  # fmt: skip


@app.callback()
def symbiosis(version: Version = False) -> None:
    """One frozen base model, many clients."""


@executor_app.command("executor", cls=InLines)
@takes(Options, version=Version)
def executor(given: Given, config: Path | None) -> None:
    """Hold the frozen layers of MODEL and answer the calls of any number of clients."""
    options = load_options(given, config)
    options = msgspec.structs.replace(options, listen=options.listen or default_endpoints())
    from symbiosis.executor.preflight import check
    from symbiosis.executor.ranks.torchrun import is_launched
    from symbiosis.executor.ranks.torchrun import serve as run_launched

    if is_launched():
        run_launched(options)
        return
    model = check(options)
    if len(options.places) > 1:
        from symbiosis.executor.ranks.service import serve as run_ranks

        raise typer.Exit(run_ranks(model, options))
    from symbiosis.executor.daemon import serve as run

    run(model, options)


@app.command("serve", cls=ServeCommand)
@takes(ServeOptions)
def serve(given: Given, config: Path | None) -> None:
    """Serve MODEL and any number of adapters of it by OpenAI's API."""
    options = load_as(ServeOptions, given, config, "symbiosis serve")
    from symbiosis.server.launch.preflight import check

    listener = check(options)
    prepare_to_serve()
    from symbiosis.server.launch.serve_processes import serve as run

    run(options, listener)


@app.command(cls=InLines)
def demo(
    layers: Annotated[int, typer.Option(min=5, help="Layers of the base, of 68 MiB each.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the client that fine-tunes a LoRA.")] = 24,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that each of the two writing clients makes.")] = 200,
    keep: Annotated[Path | None, typer.Option(help="Folder to keep adapters and logs in. Default: they are deleted.")] = None,
) -> None:  # fmt: skip
    """Train a LoRA and write text, twice, on one shared base at once, and compare with plain PEFT."""
    from symbiosis.demo.programs import run

    raise typer.Exit(run(layers, steps, tokens, keep))


@app.command(cls=InLines)
def doctor(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="An executor's endpoint. Default: this user's.")] = None,
    model: Annotated[str | None, typer.Option(help="A model: say on which devices of this machine its weights fit.")] = None,
    cluster: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="The file of a cluster: say whether it can be started here or, if it runs, how its processes are.")] = None,
) -> None:  # fmt: skip
    """Check versions, devices, memory, limits and the executor or a cluster; exit status 1 if something is broken."""
    from symbiosis.cli.doctor import run

    raise typer.Exit(run(url, model, cluster))


@app.command(cls=InLines)
def top(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="An executor's endpoint. Default: this user's.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one plain view and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two views.")] = 1.0,
) -> None:  # fmt: skip
    """Watch an executor: sessions, busiest layers, batch sizes, queue, memory, rates."""
    from symbiosis.cli.top import run

    run(url or default_endpoints()[0], once, interval)


@app.command(cls=InLines, context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="A program, with its arguments: trl, accelerate launch, torchrun, python train.py, ...", show_default=False)],
    endpoint: Annotated[str | None, typer.Option(help="The executor's endpoint. Default: $SYMBIOSIS_ENDPOINT, else this user's.")] = None,
    require: Annotated[bool, typer.Option("--require", help="A model that does not share the executor's layers is an error.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run it until a model computes, say of each that it has loaded whether it would share, and end it. Exit status 0: all would.")] = False,
    timeout: Annotated[float | None, typer.Option(min=1, help="Seconds that --dry-run waits for a model to compute. Default: 1800.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Have --dry-run print one JSON object.")] = False,
) -> None:  # fmt: skip
    """Run a program as it is: the models of transformers that it loads share the executor's layers. SYMBIOSIS_RUN=1 COMMAND is the same."""
    from symbiosis.run import command as runs

    words = [command, *context.args]
    if not dry_run:
        if as_json or timeout is not None:
            raise ConfigError("--json and --timeout go with --dry-run: write it, too, or leave them out")
        runs.run(words, endpoint, require)
    if require:
        raise ConfigError("leave --require out: the exit status of --dry-run is 1 anyway if a model would not share")
    from symbiosis.run import dry_run as dry_runs

    found = dry_runs.dry_run(words, endpoint, timeout or dry_runs.MOST_S)
    typer.echo(found.json if as_json else found.text)
    if as_json and found.why_not_whole:
        typer.echo(found.why_not_whole, err=True)
    raise typer.Exit(not found.shares)


BENCHMARKS = {  # scripts/bench_*.py, with what they take on two cores; gpu: on one H200
    "call": "latency of a call: 4 minutes (--quick: 1)",
    "step": "training steps and tokens of one program and of four: a quarter of an hour (--quick: 4 minutes)",
    "batching": "eight clients under each policy: a quarter of an hour (--quick: 3 minutes)",
    "isolation": "one tenant beside another's floods: 10 minutes (--quick: 1)",
    "strangers": "a program at tcp:// beside strangers who attack its port: 6 minutes (--only NAME)",
    "api": "what HTTP costs a server: 5 minutes (--quick: 1)",
    "privacy": "what each level costs: half an hour (--quick: 5 minutes)",
    "long": "a token after a long text, on a CPU",
    "serve": "many adapters in one server; on a CPU --cpu (--cpu --quick), on a GPU the name of a load (--help)",
    "shard": "services of several ranks: on a CPU --tiny (two minutes), on GPUs --gpus",
    "train": "the engine that trains, beside PEFT: on a GPU two minutes (--quick: 1), on a CPU --tiny",
    "runs": "thousands of runs of that engine, in memory and on disk: 5 minutes (--quick: 1)",
    "rollout": "publishing what is trained, and sampler against trainer: on a CPU --tiny",
    "tensor": "a server's model divided over GPUs, beside one GPU: a minute (--quick)",
    "quantised": "products by packed weights on a GPU, beside those of floats: seconds",
    "large": "a server and a trainer on one packed base of 70B shapes: on a GPU two minutes, on a CPU --tiny",
    "speculation": "draft tokens of a server, beside the same texts without: a minute",
    "gpu": "all of it on a GPU, where its parts are named: minutes each",
}


@app.command(cls=InLines, context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def bench(
    context: typer.Context,
    what: Annotated[str, typer.Argument(metavar="NAME", help=". ".join(f"{name}: {told}" for name, told in BENCHMARKS.items()) + ".")],
) -> None:  # fmt: skip
    """Run one of the benchmarks in the repository's scripts folder. What follows its name goes to it (try --help)."""
    if what not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {shown(what, 80)!r}: choose one of {', '.join(BENCHMARKS)}")
    script = Path(__file__).parents[2] / "scripts" / f"bench_{what}.py"
    if not script.is_file():
        typer.echo(
            f"error: there is no {script}: benchmarks come with the source, so install from a checkout", err=True
        )
        raise typer.Exit(2)
    typer.echo(f"{what}: {BENCHMARKS[what]}", err=True)
    raise typer.Exit(subprocess.run([sys.executable, str(script), *context.args]).returncode)


@app.command(cls=InLines)
def convert(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder that torch.distributed.checkpoint has written, as FSDP does.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to make.")],
    model: Annotated[str | None, typer.Option(help="A directory or hub id with the model's config.json and tokenizer. Default: CHECKPOINT.")] = None,
) -> None:  # fmt: skip
    """Make a MODEL for executors of a distributed checkpoint. Nothing that the checkpoint contains is run."""
    from symbiosis.cli.convert import convert as run

    typer.echo(f"{output}: {len(run(checkpoint, output, model))} tensors of {checkpoint}")


@app.command(cls=InLines)
def keygen(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the executor or tenant that the keys are for.")],
    folder: Annotated[Path, typer.Option("--output", "-o", help="Folder to put them in.")] = Path(),
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="DAY", help="When the key stops working: 2027-01-31, or 2027-01-31T12:00Z. Default: never."
        ),
    ] = None,
) -> None:
    """Make a pair of keys for tcp://: NAME.key, which its owner keeps, and NAME.pub, which others need."""
    from symbiosis.base.curve_keys import generate

    secret, public = generate(name, folder, expires)
    typer.echo(f"{secret}: keep it where only {name} can read it")
    typer.echo(
        f"{public}: give it to others: an executor's to its clients (server=), a tenant's to the executor (--tenants)"
    )


@app.command(cls=InLines)
def pads(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory, a hub id, or `demo`: the weights that the executor serves.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many rows to make pads for.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to make.")],
    bits: Annotated[int, typer.Option(help="Bits of the quantised weights: 8 or 16.")] = 8,
    training: Annotated[bool, typer.Option("--training", help="Pads for gradients, too.")] = False,
    dtype: Annotated[str | None, typer.Option(help="As the executor's --dtype. Default: that of the checkpoint.")] = None,
) -> None:  # fmt: skip
    """Make the pads of privacy=symbiosis.Pads(FILE), on a machine of your own: the executor must never see them."""
    from symbiosis.cli.pad_files import make

    made = make(model, tokens, output, bits, training, dtype)
    typer.echo(f"{output}: {tokens} pads for {len(made.streams)} kinds of rows, {output.stat().st_size / 1e6:.1f} MB")


class LevelName(StrEnum):
    """The levels of privacy that `symbiosis audit` attacks, and none."""

    NONE = "none"
    NOISE = "noise"
    SPLIT = "split"
    PADS = "pads"


@app.command(cls=InLines)
def audit(
    level: Annotated[LevelName, typer.Option(help="none: rows are sent as they are. noise, split, pads: as with privacy= of wrap.")],
    quick: Annotated[bool, typer.Option("--quick", help="Less data.")] = False,
    bits: Annotated[int, typer.Option(help="Bits of the quantised weights of split and pads: 8 or 16.")] = 8,
    tcp: Annotated[bool, typer.Option("--tcp", help="Over tcp://, not within one process.")] = False,
    tokens: Annotated[int | None, typer.Option(
        min=0, help="Additional known tokens, for the equations of the adapter. Default 32,768; --quick and pads: 0.",
    )] = None,
) -> None:  # fmt: skip
    """Attack, as an operator would, what executors see of a demo client; exit status 0 if the level holds what it promises."""
    from symbiosis.audit.run import run

    raise typer.Exit(run(level.value, quick, bits, tcp, tokens))


@app.command(cls=InLines)
def version() -> None:
    """Print the version, with the commit that it was made of."""
    typer.echo(build())


def main() -> None:
    os.environ.pop(SWITCH, None)  # what our own processes load is what they serve
    app()


def executor_main() -> None:
    os.environ.pop(SWITCH, None)
    prepare_to_serve()
    executor_app()


def prepare_to_serve() -> None:
    """Set what matters while torch is loaded, or is read then. Threads that have nothing to multiply must not spin: the clients on this
    machine need the cores. And weights that lie in huge pages come from memory a tenth faster."""
    look_seldom()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
