"""The life of a service's ranks, at moments that real processes seldom meet: with ranks that are pipes."""

import logging
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from symbiosis.errors import ConfigError
from symbiosis.executor import sessions
from symbiosis.executor.loop import ExecutorLoop
from symbiosis.executor.model.store import Store
from symbiosis.executor.options import Options, load_options
from symbiosis.executor.ranks import rank_figures, rendezvous, service
from symbiosis.executor.ranks.descriptor_exchange import Exchange
from symbiosis.executor.ranks.orders import Order, Ready
from symbiosis.executor.ranks.rank import tell_what_is_not_mapped
from symbiosis.executor.ranks.rendezvous import Rendezvous, Wait
from tests.conftest import tiny_llama
from tests.processes import Client, Say, killed_at_the_end, until


class Rank:
    """As much of a rank as a service uses."""

    def __init__(self, order: Order) -> None:
        self.order, self.number, self.pid = order, order.rank, os.getpid()
        self.ready: Ready | None = None
        self.told: list[int] = []
        self.status = 0
        stdout, self._says = os.pipe()
        self.stdout = os.fdopen(stdout, "rb")

    def says(self, ready: Ready) -> None:
        os.write(self._says, msgspec.json.encode(ready) + b"\n")

    def ends(self, status: int = 0) -> None:
        if self._says >= 0:
            self.status, says, self._says = status, self._says, -1
            os.close(says)

    def signal(self, number: int) -> None:
        self.told.append(number)
        self.ends()

    def wait(self, seconds: float) -> bool:
        return True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[service.Service, Any], None]], list[Any]]:
    """Runs a service of three ranks to its end. `made` is called with the service and each rank while the rank is being made."""

    def run(made: Callable[[service.Service, Any], None]) -> list[Any]:
        ranks: list[Any] = []

        def new(order: Order) -> Any:
            ranks.append(Rank(order))
            made(served, ranks[-1])
            return ranks[-1]

        monkeypatch.setattr(service, "Rank", new)
        served = service.Service("a model", load_options({"ranks": 3, "listen": ["local:///a.sock"]}), "/none")
        status: list[int] = []
        thread = Thread(target=lambda: status.append(served.run()), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "it has not ended"
        return [*status, ranks]

    return run


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_service_that_is_told_to_end_while_it_starts_ends(at: int, run: Callable) -> None:
    def made(served: service.Service, rank: Any) -> None:
        if rank.number == at:
            served.end()

    status, ranks = run(made)
    assert status == 0 and len(ranks) == at + 1 and all(signal.SIGTERM in rank.told for rank in ranks)


# A rank that is ready and has a socket; the second one freezes.
FREEZES = """
import json, os, signal, socket, sys
order = json.loads(sys.stdin.readline())
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.bind(order["options"]["listen"][0].removeprefix("local://") + ".rank1" * order["rank"])
sock.listen()
print(json.dumps({"layers": 1, "nbytes": 1}), flush=True)
if order["rank"]:
    os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""


def test_a_service_ends_though_a_rank_is_frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And leaves neither the process nor sockets."""
    monkeypatch.setattr(service, "program", lambda *_, **__: ["-c", FREEZES])
    monkeypatch.setattr(service, "END_S", 0.3)
    options = load_options({"ranks": 2, "listen": [f"local://{tmp_path}/a.sock"]})
    served = service.Service("a model", options, "/none")
    status: list[int] = []
    thread = Thread(target=lambda: status.append(served.run()), daemon=True)
    thread.start()
    state = lambda rank: Path(f"/proc/{rank.pid}/stat").read_text().split()[2]  # noqa: E731
    until(lambda: served._told and state(served._ranks[1]) == "T", "that one is frozen")
    frozen = served._ranks[1]
    try:
        assert len(list(tmp_path.iterdir())) == 2
        served.end()
        thread.join(30)
        assert status == [1] and not Path(f"/proc/{frozen.pid}").exists() and not list(tmp_path.iterdir())
    finally:
        if thread.is_alive():
            frozen.signal(signal.SIGKILL)


# A rank that says nothing more, and does not end.
HANGS = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.readline()
os.close(1)
signal.pause()
"""


@pytest.mark.parametrize(("at_once", "end_s"), [(False, 0.3), (True, 60.0)])
def test_a_rank_that_hangs_after_its_last_word_is_killed(
    at_once: bool, end_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """... when its time is over, and at once if the service is told to end a second time."""
    made: list[service.Rank] = []

    class Noted(service.Rank):
        def __init__(self, order: Order) -> None:
            super().__init__(order)
            made.append(self)

    monkeypatch.setattr(service, "program", lambda *_, **__: ["-c", HANGS])
    monkeypatch.setattr(service, "Rank", Noted)
    monkeypatch.setattr(service, "END_S", end_s)
    served = service.Service("m", load_options({"ranks": 2, "listen": [f"local://{tmp_path}/a.sock"]}), "/none")
    status: list[int] = []
    thread = Thread(target=lambda: status.append(served.run()), daemon=True)
    thread.start()
    try:
        until(lambda: len(made) == 2 and len(served._selector.get_map()) < 2, "that one says nothing more")
        if at_once:
            served.end_at_once()
        thread.join(15)
        assert status == [1] and not any(Path(f"/proc/{rank.pid}").exists() for rank in made)
    finally:
        for rank in made if thread.is_alive() else []:
            rank.signal(signal.SIGKILL)


def test_a_socket_that_a_successor_has_by_now_stays(tmp_path: Path) -> None:
    order = Order("a model", load_options({"listen": [f"local://{tmp_path}/a.sock"]}), 0, "/none")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as successor:
        successor.bind(str(tmp_path / "a.sock"))
        successor.listen()
        service.remove_sockets(order)
        assert (tmp_path / "a.sock").exists()
    service.remove_sockets(order)
    assert not (tmp_path / "a.sock").exists()


def test_the_log_tells_which_rank_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(rendezvous, "ALARM_S", 0.0)
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(Rendezvous(store, 0, 2).wait_for, "checked", 1)
        until(lambda: "waiting for another rank" in caplog.text, "a line")
        Rendezvous(store, 1, 2).note("checked")
        waits.result(60)
    told = next(record for record in caplog.records if "waiting for another rank" in record.getMessage())
    assert told.fields["rank"] == 1  # type: ignore[attr-defined]


def test_a_service_that_fails_says_not_that_it_is_ready(run: Callable, capsys: pytest.CaptureFixture) -> None:
    def made(_: service.Service, rank: Any) -> None:
        if rank.number == 0:
            rank.ends(2)
        else:  # what it has said is read after the other's end
            rank.says(Ready(1, 1))

    status, _ = run(made)
    assert status == 2 and "ready" not in capsys.readouterr().out


def test_a_rank_that_dies_when_it_has_just_become_ready_is_started_again(run: Callable) -> None:
    def made(served: service.Service, rank: Any) -> None:
        if rank.number == 0 and not rank.order.options.operator:
            rank.order = msgspec.structs.replace(rank.order, options=Options(operator="again"))
            rank.says(Ready(1, 1, part=1 << 20))  # a descriptor that is there no more
            rank.ends(-signal.SIGKILL)
        elif rank.order.options.operator:
            served.end()

    status, ranks = run(made)
    assert status == 0 and [rank.number for rank in ranks] == [0, 1, 2, 0]


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_the_pages_of_ranks_are_asked_for_at_the_same_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page whose ranks are frozen says so before those who ask give up."""
    everybody = Barrier(4)

    def page(url: str) -> None:
        assert url.endswith(path)
        everybody.wait(10)

    monkeypatch.setattr(rank_figures, "read_page", page)
    ports = dict.fromkeys(range(4), 1)
    if path == "/health":
        assert rank_figures.health_of(ports, 4)[0] == "stalled"
    else:
        assert not of_ranks(rank_figures.RankFigures(ports))


def of_ranks(figures: rank_figures.RankFigures) -> list[str]:
    """The metrics that ranks have told; the others are of the service's own process."""
    return [metric.name for metric in figures.collect() if any("rank" in sample.labels for sample in metric.samples)]


def test_a_service_has_pages_before_its_ranks_have() -> None:
    assert rank_figures.health_of({}, 4)[0] == "starting"
    assert not of_ranks(rank_figures.RankFigures({}))


def test_the_fingerprint_is_the_model_s_wherever_it_lies(tmp_path: Path) -> None:
    found = set()
    for name in ("here", "there"):
        model = tiny_llama()
        model.config._name_or_path = str(tmp_path / name)
        found.add(Store(model).fingerprint)
    assert len(found) == 1
    other = tiny_llama()
    other.config.rms_norm_eps *= 2
    assert Store(other).fingerprint not in found


def rank_that_waits(say: Say, file: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # as a rank that loads does
    ranks = Rendezvous.at(file, 0, 2)
    say("waits")
    ranks.wait_for("what it never says", 1)


def test_a_rank_that_waits_for_another_can_be_ended(tmp_path: Path) -> None:
    with killed_at_the_end() as processes:
        rank = Client(rank_that_waits, str(tmp_path / "board"))
        processes.append(rank)
        assert rank.heard() == "waits"
        rank.signal(signal.SIGTERM)
        assert rank.wait(10) == 0


def test_ranks_agree_on_the_configuration_also_when_one_is_started_again() -> None:
    """Weights may be the same while the model is another."""
    store, config, manifest = HashStore(), '{"rms_norm_eps": 1e-6}', Store(tiny_llama()).manifest
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: Rendezvous(store, rank, 2).agree(config, manifest), range(2)))
    Rendezvous(store, 1, 2).agree(config, manifest)
    for other in (('{"rms_norm_eps": 1e-5}', manifest), (config, manifest[:-1])):
        with pytest.raises(ConfigError, match="rank 1 was started again and finds another checkpoint"):
            Rendezvous(store, 1, 2).agree(*other)
    store.set("model1", "another")
    with pytest.raises(ConfigError, match="rank 1 reads another checkpoint than rank 0"):
        Rendezvous(store, 0, 2).agree(config, manifest)


