"""Every transport carries every call: the same bits, whatever their dtype, size and shape."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zmq

import symbiosis
import symbiosis.client.session
from symbiosis import transport
from symbiosis.client import requests
from symbiosis.client.session import Session
from symbiosis.errors import ConnectionLost
from symbiosis.protocol import DTYPES, Call, Hello, Limits, Op, Welcome, encode_control
from symbiosis.transport.fingerprint import model_fingerprint
from symbiosis.transport.local.peer import FIRST_SLAB
from symbiosis.transport.tcp.client import TcpConnection
from symbiosis.transport.tcp.sockets import COPY_BELOW
from tests.conftest import tiny_llama
from tests.transports import WAIT_S, anything, echoed


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_arrives_bit_for_bit(session: Session, dtype: str) -> None:
    for shape in ((1,), (7,), (3, 5), (2, 3, 5), (1, 1, 1), (0,), (0, 5), (4, 0)):
        assert echoed(session, anything(shape, dtype)), shape


@pytest.mark.parametrize(
    "nbytes", [COPY_BELOW - 1, COPY_BELOW, COPY_BELOW + 1, FIRST_SLAB // 2, FIRST_SLAB, 3 * FIRST_SLAB + 1]
)
def test_every_size_arrives_bit_for_bit(session: Session, nbytes: int) -> None:
    for _ in range(2):  # once with growing, once without
        assert echoed(session, anything((1, nbytes), "uint8"))
        assert echoed(session, anything((3,), "uint8"))


def test_a_reply_much_larger_than_its_call_arrives(url: str, serve: Callable) -> None:
    model = tiny_llama()
    executor = serve(model, listen=[url], serve=["*"])
    session = Session(executor.endpoint)
    number = next(n for n, layer in enumerate(session.manifest) if layer.name == "model.embed_tokens")
    ids = torch.arange(50_000) % 100
    assert torch.equal(session.call(Op.LOOKUP, number, ids, dtype=torch.float32), model.model.embed_tokens.weight[ids])
    session.close()


@pytest.mark.parametrize("rows", [3, 9_000], ids=["few", "many"])
def test_a_product_is_that_of_the_layer(url: str, serve: Callable, rows: int) -> None:
    """Wherever its rows lie in the executor's memory."""
    layer = torch.nn.Linear(48, 32)
    session = Session(serve(torch.nn.Sequential(layer), listen=[url]).endpoint)
    x = torch.randn(rows, 48)
    number = next(number for number, layer in enumerate(session.manifest) if layer.kind == "linear")
    y = session.call(Op.FORWARD, number, x, bias=True)
    with torch.no_grad():
        assert torch.equal(y, torch.cat([layer(part) for part in x.split(4096)]))
    session.close()


def test_rows_need_not_be_contiguous(session: Session) -> None:
    x = anything((6, 4), "int32").t()
    assert torch.equal(session.call(Op.ECHO, 0, x), x)
    wide = anything((6, 8), "int32")[:, ::2]
    assert torch.equal(session.call(Op.ECHO, 0, wide), wide)


def test_ids_may_be_of_any_integer_type(url: str, serve: Callable) -> None:
    model = tiny_llama()
    split = symbiosis.wrap(tiny_llama(), serve(model, listen=[url], serve=["*"]).endpoint)
    for dtype in (torch.int64, torch.int32):
        ids = torch.tensor([[5, 7, 9]], dtype=dtype)
        with torch.no_grad():
            assert torch.equal(split(ids).logits, model(ids).logits)


def test_weights_of_more_dimensions_are_read_whole(url: str, serve: Callable) -> None:
    """A vision tower has convolutions: they are the client's own, and come from the executor like all that is."""
    model = tiny_llama()
    model.patches = torch.nn.Conv3d(3, 4, 2)
    executor = serve(model, listen=[url])
    session = Session(executor.endpoint)
    number = next(n for n, layer in enumerate(session.manifest) if layer.name == "patches.weight")
    assert torch.equal(session.call(Op.READ, number), model.patches.weight)
    session.close()


