"""The options of `symbiosis serve`."""

import ipaddress
import math
import re
from typing import Annotated, Literal

import msgspec
from typing_extensions import Doc

from symbiosis.base.devices import gpus_of
from symbiosis.base.dtypes import check_dtype
from symbiosis.base.hosts import check_hosts
from symbiosis.base.key_lines import FORMAT
from symbiosis.errors import ConfigError
from symbiosis.serving.speculation.speculate_rule import SpeculateRule

PORT = 8000
Policy = Literal["fcfs", "abort", "vtc"]  # which waiting request is first; see `symbiosis.serving.scheduler.policy`
ToolFormat = Literal["hermes", "llama3_json", "mistral", "pythonic"]
SHARE = 0.25  # of the memory that is free, where nothing is said
UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
NAME = re.compile(r"\w[\w.-]{0,127}")
SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?([KMGT]iB)?", re.IGNORECASE)
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
ROOT_PATH = re.compile(r"(/[\w.~-]+)+")


def listed(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return what was given one by one, or, as vLLM takes it, as a JSON list.

    >>> listed(("a", '["b", "c"]'))
    ('a', 'b', 'c')
    """
    found: list[str] = []
    for each in given:
        try:
            found += msgspec.json.decode(each, type=list[str]) if each.lstrip().startswith("[") else [each]
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{each!r:.200} is no JSON list of texts: {error}") from None
    return tuple(found)


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter, as vLLM's --lora-modules takes it."""

    name: str
    path: str
    base_model_name: str | None = None  # which vLLM shows as its parent; here that is always the base


def lora_modules(given: tuple[str, ...]) -> list[LoraModule]:
    """Return the adapters that --lora-modules names.

    >>> [(each.name, each.path) for each in lora_modules(("a=/x", '{"name": "b", "path": "/y"}'))]
    [('a', '/x'), ('b', '/y')]
    """
    found: list[LoraModule] = []
    for each in given:
        try:
            if each.lstrip().startswith("["):
                found += msgspec.json.decode(each, type=list[LoraModule])
            elif each.lstrip().startswith("{"):
                found.append(msgspec.json.decode(each, type=LoraModule))
            else:
                name, equals, path = each.partition("=")
                if not (name and equals and path):
                    raise ConfigError(f"lora-modules: {each!r:.200} is not NAME=PATH, and not JSON")
                found.append(LoraModule(name, path))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"lora-modules: {each!r:.200}: {error}") from None
    return found


