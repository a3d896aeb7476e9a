"""`symbiosis://MODEL` while a cluster starts, moves and ends executors: programs wait for one, take another, or follow it."""

import contextlib
import fcntl
import gc
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import symbiosis
from symbiosis.base.ownership import make_folder
from symbiosis.cli import top
from symbiosis.client.session import Session
from symbiosis.errors import ConfigError, ExecutorUnavailable
from symbiosis.executor.model.load import load_model
from symbiosis.protocol import Op
from symbiosis.protocol.cluster_state import Member, Told, folder_of, tell

IDS = torch.tensor([list(b"def average(numbers):")])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def running() -> Iterator[None]:
    """A cluster that has told nothing yet."""
    make_folder(folder_of("lab"))
    with (folder_of("lab") / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def cluster(home: Path) -> Iterator[None]:
    with running():
        yield


def tell_of(*urls: str) -> None:
    """Let programs know of executors. Those without a URL are being started, as on a node that Ray has not chosen yet."""
    members = [
        Member(name=f"demo-executor-{n}", kind="executor", model="demo", url=url, state="ready" if url else "starting")
        for n, url in enumerate(urls, 1)
    ]
    tell(Told(name="lab", url="", members=tuple(members)))


def wrapped(url: str | list[str], **words: Any) -> Any:
    """A program that computes by the executor that it finds, as the unsplit model does."""
    model = symbiosis.wrap(load_model("demo"), url, share=False, **words)
    assert torch.equal(model(input_ids=IDS).logits, load_model("demo")(input_ids=IDS).logits)
    return model


def executor(home: Path, name: str) -> symbiosis.Executor:
    return symbiosis.Executor("demo", listen=[f"local://{home}/{name}.sock"])


@contextlib.contextmanager
def soon(do: Callable[[], object]) -> Iterator[None]:
    timer = threading.Timer(0.15, do)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_a_program_waits_for_an_executor_that_is_being_started(home: Path, cluster: None) -> None:
    tell_of("")
    with executor(home, "a") as one, soon(lambda: tell_of(one.endpoint)):
        wrapped("symbiosis://demo")


def test_a_program_waits_for_one_whose_place_is_known_already(home: Path, cluster: None) -> None:
    """As on this host, where a socket has its name before the executor listens there."""
    tell_of(f"local://{home}/a.sock")
    with contextlib.ExitStack() as stack, soon(lambda: stack.enter_context(executor(home, "a"))):
        wrapped("symbiosis://lab/demo")


def test_a_program_takes_another_one_meanwhile(home: Path, cluster: None) -> None:
    with executor(home, "a") as one:
        tell_of("", one.endpoint)
        begun = time.monotonic()
        wrapped("symbiosis://demo")
        tell_of("")
        wrapped(["symbiosis://demo", one.endpoint])
        assert time.monotonic() - begun < 20, "nothing was waited for"


def test_what_is_never_started_is_an_error_that_says_where_to_look(home: Path, cluster: None) -> None:
    tell_of("", "")
    with pytest.raises(ExecutorUnavailable, match="still starting its executors: symbiosis cluster status lab"):
        symbiosis.from_executor("symbiosis://demo", patience=0.3)
    with pytest.raises(ExecutorUnavailable, match="still starting"):
        top.run("symbiosis://demo", once=True, interval=0.1)


def test_a_program_that_says_so_waits_for_the_cluster_itself(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"there are: none\)"):
        symbiosis.from_executor("symbiosis://demo")
    with executor(home, "a") as one, contextlib.ExitStack() as stack:

        def come() -> None:
            stack.enter_context(running())
            tell_of(one.endpoint)

        with soon(come):
            wrapped("symbiosis://demo", wait=20)


@pytest.mark.parametrize("beside", [[], ["gone"]], ids=["the only one", "one of two"])
def test_a_program_follows_an_executor_that_is_started_again_elsewhere(
    home: Path, cluster: None, beside: list[str]
) -> None:
    gone = [f"local://{home}/{name}.sock" for name in beside]
    with executor(home, "a") as one:
        tell_of(one.endpoint, *gone)
        model = wrapped("symbiosis://demo", patience=20)
        wanted = model(input_ids=IDS).logits
    with executor(home, "b") as other, soon(lambda: tell_of(*gone, other.endpoint)):
        assert torch.equal(model(input_ids=IDS).logits, wanted)


def test_a_copy_of_a_program_follows_it_too(home: Path, cluster: None) -> None:
    """It joins where the original was, and knows by which name to ask."""
    with executor(home, "a") as one:
        tell_of(one.endpoint)
        session = Session("symbiosis://demo", patience=20)
        pickled = pickle.dumps(session)
        del session
        gc.collect()
    tell_of(f"local://{home}/b.sock")
    copied = pickle.loads(pickled)
    with executor(home, "b") as other:
        assert torch.equal(copied.call(Op.ECHO, 0, torch.ones(1, 2)), torch.ones(1, 2))
        assert copied.endpoint == other.endpoint and copied.wait == 20


def test_a_program_stays_with_an_executor_that_no_cluster_tells_of(home: Path) -> None:
    """Its cluster has ended, and starts again at the same place."""
    with running(), executor(home, "a") as one:
        tell_of(one.endpoint)
        model = wrapped("symbiosis://demo", patience=20)
        wanted = model(input_ids=IDS).logits
    with contextlib.ExitStack() as stack, soon(lambda: stack.enter_context(executor(home, "a"))):
        assert torch.equal(model(input_ids=IDS).logits, wanted)
