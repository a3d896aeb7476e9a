"""An adapter that is replaced under its name while requests with it run: each answer is by the version that it tells, and by nothing that another one computed."""

import threading
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from torch import nn

from symbiosis.serving import Engine
from tests.inproc.test_publish import llama, lora
from tests.inproc.test_serving_engine import wait_until_idle

PROMPT = [(7 * place) % 90 + 3 for place in range(75)]  # four blocks, which are found again
TOKENS, CONTENTS, RELOADS, READERS = 6, 3, 9, 4
LATEST_S = 60.0

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Answer(NamedTuple):
    version: int
    tokens: list[int]
    known: int  # the version that was there before it was asked for
    cached: int


@pytest.fixture(scope="module")
def base() -> nn.Module:
    return llama()


@pytest.fixture(scope="module")
def contents(base: nn.Module) -> list[Any]:
    """Models whose adapters say different things."""
    made = []
    for number in range(CONTENTS):
        model = peft.get_peft_model(deepcopy(base), lora()).eval()
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in (each for each in model.parameters() if each.requires_grad):
                parameter += torch.randn_like(parameter) * 0.2
        made.append(model)
    return made


@pytest.fixture(scope="module")
def texts(contents: list[Any]) -> list[list[int]]:
    """What each says to the prompt."""
    ids = torch.tensor([PROMPT])
    how: Any = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "do_sample": False}
    with torch.no_grad():
        found = [model.generate(input_ids=ids, **how)[0, len(PROMPT) :].tolist() for model in contents]
    assert len(set(map(tuple, found))) == CONTENTS
    return found


class Readers:
    """Threads that ask the adapter again and again."""

    def __init__(self, engine: Engine, version: Callable[[], int], more: dict[str, Any]) -> None:
        self.answers: list[Answer] = []
        self.errors: list[BaseException] = []
        self._engine, self._version, self._more, self._ends = engine, version, more, threading.Event()
        self._threads = [threading.Thread(target=self._read, daemon=True) for _ in range(READERS)]

    def _read(self) -> None:
        try:
            while not self._ends.is_set():
                known = self._version()
                told = self._engine.generate(PROMPT, adapter="mine", max_tokens=TOKENS, **self._more)
                self.answers.append(Answer(told.model_version, list(told.tokens), known, told.cached_tokens))
        except BaseException as error:
            self.errors.append(error)

    def wait(self, more: int) -> None:
        """Wait for so many answers more."""
        until, wanted = time.monotonic() + LATEST_S, len(self.answers) + more
        while len(self.answers) < wanted and not self.errors:
            assert time.monotonic() < until
            time.sleep(0.002)

    def __enter__(self) -> "Readers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(LATEST_S)


@pytest.mark.parametrize("pages", [None, 160], ids=["", "little memory"])
@pytest.mark.parametrize("speculate", [None, "ngram:4"], ids=["", "with drafts"])
@pytest.mark.parametrize("way", ["add", "publish"])
def test_answers_are_by_the_version_that_they_tell(
    way: str, speculate: str | None, pages: int | None, base: nn.Module, contents: list[Any], texts: list[list[int]], tmp_path: Path
) -> None:  # fmt: skip
    for number, model in enumerate(contents):
        model.save_pretrained(tmp_path / str(number))
    memory = 1 << 24 if pages is None else pages * 16 * 2 * 2 * 16 * 4
    with Engine(deepcopy(base), memory=memory, speculate=speculate, prefill_tokens=32) as engine:

        def load(content: int) -> int:
            if way == "publish":
                return engine.publish("mine", contents[content])
            return engine.add("mine", tmp_path / str(content)).version

        of_version = {load(0): 0}
        with Readers(engine, lambda: max(of_version), {"temperature": 0.0}) as readers:
            for number in range(1, RELOADS):
                readers.wait(READERS // 2)
                of_version[load(number % CONTENTS)] = number % CONTENTS
            readers.wait(2 * READERS)
        figures = engine.figures()
        engine.remove("mine")
        wait_until_idle(engine)
        assert engine.figures().pages_free == figures.pages, "nothing of any version is kept"
    assert not readers.errors
    for answer in readers.answers:
        assert answer.tokens == texts[of_version[answer.version]] and answer.version >= answer.known
    assert {answer.version for answer in readers.answers[-READERS:]} == {max(of_version)}
    assert len({answer.version for answer in readers.answers}) > RELOADS // 2
    assert figures.prefix_hits > 0 and any(answer.cached == 64 for answer in readers.answers)


def test_files_that_change_in_the_folder_are_another_version(
    base: nn.Module, contents: list[Any], texts: list[list[int]], tmp_path: Path
) -> None:
    """Found when it is asked for; requests under way keep the old one."""

    def put(content: int) -> None:
        contents[content].save_pretrained(tmp_path / "new")
        old = tmp_path / "adapters" / "mine"
        old.mkdir(parents=True, exist_ok=True)
        for file in (tmp_path / "new").iterdir():
            file.replace(old / file.name)

    put(0)
    with Engine(deepcopy(base), memory=1 << 24, adapters=tmp_path / "adapters") as engine:
        with Readers(engine, lambda: 0, {"temperature": 0.0}) as readers:
            for number in range(1, RELOADS):
                readers.wait(READERS)
                put(number % CONTENTS)
            readers.wait(3 * READERS)
        last = engine.generate(PROMPT, adapter="mine", max_tokens=TOKENS, temperature=0.0)
    assert not readers.errors
    by_version: dict[int, set[tuple[int, ...]]] = {}
    for answer in readers.answers:
        by_version.setdefault(answer.version, set()).add(tuple(answer.tokens))
    assert all(len(said) == 1 for said in by_version.values())
    assert set.union(*by_version.values()) == set(map(tuple, texts))
    assert list(last.tokens) == texts[(RELOADS - 1) % CONTENTS]
