"""The executor's options: defaults, configuration file, command line."""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from typing_extensions import Doc

from symbiosis.base.devices import gpus_of
from symbiosis.base.dtypes import check_dtype
from symbiosis.errors import ConfigError
from symbiosis.protocol import LARGEST_LIMIT, LONGEST_BEAT_S, LONGEST_NAME, MOST_RANKS, SHORTEST_BEAT_S, Limits
from symbiosis.protocol.endpoints import HOST, of_rank, reaches_other_hosts, socket_path

RATES = tuple(name for name in Limits.__struct_fields__ if name.endswith("_per_s"))
OptionsType = TypeVar("OptionsType", bound=msgspec.Struct)
PolicyName = Literal["immediate", "lockstep", "opportunistic"]  # `executor/scheduling/rules.py` says what they do
SMALLEST_SHARE, LARGEST_SHARE, MOST_UNLIKE = 1e-6, 1e15, 1000
MAY_BE_ZERO = ("max_wait_us", "spread_rows", "gather_buffers")
COUNTS = (*MAY_BE_ZERO, "max_batch_tokens", "workers", "ranks", "heartbeat_s", "max_bytes", *Limits.__struct_fields__)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be said about an executor. The names are the long options of `symbiosis-executor`.

    >>> Options(policy="lockstep").limits.max_in_flight
    8
    """

    # fmt: off
    model: Annotated[str | None, Doc("A directory, a hub id, or `demo`. Without it, --config must name one.")] = None
    listen: Annotated[tuple[str, ...], Doc("Endpoint: local:///PATH or tcp://HOST:PORT. Repeatable. Default: this user's socket.")] = ()
    device: Annotated[str, Doc("Device that holds the weights: cpu, cuda or cuda:NUMBER. Default: cpu.")] = "cpu"
    devices: Annotated[str | None, Doc(
        "Several devices, each with an executor (a rank) that holds a part of the model: GPUs, such as 0-3 or 0,2, or cpu, with "
        "--ranks. Rank K answers at the endpoint with .rankK at its end, or at PORT + K.")] = None
    ranks: Annotated[int | None, Doc("How many ranks in all, the same number on each of --devices. Default: one on each.")] = None
    shard: Annotated[Literal["layers", "fsdp"], Doc(
        "How the model is laid out over ranks. layers (default): whole layers on each. fsdp: a part of every tensor on each, so that "
        "any rank answers any call.")] = "layers"
    shares: Annotated[tuple[float, ...], Doc(
        "How much of the model each rank holds, in proportion, such as 3,1. Default: equal shares.")] = ()
    spread_rows: Annotated[int, Doc(
        "With --shard fsdp: calls of at most this many rows go to all ranks, each of which computes some columns of the result, or its "
        "part of a gradient's sum. The result rounds differently from that of one product. Default: 0.")] = 0
    gather_buffers: Annotated[int, Doc(
        "With --shard fsdp on GPUs: bytes that each rank may use for weights that it gathers before products of many rows. Default: 0; "
        "parts on other GPUs are read in place.")] = 0
    hosts: Annotated[tuple[str, ...], Doc(
        "Where clients reach each host, if torchrun starts ranks on several. Repeatable, in torchrun's order. Endpoints of clients list "
        "them: tcp://A:PORT?hosts=A,B.")] = ()
    mps: Annotated[bool, Doc("Share the GPU with its clients by CUDA MPS: join its daemon, or start and stop one.")] = False
    dtype: Annotated[str | None, Doc("float32, bfloat16, ... Default: that of the checkpoint.")] = None
    quantize: Annotated[Literal["int8", "fp8", "nf4"] | None, Doc(
        "Hold the served weights of a float checkpoint in 8 or 4 bits: int8 (closest), fp8 or nf4. Default: as the checkpoint has them.")] = None
    policy: Annotated[PolicyName, Doc("immediate, lockstep or opportunistic (default).")] = "opportunistic"
    max_wait_us: Annotated[int | None, Doc(
        "Longest time, in microseconds, that a call waits for others to be batched with it, if that pays. Default: 10000, on a GPU 2000.")] = None
    max_batch_tokens: Annotated[int, Doc("Maximum rows of one product. Default: 4096.")] = 4096
    batch_invariant: Annotated[bool, Doc(
        "A client's results never depend on who else is served: they are those of the unsplit model, bit for bit. Calls are not batched "
        "then, and a GPU makes packed weights whole for all of them.")] = False
    workers: Annotated[int, Doc(
        "How many large products a CPU computes at the same time, each with OMP_NUM_THREADS threads. Batched products of few rows use as "
        "many threads. Default: 1.")] = 1
    train_share: Annotated[float, Doc(
        "Share of a GPU's time that large products of training clients get while another client decodes. Default: 0.083; 1: no limit.")] = 0.083
    rounds: Annotated[bool, Doc(
        "Under MPS, the GPU itself answers all calls of a captured step, without the CPU taking part in each. The default.")] = True
    serve: Annotated[tuple[str, ...], Doc(
        "Pattern of layer names to serve, or, after !, to leave out. Repeatable. Default: all linear and expert layers except heads.")] = ()
    allow_read: Annotated[bool, Doc("Let clients read weights (merging, methods that need values).")] = False
    share_weights: Annotated[bool | None, Doc(
        "Let clients of your own user at local:// (on a GPU: on the same one) map the weights read-only, and multiply by them directly "
        "where a call would gain nothing. With --shard fsdp on GPUs nothing is mapped. Default: they may, unless a "
        "--max-tenant-...-per-s is set.")] = None
    integers: Annotated[tuple[int, ...], Doc(
        "Also serve integer products, with weights quantised to 8 or 16 bits, for clients that hide their rows. Repeatable.")] = ()
    operator: Annotated[str, Doc(
        "Name of whoever runs this executor. Clients that split their rows between two executors need two operators.")] = ""
    metrics_port: Annotated[int | None, Doc(
        "Prometheus metrics at http://127.0.0.1:PORT/metrics, and /health for probes: 200 while calls are answered, else 503.")] = None
    metrics_host: Annotated[str, Doc(
        "Where to serve --metrics-port. Default: 127.0.0.1. Anybody who can connect can read who the tenants are and what they use.")] = "127.0.0.1"
    key: Annotated[str | None, Doc(
        "This executor's .key file (symbiosis keygen): tcp:// is then encrypted, and for --tenants only.")] = None
    tenants: Annotated[str | None, Doc("Folder with the .pub file of each tenant; read again when it changes.")] = None
    nccl: Annotated[bool | None, Doc(
        "With keys: let tenants' GPUs send rows by NCCL, which neither encrypts nor authenticates them. Without keys they always may.")] = None
    audit_log: Annotated[str | None, Doc(
        "Record who joined, was refused, was struck off or left, and how much they used: one JSON object per line. When the file is "
        "moved away, the next line begins a new one."), "FILE"] = None
    log_format: Annotated[Literal["text", "json"], Doc("text (default) or json.")] = "text"
    heartbeat_s: Annotated[float, Doc("A session silent for this long is dropped. Default: 5.")] = 5.0
    non_finite: Annotated[Literal["refuse", "pass"], Doc("refuse (default) or pass: NaN and infinity in forward calls.")] = "refuse"
    max_call_bytes: Annotated[int, Doc("Largest payload of one call. Default: 1 GiB.")] = Limits().max_call_bytes
    max_rows: Annotated[int, Doc("Maximum rows of one call. Default: 1048576.")] = Limits().max_rows
    max_in_flight: Annotated[int, Doc("Maximum unanswered calls of one session. Default: 8.")] = Limits().max_in_flight
    max_sessions: Annotated[int, Doc("Maximum sessions at a time. Default: 256.")] = Limits().max_sessions
    max_tenant_sessions: Annotated[int, Doc(
        "Maximum sessions of one tenant. Without keys each session is a tenant of its own. Default: 64.")] = Limits().max_tenant_sessions
    max_tenant_in_flight: Annotated[int, Doc("Maximum unanswered calls of one tenant. Default: 64.")] = Limits().max_tenant_in_flight
    max_tenant_bytes: Annotated[int, Doc(
        "Maximum bytes of a tenant's calls and unread replies. Default: 4 GiB.")] = Limits().max_tenant_bytes
    max_tenant_rows_per_s: Annotated[int, Doc(
        "Rows per second of one tenant; a client over it is slowed down. Default: 0, no limit.")] = Limits().max_tenant_rows_per_s
    max_call_multiplications: Annotated[int, Doc(
        "Maximum multiplications of one call. Default: 10^14.")] = Limits().max_call_multiplications
    max_tenant_multiplications_per_s: Annotated[int, Doc(
        "Multiplications per second of one tenant, in the same way.")] = Limits().max_tenant_multiplications_per_s
    max_tenant_bytes_per_s: Annotated[int, Doc(
        "Bytes per second to and from one tenant, in the same way.")] = Limits().max_tenant_bytes_per_s
    max_bytes: Annotated[int | None, Doc(
        "Maximum bytes of all tenants' calls and unread replies together, in each rank; who holds less than 4 MiB may go on. Default: "
        "half of the memory, divided by the ranks on this host.")] = None
    # fmt: on

    def __post_init__(self) -> None:
        self._check_numbers()
        if len(self.operator) > LONGEST_NAME or not self.operator.strip().isprintable():
            raise ConfigError(f"operator is a name of at most {LONGEST_NAME} printable characters")
        check_dtype(self.dtype)
        if not set(self.integers) <= {8, 16}:
            raise ConfigError(f"integers must be 8 or 16, the bits of quantised weights, not {self.integers}")
        self._check_together()
        self._check_ranks()
        self.check_device(self.on_gpu)

    def _check_numbers(self) -> None:
        """Raise `ConfigError` if a number is out of range."""
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and not value > 0 and name not in (*MAY_BE_ZERO, *RATES):
                raise ConfigError(f"{name.replace('_', '-')} must be positive, not {value}")
            if value is not None and value > LARGEST_LIMIT:
                raise ConfigError(f"{name.replace('_', '-')} must be at most 2^62, not {value}")
        if not SHORTEST_BEAT_S <= self.heartbeat_s <= LONGEST_BEAT_S:
            raise ConfigError(
                f"heartbeat-s must be between {SHORTEST_BEAT_S:g} and {LONGEST_BEAT_S:g}, not {self.heartbeat_s}"
            )
        for name in (*MAY_BE_ZERO, *RATES):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name.replace('_', '-')} must not be negative, and is {getattr(self, name)}")
        if not 0 <= (self.metrics_port or 0) <= 65535:
            raise ConfigError(f"metrics-port must be a port from 0 to 65535, not {self.metrics_port}")
        if not 0 < self.train_share <= 1:
            raise ConfigError(f"train-share is a fraction of the time, above 0 and at most 1, not {self.train_share}")

    def _check_together(self) -> None:
        """Raise `ConfigError` if an option lacks another that it needs, or has one that it excludes."""
        if (self.key is None) != (self.tenants is None):
            raise ConfigError(
                "key and tenants go together: the executor's own key, and the folder with the keys of those it lets in"
            )
        if self.mps and not self.on_gpu:
            raise ConfigError(f"mps shares a GPU, but device is {self.device}: add --device cuda, or leave out --mps")
        if self.share_weights and self._has_rates:
            raise ConfigError(
                "with share-weights clients compute products themselves, and no rate limit can slow them down: leave out either share-weights or max-tenant-...-per-s"
            )

    def _check_ranks(self) -> None:
        """Raise `ConfigError` if there cannot be such ranks."""
        count = len(self.places)
        if count > MOST_RANKS:
            raise ConfigError(f"a service has at most {MOST_RANKS} ranks, not {count}")
        kind = self.places[0].partition(":")[0]
        if self.devices is not None and self.device not in ("cpu", kind) and {self.device} != set(self.places):
            raise ConfigError(
                f"device {self.device} and devices {self.devices} contradict each other: leave out --device"
            )
        self._check_hosts(count)
        if self.spread_rows and (self.shard != "fsdp" or count < 2 or self.batch_invariant):
            raise ConfigError(
                "spread-rows needs several ranks with --shard fsdp, each of which can answer all, and no --batch-invariant, because what is spread rounds otherwise"
            )
        if self.gather_buffers and (self.shard != "fsdp" or count < 2 or not self.on_gpu):
            raise ConfigError(
                "gather-buffers is for ranks on GPUs with --shard fsdp: anywhere else no weight has to be gathered"
            )
        told = ",".join(map("{:g}".format, self.shares))
        if self.shares and (len(self.shares) != count or not all(0 < share < math.inf for share in self.shares)):
            raise ConfigError(f"shares must be one positive number for each of {count} ranks, as 3,1, not {told}")
        least, most = min(self.shares, default=1.0), max(self.shares, default=1.0)
        if least < SMALLEST_SHARE or most > LARGEST_SHARE or most > MOST_UNLIKE * least:
            raise ConfigError(
                f"shares must be numbers from {SMALLEST_SHARE:g} to {LARGEST_SHARE:g}, the largest at most {MOST_UNLIKE} times the smallest, not {told}"
            )

    def _check_hosts(self, ranks: int) -> None:
        """Raise `ConfigError` if there cannot be such hosts."""
        if wrong := next((host for host in self.hosts if not HOST.fullmatch(host)), None):
            raise ConfigError(f"hosts: {wrong!r} is no host's name or address")
        uneven = self.hosts and ranks % len(self.hosts) and (self.ranks or self.devices)  # else torchrun says how many
        if uneven or len(set(self.hosts)) < len(self.hosts):
            raise ConfigError(
                f"hosts are different ones, with as many of the {ranks} ranks on each: {len(self.hosts)} are named"
            )
        if self.hosts and (self.shard != "layers" or not all(map(reaches_other_hosts, self.listen))):
            raise ConfigError("ranks on several hosts hold whole layers, and clients reach them at tcp:// only")

    @property
    def host_of_each(self) -> tuple[str, ...]:
        """The host of each rank, if there are several."""
        return tuple(host for host in self.hosts for _ in range(self.ranks_on_a_host))

    @property
    def ranks_on_a_host(self) -> int:
        return len(self.places) // max(1, len(self.hosts))

    @property
    def places(self) -> tuple[str, ...]:
        """The device of each rank."""
        if self.devices is None or self.devices == "cpu":
            return (self.devices or self.device,) * (self.ranks or 1)
        devices, hosts = gpus_of(self.devices), max(1, len(self.hosts))
        each, left = divmod(self.ranks or len(devices) * hosts, len(devices) * hosts)
        if left:
            raise ConfigError(f"{self.ranks} ranks cannot be equally many on each of {len(devices) * hosts} devices")
        return tuple(f"cuda:{number}" for number in devices for _ in range(each)) * hosts

    @property
    def all_shares(self) -> tuple[float, ...]:
        """The share of each rank."""
        return self.shares or (1.0,) * len(self.places)

    def of_rank(self, rank: int) -> "Options":
        """Return the options of one rank, which has the device and the endpoints of its own."""
        return msgspec.structs.replace(
            self,
            device=self.places[rank],
            devices=None,
            ranks=len(self.places),
            listen=tuple(of_rank(url, rank % self.ranks_on_a_host) for url in self.listen),
        )

    def check_device(self, on_gpu: bool) -> None:
        """Check the options that depend on the device, which an embedded executor learns from its model."""
        if on_gpu and self.workers > 1:
            raise ConfigError("products run one after another on a GPU: leave out --workers")

    @property
    def shares_weights(self) -> bool:
        """Whether clients on this host may map the weights. By default they may, unless there are rate limits."""
        if self.share_weights is None and self._has_rates:
            return False
        return self.share_weights is not False and any(map(socket_path, self.listen))

    @property
    def shares_all_weights(self) -> bool:
        """Whether such clients can map every layer. On GPUs they map what lies on their own, and no parts of tensors."""
        is_divided = len(self.places) > 1 and (self.shard == "fsdp" or len(set(self.places)) > 1)
        return self.shares_weights and not (self.on_gpu and is_divided)

    @property
    def _has_rates(self) -> bool:
        return any(getattr(self, name) for name in RATES)

    @property
    def on_gpu(self) -> bool:
        return self.places[0].partition(":")[0] == "cuda"

    @property
    def limits(self) -> Limits:
        return Limits(*(getattr(self, name) for name in Limits.__struct_fields__))


HINTS = get_type_hints(Options)
CHOICES = {name: get_args(hint) for name, hint in HINTS.items() if get_origin(hint) is Literal}
PATHS = ("key", "tenants", "audit_log", "api_keys")
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def load_options(given: dict[str, object], file: Path | None = None) -> Options:
    """Load options: those from the command line (`given`, without what was not said) over those of a YAML file over the defaults.

    >>> load_options({"policy": "lockstep"}).policy
    'lockstep'
    >>> load_options({"devices": "1"}).device
    'cuda:1'
    """
    options = load_as(Options, given, file, "symbiosis-executor")
    if options.devices and len(options.places) == 1:
        return msgspec.structs.replace(options, device=options.places[0], devices=None)
    return options


def load_as(kind: type[OptionsType], given: dict[str, object], file: Path | None, command: str) -> OptionsType:
    """Load the options of any command, which are the fields of a Struct, in the same way."""
    values = {**(read_config_file(file, kind) if file else {}), **given}
    values = {name: os.fspath(value) if isinstance(value, Path) else value for name, value in values.items()}
    hints = get_type_hints(kind)
    for name, hint in hints.items():
        if name in values:
            values[name] = _as_a_list(hint, values[name])
            _check_choice(name, hint, values[name])
    for name in PATHS:  # no shell has replaced a `~` in a file or an argument
        if isinstance(value := values.get(name), str):
            values[name] = os.path.expanduser(value)  # noqa: PTH111  (which keeps the string as it is otherwise)
    return kind(**{name: _of_its_kind(name, value, hints, command) for name, value in values.items()})


def read_config_file(file: Path, kind: type[msgspec.Struct] = Options) -> dict[str, object]:
    """Read a file whose keys are spelt like options (`max-wait-us`), or with underscores like the fields."""
    import yaml

    from symbiosis.base.yaml_file import read_yaml

    try:
        content = read_yaml(file) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold `option: value` lines, not a {type(content).__name__}")
    known = {name.replace("_", "-") for name in kind.__struct_fields__}
    spelt = {key: str(key).replace("_", "-") for key in content}
    if unknown := sorted(str(key) for key, option in spelt.items() if option not in known):
        raise ConfigError(f"{file}: unknown option {', '.join(unknown)}. Known: {', '.join(sorted(known))}")
    if twice := sorted(option for option in spelt.values() if list(spelt.values()).count(option) > 1):
        raise ConfigError(f"{file} says {twice[0]} twice")
    if empty := [option for key, option in spelt.items() if content[key] is None]:
        raise ConfigError(f"{file}: {empty[0]} is empty: give it a value, or remove the line")
    return {option.replace("-", "_"): content[key] for key, option in spelt.items()}


def _as_a_list(hint: Any, value: object) -> object:
    """Let one value stand for a list of it, and numbers with commas between them for theirs."""
    if get_origin(hint) is not tuple or not isinstance(value, str | int | float):
        return value
    if get_args(hint)[0] is not float or not isinstance(value, str):
        return (value,)
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        return (value,)


def _check_choice(name: str, hint: Any, value: object) -> None:
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ConfigError(
            f"wrong option: {value!r} is not a valid {name.replace('_', '-')}: write {' or '.join(map(str, get_args(hint)))}"
        )


def _of_its_kind(name: str, value: object, hints: dict[str, Any], command: str) -> Any:
    """Return `value` as the option of this name takes it, or raise `ConfigError`."""
    if name not in hints:
        known = ", ".join(sorted(hints))
        raise ConfigError(f"unknown option {name}. Known: {known} ({command} --help says what each one takes)")
    if name == "devices" and type(value) is int:  # a file has it as a number
        value = str(value)
    try:
        return msgspec.convert(value, hints[name])
    except msgspec.ValidationError:
        kind, *more = get_args(hints[name]) or (hints[name],)
        wanted = KINDS[kind] + (", or a list of such" if Ellipsis in more else "")
        raise ConfigError(f"wrong option: {name.replace('_', '-')} is {wanted}, not {value!r:.80}") from None
