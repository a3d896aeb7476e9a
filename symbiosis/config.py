"""The executor's options: defaults, configuration file, command line; and where endpoints live by default."""

import os
import tempfile
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec

from symbiosis.errors import ConfigError
from symbiosis.ownership import check_folder, why_not_ours
from symbiosis.protocol import LARGEST_LIMIT, LONGEST_BEAT_S, LONGEST_NAME, SHORTEST_BEAT_S, Limits

RATES = tuple(name for name in Limits.__struct_fields__ if name.endswith("_per_s"))
Policy = Literal["immediate", "lockstep", "opportunistic"]
DTYPE_BITS = {"float64": 64, "double": 64, "float32": 32, "float": 32, "float16": 16, "half": 16, "bfloat16": 16}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be said about an executor. The names are the long options of `symbiosis-executor`.

    >>> Options(policy="lockstep").limits.max_in_flight
    8
    """

    model: str | None = None
    listen: tuple[str, ...] = ()
    device: str = "cpu"
    mps: bool = False
    dtype: str | None = None
    policy: Policy = "opportunistic"
    max_wait_us: int | None = None
    max_batch_tokens: int = 4096
    batch_invariant: bool = False
    workers: int = 1
    train_share: float = 0.05
    rounds: bool = True
    serve: tuple[str, ...] = ()
    allow_read: bool = False
    integers: tuple[int, ...] = ()
    operator: str = ""
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    key: str | None = None
    tenants: str | None = None
    nccl: bool | None = None
    audit_log: str | None = None
    log_format: Literal["text", "json"] = "text"
    heartbeat_s: float = 5.0
    non_finite: Literal["refuse", "pass"] = "refuse"
    max_call_bytes: int = Limits().max_call_bytes
    max_rows: int = Limits().max_rows
    max_in_flight: int = Limits().max_in_flight
    max_sessions: int = Limits().max_sessions
    max_tenant_sessions: int = Limits().max_tenant_sessions
    max_tenant_in_flight: int = Limits().max_tenant_in_flight
    max_tenant_bytes: int = Limits().max_tenant_bytes
    max_tenant_rows_per_s: int = Limits().max_tenant_rows_per_s
    max_call_multiplications: int = Limits().max_call_multiplications
    max_tenant_multiplications_per_s: int = Limits().max_tenant_multiplications_per_s
    max_tenant_bytes_per_s: int = Limits().max_tenant_bytes_per_s
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "workers", "heartbeat_s", "max_bytes", *Limits.__struct_fields__):
            value = getattr(self, name)
            if value is not None and not value > 0 and name not in RATES:
                raise ConfigError(f"{name.replace('_', '-')} must be positive, not {value}")
            if value is not None and value > LARGEST_LIMIT:
                raise ConfigError(f"{name.replace('_', '-')} is at most 2^62, not {value}")
        if not SHORTEST_BEAT_S <= self.heartbeat_s <= LONGEST_BEAT_S:
            raise ConfigError(
                f"heartbeat-s lies between {SHORTEST_BEAT_S:g} and {LONGEST_BEAT_S:g}, and is {self.heartbeat_s}"
            )
        if len(self.operator) > LONGEST_NAME or not self.operator.strip().isprintable():
            raise ConfigError(f"operator is a name of at most {LONGEST_NAME} printable characters")
        for name in ("max_wait_us", *RATES):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name.replace('_', '-')} must not be negative, but is {getattr(self, name)}")
        if not 0 <= (self.metrics_port or 0) <= 65535:
            raise ConfigError(f"metrics-port is a port from 0 to 65535, not {self.metrics_port}")
        if not 0 < self.train_share <= 1:
            raise ConfigError(f"train-share is a part of the time, above 0 and at most 1, not {self.train_share}")
        check_dtype(self.dtype)
        if not set(self.integers) <= {8, 16}:
            raise ConfigError(f"integers names the bits of quantised weights, 8 or 16, not {self.integers}")
        if (self.key is None) != (self.tenants is None):
            raise ConfigError(
                "key and tenants go together: the executor's own key, and the folder of those who may come in"
            )
        if self.mps and not self.on_gpu:
            raise ConfigError(f"mps shares a GPU, but device is {self.device}: add --device cuda, or leave out --mps")
        self.check_device(self.on_gpu)

    def check_device(self, on_gpu: bool) -> None:
        """An embedded executor knows where it computes by its model only."""
        if on_gpu and self.workers > 1:
            raise ConfigError("products run one after another on a GPU: leave out --workers")

    @property
    def on_gpu(self) -> bool:
        return self.device.partition(":")[0] == "cuda"

    @property
    def limits(self) -> Limits:
        return Limits(*(getattr(self, name) for name in Limits.__struct_fields__))


CHOICES = {name: get_args(hint) for name, hint in get_type_hints(Options).items() if get_origin(hint) is Literal}


def check_dtype(name: str | None) -> None:
    """None stands for that of the checkpoint."""
    if name is not None and name not in DTYPE_BITS:
        raise ConfigError(f"--dtype {name!r} is no floating point type: float32, bfloat16, float16 or float64")


def load_options(given: dict[str, object], file: Path | None = None) -> Options:
    """Options from the command line (`given`, without what was not said) over a YAML file over the defaults.

    >>> load_options({"policy": "lockstep"}).policy
    'lockstep'
    """
    return _convert({**(read_config_file(file) if file else {}), **given})


def read_config_file(file: Path) -> dict[str, object]:
    """The file's keys, spelt as option names (`max-wait-us`) or with underscores, as names of `Options` fields."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold `option: value` lines, not a {type(content).__name__}")
    known = {name.replace("_", "-") for name in Options.__struct_fields__}
    spelt = {key: str(key).replace("_", "-") for key in content}
    if unknown := sorted(str(key) for key, option in spelt.items() if option not in known):
        raise ConfigError(f"{file}: unknown option {', '.join(unknown)}. Known: {', '.join(sorted(known))}")
    if twice := sorted(option for option in spelt.values() if list(spelt.values()).count(option) > 1):
        raise ConfigError(f"{file} says {twice[0]} twice")
    return {option.replace("-", "_"): content[key] for key, option in spelt.items()}


