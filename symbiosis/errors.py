"""The exceptions of Symbiosis and the codes by which they travel.

SymbiosisError
├── ConfigError                 an option, file or pattern is wrong
│   ├── OutdatedPackage         ... a package that is needed is too old
│   └── AdapterError            ... an adapter, which cannot be served as it is
│       ├── UnknownAdapter      ... there is none of this name
│       └── NoAdapterMemory     ... those that are there have all the memory
├── WrapError                   a model cannot be wrapped (nothing was changed)
├── RemoteWeightError           client code touched a weight that lives in the executor
│   ├── WeightRead              ... its values (and the executor does not allow reads)
│   └── WeightWrite             ... to change it
├── ConnectionLost              the connection broke; the session reconnects and resends by itself
│   ├── HandshakeFailed         ... before it was there: the keys do not agree, or nobody let us in
│   └── ExecutorUnavailable     ... and no executor answered within the patience
├── NotShared                   a program's model would be a copy of its own, and `symbiosis run --require` forbids that
├── Busy                        so much waits already that this does not: it may be sent again later
├── PadsUsedUp                  a file of pads has none left for a call
├── OutOfHostMemory             keys and values need more memory than the host has
├── CaptureError                something in a step cannot be part of a CUDA graph
└── CallError                   the executor refused a call; `code` says why
    ├── CallNotTaken            ... of a GPU, before any stream knew of it
    └── ProtocolError           a frame or header that is not one of ours
"""

from enum import IntEnum

from symbiosis.text import LONGEST, shown


class Code(IntEnum):
    """Why a call or a join was refused. The numbers are part of the protocol."""

    OK = 0
    BAD_FRAME = 1
    BAD_VERSION = 2
    UNKNOWN_LAYER = 3
    UNKNOWN_OP = 4
    BAD_SHAPE = 5
    BAD_DTYPE = 6
    BAD_VIEW = 7
    NON_FINITE = 8
    TOO_LARGE = 9
    LIMIT = 10
    READ_DENIED = 11
    NOT_JOINED = 12
    WRONG_MODEL = 13
    DRAINING = 14
    RESOURCE = 15
    INTERNAL = 16
    GROW = 17  # not an error: the reply needs more shared memory
    NOT_ALLOWED = 18
    BUSY = 19  # a tenant has as much under way as it may: the reply says when to try again
    WRONG_ANSWER = 20


class SymbiosisError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(SymbiosisError, ValueError):
    """An option, a configuration file or a pattern is wrong."""


class AdapterError(ConfigError):
    """An adapter cannot be served as it is. What it says is kept, and may have names of the adapter: it is cut."""

    def __init__(self, message: str) -> None:
        super().__init__(message[:LONGEST])


class UnknownAdapter(AdapterError):
    """There is no adapter of this name."""


class NoAdapterMemory(AdapterError):
    """The host's memory for adapters is taken."""


class OutdatedPackage(ConfigError, ImportError):
    """A package that Symbiosis needs is older than what it needs."""


class WrapError(SymbiosisError, ValueError):
    """A model cannot be wrapped; it was left unchanged. `code` is WRONG_MODEL where it is not the executor's."""

    def __init__(self, message: str, code: Code | None = None) -> None:
        super().__init__(message)
        self.code = code


class RemoteWeightError(SymbiosisError, RuntimeError):
    """Client code touched a weight that lives in the executor."""


class NotShared(SymbiosisError):
    """A program under `symbiosis run --require` loads a model that no executor shares with it."""


class Busy(SymbiosisError):
    """So much waits already that there is no room for this. It may be sent again later."""


class PadsUsedUp(SymbiosisError):
    """A file of pads has none left for a call."""


class OutOfHostMemory(SymbiosisError, MemoryError):
    """Keys and values that are kept in the host's memory need more than is free."""


class CaptureError(SymbiosisError, RuntimeError):
    """Something in a step cannot be part of a CUDA graph."""


class WeightRead(RemoteWeightError):
    """The values of a remote weight were needed, and the executor does not allow reads."""


class WeightWrite(RemoteWeightError):
    """Something tried to change a shared weight, or to make it trainable."""


class ConnectionLost(SymbiosisError, ConnectionError):
    """The connection to the executor broke."""


class HandshakeFailed(ConnectionLost):
    """The executor at the endpoint has other keys than the endpoint names, is just ending, or does not answer those who connect."""


class ExecutorUnavailable(ConnectionLost):
    """No executor answered at the endpoint within the session's patience."""


class CallError(SymbiosisError, RuntimeError):
    """The executor refused a call."""

    def __init__(self, code: Code, message: str, retry_s: float = 0.0) -> None:
        super().__init__(f"{message} [{code.name}]")
        self.code = code
        self.message = message
        self.retry_s = retry_s  # after BUSY, the seconds until the call may be made again

    @classmethod
    def told(cls, code: int, text: str, retry_s: float = 0.0) -> "CallError":
        """Make an error of what a peer says. Its code and text may be anything."""
        known = Code(code) if code in list(Code) else Code.INTERNAL
        return cls(known, shown(text), retry_s)

    def __reduce__(self) -> tuple[type, tuple[Code, str, float]]:
        return type(self), (self.code, self.message, self.retry_s)


class CallNotTaken(CallError):
    """The executor refused a GPU's call before any stream knew of it, so nothing is void."""


class ProtocolError(CallError):
    """Bytes that are not a well-formed message of this protocol version."""
