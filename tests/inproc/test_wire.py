"""What goes over the wire has a number, which rises when it changes; and programs of two builds say which they are."""

import enum
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from symbiosis import protocol
from symbiosis.build import build
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code
from symbiosis.protocol import VERSION, Call, Hello, Op, Priority, Refusal, Reply, View, Welcome, decode_from_executor
from symbiosis.transport import connect
from symbiosis.transport.cuda import words
from symbiosis.transport.local import segment, shared_page
from symbiosis.transport.local.packed_file import FileEntry
from symbiosis.transport.nccl import driver as nccl
from symbiosis.transport.reply_checks import accepted
from tests.conftest import tiny_llama
from tests.fault.test_hostile_executor import Operator

# The digest of what goes over the wire in each version. A version that was ever released stays as it is here.
DIGESTS = {14: "00c0f0cf8ea292f0", 15: "92f4e5fe8406a639", 16: "4425d31999e5e1b8"}
HOW = (
    "what goes over the wire has changed: raise VERSION in symbiosis/protocol/ops.py to the next number that is not in DIGESTS, so that "
    "programs of other builds are refused by name, and add it there with the digest {}"
)


def described(kind: inspect.Type, seen: dict[str, Any]) -> object:
    """What of a type decides what its bytes are. A struct is described once, in `seen`, under its tag or its fields' names."""
    if isinstance(kind, inspect.StructType):
        name = f"{kind.tag}:{','.join(field.encode_name for field in kind.fields)}"
        if name not in seen:
            seen[name] = None
            seen[name] = [kind.array_like, kind.forbid_unknown_fields, kind.tag_field] + [
                [field.encode_name, described(field.type, seen), field.required, repr(field.default)]
                for field in kind.fields
            ]
        return name
    if isinstance(kind, inspect.EnumType):
        return sorted(member.value for member in kind.cls)
    parts: list[object] = [type(kind).__name__]
    for name in kind.__struct_fields__:
        value = getattr(kind, name)
        if isinstance(value, inspect.Type):
            parts.append([name, described(value, seen)])
        elif isinstance(value, tuple) and value and isinstance(value[0], inspect.Type):
            parts.append([name, [described(one, seen) for one in value]])
        elif isinstance(value, int | str | float | tuple):
            parts.append([name, value])
    return parts


def numbers(kind: type[enum.IntEnum]) -> dict[str, int]:
    return {member.name: int(member) for member in kind}


def constants(module: Any) -> dict[str, object]:
    """The numbers of a module that says where something lies."""
    return {name: value for name, value in sorted(vars(module).items()) if name.isupper() and isinstance(value, int)}


def wire() -> str:
    """The digest of all that a client and an executor must agree on."""
    seen: dict[str, Any] = {}
    unions = [
        described(inspect.type_info(kind), seen) for kind in (protocol.FromClient, protocol.FromExecutor, FileEntry)
    ]
    calls = [
        Call(Op.FORWARD, 3, "float32", (2, 64), bias=True, also=(4, 5)),
        Call(Op.PRODUCT, 1, "bfloat16", (7, 5), view=View((5, 2), (1, 9), 3), priority=Priority.TRAIN, gradient=True),
    ]
    frames = [protocol.encode_call(call, 7)[8:].hex() for call in calls]
    frames.append(protocol.encode_reply(Reply(7, Code.BUSY, "uint8", (4,), 2, 3, 4))[8:].hex())
    layout = {
        "segment": {name: value for name, value in constants(segment).items() if name.endswith("_AT")},
        "page": [constants(shared_page), shared_page.FIGURES.format],
        "words": constants(words),
        "nccl": [nccl.UNIQUE_BYTES, nccl.shown(b"token").hex()],
    }
    tables = [numbers(Op), numbers(Code), numbers(Priority), list(protocol.DTYPES)]
    told = msgspec.json.encode([unions, seen, frames, layout, tables], order="deterministic")
    return hashlib.sha256(told).hexdigest()[:16]


def test_the_version_rises_with_what_goes_over_the_wire() -> None:
    assert max(DIGESTS) == VERSION and wire() == DIGESTS[VERSION], HOW.format(wire())


def test_the_digest_would_notice_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = wire()
    monkeypatch.setattr(segment, "REPLY_AT", 512)
    assert wire() != before
    monkeypatch.undo()
    later = msgspec.defstruct("Beat", [("urgent", bool, False)], tag="beat", frozen=True)
    monkeypatch.setattr(protocol, "FromClient", later | Hello)
    assert wire() != before


# ---------------------------------------------------------------- who differs


def test_an_executor_says_who_differs(serve: Callable) -> None:
    executor = serve(tiny_llama())
    for told in ("0.0.9+gabc", ""):
        with pytest.raises(CallError) as error:
            connect(executor.endpoint, Hello(version=VERSION - 1, build=told), 5.0)
        assert error.value.code is Code.BAD_VERSION
        for part in (told or "another release", build(), f"protocol {VERSION - 1}", f"protocol {VERSION}"):
            assert part in error.value.message


def test_a_client_says_who_it_is_where_an_older_executor_does_not() -> None:
    old = Refusal(Code.BAD_VERSION, f"this executor speaks protocol version 13, the client {VERSION}")
    with pytest.raises(CallError) as error:
        accepted(old, "local:///x.sock", Hello(build=build()))
    assert error.value.code is Code.BAD_VERSION and f"the client is symbiosis {build()}" in error.value.message


@pytest.mark.parametrize("other", ["0.0.9+gabc", "", "\x1b[2J"])
def test_a_welcome_that_this_build_does_not_know_tells_whose_it_is(other: str) -> None:
    raw = msgspec.msgpack.encode({"type": "welcome", "session": 1, "since_then": [1], "build": other})
    with pytest.raises(CallError) as error:
        decode_from_executor(raw)
    assert error.value.code is Code.BAD_VERSION and build() in error.value.message and "\x1b" not in str(error.value)
    with Operator(raw, lambda seq, call: []) as operator, pytest.raises(CallError, match="BAD_VERSION"):
        _ = Session(operator.url).welcome
    mine = msgspec.msgpack.encode({"type": "welcome", "session": "x", "build": build()})
    with pytest.raises(CallError, match="BAD_FRAME"):
        decode_from_executor(mine)


def test_both_sides_are_told_of(serve: Callable) -> None:
    session = Session(serve(tiny_llama()).endpoint)
    told: Welcome = session.welcome
    assert told.build == build() == session._hello().build and told.gpu == ""
    session.close()
