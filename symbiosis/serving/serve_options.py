"""The options of `symbiosis serve`."""

import ipaddress
import math
import re
from typing import Literal

import msgspec

from symbiosis.base.dtypes import check_dtype
from symbiosis.base.hosts import check_hosts
from symbiosis.errors import ConfigError

PORT = 8000
Policy = Literal["fcfs", "abort", "vtc"]  # which waiting request is first; see `symbiosis.serving.scheduler.policy`
SHARE = 0.25  # of the memory that is free, where nothing is said
UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?([KMGT]iB)?", re.IGNORECASE)


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

    model: str | None = None
    served_model_name: str | None = None  # None: as `model`
    executor: str | None = None  # None: one of its own
    adapters: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = PORT
    allowed_hosts: tuple[str, ...] = ()  # besides those that are known anyway; see `hosts_of`
    api_keys: str | None = None
    chat_template: str | None = None  # a file; None: the tokenizer's
    max_batch: int = 64
    max_tenant_batch: int | None = None  # None: half of the batch, if there are keys
    adapters_in_batch: int | None = None
    memory: int | float | str | None = None  # bytes, or a share of what is free; see `size`
    adapter_memory: int | float | str | None = None  # of the host's memory
    max_rank: int = 256
    policy: Policy = "fcfs"
    first_token_s: float = 6.0
    prefill_tokens: int = 512
    dtype: str | None = None
    compile: bool = False
    drain_s: float = 30.0
    max_body_bytes: int = 16 << 20
    max_adapter_bytes: int = 1 << 30
    max_requests: int = 4096
    max_step_s: float = 600.0
    wait_s: float = 60.0  # for an executor that comes up, or is just started again
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        _ = self.memory_size, self.adapter_memory_size  # are checked
        for name in ("max_batch", "max_tenant_batch", "adapters_in_batch", "max_rank", "first_token_s", "prefill_tokens", "drain_s",
                     "max_body_bytes", "max_adapter_bytes", "max_requests", "max_step_s"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < 2**62:
                raise ConfigError(f"{name.replace('_', '-')} must be positive, not {value}")
        if not 0 <= self.wait_s < math.inf:
            raise ConfigError(f"wait-s must not be negative, and is {self.wait_s}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        if self.max_tenant_batch is not None and self.api_keys is None:
            raise ConfigError("max-tenant-batch is for each API key: give --api-keys FILE, too")
        check_dtype(self.dtype)
        check_hosts(self.allowed_hosts)

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
