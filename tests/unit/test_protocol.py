"""The wire format: every message comes back as it went out, and no bytes whatever do more than raise `ProtocolError`."""

import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import msgspec.inspect
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from symbiosis.errors import CallError, Code, ProtocolError
from symbiosis.protocol import (
    BODY_SIZE,
    CALL_SIZE,
    DTYPES,
    HEAD_SIZE,
    ITEMSIZE,
    LONGEST_TEXT,
    MAX_CONTROL,
    MAX_DIM,
    MAX_GROUP,
    REPLY_SIZE,
    SEED_BYTES,
    VERSION,
    Beat,
    Bye,
    Call,
    Compose,
    Forget,
    FromClient,
    FromExecutor,
    Grow,
    Grown,
    Hello,
    Layer,
    Limits,
    Op,
    Priority,
    Refusal,
    Register,
    Reply,
    View,
    Welcome,
    decode_call,
    decode_from_client,
    decode_from_executor,
    decode_reply,
    encode_call,
    encode_control,
    encode_reply,
)
from symbiosis.text import shown
from tests import tally
from tests.frames import FILLED, only_used

FRAMES = 100_000
VERSION_AT = 4  # behind the magic

dims = st.integers(0, 2**63 - 1)
shapes = st.lists(dims, max_size=MAX_DIM).map(tuple)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
views = st.integers(0, MAX_DIM).flatmap(
    lambda n: st.builds(View, *[st.lists(dims, min_size=n, max_size=n).map(tuple)] * 2, offset=dims)
)
calls = st.builds(
    Call, st.sampled_from(Op), u32, st.sampled_from(DTYPES), shapes, st.booleans(), st.sampled_from(Priority),
    st.none() | views, u32, st.booleans(), st.lists(u32, max_size=MAX_GROUP - 1).map(tuple), st.booleans(),
)  # fmt: skip
replies = st.builds(Reply, u64, st.sampled_from(Code), st.sampled_from(DTYPES), shapes, u32, u32, u32)
i64, text, flag = st.integers(-(2**63), 2**63 - 1), st.text(max_size=20), st.booleans()
numbers = st.lists(i64, max_size=5).map(tuple)
layers = st.builds(Layer, text, text, st.lists(i64, max_size=4).map(tuple), text, text, flag)
said_by_clients = st.one_of(
    st.builds(Hello, i64, text, st.none() | st.sampled_from(Priority), st.none() | text, flag, st.none() | text),
    st.builds(Grow, i64), st.builds(Beat), st.builds(Bye), st.builds(Compose, i64, numbers, flag),
    st.builds(Forget, numbers, numbers),
)  # fmt: skip
said_by_executors = st.one_of(
    st.builds(
        Welcome, i64, text, st.lists(layers, max_size=3), text, text, st.builds(Limits, i64, i64, i64, i64), flag,
        st.floats(allow_nan=False), text, i64, st.lists(i64, max_size=2).map(tuple), text,
    ),
    st.builds(Refusal, i64, text), st.builds(Grown, i64),
)  # fmt: skip
FROM_CLIENT, FROM_EXECUTOR = get_args(FromClient), get_args(FromExecutor)

CALL = encode_call(Call(Op.PRODUCT, 3, "float32", (2, 64), view=View((8, 8), (8, 1), 0)), seq=7)
REPLY = encode_reply(Reply(7, shape=(2, 64), dtype="float32"))


@given(calls.map(only_used), u64)
def test_calls_come_back(call: Call, seq: int) -> None:
    assert decode_call(encode_call(call, seq)) == (seq, call)


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("name", FILLED)
def test_what_an_op_does_not_use_must_be_empty(op: Op, name: str) -> None:
    call = replace(only_used(Call(op, 0, "float32")), **{name: FILLED[name]})
    if name in op.traits.uses:
        assert decode_call(encode_call(call, 1)) == (1, call)
        return
    with pytest.raises(ProtocolError, match=f"{op.name} does not use {name}: leave it empty") as error:
        decode_call(encode_call(call, 1))
    assert error.value.code is Code.UNKNOWN_OP


