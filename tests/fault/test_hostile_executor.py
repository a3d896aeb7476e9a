"""Executors that mean harm: what a client takes from one is a list of what is allowed, and everything else is refused by name."""

import fcntl
import json
import os
import resource
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
import zmq
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import DebertaV2Config, DebertaV2ForMaskedLM, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

import symbiosis
from symbiosis.cli import top
from symbiosis.client.connection import reconnect
from symbiosis.client.connection.lifetime import beat_every
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code, ConfigError, ProtocolError, SymbiosisError, WrapError
from symbiosis.executor.model.store import Store
from symbiosis.protocol import (
    LONGEST_BEAT_S,
    SHORTEST_BEAT_S,
    Call,
    Grown,
    Hello,
    Layer,
    Limits,
    Op,
    Refusal,
    Reply,
    Welcome,
    decode_call,
    decode_from_client,
    encode_control,
    encode_reply,
)
from symbiosis.protocol.endpoints import of_rank
from symbiosis.text import shown
from symbiosis.transport import connect
from symbiosis.transport.fingerprint import model_fingerprint
from symbiosis.transport.local import peer as local
from symbiosis.transport.local.segment import Slab
from symbiosis.transport.reply_checks import Answers
from symbiosis.transport.tcp import peer as zeromq
from tests.conftest import MODELS, tiny_llama
from tests.frames import only_used
from tests.processes import WAIT_S, Client, until

CLEAR = "\x1b[2J"  # what a terminal obeys
MIB = 1 << 20
LAYER = "model.layers.0.self_attn.q_proj"


def number_of(session: Session, name: str) -> int:
    return next(index for index, layer in enumerate(session.manifest) if layer.name == name)


def welcome_of(model: nn.Module, **changes: Any) -> Welcome:
    """What a true executor would say, but for the changes."""
    store = Store(model)
    told = {
        "session": 1, "manifest": store.manifest, "config": store.config_json, "model_class": store.model_class,
        "limits": Limits(), "allow_read": False, "heartbeat_s": 5.0, "executor": "host:1", **changes,
    }  # fmt: skip
    return Welcome(**{"fingerprint": model_fingerprint(told["config"], told["manifest"]), **told})


def doctor(executor: symbiosis.Executor, **changes: Any) -> symbiosis.Executor:
    """A real executor that tells something else of its model, consistently."""
    store = executor.server.store
    for name, value in changes.items():
        setattr(store, name, value)
    store.fingerprint = model_fingerprint(store.config_json, store.manifest)
    return executor


class Operator:
    """Who answers at tcp:// or local:// with whatever it likes: a join by `welcome`, a call by what `answer` makes of its number."""

    def __init__(self, welcome: bytes, answer: Callable[[int, Call], list[bytes]], place: str = "") -> None:
        self._welcome, self._answer, self._ends = welcome, answer, False
        self._socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind(f"tcp://{place or '127.0.0.1:*'}")
        self.url = self._socket.last_endpoint.decode()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends:
            if not self._socket.poll(20):
                continue
            identity, head, *_ = self._socket.recv_multipart()
            if head[:4] == b"SYMc":
                self._socket.send_multipart([identity, *self._answer(*decode_call(head))])
            elif isinstance(decode_from_client(head), Hello):
                self._socket.send_multipart([identity, self._welcome])
        self._socket.close(linger=0)

    def __enter__(self) -> "Operator":
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---------------------------------------------------------------- texts


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert shown(f"alice{CLEAR}") == "alice?[2J"
    assert shown("a\r\nb\u202ec\u2028d\x9bm\x00") == "a??b?c?d?m?"
    assert shown("Zoë 日本") == "Zoë 日本"
    assert len(shown("x" * 10**6)) == 1024


