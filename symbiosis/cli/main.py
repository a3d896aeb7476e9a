"""The commands `symbiosis-executor` and `symbiosis`. Importing this, and `--help`, loads no torch."""

import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import typer.core

from symbiosis.base.memory import look_seldom
from symbiosis.build import build
from symbiosis.errors import ConfigError, SymbiosisError
from symbiosis.executor.options import load_as, load_options
from symbiosis.protocol.endpoints import default_endpoints
from symbiosis.text import shown


class InLines(typer.core.TyperCommand):
    """A command that ends with a line for each error of the user's. Any other exception is a bug, and shows its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SymbiosisError as error:
            for line in str(error).splitlines():
                typer.echo(f"error: {line}", err=True)
            raise typer.Exit(2) from None


# Plain help and errors: a wrong option is a line or two, and not a box.
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
executor_app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(build())
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and end.")]  # fmt: skip


@app.callback()
def symbiosis(version: Version = False) -> None:
    """One frozen base model, many clients."""


@executor_app.command(cls=InLines)
def executor(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A directory, a hub id, or `demo`. Without it, --config must name one.", show_default=False)] = None,
    listen: Annotated[list[str] | None, typer.Option(help="Endpoint: local:///PATH or tcp://HOST:PORT. Repeatable. Default: this user's socket.")] = None,
    device: Annotated[str | None, typer.Option(help="Device that holds the weights: cpu, cuda or cuda:NUMBER. Default: cpu.")] = None,
    devices: Annotated[str | None, typer.Option(help="Several devices, each with an executor (a rank) that holds a part of the model: GPUs, such as 0-3 or 0,2, or cpu, with --ranks. Rank K answers at the endpoint with .rankK at its end, or at PORT + K.")] = None,
    ranks: Annotated[int | None, typer.Option(help="How many ranks in all, the same number on each of --devices. Default: one on each.")] = None,
    shard: Annotated[str | None, typer.Option(help="How the model is laid out over ranks. layers (default): whole layers on each. fsdp: a part of every tensor on each, so that any rank answers any call.")] = None,
    shares: Annotated[str | None, typer.Option(help="How much of the model each rank holds, in proportion, such as 3,1. Default: equal shares.")] = None,
    spread_rows: Annotated[int | None, typer.Option(help="With --shard fsdp: calls of at most this many rows go to all ranks, each of which computes some columns of the result, or its part of a gradient's sum. The result rounds differently from that of one product. Default: 0.")] = None,
    gather_buffers: Annotated[int | None, typer.Option(help="With --shard fsdp on GPUs: bytes that each rank may use for weights that it gathers before products of many rows. Default: 0; parts on other GPUs are read in place.")] = None,
    hosts: Annotated[list[str] | None, typer.Option(help="Where clients reach each host, if torchrun starts ranks on several. Repeatable, in torchrun's order. Endpoints of clients list them: tcp://A:PORT?hosts=A,B.")] = None,
    mps: Annotated[bool | None, typer.Option("--mps/--no-mps", help="Share the GPU with its clients by CUDA MPS: join its daemon, or start and stop one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ... Default: that of the checkpoint.")] = None,
    policy: Annotated[str | None, typer.Option(help="immediate, lockstep or opportunistic (default).")] = None,
    max_wait_us: Annotated[int | None, typer.Option(help="Longest time, in microseconds, that a call waits for others to join it, if that pays. Default: 10000, on a GPU 2000.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Maximum rows of one product. Default: 4096.")] = None,
    batch_invariant: Annotated[bool | None, typer.Option("--batch-invariant/--no-batch-invariant", help="A client's results never depend on who else is served: they are those of the unsplit model, bit for bit. Calls are not joined then.")] = None,
    workers: Annotated[int | None, typer.Option(help="How many large products a CPU computes at the same time, each with OMP_NUM_THREADS threads. Joined products of few rows use as many threads. Default: 1.")] = None,
    train_share: Annotated[float | None, typer.Option(help="Share of a GPU's time that large products of training clients get while another client decodes. Default: 0.083; 1: no limit.")] = None,
    rounds: Annotated[bool | None, typer.Option("--rounds/--no-rounds", help="Under MPS, the GPU itself answers all calls of a captured step, without the CPU taking part in each. The default.")] = None,
    serve: Annotated[list[str] | None, typer.Option(help="Pattern of layer names to serve, or, after !, to leave out. Repeatable. Default: all linear and expert layers except heads.")] = None,
    allow_read: Annotated[bool | None, typer.Option("--allow-read/--no-allow-read", help="Let clients read weights (merging, methods that need values).")] = None,
    share_weights: Annotated[bool | None, typer.Option("--share-weights/--no-share-weights", help="Let clients of your own user at local:// (on a GPU: on the same one) map the weights read-only, and multiply by them directly where a call would gain nothing. With --shard fsdp on GPUs nothing is mapped. Default: they may, unless a --max-tenant-...-per-s is set.")] = None,
    integers: Annotated[list[int] | None, typer.Option(help="Also serve integer products, with weights quantised to 8 or 16 bits, for clients that hide their rows. Repeatable.")] = None,
    operator: Annotated[str | None, typer.Option(help="Name of whoever runs this executor. Clients that split their rows between two executors need two operators.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Prometheus metrics at http://127.0.0.1:PORT/metrics, and /health for probes: 200 while calls are answered, else 503.")] = None,
    metrics_host: Annotated[str | None, typer.Option(help="Where to serve --metrics-port. Default: 127.0.0.1. Anybody who can connect can read who the tenants are and what they use.")] = None,
    key: Annotated[str | None, typer.Option(help="This executor's .key file (symbiosis keygen): tcp:// is then encrypted, and for --tenants only.")] = None,
    tenants: Annotated[str | None, typer.Option(help="Folder with the .pub file of each tenant; read again when it changes.")] = None,
    nccl: Annotated[bool | None, typer.Option("--nccl/--no-nccl", help="With keys: let tenants' GPUs send rows by NCCL, which neither encrypts nor authenticates them. Without keys they always may.")] = None,
    audit_log: Annotated[str | None, typer.Option(metavar="FILE", help="Record who joined, was refused, was struck off or left, and how much they used: one JSON object per line. When the file is moved away, the next line begins a new one.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with these options as keys.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text (default) or json.")] = None,
    heartbeat_s: Annotated[float | None, typer.Option(help="A session silent for this long is dropped. Default: 5.")] = None,
    non_finite: Annotated[str | None, typer.Option(help="refuse (default) or pass: NaN and infinity in forward calls.")] = None,
    max_call_bytes: Annotated[int | None, typer.Option(help="Largest payload of one call. Default: 1 GiB.")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Maximum rows of one call. Default: 1048576.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(help="Maximum unanswered calls of one session. Default: 8.")] = None,
    max_sessions: Annotated[int | None, typer.Option(help="Maximum sessions at a time. Default: 256.")] = None,
    max_tenant_sessions: Annotated[int | None, typer.Option(help="Maximum sessions of one tenant. Without keys each session is a tenant of its own. Default: 64.")] = None,
    max_tenant_in_flight: Annotated[int | None, typer.Option(help="Maximum unanswered calls of one tenant. Default: 64.")] = None,
    max_tenant_bytes: Annotated[int | None, typer.Option(help="Maximum bytes of a tenant's calls and unread replies. Default: 4 GiB.")] = None,
    max_call_multiplications: Annotated[int | None, typer.Option(help="Maximum multiplications of one call. Default: 10^14.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Maximum bytes of all tenants' calls and unread replies together, in each rank; who holds less than 4 MiB may go on. Default: half of the memory, divided by the ranks on this host.")] = None,
    max_tenant_rows_per_s: Annotated[int | None, typer.Option(help="Rows per second of one tenant; a client over it is slowed down. Default: 0, no limit.")] = None,
    max_tenant_multiplications_per_s: Annotated[int | None, typer.Option(help="Multiplications per second of one tenant, in the same way.")] = None,
    max_tenant_bytes_per_s: Annotated[int | None, typer.Option(help="Bytes per second to and from one tenant, in the same way.")] = None,
    version: Version = False,
) -> None:  # fmt: skip
    """Hold the frozen layers of MODEL and answer the calls of any number of clients."""
    # As long as there are options: its parameters are what --help shows.
    given = {key: value for key, value in locals().items() if key not in ("config", "version") and value is not None}
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


@app.command(cls=InLines)
def serve(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A directory, a hub id, or `demo`. Without it, --config must name one.", show_default=False)] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call MODEL. Default: MODEL, as it is given here.")] = None,
    executor: Annotated[str | None, typer.Option(metavar="URL", help="The executor that holds MODEL. Default: one is started, which trainers may use, too.")] = None,
    adapters: Annotated[list[str] | None, typer.Option(metavar="DIR | NAME=PATH", help="A folder of adapters, each in a folder of its name, or one adapter. Repeatable.")] = None,
    host: Annotated[str | None, typer.Option(help="Where to listen. Default: 127.0.0.1, which only this machine reaches.")] = None,
    port: Annotated[int | None, typer.Option(help="Default: 8000. 0: any that is free.")] = None,
    allowed_hosts: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A name by which clients ask for the server, such as that of a proxy; *.DOMAIN: all of a domain; *: any. Repeatable. Default: this host's name, addresses and, with --api-keys, any.")] = None,
    api_keys: Annotated[str | None, typer.Option(metavar="FILE", help="Lines of `NAME KEY [admin] [requests=N] [tokens_per_s=N] [old_key=KEY]`; read again when it changes.")] = None,
    chat_template: Annotated[str | None, typer.Option(metavar="FILE", help="Jinja template that makes a prompt of a chat. Default: the tokenizer's.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Maximum sequences in one step. Default: 64.")] = None,
    max_tenant_batch: Annotated[int | None, typer.Option(help="Maximum sequences of one API key in one step, while others wait. Default: half of --max-batch.")] = None,
    adapters_in_batch: Annotated[int | None, typer.Option(help="Maximum adapters in one step. Default: no limit.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for keys, values and adapters: 8GiB, or a share of what is free, such as 0.5. Default: 0.25.")] = None,
    adapter_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="The host's memory for adapters, in the same way. Default: 0.25.")] = None,
    max_rank: Annotated[int | None, typer.Option(help="Largest rank of an adapter. Default: 256.")] = None,
    policy: Annotated[str | None, typer.Option(help="fcfs (default), abort (what can no longer begin in time gives way) or vtc (fair shares for API keys).")] = None,
    first_token_s: Annotated[float | None, typer.Option(help="With --policy abort, the seconds within which a first token must come. Default: 6.")] = None,
    prefill_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of prompts in one step. Default: 512.")] = None,
    dtype: Annotated[str | None, typer.Option(help="dtype of the executor that is started: float32, bfloat16, ... Default: that of the checkpoint.")] = None,
    compile: Annotated[bool | None, typer.Option("--compile", help="Compile the model's layers, on a GPU: faster steps, after a start of up to a minute more.")] = None,
    drain_s: Annotated[float | None, typer.Option(help="On SIGTERM or ctrl-C, how long requests under way may take to finish; a second one ends the server at once. Default: 30.")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Largest body of a request. Default: 16 MiB.")] = None,
    max_adapter_bytes: Annotated[int | None, typer.Option(help="Largest adapter that is sent, and largest file of one that lies here, unless --adapter-memory is more. Default: 1 GiB.")] = None,
    max_requests: Annotated[int | None, typer.Option(help="Maximum requests under way, including those that wait; one key alone may have half of them. Default: 4096.")] = None,
    max_step_s: Annotated[float | None, typer.Option(help="A step that takes longer counts as hung: the server ends with status 1. Default: 600.")] = None,
    wait_s: Annotated[float | None, typer.Option(help="How long the executor at --executor may take to come up. Default: 60.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text (default) or json, of all processes.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with these options as keys.")] = None,
) -> None:  # fmt: skip
    """Serve MODEL and any number of adapters of it by OpenAI's API."""
    given = {key: value for key, value in locals().items() if key != "config" and value is not None}
    from symbiosis.serving.serve_options import ServeOptions

    options = load_as(ServeOptions, given, config, "symbiosis serve")
    from symbiosis.server.launch.preflight import check

    listener = check(options)
    prepare_to_serve()
    from symbiosis.server.launch.serve_processes import serve as run

    run(options, listener)