def test_the_table_of_what_ops_use_is_this() -> None:
    """The payload, the matrix and the arithmetic follow from these words; who adds one, adds checks of it."""
    assert {op.name: " ".join(sorted(names)) for op in Op for names in [op.traits.uses]} == {
        "FORWARD": "also bias dtype gradient layer seeded shape", "DGRAD": "also dtype layer seeded shape",
        "PRODUCT": "bias columns dtype gradient layer shape view", "LEFT": "columns dtype gradient layer shape view",
        "GROUPED": "dtype gradient groups layer shape view", "LOOKUP": "dtype layer shape", "NORMS": "dtype layer",
        "READ": "dtype layer view", "ECHO": "dtype shape", "STATS": "",
    }  # fmt: skip


def test_groups_of_rows_are_one_or_more() -> None:
    with pytest.raises(ProtocolError, match="one group of rows or more") as error:
        decode_call(encode_call(Call(Op.GROUPED, 0, "float32", (2, 8)), 1))
    assert error.value.code is Code.BAD_SHAPE


@given(replies)
def test_replies_come_back(reply: Reply) -> None:
    assert decode_reply(encode_reply(reply)) == reply


@given(said_by_clients)
def test_what_clients_say_comes_back(message: FromClient) -> None:
    assert decode_from_client(encode_control(message)) == message


@given(said_by_executors)
def test_what_executors_say_comes_back(message: FromExecutor) -> None:
    assert decode_from_executor(encode_control(message)) == message


@pytest.mark.parametrize("message", [*FROM_CLIENT, *FROM_EXECUTOR])
def test_each_end_understands_only_what_the_other_says(message: type) -> None:
    raw = msgspec.msgpack.encode({"type": message.__struct_config__.tag})  # type: ignore[attr-defined]
    decode: Callable = decode_from_executor if message in FROM_CLIENT else decode_from_client
    with pytest.raises(ProtocolError, match="not a control message: Invalid value"):
        decode(raw)


def parts_of(told: Any) -> Iterator[Any]:
    """A type, as msgspec reads it, and those that it is made of."""
    yield told
    inner = (*getattr(told, "types", ()), *getattr(told, "item_types", ()))
    inner += tuple(getattr(told, name) for name in ("item_type", "key_type", "value_type") if hasattr(told, name))
    for one in inner:
        yield from parts_of(one)


def fields_of_all_messages() -> Iterator[tuple[str, Any]]:
    """The fields of all messages, and of the structs within them."""
    waiting, seen = [*FROM_CLIENT, *FROM_EXECUTOR], set[type]()
    while waiting:
        kind = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
            waiting += [part.cls for part in parts_of(field.type) if isinstance(part, msgspec.inspect.StructType)]
            yield f"{kind.__name__}.{field.name}", field.type


OF_ANY_SIZE = (
    msgspec.inspect.StrType, msgspec.inspect.BytesType, msgspec.inspect.ByteArrayType, msgspec.inspect.ListType,
    msgspec.inspect.VarTupleType, msgspec.inspect.SetType, msgspec.inspect.FrozenSetType, msgspec.inspect.DictType,
    msgspec.inspect.AnyType, msgspec.inspect.RawType, msgspec.inspect.ExtType,
)  # fmt: skip


@pytest.mark.parametrize(("name", "told"), fields_of_all_messages())
def test_every_field_of_a_control_message_is_bounded(name: str, told: Any) -> None:
    for part in parts_of(told):
        if isinstance(part, OF_ANY_SIZE):
            assert getattr(part, "max_length", None) is not None, f"{name} may be of any length"


@pytest.mark.parametrize("kind", [*FROM_CLIENT, *FROM_EXECUTOR, Layer, Limits])
def test_fields_that_a_release_does_not_know_are_refused(kind: type) -> None:
    """But for the messages by which programs of different releases find out that they differ."""
    assert kind.__struct_config__.forbid_unknown_fields == (kind not in (Hello, Refusal))  # type: ignore[attr-defined]