def test_names_of_clients_reach_no_terminal(llama: nn.Module, serve: Callable, url: str, caplog: Any) -> None:
    executor = serve(llama, listen=[url])
    with caplog.at_level("INFO", "symbiosis"):
        client = connect(executor.endpoint, Hello(client=f"me{CLEAR}\u202e"), WAIT_S)
        observer = Session(executor.endpoint, observer=True)
        now = top.snapshot(observer)
        client.close()
        observer.close()
    assert [s.client for s in now.sessions if not s.observer] == ["me?[2J?"]
    assert all("\x1b" not in str(record.__dict__) for record in caplog.records)


def test_figures_of_an_executor_reach_no_terminal(llama: nn.Module, serve: Callable, monkeypatch: Any) -> None:
    """Whatever it says: names, and numbers that are none."""
    executor = serve(llama)
    session = Session(executor.endpoint, observer=True)
    figures = msgspec.to_builtins(executor.server.snapshot())
    named = {**figures, "endpoints": [f"local://{CLEAR}"], "policy": CLEAR, "bytes": {CLEAR: 3}, "errors": {CLEAR: 1}}
    monkeypatch.setattr(executor.server, "snapshot", lambda: named)
    now = top.snapshot(session)
    assert "x1b" not in repr(msgspec.to_builtins(now))
    for name, wrong in (("uptime_s", float("nan")), ("rss_bytes", -1), ("calls", float("inf")), ("layers", "no")):
        monkeypatch.setattr(executor.server, "snapshot", lambda w={name: wrong}: {**figures, **w})
        with pytest.raises(ProtocolError, match="does not send its figures in a form that this release knows"):
            top.snapshot(session)
    session.close()


def test_texts_of_refusals_are_written_out() -> None:
    def answer(seq: int, call: Call) -> list[bytes]:
        text = f"no{CLEAR}".encode()
        return [encode_reply(Reply(seq, Code.LIMIT, shape=(len(text),))), text]

    with Operator(encode_control(welcome_of(tiny_llama())), answer) as operator:
        session = Session(operator.url)
        with pytest.raises(CallError, match=r"^no\?\[2J \[LIMIT\]$"):
            session.call(Op.ECHO, 0, torch.ones(2))
        session.close()
    for code in (int(Code.LIMIT), 999, -1):
        refusing = Operator(encode_control(Refusal(code, f"no{CLEAR}")), answer)
        with refusing, pytest.raises(CallError, match=r"^no\?\[2J "):
            Session(refusing.url).call(Op.ECHO, 0, torch.ones(2))


# ---------------------------------------------------------------- what it asks for


