"""`symbiosis top`: what it shows is what happened, and watching holds nobody up."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import symbiosis
from symbiosis.cli import top
from symbiosis.client.session import Session
from symbiosis.errors import CallError, Code
from symbiosis.executor.observe.snapshot import of_service
from symbiosis.protocol import Op
from symbiosis.protocol.endpoints import of_rank
from tests.conftest import tiny_llama
from tests.processes import run, until
from tests.ranks import ranks_of

LAYER = "model.layers.0.self_attn.q_proj"


def number_of(session: Session, name: str) -> int:
    return next(index for index, layer in enumerate(session.manifest) if layer.name == name)


@contextmanager
def joined(endpoint: str, **options: bool) -> Iterator[Session]:
    session = Session(endpoint, **options)  # type: ignore[arg-type]
    assert session.welcome
    yield session
    session.close()


def test_a_snapshot_holds_what_happened(llama: nn.Module, serve: Callable, url: str) -> None:
    executor = serve(llama, listen=[url])
    with joined(executor.endpoint) as client, joined(executor.endpoint, observer=True) as observer:
        layer = number_of(client, LAYER)
        for rows in (3, 5):
            client.call(Op.FORWARD, layer, torch.ones(rows, 64))
        client.call(Op.DGRAD, layer, torch.ones(2, 64))
        with pytest.raises(CallError):
            client.call(Op.FORWARD, layer, torch.ones(2, 63))
        seen = top.snapshot(observer)
    layers = {(each.layer, each.op): each for each in seen.layers}
    assert (layers[LAYER, "FORWARD"].calls, layers[LAYER, "FORWARD"].rows, layers[LAYER, "FORWARD"].batches) == (
        2,
        8,
        2,
    )
    assert (layers[LAYER, "DGRAD"].calls, layers[LAYER, "DGRAD"].rows) == (1, 2)
    assert seen.calls == 3 and seen.rows == 10
    assert seen.batch_sizes == {1: 3} and seen.mean_batch == 1.0
    assert seen.errors == {"BAD_SHAPE": 1}
    assert seen.bytes == {url.partition(":")[0]: 2 * 10 * 64 * 4}
    own = {session.observer: session for session in seen.sessions}
    assert (own[False].calls, own[False].rows, own[False].bytes) == (3, 10, 10 * 64 * 4)
    assert own[True].calls == 0
    assert seen.rss_bytes > seen.weights_bytes > 0


def test_echoes_count_as_one_and_of_no_layer(llama: nn.Module, serve: Callable) -> None:
    """A client must not be able to make up layers."""
    executor = serve(llama)
    with joined(executor.endpoint) as client, joined(executor.endpoint, observer=True) as observer:
        for _ in range(3):
            client.call(Op.ECHO, 0, torch.ones(2, 4))
        for layer in (7, 1 << 20):
            with pytest.raises(CallError, match="ECHO does not use layer"):
                client.call(Op.ECHO, layer, torch.ones(2, 4))
        echoes = [each for each in top.snapshot(observer).layers if each.op == "ECHO"]
    assert [(each.layer, each.calls) for each in echoes] == [("", 3)]


def test_an_observer_gets_figures_and_echoes_only(llama: nn.Module, serve: Callable, url: str) -> None:
    executor = serve(llama, listen=[url])
    with joined(executor.endpoint, observer=True) as observer:
        payload = torch.arange(6.0).view(2, 3)
        assert torch.equal(observer.call(Op.ECHO, 0, payload), payload)
        with pytest.raises(CallError) as refused:
            observer.call(Op.FORWARD, number_of(observer, LAYER), torch.ones(2, 64))
        assert refused.value.code is Code.UNKNOWN_OP
        with pytest.raises(CallError):
            observer.call(Op.READ, 0)


@pytest.mark.parametrize("other_does", ["observes", "only echoes", "computes"])
def test_lockstep_waits_for_clients_that_compute(llama: nn.Module, serve: Callable, other_does: str) -> None:
    executor, observer = serve(llama, policy="lockstep"), other_does == "observes"
    with joined(executor.endpoint) as client, joined(executor.endpoint, observer=observer) as other:
        layer, computes = number_of(client, LAYER), other_does == "computes"
        other.call(Op.ECHO, 0, torch.ones(1, 4))
        other.call(Op.STATS, 0)
        if computes:
            other.call(Op.FORWARD, layer, torch.ones(1, 64))
        caller = threading.Thread(target=client.call, args=(Op.FORWARD, layer, torch.ones(2, 64)))
        caller.start()
        caller.join(0.5 if computes else 10)
        assert caller.is_alive() == computes
        other.close()
        caller.join(10)
        assert not caller.is_alive()


def test_rates_are_those_between_two_snapshots(llama: nn.Module, serve: Callable) -> None:
    executor = serve(llama)
    with joined(executor.endpoint) as client, joined(executor.endpoint, observer=True) as observer:
        layer = number_of(client, LAYER)
        client.call(Op.FORWARD, layer, torch.ones(100, 64))
        before = top.snapshot(observer)
        client.call(Op.FORWARD, layer, torch.ones(4, 64))
        now = top.snapshot(observer)
    seconds = now.uptime_s - before.uptime_s
    text = shown(top.render(before, now))
    assert f"{1 / seconds:.0f} calls/s" in text
    assert f"{4 / seconds:.0f} rows/s" in text
    assert LAYER in text


def test_what_clients_multiply_themselves_is_shown(llama: nn.Module, serve: Callable, tmp_path: Path) -> None:
    executor = serve(llama, listen=[f"local://{tmp_path}/executor.sock"], share_weights=True, heartbeat_s=0.5)
    with joined(executor.endpoint, share=True) as client, joined(executor.endpoint, observer=True) as observer:
        before = top.snapshot(observer)
        client.call(Op.FORWARD, number_of(client, LAYER), torch.ones(300, 64))
        until(lambda: top.snapshot(observer).direct_rows == 300, "a heartbeat")
        now = top.snapshot(observer)
    whole, by_session = re.findall(
        r"(?<!\d)300\b", shown(top.render(type(now)(**{**fields(before), "uptime_s": now.uptime_s - 1}), now))
    )
    assert whole == by_session


def test_after_a_restart_rates_begin_anew(llama: nn.Module, serve: Callable) -> None:
    executor = serve(llama)
    with joined(executor.endpoint) as client, joined(executor.endpoint, observer=True) as observer:
        client.call(Op.FORWARD, number_of(client, LAYER), torch.ones(4, 64))
        now = top.snapshot(observer)
    assert f"{1 / now.uptime_s:.0f} calls/s" in shown(top.render(type(now)(**{**fields(now), "uptime_s": 1e6}), now))


def fields(snapshot: top.Snapshot) -> dict[str, object]:
    return {name: getattr(snapshot, name) for name in snapshot.__struct_fields__}


def shown(view: object) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def test_a_name_is_shown_as_it_is(llama: nn.Module, serve: Callable) -> None:
    """A client cannot colour the operator's terminal."""
    from symbiosis import transport
    from symbiosis.protocol import Hello

    executor = serve(llama)
    name = "[bold red]nobody[/]"
    connection = transport.connect(executor.endpoint, Hello(client=name + "x" * 1000), 5.0)
    with joined(executor.endpoint, observer=True) as observer:
        now = top.snapshot(observer)
    connection.close()
    assert [s.client for s in now.sessions if not s.observer] == [(name + "x" * 1000)[:64]]
    assert name in shown(top.render(now, now)).replace("\n", "")