def test_a_list_longer_than_a_message_is_refused() -> None:
    call = b"\0" * BODY_SIZE
    decode_from_client(encode_control(Register(1, call, 0, 0, ((0, 0),) * MAX_GROUP)))
    for spoilt in (
        Register(1, call + b"\0", 0, 0), Register(1, call, 0, 0, ((0, 0),) * (MAX_GROUP + 1)),
        Compose(1, (0,) * (MAX_CONTROL + 1)), Forget((0,) * (MAX_CONTROL + 1)), Forget((), (0,) * (MAX_CONTROL + 1)),
        Hello(client="x" * 129), Hello(device="x" * 129), Hello(fingerprint="x" * 129),
    ):  # fmt: skip
        with pytest.raises(ProtocolError, match="of length <="):
            decode_from_client(encode_control(spoilt))
    with pytest.raises(ProtocolError, match="of length <="):
        decode_from_executor(encode_control(Refusal(1, "x" * (LONGEST_TEXT + 1))))


def test_a_refusal_says_as_much_as_fits() -> None:
    refusal = Refusal.of(CallError(Code.LIMIT, "x" * 5000))
    assert decode_from_executor(encode_control(refusal)) == Refusal(Code.LIMIT, "x" * LONGEST_TEXT)
    assert Refusal.of(OSError("gone")) == Refusal(Code.RESOURCE, "gone")


@given(st.sampled_from(Code), text)
def test_a_refusal_is_raised_with_its_code_and_message(code: Code, message: str) -> None:
    refusal = decode_from_executor(encode_control(Refusal(code, message)))
    assert isinstance(refusal, Refusal)
    error = refusal.error()
    assert error.code is code and error.message == shown(message)


def test_times_beyond_the_field_are_cut() -> None:
    late = Reply(1, batch=2**40, wait_us=2**40, compute_us=2**40)
    most = 2**32 - 1
    assert decode_reply(encode_reply(late)) == Reply(1, batch=most, wait_us=most, compute_us=most)


@given(calls)
def test_a_calls_size_is_that_of_its_rows_and_groups(call: Call) -> None:
    count = 1
    for dim in call.shape:
        count *= dim
    rows = SEED_BYTES if call.seeded else count * ITEMSIZE["int64" if call.op is Op.LOOKUP else call.dtype]
    if not call.op.traits.has_payload:
        assert call.nbytes == 0
    elif call.groups:
        assert call.nbytes - 4 * call.groups in range(rows, rows + 8)
        assert (call.nbytes - 4 * call.groups) % 8 == 0
    else:
        assert call.nbytes == rows
    leading = 1
    for dim in call.shape[:-1] or call.shape:
        leading *= dim
    assert call.rows == leading


@pytest.mark.parametrize(
    ("shape", "fits"), [((3, 64), True), ((4, 64), False), ((3, 65), False), ((2**62, 2**62), False)]
)
def test_limits_say_what_fits(shape: tuple[int, ...], fits: bool) -> None:
    limits, call = Limits(max_call_bytes=3 * 64 * 4, max_rows=3), Call(Op.FORWARD, 0, "float32", shape)
    if fits:
        limits.check(call)
        return
    with pytest.raises(CallError, match="send smaller batches, or raise --max-rows / --max-call-bytes") as error:
        limits.check(call)
    assert error.value.code is Code.TOO_LARGE


def test_a_promise_of_2_to_the_40_elements_is_a_number_and_no_memory() -> None:
    """The sizes are Python integers: what exceeds the limits is refused by comparing, and nothing was allocated for it."""
    _, call = decode_call(encode_call(Call(Op.FORWARD, 0, "float64", (2**40, 2**40)), 1))
    assert call.nbytes == 2**83
    assert decode_reply(encode_reply(Reply(1, dtype="float64", shape=(2**40, 2**40)))).nbytes == 2**83