@pytest.mark.parametrize(
    "place", ["/proc/1/fd/7", "", "2f6e6f6265", None], ids=["a path", "nothing", "nobody", "parts of another model"]
)
def test_no_part_is_taken_from_where_others_say(place: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the store of torchrun may write there; what counts is who answers, and what it says that it has."""
    other, right = Exchange(), Exchange()
    with Path(os.devnull).open() as file:
        other.hold(1, "other", [file.fileno()])
        right.hold(1, "d", [file.fileno()])
        store = HashStore()
        store.set("file1", other.address if place is None else place)
        monkeypatch.setattr(Wait, "turn", lambda *_: store.set("file1", right.address))
        if place is None:
            with pytest.raises(ConfigError, match="rank 1 reads another checkpoint than rank 0"):
                Rendezvous(store, 0, 2).parts(Exchange(), "d")
        else:
            (part,) = Rendezvous(store, 0, 2).parts(Exchange(), "d")[1]
            assert os.path.sameopenfile(part, file.fileno())
            os.close(part)


def test_ranks_of_a_host_share_half_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "half_of_memory", lambda: 600)
    store = Store(tiny_llama())
    most = lambda **words: ExecutorLoop(store, load_options(words).of_rank(0)).sessions._pool.most  # noqa: E731
    assert most() == 600 and most(ranks=3) == 200 and most(ranks=3, max_bytes=500) == 500
    assert most(ranks=4, hosts=("a", "b"), listen=("tcp://a:70",)) == 300


@pytest.mark.parametrize(
    ("rank", "words", "told"),
    [
        (0, {"share_weights": True, "shard": "fsdp", "devices": "0,1"}, True),
        (1, {"share_weights": True, "shard": "fsdp", "devices": "0,1"}, False),
        (0, {"shard": "fsdp", "devices": "0,1"}, False),
        (0, {"share_weights": True, "devices": "0,1"}, False),
        (0, {"share_weights": True, "shard": "fsdp", "ranks": 2}, False),
    ],
    ids=str,
)
def test_weights_that_nobody_maps_are_told_of_once(
    rank: int, words: dict, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tell_what_is_not_mapped(Order("a model", load_options(words), rank, "/none"))
    assert ("--share-weights does nothing here" in caplog.text) == told
