"""The link between the engine and HTTP: a request that fails on the way to its client takes nobody else along, and what waits holds up no other."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import pytest

from symbiosis.base.fair_share import FairShare
from symbiosis.errors import AdapterError
from symbiosis.server.api_errors import ApiError
from symbiosis.server.ipc import engine_server
from symbiosis.server.ipc.engine_client import EngineClient
from symbiosis.server.ipc.engine_ipc import (
    LENGTH,
    Answer,
    Ask,
    Cancel,
    EngineReady,
    Outputs,
    Refused,
    Submit,
    framed,
    from_engine,
)
from symbiosis.server.ipc.engine_server import EngineServer
from symbiosis.serving.engine.engine_stats import EngineStats
from symbiosis.serving.request import Finish, Output, Request, Sampling, Token


async def _given_to_two(first: list[ApiError], second: list[Output | ApiError]) -> bool:
    """Give outputs to two requests, the first of which cannot take its own. Return whether the link is still there."""
    ours, theirs = socket.socketpair()
    ours.sendall(framed(EngineReady(model="demo", longest=8, most_tokens=8, vocabulary=8)))
    remote = await EngineClient.connect(theirs)

    def broken(output: Output | ApiError) -> None:
        if isinstance(output, ApiError):
            first.append(output)
        else:
            raise IndexError("string index out of range")

    takers = {next(remote.ids): broken, next(remote.ids): second.append}
    for id, take in takers.items():
        remote.submit(Request(id=id, prompt=(1,), sampling=Sampling(max_tokens=1)), take)
    outputs = [Output(request=id, tokens=(Token(1),), finish=Finish.LENGTH) for id in takers]
    ours.sendall(framed(Outputs(outputs)))
    while not second:
        await asyncio.sleep(0.001)
    is_there = remote.is_there
    remote.close()
    ours.close()
    await remote.ended
    return is_there


def test_an_output_that_cannot_be_taken_ends_its_own_request_only() -> None:
    first, second = list[ApiError](), list[Output | ApiError]()
    assert asyncio.run(asyncio.wait_for(_given_to_two(first, second), 30))
    assert [error.status for error in first] == [500] and "IndexError" in str(first[0])
    assert isinstance(second[0], Output)


async def _cancelled(taken: list[Output | ApiError]) -> list[int]:
    """Cancel two of three requests, and return how many are under way, then and after each message of the engine's."""
    ours, theirs = socket.socketpair()
    ours.sendall(framed(EngineReady(model="demo", longest=8, most_tokens=8, vocabulary=8)))
    remote = await EngineClient.connect(theirs)
    remote.places = FairShare(12)
    for id, completions in ((1, 2), (2, 1), (3, 1)):
        remote.submit(Request(id=id, prompt=(1,), completions=completions), taken.append)
    for id in (1, 2, 1):
        remote.cancel(id)
    assert remote.places.has("", 2) and not remote.places.has("", 3), "four of twelve are taken"
    counts = [len(remote.requests)]
    for message in (
        Outputs([Output(request=1, tokens=(Token(1),))]),
        Outputs([Output(request=1, completion=0, finish=Finish.LENGTH)]),
        Outputs([Output(request=1, completion=1, finish=Finish.CANCELLED)]),
        Refused(2, "cancelled", 503),
        Outputs([Output(request=3, finish=Finish.LENGTH)]),
    ):
        remote.data_received(framed(message))
        counts.append(len(remote.requests))
    assert remote.places.has("", 6), "all are given back"
    remote.close()
    ours.close()
    await remote.ended
    return counts


def test_what_is_cancelled_is_under_way_until_the_engine_has_ended_it() -> None:
    taken = list[Output | ApiError]()
    assert asyncio.run(asyncio.wait_for(_cancelled(taken), 30)) == [3, 3, 3, 2, 1, 0]
    assert [output.request for output in taken if isinstance(output, Output)] == [3] and len(taken) == 1


class _Refuses:
    """An engine whose adapters are refused for a reason, if there is one."""

    step_s, room = 0.0, (0, 0)
    why: str | None = "adapter 'mine': cut off"

    def on_pause(self, call: Callable[[], None]) -> None: ...

    def has_loaded(self, name: str) -> bool:
        return False

    def cancel(self, id: int) -> None: ...
    def stop(self, id: int, completion: int = 0) -> None: ...

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        if self.why is not None:
            raise AdapterError(self.why)
        on_output(Output(request=request.id, finish=Finish.LENGTH))


