"""The bytes of Tinker's wire: protobuf, by the descriptor that the package `tinker` brings."""

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from symbiosis.base.sizes import cells
from symbiosis.errors import ConfigError
from symbiosis.server.json_pieces import PLACES
from symbiosis.server.tinker.tinker_messages import (
    Array,
    Pass,
    Passed,
    PlainDatum,
    PromiseOutcome,
    RefusedRequest,
    TinkerRefusal,
)
from symbiosis.serving.request import Token

SDKS = ("0.38.0",)  # releases that are known to work with this server, and whose descriptor it reads
INSTALL = f"pip install 'symbiosis-llm[tinker]', or 'tinker=={SDKS[-1]}'"
MOST_DATA = 1024  # in one request
MOST_BYTES = 5_000_000  # of one request; a single datum may be larger
SPARE_BYTES = 500_000  # what the SDK's estimate may lack
MOST_TARGETS = 1 << 22  # log probabilities of one datum
MOST_FIELDS, SPARE_FIELDS = 64, 4096  # of a body: for each datum, and besides
FEW = 80  # letters of a name, in an error
FILLED_BY_BYTE = 64  # cells of sparse tensors: a small body does not ask for much memory
CUT_OFF = "the body is no ForwardBackwardRequest, or is cut off: {}"
VARINT, LENGTH, FIXED = 0, 2, {1: 8, 5: 4}  # how protobuf writes fields
NO_TOKEN = (0, -99999.0)  # of a table of the most likely tokens
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4  # Tinker's dtypes
WHOLE_INPUTS = {"target_tokens"}
INPUTS = WHOLE_INPUTS | {"weights", "logprobs", "advantages"}


def check_package() -> None:
    """Raise `ConfigError` unless a release of the package `tinker` is installed that this server knows."""
    try:
        version = importlib.metadata.version("tinker")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"--train needs the package tinker for its descriptor of the wire: {INSTALL}") from None
    if version not in SDKS:
        raise ConfigError(f"the package tinker is {version}, and --train knows {', '.join(SDKS)}: {INSTALL}")


def check_sdk(version: str) -> None:
    """Refuse an SDK whose wire may be another.

    >>> check_sdk("0.38.0")
    """
    if version not in SDKS:
        known = " and ".join(SDKS)
        raise TinkerRefusal(
            f"this server knows the Tinker SDK {known}, and yours is {version[:50] or 'nameless'}: pip install 'tinker=={SDKS[-1]}'"
        )


@cache
def messages() -> ModuleType:
    """Return the module of message classes of the package `tinker`. The rest of that package is not imported."""
    check_package()
    package = importlib.util.find_spec("tinker")
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "proto" / "tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location("symbiosis_tinker_public_pb2", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_pass(body: bytes) -> Pass | RefusedRequest:
    """Read the body of forward_backward. Whatever it claims is checked against what is there."""
    from google.protobuf.message import DecodeError

    check_fields(body)
    try:
        told = messages().ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise TinkerRefusal(CUT_OFF.format(error)) from None
    if not told.data:
        raise TinkerRefusal("data is empty: send at least one datum")
    _check_filled(told, len(body))
    try:
        data = [_datum(number, datum) for number, datum in enumerate(told.data)]
        config = _config(told)
    except TinkerRefusal as wrong:
        return RefusedRequest(model_id=told.model_id, seq_id=told.seq_id, refusal=str(wrong))
    return Pass(
        model_id=told.model_id, seq_id=told.seq_id, loss_fn=told.loss_fn, forward_only=told.forward_only, config=config, data=data,
    )  # fmt: skip


def check_fields(body: bytes) -> None:
    """Refuse a body of very many small messages before protobuf makes an object of each, for which all threads would wait. Its fields are walked
    through, with what is in them left alone."""
    request = messages().ForwardBackwardRequest.DESCRIPTOR
    try:
        outer = _fields(body, 0, len(body), request, SPARE_FIELDS + MOST_DATA)
        waiting = [each for each in outer if each[2] is not None]
        data = sum(kind is request.fields_by_name["data"].message_type for _, _, kind in waiting)
        _check_sizes(data, len(body))
        left = SPARE_FIELDS + MOST_FIELDS * data
        while waiting:
            for each in _fields(body, *waiting.pop(), left):
                left -= 1
                waiting += [each] if each[2] is not None else []
    except (IndexError, KeyError):
        raise TinkerRefusal(CUT_OFF.format("a field ends too early, or is of no kind that there is")) from None


def _check_sizes(data: int, nbytes: int) -> None:
    if data > MOST_DATA:
        raise TinkerRefusal(
            f"one request has at most {MOST_DATA} data, and this has {data} or more: send it in several", 413
        )
    if data > 1 and nbytes > MOST_BYTES + SPARE_BYTES:
        raise TinkerRefusal(
            f"one request has at most {MOST_BYTES} bytes, and this has {nbytes}: send it in several", 413
        )