def test_once_prints_one_plain_view(llama: nn.Module, serve: Callable, tmp_path: Path) -> None:
    executor = serve(llama, listen=[f"local://{tmp_path}/executor.sock"])
    model = symbiosis.from_executor(executor.endpoint)
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5]]))
    result = run("top", executor.endpoint, "--once", "--interval", "0.2")
    assert result.returncode == 0, result.stderr
    assert "1 session, 1 observing" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stdout.count("executor at") == 1


def test_no_executor_is_said_in_one_line(tmp_path: Path) -> None:
    result = run("top", f"local://{tmp_path}/none.sock")
    assert result.returncode == 2
    assert result.stderr.startswith("error: no executor at")
    assert result.stderr.count("symbiosis-executor MODEL") == 1
    assert "Traceback" not in result.stderr


def test_all_ranks_of_a_service_are_shown(ids: torch.Tensor) -> None:
    """Their figures are added; each has a line of its own, and one that does not answer is named."""
    url = "inproc://watched"
    with ranks_of(tiny_llama(), url) as servers:
        split = symbiosis.from_executor(url)
        each = {rank: Session(of_rank(url, rank), observer=True, patience=0.2) for rank in (0, 1)}
        views = top.watch(each, 0.01)
        before = top.snapshots(each)
        split(ids)
        now = top.snapshots(each)
        both = of_service(sorted(now.items()))
        assert both.calls - of_service(sorted(before.items())).calls == symbiosis.stats(split).by_op["FORWARD"]
        assert all(now[rank].calls > before[rank].calls for rank in (0, 1))
        assert both.weights_bytes == sum(server.store.nbytes for server in servers)
        assert sorted(session.rank for session in both.sessions if not session.observer) == [0, 1]
        text = shown(next(views))
        assert "2 ranks" in text and "2 sessions, 2 observing" in text
        servers[1].stop()
        assert "does not answer" in shown(next(views))
        for session in each.values():
            session.close()