def test_a_refused_adapter_is_logged_once_for_all_who_ask(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    engine = _Refuses()
    link = EngineServer(engine, ours, EngineReady(model="demo", longest=8, most_tokens=8, vocabulary=8))  # type: ignore[arg-type]
    with theirs.makefile("rb") as stream:

        def refuse(id: int, why: str) -> None:
            engine.why = why
            theirs.sendall(framed(Submit(Request(id=id, prompt=(1,), adapter="mine"))))
            message: object = None
            while not isinstance(message, Refused):
                message = from_engine.decode(stream.read(LENGTH.unpack(stream.read(LENGTH.size))[0]))
            assert message == Refused(id, why, 500)

        for id in range(5):
            refuse(id, "adapter 'mine': cut off")
        refuse(5, "adapter 'mine': not JSON")
        engine.why = None
        theirs.sendall(framed(Submit(Request(id=6, prompt=(1,), adapter="mine"))))
        deadline = time.monotonic() + 20
        while link._refused and time.monotonic() < deadline:
            time.sleep(0.001)
        refuse(7, "adapter 'mine': not JSON")
    link.close()
    theirs.close()
    told = [each.getMessage() for each in caplog.records if "mine" in each.getMessage()]
    assert told == ["adapter 'mine': cut off", "adapter 'mine': not JSON", "adapter 'mine': not JSON"]


class _Busy:
    """An engine that is asked for its figures while it waits until adapters may be removed."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.step_s, self.room = 0.0, (0, 0)

    def on_pause(self, call: Callable[[], None]) -> None: ...

    def has_loaded(self, name: str) -> bool:
        return False

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        assert self.may_go_on.wait(20)

    def cancel(self, id: int) -> None: ...
    def stop(self, id: int, completion: int = 0) -> None: ...

    def remove(self, name: str) -> None:
        assert self.may_go_on.wait(20)

    def figures(self) -> EngineStats:
        return EngineStats()


def test_what_waits_to_be_removed_holds_up_no_other_question() -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    engine = _Busy()
    link = EngineServer(engine, ours, EngineReady(model="demo", longest=8, most_tokens=8, vocabulary=8))  # type: ignore[arg-type]
    for number in range(8):
        theirs.sendall(framed(Ask(number, "remove", ("mine",))))
    theirs.sendall(framed(Ask(8, "figures")))
    numbers: list[int] = []
    with theirs.makefile("rb") as stream:
        while len(numbers) < 9:
            message = from_engine.decode(stream.read(LENGTH.unpack(stream.read(LENGTH.size))[0]))
            if isinstance(message, Answer):
                numbers.append(message.number)
                engine.may_go_on.set()
    link.close()
    theirs.close()
    assert numbers[0] == 8 and sorted(numbers) == list(range(9))


def test_the_engine_says_that_it_has_not_begun_what_was_cancelled_before() -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    engine = _Busy()
    link = EngineServer(engine, ours, EngineReady(model="demo", longest=8, most_tokens=8, vocabulary=8))  # type: ignore[arg-type]
    for id in range(40):  # more than there are threads
        theirs.sendall(framed(Submit(Request(id=id, prompt=(1,), adapter="mine"))))
    theirs.sendall(framed(Cancel(39)))
    with theirs.makefile("rb") as stream:
        while not isinstance(message := from_engine.decode(stream.read(LENGTH.unpack(stream.read(4))[0])), Refused):
            pass
    assert (message.id, message.status) == (39, 503)
    engine.may_go_on.set()
    link.close()
    theirs.close()


def test_an_adapter_that_is_read_holds_up_no_schema_of_others() -> None:
    ours, theirs = socket.socketpair()
    engine, begun = _Busy(), threading.Event()

    def submit(request: Request, on_output: Callable[[Output], None]) -> None:
        assert engine.may_go_on.wait(20) if request.adapter else begun.set() is None

    engine.submit = submit  # type: ignore[method-assign]
    link = EngineServer(engine, ours, EngineReady(model="demo", longest=8, most_tokens=8, vocabulary=8))  # type: ignore[arg-type]
    schema = Sampling(schema="{}")
    for id in range(3):
        asked = Request(id=id, prompt=(1,), sampling=schema, adapter=None if id == 2 else "mine")
        theirs.sendall(framed(Submit(asked)))
    assert begun.wait(20)
    engine.may_go_on.set()
    link.close()
    theirs.close()


def test_adapters_that_one_key_has_read_hold_up_no_other_keys() -> None:
    ours, theirs = socket.socketpair()
    engine, begun = _Busy(), threading.Event()

    def submit(request: Request, on_output: Callable[[Output], None]) -> None:
        assert engine.may_go_on.wait(20) if request.tenant == "carol" else begun.set() is None

    engine.submit = submit  # type: ignore[method-assign]
    link = EngineServer(engine, ours, EngineReady(model="demo", longest=8, most_tokens=8, vocabulary=8))  # type: ignore[arg-type]
    for id in range(40):
        theirs.sendall(framed(Submit(Request(id=id, prompt=(1,), adapter=f"h{id}", tenant="carol"))))
    theirs.sendall(framed(Submit(Request(id=40, prompt=(1,), adapter="mine", tenant="anna"))))
    assert begun.wait(20)
    engine.may_go_on.set()
    link.close()
    theirs.close()


def test_what_is_cancelled_while_it_is_begun_is_cancelled_then() -> None:
    ours, theirs = socket.socketpair()
    engine, begins, told = _Busy(), threading.Event(), list[str]()
    ended = threading.Event()

    def submit(request: Request, on_output: Callable[[Output], None]) -> None:
        begins.set()
        assert engine.may_go_on.wait(20)
        told.append("begun")

    def cancel(id: int) -> None:
        told.append(f"cancelled {id}")
        ended.set()

    engine.submit, engine.cancel = submit, cancel  # type: ignore[method-assign]
    link = EngineServer(engine, ours, EngineReady(model="demo", longest=8, most_tokens=8, vocabulary=8))  # type: ignore[arg-type]
    theirs.sendall(framed(Submit(Request(id=5, prompt=(1,), adapter="mine"))))
    assert begins.wait(20)
    theirs.sendall(framed(Cancel(5)))
    theirs.sendall(framed(Ask(1, "figures")))  # which is answered once the other message has been taken
    theirs.settimeout(20)
    with theirs.makefile("rb") as stream:
        while not isinstance(from_engine.decode(stream.read(LENGTH.unpack(stream.read(4))[0])), Answer):
            pass
    assert not told
    engine.may_go_on.set()
    assert ended.wait(20) and told[:2] == ["begun", "cancelled 5"]
    link.close()
    theirs.close()


def test_a_process_that_reads_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_server, "MOST_UNREAD", 100)
    ours, theirs = socket.socketpair()
    engine, pauses = _Busy(), list[Callable[[], None]]()
    engine.on_pause = pauses.append  # type: ignore[method-assign]
    link = EngineServer(engine, ours, EngineReady(model="demo", longest=8, most_tokens=8, vocabulary=8))  # type: ignore[arg-type]
    tokens = tuple(map(Token, range(10_000)))
    for _ in range(101):
        link._told.append(Output(request=1, tokens=tokens))
        assert ours.fileno() != -1
        pauses[0]()
    link._threads[1].join(20)
    assert not link._threads[1].is_alive(), "the one that writes"
    link.close()
    theirs.close()


async def _calls_for(outputs: int) -> list[int]:
    """How many outputs of one message there were each time that something was called at a pause."""
    ours, theirs = socket.socketpair()
    ours.sendall(framed(EngineReady(model="demo", longest=8, most_tokens=8, vocabulary=8)))
    remote = await EngineClient.connect(theirs)
    taken, calls, called = list[Output | ApiError](), list[int](), asyncio.Event()

    def at_pause() -> None:
        calls.append(len(taken))
        called.set()

    def take(output: Output | ApiError) -> None:
        taken.append(output)
        if len(taken) == 1:
            remote.at_pause.append(at_pause)

    remote.submit(Request(id=1, prompt=(1,), sampling=Sampling(max_tokens=9)), take)
    ours.sendall(framed(Outputs([Output(request=1, tokens=(Token(n),)) for n in range(outputs)])))
    await called.wait()
    remote.close()
    ours.close()
    await remote.ended
    return calls


def test_what_one_message_brings_is_handed_on_once() -> None:
    assert asyncio.run(asyncio.wait_for(_calls_for(5), 30)) == [5]