@pytest.mark.parametrize(("decode", "frame"), [(decode_call, CALL), (decode_reply, REPLY)])
def test_another_version_is_refused_with_both_versions_named(decode: Callable, frame: bytes) -> None:
    other = frame[:VERSION_AT] + struct.pack("<H", 4711) + frame[VERSION_AT + 2 :]
    with pytest.raises(ProtocolError, match=rf"version 4711, this side {VERSION}.*same release") as error:
        decode(other)
    assert error.value.code is Code.BAD_VERSION


@pytest.mark.parametrize(("decode", "frame"), [(decode_call, CALL), (decode_reply, REPLY)])
@pytest.mark.parametrize("bad", [lambda f: f[:-1], lambda f: f + b"\0", lambda f: b"", lambda f: b"HTTP" + f[4:]])
def test_truncated_padded_and_foreign_headers_are_refused(decode: Callable, frame: bytes, bad: Callable) -> None:
    decode(frame)
    with pytest.raises(ProtocolError) as error:
        decode(bad(frame))
    assert error.value.code is Code.BAD_FRAME


def codes_of_every_byte(decode: Callable[[bytes], Any], frame: bytes) -> set[Code]:
    """The codes by which a frame is refused when one of its bytes is 0xff."""
    codes = set()
    for position in range(len(frame)):
        try:
            decode(frame[:position] + b"\xff" + frame[position + 1 :])
        except ProtocolError as error:
            codes.add(error.code)
    return codes


def test_every_field_of_a_header_is_checked() -> None:
    expected = {Code.BAD_FRAME, Code.BAD_VERSION, Code.UNKNOWN_OP, Code.BAD_SHAPE}
    assert codes_of_every_byte(decode_call, CALL) == expected
    assert codes_of_every_byte(decode_reply, REPLY) == {Code.BAD_FRAME, Code.BAD_VERSION}


OP, FLAGS, DTYPE, PRIORITY, DIMS, VIEW_DIMS = range(HEAD_SIZE, HEAD_SIZE + 6)


@pytest.mark.parametrize(
    ("decode", "frame", "at", "value", "code"),
    [
        (decode_call, CALL, OP, len(Op), Code.UNKNOWN_OP),
        (decode_call, CALL, FLAGS, 32, Code.BAD_FRAME),
        (decode_call, CALL, DTYPE, len(DTYPES), Code.BAD_FRAME),
        (decode_call, CALL, PRIORITY, len(Priority), Code.BAD_FRAME),
        (decode_call, CALL, DIMS, MAX_DIM + 1, Code.BAD_SHAPE),
        (decode_call, CALL, VIEW_DIMS, MAX_DIM + 1, Code.BAD_SHAPE),
        (decode_call, CALL, CALL_SIZE - 1, 128, Code.BAD_SHAPE),  # an offset of 2^63
        (decode_reply, REPLY, HEAD_SIZE, len(Code), Code.BAD_FRAME),
        (decode_reply, REPLY, HEAD_SIZE + 1, MAX_DIM + 1, Code.BAD_FRAME),
        (decode_reply, REPLY, HEAD_SIZE + 2, len(DTYPES), Code.BAD_FRAME),
        (decode_reply, REPLY, REPLY_SIZE - 1, 128, Code.BAD_FRAME),
    ],
)
def test_the_first_value_beyond_what_a_field_may_be_is_refused(
    decode: Callable, frame: bytes, at: int, value: int, code: Code
) -> None:
    with pytest.raises(ProtocolError) as error:
        decode(frame[:at] + bytes([value]) + frame[at + 1 :])
    assert error.value.code is code


def mutated(frame: bytes, chance: random.Random) -> bytes:
    """The frame with a few bytes changed, cut, put in or doubled; or something that never was a frame."""
    if chance.random() < 0.1:
        return chance.randbytes(chance.choice((0, 1, CALL_SIZE, REPLY_SIZE, chance.randrange(300))))
    raw = bytearray(frame)
    for _ in range(chance.randrange(1, 5)):
        raw[chance.randrange(len(raw))] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
    if chance.random() < 0.2:
        cut = chance.randrange(len(raw))
        raw = chance.choice((raw[:cut], raw[:cut] + chance.randbytes(4) + raw[cut:], raw + raw))
    return bytes(raw)