def _convert(values: dict[str, object]) -> Options:
    for name in ("listen", "serve", "integers"):
        if isinstance(values.get(name), str | int):
            values[name] = (values[name],)
    for name, allowed in CHOICES.items():
        if name in values and values[name] not in allowed:
            raise ConfigError(
                f"wrong option: {values[name]!r} is no {name.replace('_', '-')}: write {' or '.join(map(str, allowed))}"
            )
    for name in ("key", "tenants", "audit_log"):  # no shell has replaced a `~` in a file or an argument
        if isinstance(value := values.get(name), str):
            values[name] = os.path.expanduser(value)  # noqa: PTH111  (which keeps the string as it is otherwise)
    try:
        return msgspec.convert(values, Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"wrong option: {error} (symbiosis-executor --help says what each one takes)") from None


def default_endpoints() -> tuple[str, ...]:
    """Those in $SYMBIOSIS_ENDPOINT, with spaces or commas between replicas; else this user's socket on this host."""
    if named := os.environ.get("SYMBIOSIS_ENDPOINT", "").replace(",", " ").split():
        return tuple(named)
    folder = runtime_dir()
    check_folder(folder)
    return (f"local://{folder / 'executor.sock'}",)


def runtime_dir() -> Path:
    """A folder of this user for sockets. Whoever uses it checks whose it is (`ownership`): in /tmp, another user may have made it."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK) and why_not_ours(Path(base)) is None:
        return Path(base) / "symbiosis"
    return Path(tempfile.gettempdir()) / f"symbiosis-{os.getuid()}"