@pytest.mark.parametrize("join", ["from_executor", "top"])
def test_a_client_connects_to_no_host_that_only_the_executor_names(join: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another address of this machine stands for a host of the user's, which lets nobody in."""
    monkeypatch.setattr(reconnect, "JOIN_S", 0.5)
    with socket.create_server(("127.0.0.2", 0)) as victim:
        victim.settimeout(0.5)
        port = victim.getsockname()[1]
        layers = [replace(layer, kind="elsewhere") for layer in Store(tiny_llama()).manifest]
        ranks = {"ranks": 2, "shard": "layers", "manifest": layers, "hosts": ("here", "127.0.0.2")}
        welcome = encode_control(welcome_of(tiny_llama(), **ranks))
        with Operator(welcome, lambda seq, call: [], f"127.0.0.1:{port}") as operator:
            told = rf"model is on 127\.0\.0\.2.*{operator.url}\?hosts=here,127\.0\.0\.2"
            with pytest.raises(SymbiosisError, match=told):
                if join == "top":
                    top.run(operator.url, True, 0.1)
                else:
                    symbiosis.from_executor(operator.url, patience=1.0)
            with pytest.raises(TimeoutError):
                victim.accept()
            with pytest.raises(SymbiosisError):
                symbiosis.from_executor(f"{operator.url}?hosts=127.0.0.2", patience=0.1)
            victim.accept()[0].close()  # which the user has named


@pytest.mark.parametrize(("rank", "port"), [(0, 65535), (1, 1)])
def test_there_are_no_ranks_at_ports_that_do_not_exist(rank: int, port: int) -> None:
    with pytest.raises(ConfigError, match="there is none"):
        of_rank(f"tcp://127.0.0.1:{port}", 1 - rank, rank)
    assert of_rank("tcp://127.0.0.1:0", rank, rank) == "tcp://127.0.0.1:0"


def test_who_is_always_busy_costs_a_client_little() -> None:
    asked = []

    def busy(seq: int, call: Call) -> list[bytes]:
        asked.append(seq)
        return [encode_reply(Reply(seq, Code.BUSY, shape=(4,))), b"wait"]

    with Operator(encode_control(welcome_of(tiny_llama())), busy) as operator:
        session = Session(operator.url, patience=1.0)
        with pytest.raises(CallError, match="BUSY"):
            session.call(Op.ECHO, 0, torch.ones(2))
        session.close()
    assert 10 < len(asked) < 40


@pytest.mark.parametrize("heartbeat_s", [SHORTEST_BEAT_S, LONGEST_BEAT_S])
def test_a_heartbeat_costs_a_client_little(heartbeat_s: float, serve: Callable) -> None:
    """However often it is asked for; and a thread that beats soon sees that its connection is gone."""
    session = Session(serve(tiny_llama(), heartbeat_s=heartbeat_s).endpoint)
    assert session.welcome and session._connection
    assert 0.02 < beat_every(session._connection) <= 10
    session.close()


# ---------------------------------------------------------------- who joins


def named(**changes: Any) -> dict[str, Any]:
    return {"manifest": [replace(layer, **changes) for layer in Store(tiny_llama()).manifest]}


WELCOMES: dict[str, dict[str, Any]] = {
    "a configuration that is none": {"config": "nonsense"},
    "a list for a configuration": {"config": "[1]"},
    "a nested configuration": {"config": "[" * 100_000},
    "an operator with an escape": {"operator": "north\x1b[2J"},
    "a layer's name": named(name=f"layer{CLEAR}"),
    "a very long name": named(name="x" * 10_000),
    "a kind": named(kind="python"),
    "a negative shape": named(shape=(-1, 64)),
    "a huge shape": named(shape=(1 << 60, 64)),
    "many dimensions": named(shape=(1,) * 1000),
    "a dtype": named(dtype="\x1b"),
    "a model's name": {"model_class": f"Llama{CLEAR}"},
    "an operator of a megabyte": {"operator": "x" * MIB},
    "a heartbeat of zero": {"heartbeat_s": 0.0},
    "a heartbeat of NaN": {"heartbeat_s": float("nan")},
    "a heartbeat of a millisecond": {"heartbeat_s": 1e-3},
    "a port of the system's": {"port": 22},
    "a negative limit": {"limits": Limits(max_rows=-1)},
    "a port": {"port": -1},
    "another fingerprint": {"fingerprint": "0" * 64},
    "very many layers": {"manifest": [Layer(f"l{n}", "linear", (2, 2), "float32", "") for n in range((1 << 17) + 1)]},
    "a large configuration": {"config": " " * (5 << 20)},
}


@pytest.mark.parametrize("what", WELCOMES)
@pytest.mark.parametrize("scheme", ["local", "tcp"])
def test_a_welcome_that_is_none_is_refused(what: str, scheme: str, tmp_path: Path) -> None:
    raw = encode_control(welcome_of(tiny_llama(), **WELCOMES[what]))
    with answering(scheme, raw, tmp_path) as url, pytest.raises(ProtocolError) as error:
        _ = Session(url).welcome
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("scheme", ["local", "tcp"])
@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", b"\x91" * 200_000, encode_control(Grown(1)), b"\xdd\xff\xff\xff\xff", b" " * (80 * MIB)],
    ids=["nothing", "no message", "nested", "another message", "a list of 2^32", "80 MiB"],
)  # fmt: skip
def test_what_is_no_welcome_is_refused(raw: bytes, scheme: str, tmp_path: Path) -> None:
    before = peak_bytes()
    with answering(scheme, raw, tmp_path) as url, pytest.raises(SymbiosisError):
        _ = Session(url).welcome
    if scheme == "local":  # over tcp:// the operator, in this process, copies what it sends
        assert peak_bytes() - before < 64 * MIB