def _fields(body: bytes, at: int, end: int, kind: Any, most: int) -> Iterator[tuple[int, int, Any]]:
    """Yield each field of a message that lies there: from where to where, and the message that it is, None for anything else."""
    inner = _messages_in(kind)
    while at < end:
        if not most:
            raise TinkerRefusal(
                f"the body has too many fields: at most {MOST_FIELDS} for one datum. Send it in several", 413
            )
        most -= 1
        tag, at = _varint(body, at)
        begin, nested = at, None
        if tag & 7 == LENGTH:
            size, begin = _varint(body, at)
            at, nested = begin + size, inner.get(tag >> 3)
        else:
            at = _varint(body, at)[1] if tag & 7 == VARINT else at + FIXED[tag & 7]
        yield begin, at, nested
    if at != end:
        raise IndexError


@cache
def _messages_in(kind: Any) -> dict[int, Any]:
    """Return which fields of a message are messages, by their numbers."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where it ends."""
    value = body[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    for shift in range(7, 70, 7):
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError


def _check_filled(told: Any, nbytes: int) -> None:
    """Refuse a body whose sparse tensors are far larger than it is, before any of them is filled."""
    tensors = [
        tensor for datum in told.data for tensor in datum.loss_fn_inputs.values() if tensor.HasField("sparse_csr")
    ]
    filled = sum(cells(tensor.shape, MOST_TARGETS) or 0 for tensor in tensors)  # what is too large is refused by itself
    most = min(MOST_TARGETS, FILLED_BY_BYTE * nbytes)
    if filled > most:
        raise TinkerRefusal(
            f"its sparse tensors have {filled} cells, and those of {nbytes} bytes have at most {most}: send fewer columns, or fewer data",
            413,
        )


def _config(told: Any) -> dict[str, float]:
    found = dict(told.loss_fn_config)
    for name, value in told.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise TinkerRefusal(f"loss_fn_config: {name[:FEW]!r} is a text, and the losses here have numbers")
        found[name] = value.number
    return found


def _datum(number: int, told: Any) -> PlainDatum:
    try:
        tokens = b"".join(_tokens(chunk) for chunk in told.model_input)
        if unknown := sorted(set(told.loss_fn_inputs) - INPUTS):
            raise TinkerRefusal(
                f"nothing is known of the loss's input {unknown[0][:FEW]!r}: there are {', '.join(sorted(INPUTS))}"
            )
        inputs = {name: _array(name, tensor, len(tokens) // 4) for name, tensor in told.loss_fn_inputs.items()}
        if "target_tokens" not in inputs:
            raise TinkerRefusal("it lacks target_tokens")
    except TinkerRefusal as refusal:
        raise TinkerRefusal(f"datum {number}: {refusal}", refusal.status) from None
    return PlainDatum(tokens, inputs)


def _tokens(chunk: Any) -> bytes:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise TinkerRefusal(f"it has a chunk of the kind {kind}: this model reads text only")
    if len(chunk.encoded_text.tokens) % 4:
        raise TinkerRefusal("its tokens are cut off: they are int32")
    return bytes(chunk.encoded_text.tokens)


def _array(name: str, tensor: Any, tokens: int) -> Array:
    """Return a tensor's numbers, as float32 or int64. One that is sparse is filled with zeros."""
    kind = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32}.get(tensor.dtype)
    if kind is None:
        raise TinkerRefusal(f"{name} has the dtype {tensor.dtype}: they are float32 and int64")
    if len(tensor.shape) > 2:
        raise TinkerRefusal(f"{name} has {len(tensor.shape)} dimensions: it has one or two")
    shape = tuple(tensor.shape)
    if cells(shape) is None:
        raise TinkerRefusal(f"{name} has the shape {list(shape)}, which no tensor has")
    if tensor.HasField("sparse_csr"):
        numbers = _filled(name, tensor.sparse_csr, np.dtype(kind), shape, tokens)
    else:
        numbers = _numbers(name, tensor.dense, np.dtype(kind))
        shape = shape or numbers.shape
        if cells(shape) != numbers.size:
            raise TinkerRefusal(f"{name} has {numbers.size} numbers, and the shape {list(shape)}")
    if shape[0] != tokens:
        raise TinkerRefusal(f"{name} is for {shape[0]} tokens, and there are {tokens}")
    if numbers.size > MOST_TARGETS:
        raise TinkerRefusal(f"{name} has {numbers.size} numbers: at most {MOST_TARGETS} for one datum", 413)
    whole = name in WHOLE_INPUTS
    if whole and kind is np.float32:
        raise TinkerRefusal(f"{name} are tokens, and these are float32")
    return Array(numbers.astype(np.int64 if whole else np.float32, copy=False).tobytes(), shape, whole)


def _filled(name: str, csr: Any, kind: np.dtype[Any], shape: tuple[int, ...], tokens: int) -> NDArray[Any]:
    if len(shape) != 2 or shape[0] != tokens or cells(shape, MOST_TARGETS) is None:
        raise TinkerRefusal(
            f"{name} is sparse, in the shape {list(shape)}: it has a row for each of {tokens} tokens, and {MOST_TARGETS} cells at most"
        )
    values = _numbers(name, csr.values, kind)
    ends = _numbers(name, csr.crow_indices, np.dtype(np.int64))
    columns = _numbers(name, csr.col_indices, np.dtype(np.int64))
    if ends.size != shape[0] + 1 or ends[0] != 0 or ends[-1] != values.size or (np.diff(ends) < 0).any():
        raise TinkerRefusal(
            f"{name} is sparse, and its crow_indices are not those of {shape[0]} rows with {values.size} values"
        )
    if columns.size != values.size or (columns < 0).any() or (columns >= shape[1]).any():
        raise TinkerRefusal(
            f"{name} is sparse, and its col_indices are not {values.size} numbers from 0 to {shape[1] - 1}"
        )
    rows = np.repeat(np.arange(shape[0]), np.diff(ends))
    if np.unique(rows * shape[1] + columns).size != values.size:
        raise TinkerRefusal(f"{name} is sparse, and names a cell twice")
    dense = np.zeros(shape, kind)
    dense[rows, columns] = values
    return dense


def _numbers(name: str, data: bytes, kind: np.dtype[Any]) -> NDArray[Any]:
    if len(data) % kind.itemsize:
        raise TinkerRefusal(f"{name} is cut off: {len(data)} bytes are no numbers of {kind.name}")
    return np.frombuffer(data, kind)


def pass_bytes(passed: Passed) -> bytes:
    """Return a ForwardBackwardOutput. Data whose rows have other numbers of targets than those before are in a record of their own."""
    out = messages().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    data, at = memoryview(passed.logprobs), 0
    for shapes in _alike(passed.shapes):
        sizes = [4 * prod(shape) for shape in shapes]
        record = out.loss_fn_outputs.add(num_datums=len(shapes))
        field = record.fields["logprobs"]
        field.data, field.dtype = bytes(data[at : at + sum(sizes)]), FLOAT32
        field.offsets = np.cumsum([0, *sizes]).astype(np.int64).tobytes()
        field.trailing_shape.extend(shapes[0][1:])
        at += sum(sizes)
    out.metrics.update({"loss:sum": passed.loss, **passed.metrics})
    return bytes(out.SerializeToString())


def _alike(shapes: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    runs: list[list[tuple[int, ...]]] = []
    for shape in shapes:
        if not runs or runs[-1][0][1:] != shape[1:]:
            runs.append([])
        runs[-1].append(shape)
    return runs


def outcome_bytes(outcome: PromiseOutcome) -> tuple[bytes, str]:
    """Return what retrieve_future answers, and its media type."""
    if outcome.passed is not None:
        return pass_bytes(outcome.passed), "application/x-protobuf"
    if outcome.error:
        return msgspec.json.encode({"error": outcome.error, "category": outcome.category}), "application/json"
    return msgspec.json.encode(outcome.body), "application/json"


def sample_bytes(
    sequences: Sequence[tuple[str, Sequence[Token]]],
    prompt: Iterable[Token] | None,
    prompt_top: int = 0,
    sample_top: int = 0,
    untold: int = 1,
    cached: int = 0,
) -> bytes:
    """Return a SampleResponse. It is made of some hundred tokens at a time, so that in a thread it keeps no other one from running.

    Args:
        sequences: Why each ended, and its tokens.
        prompt: The prompt's tokens with log probabilities; None if they are not wanted.
        prompt_top: Of so many of the most likely tokens at each place of the prompt, too.
        sample_top: ... and of each sample.
        untold: So many tokens at the prompt's beginning are told without: the first has none.
    """
    kinds = messages()
    out = kinds.SampleResponse(prompt_cache_hit_tokens=cached)
    for finish, tokens in sequences:
        reason = kinds.STOP_REASON_STOP if finish == "stop" else kinds.STOP_REASON_LENGTH
        one = out.sequences.add(stop_reason=reason)
        table = one.topk_sampled_logprobs if sample_top else None
        one.tokens, one.logprobs = _written(tokens, table, sample_top)
    if prompt is not None:
        told = (Token(each.id) if number < untold else each for number, each in enumerate(prompt))
        _, out.prompt_logprobs = _written(told, out.topk_prompt_logprobs if prompt_top else None, prompt_top)
    return bytes(out.SerializeToString())


def _written(tokens: Iterable[Token], table: Any, k: int) -> tuple[bytes, bytes]:
    """Return tokens and their log probabilities as bytes, and write the table of the most likely ones, if there is one."""
    remaining = iter(tokens)
    ids, logprobs, top_ids, top_logprobs = bytearray(), bytearray(), bytearray(), bytearray()
    while piece := list(islice(remaining, PLACES)):
        ids += np.array([each.id for each in piece], np.int32).tobytes()
        logprobs += np.array([np.nan if each.logprob is None else each.logprob for each in piece], np.float32).tobytes()
        if table is not None:
            rows = [[*each.top[:k], *[NO_TOKEN] * (k - len(each.top))] for each in piece]
            top_ids += np.array([[token for token, _ in row] for row in rows], np.int32).tobytes()
            top_logprobs += np.array([[logprob for _, logprob in row] for row in rows], np.float32).tobytes()
    if table is not None:
        table.token_ids, table.logprobs = bytes(top_ids), bytes(top_logprobs)
        table.k, table.length = k, len(ids) // 4
    return bytes(ids), bytes(logprobs)