cluster_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run many servers and executors as one: start, watch and end them.",
)
app.add_typer(cluster_app, name="cluster")
ClusterName = Annotated[
    str | None, typer.Argument(metavar="[CLUSTER]", help="Default: the only one of yours that runs on this host.")
]


@cluster_app.command("up", cls=InLines)
def cluster_up(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Models, and how many executors and servers of each.")],
    backend: Annotated[str | None, typer.Option(help="Where executors and servers run: local, on this host, or ray, on the nodes of the Ray cluster that this host belongs to. Default: as the file says, else local.")] = None,
) -> None:  # fmt: skip
    """Start a cluster and watch over it until it is told to end."""
    from symbiosis.cluster.controller.commands import up

    up(file, backend)


@cluster_app.command("status", cls=InLines)
def cluster_status(cluster: ClusterName = None, as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False) -> None:  # fmt: skip
    """Print the processes of a cluster and their load."""
    from symbiosis.cluster.controller.commands import status

    status(cluster, as_json)


@cluster_app.command("top", cls=InLines)
def cluster_top(
    cluster: ClusterName = None,
    once: Annotated[bool, typer.Option("--once", help="Print one plain view and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two views.")] = 1.0,
) -> None:  # fmt: skip
    """Watch a cluster: the load, the memory and the pace of each server, and what waits."""
    from symbiosis.cluster.controller.commands import top

    top(cluster, once, interval)


