"""What servers of a cluster have left that do not come back: it is removed, and nothing of those that are there or may come back."""

import time
from pathlib import Path

import pytest

from symbiosis.server.tinker.checkpoint_store import write_facts
from symbiosis.server.tinker.gone_servers import BEGINS_S, GONE_S, GoneServers
from symbiosis.server.tinker.tinker_sessions import SessionFacts, SessionsElsewhere
from symbiosis.training.engine_folder import EngineFolder


class Server:
    """One of those that share a folder, at a time that the test says."""

    def __init__(self, servers: Path, name: str) -> None:
        self.folder, self.now = servers / name, time.time()
        self.trainer: EngineFolder | None = EngineFolder(self.folder / "runs")
        self.gone = GoneServers(self.folder, name, clock=lambda: self.now)
        self.elsewhere = SessionsElsewhere(self.folder / "sessions", name)
        self.gone.look()

    def session(self, id: str) -> None:
        folder = self.folder / "sessions" / id
        (folder / "0.requests").mkdir(parents=True)
        (self.folder / "runs" / f"{id}:train:0").mkdir()
        write_facts(folder / "session.json", SessionFacts(tenant="anna", created=self.now))

    def end(self) -> None:
        assert self.trainer is not None
        self.trainer.close()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Server, Server]:
    one, two = Server(tmp_path, "one"), Server(tmp_path, "two")
    two.session("a")
    return one, two


def test_what_a_server_has_left_that_is_gone_counts_no_more(pair: tuple[Server, Server]) -> None:
    one, two = pair
    two.end()
    one.now += GONE_S - 1
    assert not one.gone.look() and len(one.elsewhere.of("anna")) == 1
    one.now += 2
    assert one.gone.look() == ["a:train:0"]
    assert not one.elsewhere.of("anna") and not any((two.folder / "runs").iterdir())
    assert not one.gone.look()


def test_a_server_that_is_there_keeps_what_it_has(pair: tuple[Server, Server]) -> None:
    one, two = pair
    for each in pair:
        each.now += 2 * GONE_S
    two.gone.look()  # it has ended a moment ago
    two.end()
    assert not one.gone.look()
    two.trainer = EngineFolder(two.folder / "runs")  # it says nothing, and has the folder still
    one.now += 2 * GONE_S
    assert not one.gone.look() and len(one.elsewhere.of("anna")) == 1


def test_a_cluster_that_was_down_for_long_misses_nobody_at_once(pair: tuple[Server, Server]) -> None:
    for each in pair:
        each.end()
    now = pair[0].now + 9 * GONE_S
    again = GoneServers(pair[0].folder, "one", clock=lambda: now)
    now += BEGINS_S - 1
    assert not again.look()
    now += 2
    assert again.look() == ["a:train:0"]


def test_one_that_is_alone_looks_at_nobody(tmp_path: Path) -> None:
    Server(tmp_path, "two").session("a")
    now = time.time()
    alone = GoneServers(tmp_path / "state", None, clock=lambda: now)
    now += 2 * GONE_S
    assert not alone.look() and (tmp_path / "two" / "sessions" / "a").is_dir()