@contextmanager
def answering(scheme: str, raw: bytes, folder: Path) -> Iterator[str]:
    """An endpoint where a join is answered by these bytes."""
    if scheme == "tcp":
        with Operator(raw, lambda seq, call: []) as operator:
            yield operator.url
        return
    with neighbour(folder, lambda sock: greet(sock, raw)) as url:
        yield url


@contextmanager
def neighbour(folder: Path, serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Who answers at local://."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(folder / "x.sock"))
        (folder / "x.sock").chmod(0o600)
        listening.listen()
        listening.settimeout(0.2)
        ends = threading.Event()

        def run() -> None:
            while not ends.is_set():
                try:
                    sock, _ = listening.accept()
                except TimeoutError:
                    continue
                with sock:
                    sock.settimeout(WAIT_S)
                    sock.recv(1 << 14)
                    serve(sock)
                    sock.recv(1)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"local://{folder}/x.sock"
        finally:
            ends.set()
            thread.join()


def greet(
    sock: socket.socket,
    raw: bytes,
    nbytes: int = 4 * MIB,
    slab: int | None = None,
    bell: int | None = None,
    ear: int | None = None,
) -> None:
    """As an executor does, with a segment of a size that may be a lie."""
    letter = os.memfd_create("letter")
    os.truncate(letter, len(raw))
    if raw.strip():
        os.pwrite(letter, raw, 0)
    memory = Slab.create(4 * MIB).fd if slab is None else slab
    ringing = os.eventfd(0, os.EFD_NONBLOCK) if bell is None else bell
    with select.epoll() as watch:
        fds = [letter, memory, ringing, os.dup(watch.fileno()) if ear is None else ear]
    socket.send_fds(sock, [encode_control(Grown(nbytes))], fds)
    for fd in fds:
        os.close(fd)


def unsealed(nbytes: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.truncate(fd, nbytes)
    return fd


def too_short() -> int:
    fd = unsealed(4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def write_end() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    "words",
    [
        {"slab": lambda: unsealed(4 * MIB)},  # it may be cut short at any time
        {"slab": too_short},  # touching it would end this process
        {"slab": lambda: os.open("/dev/zero", os.O_RDWR)},
        {"nbytes": 1 << 45},
        {"nbytes": 0},
        {"bell": write_end},
        {"ear": lambda: os.eventfd(0)},
    ],
    ids=["not sealed", "too short", "no memory", "huge", "empty", "a pipe for a bell", "an eventfd for an ear"],
)
def test_memory_that_is_none_is_refused(words: dict[str, Any], tmp_path: Path) -> None:
    raw, given = encode_control(welcome_of(tiny_llama())), {k: v() if callable(v) else v for k, v in words.items()}
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with neighbour(tmp_path, lambda sock: greet(sock, raw, **given)) as url, pytest.raises(ProtocolError):
        Session(url).call(Op.ECHO, 0, torch.ones(2))
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= open_before + 2, "the end of what it sent")


@pytest.mark.parametrize("scheme", ["inproc", "local", "tcp"])
def test_another_model_is_refused_by_the_client_itself(scheme: str, tmp_path: Path, monkeypatch: Any) -> None:
    """After a restart, by an executor that does not look."""
    urls = {"inproc": "inproc://turncoat", "local": f"local://{tmp_path}/x.sock", "tcp": "tcp://127.0.0.1:0"}
    first = symbiosis.Executor(tiny_llama(), listen=[urls[scheme]])
    session = Session(first.endpoint)
    assert torch.equal(session.call(Op.ECHO, 0, torch.ones(2)), torch.ones(2))
    first.close()
    other = tiny_llama()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    with symbiosis.Executor(other, listen=[first.endpoint]) as second:
        monkeypatch.setattr(second.server.sessions, "_admit", lambda *told: None)
        for told in (second.server.store.fingerprint, session.fingerprint):  # the truth; and a lie
            second.server.store.fingerprint = told
            with pytest.raises(CallError) as error:
                session.call(Op.ECHO, 0, torch.ones(2))
            assert error.value.code in (Code.WRONG_MODEL, Code.BAD_FRAME)
    session.close()


# ---------------------------------------------------------------- replies


@pytest.mark.parametrize("op", [op for op in Op if op not in (Op.STATS, Op.ECHO)])
@pytest.mark.parametrize("name", MODELS)
def test_the_client_knows_what_a_reply_must_be(op: Op, name: str, serve: Callable) -> None:
    """As the executor does, for every op on every layer."""
    from symbiosis.executor.calls.validation import check_call

    store, options = Store(MODELS[name](), ("*",)), symbiosis.executor.options.Options(allow_read=True)
    welcome = replace(welcome_of(MODELS[name]()), manifest=store.manifest)
    answers, checked = Answers(welcome), 0
    for number, layer in enumerate(store.manifest):
        rows = ((*layer.shape[:-2], 3, width) for width in layer.shape)
        columns = ((*layer.shape[:-2], width, 3) for width in layer.shape)
        for shape in ((3,), *((3, width) for width in layer.shape), *rows, *columns):
            for groups in (0, *layer.shape[:1]):
                call = only_used(Call(op, number, "float32", shape, groups=groups))
                try:
                    expected = check_call(call, store, options)
                except CallError:
                    continue
                assert answers.of(call) == ("float32", tuple(expected)), call
                checked += 1
    assert checked or (op is Op.GROUPED and name != "mixtral")


LIES: dict[str, Callable[[Reply], Reply]] = {
    "another dtype": lambda reply: replace(reply, dtype="int32"),
    "a narrower dtype": lambda reply: replace(reply, dtype="bfloat16"),
    "a row more": lambda reply: replace(reply, shape=(reply.shape[0] + 1, *reply.shape[1:])),
    "a row less": lambda reply: replace(reply, shape=(reply.shape[0] - 1, *reply.shape[1:])),
    "another order": lambda reply: replace(reply, shape=reply.shape[::-1]),
    "2^50 values": lambda reply: replace(reply, shape=(1 << 50,)),
    "nothing": lambda reply: replace(reply, shape=(0,)),
    "a text of a terabyte": lambda reply: replace(reply, code=Code.INTERNAL, dtype="uint8", shape=(1 << 40,)),
    "a text of floats": lambda reply: replace(reply, code=Code.INTERNAL),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("scheme", ["local", "tcp"])
def test_a_reply_to_something_else_is_refused(
    lie: str, scheme: str, serve: Callable, tmp_path: Path, monkeypatch: Any
) -> None:
    url = f"local://{tmp_path}/x.sock" if scheme == "local" else "tcp://127.0.0.1:0"
    session = Session(serve(tiny_llama(), listen=[url]).endpoint)
    layer, x = number_of(session, LAYER), torch.ones(3, 64)
    y = session.call(Op.FORWARD, layer, x)
    for module in (local, zeromq):
        monkeypatch.setattr(module, "encode_reply", lambda reply: encode_reply(LIES[lie](reply)))
    with pytest.raises(ProtocolError):
        session.call(Op.FORWARD, layer, x)
    with pytest.raises(ProtocolError):
        session.rows(
            Op.FORWARD,
            (symbiosis.client.layers.groups.GroupMember(layer, 64, False),),
            x,
            symbiosis.protocol.Priority.PREFILL,
        )
    monkeypatch.undo()
    assert torch.equal(session.call(Op.FORWARD, layer, x), y)
    session.close()


def answer_with(say: Any, frames: list[int]) -> None:
    """A process of its own: libzmq aborts one that closes a socket in the midst of a message."""
    payload = [bytes(size) for size in frames]

    def answer(seq: int, call: Call) -> list[bytes]:
        return [encode_reply(Reply(seq, Code.OK, "float32", (2, 3))), *payload]

    with Operator(encode_control(welcome_of(tiny_llama())), answer) as operator:
        say(operator.url)
        operator._thread.join()


@pytest.mark.parametrize(
    "frames", [[200 * MIB], [40 * MIB], [24] * 20_000, [2 * MIB] * 40],
    ids=["200 MiB", "40 MiB", "20,000 frames", "80 MiB in frames"],
)  # fmt: skip
def test_more_than_was_asked_for_is_not_taken(frames: list[int], processes: list) -> None:
    processes.append(Client(answer_with, frames))
    session = Session(processes[0].heard(), patience=0.3, timeout=5.0)
    with pytest.raises(SymbiosisError):
        session.call(Op.ECHO, 0, torch.ones(2, 3))
    session.close()


def test_a_reply_larger_than_a_connection_takes_is_asked_for_anew(serve: Callable, monkeypatch: Any) -> None:
    """With room for it, and nothing counted as lost."""

    monkeypatch.setattr(reconnect, "FIRST_ROOM", 1 << 20)
    session = Session(serve(tiny_llama(), listen=["tcp://127.0.0.1:0"]).endpoint)
    for rows in (10, 20_000, 100, 30_000):
        x = torch.randn(rows, 64)
        assert torch.equal(session.call(Op.ECHO, 0, x), x)
    assert session.stats.reconnects == session.stats.retries == 0
    session.close()


# ---------------------------------------------------------------- a model that is built


def told(**changes: Any) -> str:
    """A configuration with some values of the operator's choice."""
    config = json.loads(tiny_llama().config.to_json_string(use_diff=False))
    return json.dumps({**config, **changes})


@pytest.fixture
def no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reaches out for code or files of somebody's choice fails the test."""
    import huggingface_hub
    import transformers.dynamic_module_utils as dynamic
    import transformers.integrations.hub_kernels as kernels

    def reached(*args: Any, **words: Any) -> None:
        pytest.fail(f"asks for {args} {words}")

    for module, name in (
        (dynamic, "get_class_from_dynamic_module"), (dynamic, "get_cached_module_file"), (kernels, "load_and_register_attn_kernel"),
        (huggingface_hub, "hf_hub_download"), (huggingface_hub, "snapshot_download"),
    ):  # fmt: skip
        if hasattr(module, name):
            monkeypatch.setattr(module, name, reached)


HARMLESS: dict[str, dict[str, Any]] = {
    "auto_map": {"auto_map": {"AutoModelForCausalLM": "mallory/model--modeling.Evil"}, "trust_remote_code": True},
    "attn_implementation": {"attn_implementation": "mallory/kernel"},
    "_attn_implementation": {"_attn_implementation": "mallory/kernel"},
    "_attn_implementation_internal": {"_attn_implementation_internal": "mallory/kernel"},
    "experts_implementation": {"experts_implementation": "mallory/kernel", "_experts_implementation": "mallory/kernel"},
    "custom_pipelines": {"custom_pipelines": {"text": {"impl": "mallory.Evil"}}},
    "custom_generate": {
        "custom_generate": "mallory/generate",
        "generation_config": {"custom_generate": "mallory/generate"},
    },
    "_name_or_path": {"_name_or_path": "mallory/model"},
    "how long texts are": {
        "max_length": 1 << 30,
        "max_new_tokens": 1 << 30,
        "num_beams": 5000,
        "stop_strings": ["mallory"],
    },
    "what a model returns": {"output_attentions": True, "output_hidden_states": True, "return_dict": False},
    "how a model computes": {"use_cache": False, "chunk_size_feed_forward": 1, "cache_implementation": "offloaded"},
    "dtype": {"dtype": "load", "torch_dtype": "load"},
    "a method": {"to_dict": "mine", "attribute_map": {"hidden_size": "x"}, "sub_configs": {}, "__class__": "int"},
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_is_no_field_is_left_out(what: str, serve: Callable, no_code: None, ids: Tensor) -> None:
    executor = doctor(serve(tiny_llama()), config_json=told(**HARMLESS[what]))
    model = symbiosis.from_executor(executor.endpoint)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)
    assert "mallory" not in repr(model.config.__dict__) and "mallory" not in repr(model.generation_config.__dict__)
    assert model.config._attn_implementation in ("sdpa", "eager") and model.name_or_path == ""
    ours = {name: value for name, value in vars(model.generation_config).items() if not name.endswith("token_id")}
    assert ours == {name: value for name, value in vars(GenerationConfig()).items() if not name.endswith("token_id")}
    assert model(ids).keys() == tiny_llama()(ids).keys() and model.config.chunk_size_feed_forward == 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a model_type": ({"model_type": "mallory"}, "model_type 'mallory'"),
    "a path": ({"hidden_act": "mallory/act"}, "hidden_act is 'mallory/act'"),
    "an escape": ({"hidden_act": CLEAR}, "hidden_act"),
    "an activation": ({"hidden_act": "eval"}, "cannot build a LlamaForCausalLM"),
    "quantization": ({"quantization_config": {"quant_method": "mallory"}}, "quantization_config"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1e"),
    "many layers": ({"num_hidden_layers": 60_000}, "many more layers"),
    "a vocabulary": ({"vocab_size": 10**12}, "vocab_size is 1e"),
    "another vocabulary": ({"vocab_size": 10**8}, "model.embed_tokens of"),
    "no number": ({"hidden_size": "64"}, "LlamaForCausalLM|configuration"),
    "a nested list": ({"rope_parameters": {"a": [[[[[[[[[[[["x"]]]]]]]]]]]]}}, "nested"),
    "another size": ({"intermediate_size": 128}, "mlp"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_model_is_not_built_by_is_refused(what: str, serve: Callable, no_code: None) -> None:
    changes, text = REFUSED[what]
    executor = doctor(serve(tiny_llama()), config_json=told(**changes))
    before = peak_bytes()
    with pytest.raises(WrapError, match=text) as error:
        symbiosis.from_executor(executor.endpoint)
    assert "\x1b" not in str(error.value)
    assert peak_bytes() - before < 256 * MIB


def neo() -> nn.Module:
    words = {"vocab_size": 100, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32}
    return transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**words, attention_types=[[["global"], 2]]))


def swin() -> nn.Module:
    words = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "window_size": 2}
    return transformers.SwinModel(transformers.SwinConfig(**words, depths=[1, 1], num_heads=[1, 1]))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (neo, {"attention_types": [[["global"] * 10_000, 60_000]]}),
        (neo, {"attention_types": [[["global"], 60_000]] * 10_000}),
        (swin, {"depths": [60_000] * 10_000}),
        (swin, {"depths": [1] * 100_000}),
    ],
    ids=["a long list, often", "a list, often, often", "many deep stages", "very many stages"],
)
def test_lists_that_are_to_be_repeated_are_bounded(
    model: Callable[[], nn.Module], changes: dict[str, Any], serve: Callable
) -> None:
    """transformers made gigabytes of some hundred kilobytes, for a minute or for ever."""
    built = model().eval()
    config = json.loads(built.config.to_json_string(use_diff=False))
    assert symbiosis.from_executor(doctor(serve(built), config_json=json.dumps(config)).endpoint)
    executor, before = doctor(serve(built), config_json=json.dumps({**config, **changes})), peak_bytes()
    with pytest.raises(WrapError, match=f"{next(iter(changes))} has lists of .* more than any model has"):
        symbiosis.from_executor(executor.endpoint)
    assert peak_bytes() - before < 64 * MIB


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, '{"model_type": 3}', '{"model_type": ["llama"]}'])
def test_a_configuration_that_is_none_is_refused(content: str, serve: Callable) -> None:
    executor = doctor(serve(tiny_llama()), config_json=content)
    with pytest.raises((WrapError, ProtocolError)):  # one that is JSON of another kind is looked at later
        symbiosis.from_executor(executor.endpoint)