@cluster_app.command("drain", cls=InLines)
def cluster_drain(name: Annotated[str, typer.Argument(metavar="NAME", help="A process, as status names it.")], cluster: ClusterName = None) -> None:  # fmt: skip
    """Let one process hand over what it does, and end."""
    from symbiosis.cluster.controller.commands import order

    order(cluster, "drain", name)


@cluster_app.command("roll", cls=InLines)
def cluster_roll(cluster: ClusterName = None, only: Annotated[str, typer.Option(metavar="NAME", help="Only the processes of this model, or this process.")] = "") -> None:  # fmt: skip
    """Replace all processes one after the other, without an answer or a call lost."""
    from symbiosis.cluster.controller.commands import order

    order(cluster, "roll", only)


@cluster_app.command("apply", cls=InLines)
def cluster_apply(file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The file of a running cluster, with other models or aliases.")]) -> None:  # fmt: skip
    """Let a running cluster serve the models that its file has now: new ones start, others end when nobody uses them any more."""
    from symbiosis.cluster.controller.commands import apply

    apply(file)


@cluster_app.command("shift", cls=InLines)
def cluster_shift(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What clients ask for.")],
    shares: Annotated[list[str], typer.Argument(metavar="MODEL=SHARE ...", help="The models that answer, and how much of the requests each gets, in proportion.")],
    new: Annotated[bool, typer.Option("--new", help="NAME may be one that is no alias yet.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Default: the only one of yours that runs on this host.")] = None,
) -> None:  # fmt: skip
    """Divide the requests for a name among models, for example versions of one, from the next request on."""
    from symbiosis.cluster.controller.commands import shift

    shift(cluster, name, shares, new)


@cluster_app.command("down", cls=InLines)
def cluster_down(cluster: ClusterName = None) -> None:
    """End a cluster, and return when it has ended."""
    from symbiosis.cluster.controller.commands import down

    down(cluster)


@app.command(cls=InLines)
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each of the two fine-tuning clients.")] = 120,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that the generating client writes.")] = 500,
    keep: Annotated[Path | None, typer.Option(help="Folder to keep adapters and logs in. Default: they are deleted.")] = None,
) -> None:  # fmt: skip
    """Start an executor, fine-tune two adapters and generate text over it at once, and compare with plain PEFT."""
    from symbiosis.demo.programs import run

    raise typer.Exit(run(steps, tokens, keep))


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


BENCHMARKS = {  # scripts/bench_*.py, with what they take on two cores; gpu: on one H200
    "call": "latency of a call: 4 minutes (--quick: 1)",
    "step": "training steps and tokens of one program and of four: a quarter of an hour (--quick: 4 minutes)",
    "batching": "eight clients under each policy: a quarter of an hour (--quick: 3 minutes)",
    "isolation": "one tenant beside another's floods: 10 minutes (--quick: 1)",
    "api": "what HTTP costs a server: 5 minutes (--quick: 1)",
    "privacy": "what each level costs: half an hour (--quick: 5 minutes)",
    "long": "a token after a long text, on a CPU",
    "serve": "many adapters in one server; on a CPU --cpu (--cpu --quick), on a GPU the name of a load (--help)",
    "shard": "services of several ranks: on a CPU --tiny (two minutes), on GPUs --gpus",
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
    from symbiosis.cli.pads import make

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
    app()


def executor_main() -> None:
    prepare_to_serve()
    executor_app()


def prepare_to_serve() -> None:
    """Set what matters while torch is loaded, or is read then. Threads that have nothing to multiply must not spin: the clients on this
    machine need the cores. And weights that lie in huge pages come from memory a tenth faster."""
    look_seldom()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