def size(name: str, value: int | float | str) -> int | float:
    """Return bytes, or, below 1, a share of what is free.

    >>> size("memory", "1.5GiB"), size("memory", 1 << 20), size("memory", "0.25")
    (1610612736, 1048576, 0.25)
    """
    found = SIZE.fullmatch(str(value))
    number = float(found[1]) * UNITS[(found[2] or "").lower()] if found else 0.0
    if not 0 < number < 2**62:
        raise ConfigError(
            f"{name} is a size such as 8GiB, a number of bytes, or a share of what is free such as 0.5, not {value}"
        )
    return number if number < 1 else int(number)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of `symbiosis serve`, by their long names.

    >>> ServeOptions(model="demo").is_for_this_machine
    True
    """

    # fmt: off
    model: Annotated[str | None, Doc("A directory, a hub id, or `demo`. Without it, --config must name one.")] = None
    served_model_name: Annotated[str | None, Doc("What clients call MODEL. Default: MODEL, as it is given here.")] = None
    executor: Annotated[str | None, Doc(
        "The executor that holds MODEL. Default: one is started, which trainers may use, too."), "URL"] = None
    adapters: Annotated[tuple[str, ...], Doc(
        "A folder of adapters, each in a folder of its name, or one adapter. Repeatable."), "DIR | NAME=PATH"] = ()
    lora_modules: Annotated[tuple[str, ...], Doc(
        'One adapter, as vLLM takes it: NAME=PATH, or {"name": NAME, "path": PATH}. Repeatable, or a JSON list.'), "NAME=PATH | JSON"] = ()
    train: Annotated[bool, Doc("Train adapters, too: Tinker's API at the same address. Needs the extra [tinker].")] = False
    checkpoints: Annotated[str | None, Doc(
        "With --train, where checkpoints of all clients lie. Default: ~/.local/state/symbiosis/checkpoints."), "DIR"] = None
    server_name: Annotated[str | None, Doc(
        "The server's name among several, as a cluster gives it: ids tell it. With --train, servers that share --checkpoints need one each.")] = None
    host: Annotated[str, Doc("Where to listen. Default: 127.0.0.1, which only this machine reaches.")] = "127.0.0.1"
    port: Annotated[int, Doc("Default: 8000. 0: any that is free.")] = PORT
    allowed_hosts: Annotated[tuple[str, ...], Doc(
        "A name by which clients ask for the server, such as that of a proxy; *.DOMAIN: all of a domain; *: any. Repeatable. Default: "
        "this host's name, addresses and, with --api-keys, any."), "NAME"] = ()
    allowed_origins: Annotated[tuple[str, ...], Doc(
        "An origin whose pages browsers let use the server (CORS), such as https://example.org; *: any. Repeatable, or a JSON list. Default: "
        "none."), "ORIGIN"] = ()
    allowed_methods: Annotated[tuple[str, ...], Doc("With --allowed-origins, a method that they may use. Default: any."), "METHOD"] = ()
    allowed_headers: Annotated[tuple[str, ...], Doc("With --allowed-origins, a header that they may send. Default: any."), "HEADER"] = ()
    allow_credentials: Annotated[bool, Doc("With --allowed-origins, whether browsers send cookies along.")] = False
    root_path: Annotated[str | None, Doc("What a proxy in front puts before each path, such as /llm."), "PATH"] = None
    api_keys: Annotated[str | None, Doc(
        f"Lines of `{FORMAT}`; read again when it changes."), "FILE"] = None
    chat_template: Annotated[str | None, Doc("Jinja template that makes a prompt of a chat. Default: the tokenizer's."), "FILE"] = None
    pooling: Annotated[Literal["last", "mean"] | None, Doc(
        "What vectors of texts are made of: the last hidden state of the last token, or the mean of those of all. Default: what the "
        "checkpoint's 1_Pooling/config.json says, else last.")] = None
    tool_parser: Annotated[ToolFormat | None, Doc(
        "In which format the model calls tools: hermes (Qwen, too), llama3_json, mistral or pythonic. Default: what the chat template tells.")] = None
    max_batch: Annotated[int, Doc("Maximum sequences in one step. Default: 64.")] = 64
    max_tenant_batch: Annotated[int | None, Doc(
        "Maximum sequences of one API key in one step, while others wait. Default: half of --max-batch.")] = None
    adapters_in_batch: Annotated[int | None, Doc("Maximum adapters in one step. Default: no limit.")] = None
    memory: Annotated[int | float | str | None, Doc(
        "Memory for keys, values and adapters: 8GiB, or a share of what is free, such as 0.5. Default: 0.25."), "SIZE"] = None
    adapter_memory: Annotated[int | float | str | None, Doc(
        "The host's memory for adapters, in the same way. Default: 0.25."), "SIZE"] = None
    max_rank: Annotated[int, Doc("Largest rank of an adapter. Default: 256.")] = 256
    policy: Annotated[Policy, Doc(
        "fcfs (default), abort (what can no longer begin in time gives way) or vtc (fair shares for API keys).")] = "fcfs"
    first_token_s: Annotated[float, Doc("With --policy abort, the seconds within which a first token must come. Default: 6.")] = 6.0
    prefill_tokens: Annotated[int, Doc("Maximum tokens of prompts in one step. Default: 512.")] = 512
    dtype: Annotated[str | None, Doc(
        "dtype of the executor that is started: float32, bfloat16, ... Default: that of the checkpoint.")] = None
    quantize: Annotated[Literal["int8", "fp8", "nf4"] | None, Doc(
        "Have the executor that is started hold a float checkpoint's weights in 8 or 4 bits. Default: as the checkpoint has them.")] = None
    devices: Annotated[str | None, Doc(
        "Divide the model over several devices, with a process (a rank) on each, which compute every layer together: cpu, with --ranks, or GPUs, "
        "such as 0-3 or 0,2. --memory is that of each; a share of a CPU's is that of all.")] = None
    ranks: Annotated[int | None, Doc("With --devices cpu: how many ranks.")] = None
    speculate: Annotated[str | None, Doc(
        "Draft so many tokens ahead, and check them in one step; texts stay the same. ngram:N looks for them in the text itself, draft:CHECKPOINT:N asks "
        "a smaller model of the same tokens. On a CPU only. Default: none."), "ngram:N | draft:CHECKPOINT:N"] = None
    bitwise: Annotated[bool, Doc(
        "Compute each token by itself: its log probability does not depend on what else runs and, with --train, is bit for bit the one that training "
        "computes. Slower. On a CPU only; adapters that are trained are LoRA.")] = False
    compile: Annotated[bool, Doc("Compile the model's layers, on a GPU: faster steps, after a start of up to a minute more.")] = False
    drain_s: Annotated[float, Doc(
        "On SIGTERM or ctrl-C, how long requests under way may take to finish; a second one ends the server at once. Default: 30.")] = 30.0
    max_body_bytes: Annotated[int, Doc("Largest body of a request. Default: 16 MiB.")] = 16 << 20
    max_adapter_bytes: Annotated[int, Doc(
        "Largest adapter that is sent, and largest file of one that lies here, unless --adapter-memory is more. Default: 1 GiB.")] = 1 << 30
    max_requests: Annotated[int, Doc(
        "Maximum requests under way, including those that wait; one key alone may have half of them. Default: 4096.")] = 4096
    max_step_s: Annotated[float, Doc("A step that takes longer counts as hung: the server ends with status 1. Default: 600.")] = 600.0
    wait_s: Annotated[float | None, Doc("How long the executor at --executor may take to come up. Default: $SYMBIOSIS_PATIENCE_S, else 60.")] = None
    log_format: Annotated[Literal["text", "json"], Doc("text (default) or json, of all processes.")] = "text"
    # fmt: on

    def __post_init__(self) -> None:
        _ = self.memory_size, self.adapter_memory_size, lora_modules(self.lora_modules)  # are checked
        for name in ("max_batch", "max_tenant_batch", "adapters_in_batch", "max_rank", "first_token_s", "prefill_tokens", "drain_s",
                     "max_body_bytes", "max_adapter_bytes", "max_requests", "max_step_s"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < 2**62:
                raise ConfigError(f"{name.replace('_', '-')} must be positive, not {value}")
        if self.wait_s is not None and not 0 <= self.wait_s < math.inf:
            raise ConfigError(f"wait-s must not be negative, and is {self.wait_s}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        if self.max_tenant_batch is not None and self.api_keys is None:
            raise ConfigError("max-tenant-batch is for each API key: give --api-keys FILE, too")
        if self.checkpoints is not None and not self.train:
            raise ConfigError("checkpoints goes with train")
        self._check_pages()
        if self.server_name is not None and not NAME.fullmatch(self.server_name):
            raise ConfigError(
                f"server-name has letters, digits, dots, hyphens and underscores, not {self.server_name!r:.80}"
            )
        self._check_devices()
        if self.bitwise and (self.devices is not None or self.compile):
            raise ConfigError(
                f"bitwise goes without {'devices' if self.devices else 'compile'}: sums would have another order"
            )
        if self.speculate is not None:
            SpeculateRule.from_text(self.speculate, len(self.places))
        check_dtype(self.dtype)
        check_hosts(self.allowed_hosts)

    @property
    def predicts(self) -> bool:
        """Whether drafts come from a chat's prediction, too, as those by n-grams do."""
        return self.speculate is not None and SpeculateRule.from_text(self.speculate).draft is None

    def _check_pages(self) -> None:
        """Check what is told of pages of other sites, and of a proxy."""
        origins = listed(self.allowed_origins)
        if wrong := [each for each in origins if each != "*" and not ORIGIN.fullmatch(each)]:
            raise ConfigError(
                f"allowed-origins: {wrong[0]!r:.200} is no origin, such as https://example.org, and not *"
            )
        if not origins and (self.allowed_methods or self.allowed_headers or self.allow_credentials):
            raise ConfigError("allowed-methods, allowed-headers and allow-credentials go with allowed-origins")
        if "*" in origins and self.allow_credentials:
            raise ConfigError(
                "allow-credentials goes with origins by name: any page could use the cookies of its visitors"
            )
        if self.root_path is not None and not ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root-path begins with / and does not end so, such as /llm, and is {self.root_path!r:.200}"
            )

    def _check_devices(self) -> None:
        if self.ranks is not None and self.devices != "cpu":
            raise ConfigError(
                "ranks is how many there are on a CPU: it goes with --devices cpu. On GPUs there is one on each"
            )
        if self.devices is None:
            return
        if self.quantize:
            raise ConfigError("quantize goes with one device: weights that are divided over several are not packed yet")
        if len(self.places) < 2:
            raise ConfigError(
                f"devices {self.devices}: a model is divided over two or more: name several GPUs, or cpu with --ranks 2 or more"
            )
        if self.train and self.devices != "cpu":
            raise ConfigError(
                "train goes with one device, or with --devices cpu: no trainer computes on GPUs that share a model's layers"
            )

    @property
    def places(self) -> tuple[str, ...]:
        """The device of each rank, if the model is divided.

        >>> ServeOptions(devices="0-1").places, ServeOptions(devices="cpu", ranks=2).places
        (('cuda:0', 'cuda:1'), ('cpu', 'cpu'))
        """
        if self.devices == "cpu":
            return ("cpu",) * (self.ranks or 1)
        return tuple(f"cuda:{number}" for number in gpus_of(self.devices)) if self.devices else ()

    @property
    def memory_size(self) -> int | float | None:
        return None if self.memory is None else size("memory", self.memory)

    @property
    def adapter_memory_size(self) -> int | float | None:
        return None if self.adapter_memory is None else size("adapter-memory", self.adapter_memory)

    @property
    def of_tenant(self) -> int | None:
        """How many sequences of one API key run in a step while others wait.

        >>> ServeOptions(api_keys="keys", max_batch=64).of_tenant
        32
        """
        return max(1, self.max_batch // 2) if self.max_tenant_batch is None and self.api_keys else self.max_tenant_batch

    @property
    def is_for_this_machine(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