WELCOME = Welcome(
    1, "f" * 64, [Layer("model.layers.0.mlp.up_proj", "linear", (96, 64), "float32", "d" * 64)] * 3, '{"a": 1}',
    "LlamaForCausalLM", Limits(), False, 5.0, "host:1",
)  # fmt: skip
SEEDS: dict[str, tuple[Callable[[bytes], Any], list[bytes]]] = {
    "call": (
        decode_call,
        [
            CALL,
            encode_call(Call(Op.DGRAD, 1, "float32", (2, 96), also=(2, 3)), 9),
            encode_call(Call(Op.GROUPED, 1, "bfloat16", (5, 8), groups=4), 2**64 - 1),
        ],
    ),
    "reply": (decode_reply, [REPLY, encode_reply(Reply(1, Code.TOO_LARGE, shape=(40,)))]),
    "of a client": (
        decode_from_client,
        [encode_control(m) for m in (Hello(client="pid 1"), Grow(1 << 40), Compose(1, (2, 3)), Beat(), Bye())],
    ),
    "of an executor": (decode_from_executor, [encode_control(m) for m in (WELCOME, Refusal(4, "no"), Grown(1 << 40))]),
}


@pytest.mark.fault
@pytest.mark.parametrize("kind", SEEDS)
@pytest.mark.parametrize("frames", [FRAMES, pytest.param(10 * FRAMES, marks=pytest.mark.soak)])
def test_no_bytes_do_more_than_raise_protocol_error(kind: str, frames: int) -> None:
    decode, seeds = SEEDS[kind]
    chance, refused = random.Random(frames), 0
    for number in range(frames):
        frame = mutated(seeds[number % len(seeds)], chance)
        try:
            message = decode(frame)
        except ProtocolError:
            refused += 1
        else:  # no byte of a call's header is without a meaning
            assert kind != "call" or encode_call(message[1], message[0]) == frame
    tally.done[tally.PARSED] += frames
    assert frames // 10 < refused < frames  # else the frames are all alike, and test nothing


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\xdf\xff\xff\xff\xff\xa4type\xa5hello",  # a map of 2^32 pairs
        b"\x83\xa4type\xa7compose\xa6number\x01\xa5calls\xdd\xff\xff\xff\xff",  # a list of 2^32 calls
        b"\x83\xa4type\xa7welcome\xa7session\x01\xa8manifest\xdd\xff\xff\xff\xff",  # a list of 2^32 layers
        b"\x82\xa4type\xa5hello\xa6client\xdb\xff\xff\xff\xff",  # a string of 2^32 bytes
        b"\x82\xa4type\xa5hello\xa5extra" + b"\x91" * 100_000,  # a list in a list in a list ...
        b"\x82\xa4type\xa5hello\xa6client\xa2\xff\xfe",  # no UTF-8
        b"\x81\xa4type\xa6pickle",
        msgspec.msgpack.encode({"type": "hello", "version": "one"}),
        msgspec.msgpack.encode({"type": "grow", "nbytes": 2**63}) + b"\0",
        msgspec.msgpack.encode({"type": "grow", "nbytes": 1, "more": 1}),
    ],
)
@pytest.mark.parametrize("decode", [decode_from_client, decode_from_executor])
def test_control_bytes_that_are_no_message_are_refused(raw: bytes, decode: Callable) -> None:
    with pytest.raises(ProtocolError, match="not a control message") as error:
        decode(raw)
    assert error.value.code is Code.BAD_FRAME


def test_a_message_of_a_later_release_is_still_understood() -> None:
    """Fields that this release does not know are ignored, so that the version check is reached and can say what to do."""
    hello = msgspec.msgpack.encode({"type": "hello", "version": VERSION + 1, "since_then": [1, 2]})
    assert decode_from_client(hello) == Hello(version=VERSION + 1)
    refusal = msgspec.msgpack.encode({"type": "refusal", "code": Code.BAD_VERSION, "message": "no", "since_then": 1})
    assert decode_from_executor(refusal) == Refusal(Code.BAD_VERSION, "no")
