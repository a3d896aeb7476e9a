"""The engine's loop when what it computes is void, as it is when a rank of a divided model is lost: sequences begin anew, and texts are the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import symbiosis
from symbiosis.errors import SymbiosisError
from symbiosis.serving import Engine
from symbiosis.serving.engine.reader import GenerationFailed
from symbiosis.serving.request import Output, Request, Sampling
from symbiosis.serving.runner.model_runner import RanksLost
from tests.serving_api import eventually

PROMPTS = (b"Once upon a time", b"def average(numbers):", b"The quick")


@pytest.fixture(params=[False, True], ids=["by turns", "ahead"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with symbiosis.Executor("demo") as executor, Engine(executor.endpoint, memory=1 << 24) as engine:
        engine._loop.ahead = request.param
        yield engine


class Loses:
    """Stands around an engine's runner, of which some steps are void: when they are launched, or when they are read."""

    def __init__(self, engine: Engine, launched: tuple[int, ...] = (), read: tuple[int, ...] = ()) -> None:
        self._served, self._launched, self._read = engine._served, launched, read
        self._logits, self.launches, self.reads, self.restarts = engine._served.logits, 0, 0, 0
        self._served.logits, self._served.check, self._served.restart = self.logits, self.check, self.restart  # type: ignore[method-assign]

    def logits(self, step: Any, rows: Tensor) -> Tensor:
        self.launches += 1
        if self.launches in self._launched:
            raise RanksLost("a rank died")
        return self._logits(step, rows)

    def check(self) -> None:
        self.reads += 1
        if self.reads in self._read:
            raise RanksLost("a rank died")

    def restart(self) -> None:
        assert not any(block.users for block in self._served.blocks._named.values())
        self._served.blocks.forget_all()
        assert self._served.arena.pool.free == self._served.arena.pool.total  # everything was given back
        self._served.arena.flat.fill_(torch.nan)  # and nothing of it is used again
        self.restarts += 1


def texts(engine: Engine) -> list[list[int]]:
    told: dict[int, list[int]] = {}
    ends: dict[int, Output] = {}

    def on_output(output: Output) -> None:
        told.setdefault(output.request, []).extend(token.id for token in output.tokens)
        if output.finish is not None:
            ends[output.request] = output

    ids = [engine.next_id() for _ in PROMPTS]
    for id, prompt in zip(ids, PROMPTS, strict=True):
        sampling = Sampling(seed=7, max_tokens=20, ignore_eos=True)
        engine.submit(Request(id=id, prompt=tuple(prompt), sampling=sampling), on_output)
    eventually(lambda: len(ends) == len(ids))
    assert [ends[id].error for id in ids] == [None] * len(ids)
    return [told[id] for id in ids]


@pytest.mark.parametrize(
    ("launched", "read"),
    [((1,), ()), ((7,), ()), ((), (1,)), ((), (9,)), ((4, 12), (15,)), ((4, 5), ())],
    ids=["the first", "a later one", "the first, when it is read", "a later one, when it is read", "several", "twice"],
)
def test_texts_are_the_same(engine: Engine, launched: tuple[int, ...], read: tuple[int, ...]) -> None:
    expected = texts(engine)
    loses = Loses(engine, launched, read)
    assert texts(engine) == expected
    assert loses.restarts == len(launched) + len(read)


def test_a_request_with_which_ranks_are_lost_again_and_again_ends(engine: Engine) -> None:
    loses = Loses(engine, launched=(3, 4, 5))
    with pytest.raises(GenerationFailed, match="ranks were lost 3 times with it: a rank died"):
        engine.generate(list(PROMPTS[0]), max_tokens=8)
    eventually(lambda: loses.restarts == 3)
    assert len(engine.generate(list(PROMPTS[0]), max_tokens=8).tokens) > 0  # others go on


def test_ranks_that_do_not_come_back_end_all(engine: Engine) -> None:
    loses = Loses(engine, launched=(2,))

    def restart() -> None:
        raise SymbiosisError("they do not come back")

    loses._served.restart = restart  # type: ignore[method-assign]
    with pytest.raises(GenerationFailed, match="they do not come back"):
        engine.generate(list(PROMPTS[0]), max_tokens=8)
    assert engine.has_lost_ranks