@pytest.mark.parametrize(
    "name", ["pipeline", "AutoModel", "BertModel", "PreTrainedModel", "GenerationConfig", "__version__"]
)
def test_only_a_class_for_such_a_configuration_is_built(name: str, serve: Callable) -> None:
    executor = doctor(serve(tiny_llama()), model_class=name)
    with pytest.raises(WrapError, match=f"serves a '{name}', which is not one of the classes"):
        symbiosis.from_executor(executor.endpoint)


def test_parts_of_a_configuration_are_looked_at_too(serve: Callable, no_code: None) -> None:
    text, vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, {}
    small = transformers.CLIPConfig(
        text_config={**text, "vocab_size": 100, "max_position_embeddings": 16},
        vision_config={**text, "image_size": 8, "patch_size": 4}, projection_dim=16,
    )  # fmt: skip
    model = transformers.CLIPModel(small).eval()
    vision = json.loads(small.to_json_string(use_diff=False))
    for part in ("text_config", "vision_config"):
        harmless = {
            **vision,
            part: {**vision[part], "auto_map": {"AutoModel": "mallory--m.E"}, "_attn_implementation": "mallory/k"},
        }
        built = symbiosis.from_executor(doctor(serve(model), config_json=json.dumps(harmless)).endpoint)
        assert "mallory" not in repr(built.config.to_dict())
        for wrong in ({"hidden_act": "mallory/act"}, {"num_hidden_layers": 10**9}):
            executor = doctor(serve(model), config_json=json.dumps({**vision, part: {**vision[part], **wrong}}))
            with pytest.raises(WrapError, match=f"{part}.{next(iter(wrong))}"):
                symbiosis.from_executor(executor.endpoint)