def test_the_figures_arrive(session: Session) -> None:
    assert echoed(session, anything((3, 5)))
    assert session.call(Op.STATS, 0).numel() > 100
    assert (session.stats.calls, session.stats.rows, session.stats.bytes_sent) == (2, 4, 60)


def test_threads_share_a_session(session: Session) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda n: echoed(session, anything((n % 60 + 1, 64))), range(400)))
    assert session.stats.reconnects == 0


def test_sessions_do_not_mix(executor: symbiosis.Executor) -> None:
    """Each with rows and sizes of its own, all at once."""

    def run(number: int) -> bool:
        session = Session(executor.endpoint)
        try:
            return all(echoed(session, torch.full((number + n % 7, 64), float(number))) for n in range(100))
        finally:
            session.close()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(1, 9)))


def test_a_call_that_takes_too_long_is_a_lost_connection(executor: symbiosis.Executor) -> None:
    """The executor's thread is kept busy for longer than the caller waits."""
    connection = transport.connect(executor.endpoint, Hello(), WAIT_S)
    busy, go_on = threading.Event(), threading.Event()

    def compute() -> None:
        busy.set()
        go_on.wait(WAIT_S)

    executor.server.reactor.call_soon(compute)
    busy.wait(WAIT_S)
    with pytest.raises(ConnectionLost, match="no answer in time"):
        connection.call(1, Call(Op.ECHO, 0, "float32", (3, 5)), (anything((3, 5)),), 0.2)
    go_on.set()
    connection.close()


def test_very_many_rows_go_in_several_calls(serve: Callable, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """... with the same results, gradients too, also for layers that are asked together."""
    model = tiny_llama()
    split = symbiosis.wrap(copy.deepcopy(model), serve(model, listen=[url]).endpoint)
    ids = torch.randint(3, 100, (3, 120), generator=torch.Generator().manual_seed(1))
    found = []
    for largest in (requests.LARGEST, 64 * 64 * 4):
        monkeypatch.setattr(requests, "LARGEST", largest)
        before = symbiosis.stats(split).calls
        x = split.get_input_embeddings()(ids).detach().requires_grad_()
        logits = split(inputs_embeds=x).logits
        logits.sum().backward()
        assert x.grad is not None
        found.append((logits, x.grad, symbiosis.stats(split).calls - before))
    (logits, grad, few), (in_parts, grad_in_parts, more_calls) = found
    assert more_calls > 3 * few
    torch.testing.assert_close(in_parts, logits, rtol=1e-5, atol=1e-5)  # fewer rows may round in another way
    torch.testing.assert_close(grad_in_parts, grad, rtol=1e-5, atol=1e-5)


def test_the_rows_of_a_message_go_last() -> None:
    """Nothing is left to be sent behind it, whenever the socket is closed (see `wire`)."""
    call = Call(Op.GROUPED, 0, "float32", (1 << 10, 64), groups=4)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as executor, ThreadPoolExecutor(1) as pool:
        executor.linger = 0
        port = executor.bind_to_random_port("tcp://127.0.0.1")
        joining = pool.submit(TcpConnection, f"127.0.0.1:{port}", Hello("somebody"), 10.0)
        identity, _ = executor.recv_multipart()
        nothing = Welcome(1, model_fingerprint("{}", []), [], "{}", "", Limits(), False, 1.0, "")
        executor.send_multipart([identity, encode_control(nothing)])
        connection = joining.result()
        with pytest.raises(ConnectionLost, match="no answer"):
            connection.call(1, call, (torch.ones(call.shape), torch.arange(4, dtype=torch.int32)), 0.01)
        assert [len(frame) for frame in executor.recv_multipart()[2:]] == sorted(call.parts)
        connection.close()