def test_a_model_that_no_host_has_room_for_is_refused(serve: Callable) -> None:
    """Consistently: the manifest says the same as the configuration."""
    executor = serve(tiny_llama())
    store = executor.server.store
    rows = 1 << 31
    manifest = [
        replace(layer, shape=(rows, *layer.shape[1:])) if layer.name in ("model.embed_tokens", "lm_head") else layer
        for layer in store.manifest
    ]
    doctor(executor, manifest=manifest, config_json=told(vocab_size=rows))
    with pytest.raises(WrapError, match="GiB are the client's own"):
        symbiosis.from_executor(executor.endpoint)


def test_what_models_read_and_do_not_declare_is_taken(serve: Callable) -> None:
    """Heads of another width than their share, and a convolution, which no field of these configurations tells of."""
    words = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    experts = Qwen3MoeConfig(
        **words, num_key_value_heads=2, head_dim=32, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2
    )
    attention = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 64}
    convolution = DebertaV2Config(**words, **attention, conv_kernel_size=3, conv_act="gelu")
    ids = torch.arange(20).view(2, 10)
    for model in (Qwen3MoeForCausalLM(experts).eval(), DebertaV2ForMaskedLM(convolution).eval()):
        split = symbiosis.from_executor(serve(model).endpoint)
        with torch.no_grad():
            assert torch.equal(split(ids).logits, model(ids).logits)


def test_a_model_that_cannot_be_built_whole_is_refused(serve: Callable) -> None:
    """Rather than one without a part of it."""
    executor = serve(tiny_llama())
    config = json.loads(executor.server.store.config_json)
    doctor(executor, config_json=json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(WrapError, match="which the model that it describes does not have"):
        symbiosis.from_executor(executor.endpoint)
