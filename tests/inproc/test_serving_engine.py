"""The engine answers as transformers' generate() does, whatever else it does at the time."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache, partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import symbiosis
from symbiosis.client.direct.mapped import Mapped
from symbiosis.errors import ConfigError, ExecutorUnavailable, UnknownAdapter
from symbiosis.protocol import Priority
from symbiosis.server.ipc.engine_ipc import LENGTH, EngineReady, ReceivedOutputs, Submit, framed, from_engine
from symbiosis.server.ipc.engine_server import EngineServer
from symbiosis.serving import Engine
from symbiosis.serving.engine.reader import GenerationFailed
from symbiosis.serving.lora import adapter_files
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.request import Finish, Output, Request, Sampling, Token
from symbiosis.serving.scheduler.scheduler_output import SchedulerOutput
from symbiosis.transport.base import Tokens

DEMO = Path(symbiosis.__file__).parent / "demo_model"
PROMPTS = [
    b"Once upon a time",
    b"def main():",
    b"x",
    b"The quick brown fox jumps over the lazy dog. " * 4,
    b"import os\n",
]


def demo() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO).eval()


@cache
def reference() -> Any:
    return demo()


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@cache
def expected(prompt: bytes, most: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and their log probabilities by `generate()`."""
    ids = torch.tensor([list(prompt)])
    made = reference().generate(
        ids, max_new_tokens=most, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    tokens = made.sequences[0, ids.shape[1] :]
    logprobs = torch.stack([each[0] for each in made.logits]).log_softmax(-1).gather(1, tokens.unsqueeze(1))
    return tuple(tokens.tolist()), tuple(logprobs.squeeze(1).tolist())


@pytest.fixture(params=["plain", "ahead"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """With the plain loop, and with the one that launches a step while the one before runs, as on a GPU."""
    with Engine(demo(), tokenizer(), memory=1 << 24) as engine:
        engine._loop.ahead = request.param == "ahead"  # type: ignore[attr-defined]
        yield engine
        engine.close(drain=False)


class Ask:
    """A request, and what comes back."""

    def __init__(
        self, engine: Engine, id: int, prompt: bytes, adapter: str | None = None, completions: int = 1, **how: Any
    ):
        self.outputs: SimpleQueue[Output] = SimpleQueue()
        self.request = Request(
            id=id, prompt=tuple(prompt), adapter=adapter, completions=completions, sampling=Sampling(**how)
        )
        engine.submit(self.request, self.outputs.put)

    def all(self) -> list[list[Output]]:
        """By completion, up to the end of each."""
        found: list[list[Output]] = [[] for _ in range(self.request.completions)]
        while not all(of and of[-1].finish for of in found):
            output = self.outputs.get(timeout=60)
            found[output.completion].append(output)
        return found

    def tokens(self, completion: int = 0) -> tuple[int, ...]:
        return tuple(token.id for output in self.all()[completion] for token in output.tokens)


def greedy(engine: Engine, prompt: bytes, most: int = 30, **more: Any) -> tuple[int, ...]:
    return engine.generate(list(prompt), max_tokens=most, temperature=0.0, **more).tokens


def wait_until_idle(engine: Engine) -> None:
    done = threading.Event()
    engine._loop.ask(done.set)
    assert done.wait(60)


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_tokens": 5}, {"max_batch": 2}, {"policy": "vtc"}, {"memory": 5 * 16 * 16 * 4 * 4 * 30}],
    ids=["all together", "prompts in pieces", "two together", "by tenant", "evicted"],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_greedy_tokens_and_log_probabilities_are_those_of_generate(options: dict[str, Any], ahead: bool) -> None:
    with Engine(demo(), **{"memory": 1 << 24, **options}) as engine:
        engine._loop.ahead = ahead  # type: ignore[attr-defined]
        asked = [
            Ask(engine, number, prompt, max_tokens=50, temperature=0.0, logprobs=2)
            for number, prompt in enumerate(PROMPTS * 2)
        ]
        for number, one in enumerate(asked):
            tokens, logprobs = expected(PROMPTS[number % len(PROMPTS)], 50)
            (outputs,) = one.all()
            assert [token.id for output in outputs for token in output.tokens] == list(tokens)
            got = [token for output in outputs for token in output.tokens]
            assert [token.logprob for token in got] == pytest.approx(logprobs, abs=1e-4)
            assert all(token.top[0][1] == pytest.approx(token.logprob) for token in got)
        figures = engine.figures()
        assert "memory" not in options or figures.evictions > 0
    assert figures.generated_tokens == sum(len(expected(p, 50)[0]) for p in PROMPTS) * 2


def test_a_seeded_request_says_the_same_whatever_else_runs(engine: Engine) -> None:
    how = {"max_tokens": 40, "temperature": 0.9, "top_p": 0.95, "seed": 7}
    alone = Ask(engine, 0, PROMPTS[0], **how).tokens()
    others = [Ask(engine, 10 + n, PROMPTS[n % 5], max_tokens=60) for n in range(6)]
    again = Ask(engine, 1, PROMPTS[0], **how)
    other_seed = Ask(engine, 2, PROMPTS[0], **{**how, "seed": 8})
    assert again.tokens() == alone != other_seed.tokens()
    assert all(other.all() for other in others)


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_random_arrivals_with_little_memory_change_nothing(ahead: bool) -> None:
    """Seeded requests that come while others run, are evicted, and share prefixes, against the same one after another."""
    chance = random.Random(3)
    how = [
        {"max_tokens": chance.randint(1, 40), "temperature": chance.choice([0.0, 1.0]), "seed": n} for n in range(14)
    ]
    prompts = [chance.choice(PROMPTS)[: chance.randint(1, 90)] for _ in how]
    with Engine(demo(), memory=1 << 24) as engine:
        one_by_one = [engine.generate(list(p), **h).tokens for p, h in zip(prompts, how, strict=True)]  # type: ignore[arg-type]
    with Engine(demo(), memory=5 * 16 * 16 * 4 * 4 * 20, prefill_tokens=16) as engine:
        engine._loop.ahead = ahead  # type: ignore[attr-defined]
        asked = []
        for number, (prompt, h) in enumerate(zip(prompts, how, strict=True)):
            asked.append(Ask(engine, number, prompt, **h))
            if chance.random() < 0.5:
                engine.generate([1], max_tokens=chance.randint(1, 8))  # so that they come at any step of each other
        assert [one.tokens() for one in asked] == one_by_one
        assert engine.figures().evictions > 0


def test_a_step_is_launched_while_the_one_before_runs_unless_its_tokens_matter() -> None:
    """A penalty needs all tokens before; then nothing is launched ahead, nor while somebody has to give way."""
    launched: list[bool] = []
    with Engine(demo(), memory=1 << 24) as engine:
        loop = engine._loop
        loop.ahead, forward = True, loop._served.forward

        def watched(step: Any) -> torch.Tensor:
            launched.append(step.fed is not None)
            return forward(step)

        loop._served.forward = watched  # type: ignore[method-assign]
        greedy(engine, PROMPTS[0])
        assert launched[:2] == [False, True] and all(launched[1:])
        launched.clear()
        engine.generate(list(PROMPTS[0]), max_tokens=8, repetition_penalty=1.2)
        assert launched and not any(launched)


def test_completions_of_one_prompt_share_it_and_differ(engine: Engine) -> None:
    prompt = PROMPTS[3]
    one = Ask(engine, 0, prompt, completions=3, max_tokens=20, seed=4)
    outputs = one.all()
    texts = [[token.id for output in of for token in output.tokens] for of in outputs]
    assert len({tuple(text) for text in texts}) == 3
    assert outputs[0][0].prompt_tokens == len(prompt)
    assert engine.figures().prefix_hits >= 2 * (len(prompt) // 16) * 16
    again = Ask(engine, 1, prompt, completions=3, max_tokens=20, seed=4).all()
    assert [[t.id for o in of for t in o.tokens] for of in again] == texts


def test_prefixes_are_found_again(engine: Engine) -> None:
    first, second = (engine.generate(list(PROMPTS[3]), max_tokens=5, temperature=0.0) for _ in range(2))
    assert first.tokens == second.tokens == expected(PROMPTS[3], 5)[0]
    assert first.cached_tokens == 0 and second.cached_tokens == (len(PROMPTS[3]) - 1) // 16 * 16
    assert second.prompt_tokens == len(PROMPTS[3])


def test_text_ends_before_a_stop_string(engine: Engine) -> None:
    whole = engine.generate("Once upon a time", max_tokens=40, temperature=0.0)
    assert whole.text == tokenizer().decode(whole.tokens) and whole.finish == Finish.LENGTH
    stop = whole.text[10:13]
    cut = engine.generate("Once upon a time", max_tokens=40, temperature=0.0, stop=stop)
    assert cut.text == whole.text[: whole.text.find(stop)] and cut.finish == Finish.STOP


def test_ends_of_text(engine: Engine) -> None:
    tokens = expected(PROMPTS[0], 30)[0]
    assert greedy(engine, PROMPTS[0], stop_tokens=(tokens[4],)) == tokens[: tokens.index(tokens[4]) + 1]
    end = next(iter(engine._served.ends))
    pushed = {"logit_bias": {end: 100.0}}
    assert greedy(engine, PROMPTS[0], **pushed) == (end,)
    assert greedy(engine, PROMPTS[0], 5, **pushed, ignore_eos=True) == (end,) * 5
    assert greedy(engine, PROMPTS[0], 9, **pushed, min_tokens=4)[4:] == (end,)


def test_repetition_penalty_is_that_of_generate(engine: Engine) -> None:
    ids = torch.tensor([list(PROMPTS[0])])
    made = reference().generate(ids, max_new_tokens=30, do_sample=False, repetition_penalty=1.4)
    assert greedy(engine, PROMPTS[0], repetition_penalty=1.4) == tuple(made[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("prefill", [512, 7])
@pytest.mark.parametrize("completions", [1, 3])
def test_log_probabilities_of_the_prompt(prefill: int, completions: int) -> None:
    with Engine(demo(), memory=1 << 24, prefill_tokens=prefill) as engine:
        other = Ask(engine, 7, PROMPTS[1], max_tokens=30, temperature=0.0)
        got: SimpleQueue[Output] = SimpleQueue()
        prompt = tuple(PROMPTS[3])
        sampling = Sampling(max_tokens=0)
        request = Request(id=1, prompt=prompt, sampling=sampling, completions=completions, prompt_logprobs=3)
        engine.submit(request, got.put)
        output, *more = [got.get(timeout=60) for _ in range(completions)]
        assert other.tokens() == expected(PROMPTS[1], 30)[0]
    with torch.no_grad():
        logprobs = reference()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert all(each.finish == Finish.LENGTH and not each.tokens for each in (output, *more))
    assert [token.id for token in output.prompt_logprobs] == list(prompt)
    assert output.prompt_logprobs[0] == Token(prompt[0])
    for place, token in enumerate(output.prompt_logprobs[1:], 1):
        assert token.logprob == pytest.approx(logprobs[place - 1, token.id].item(), abs=1e-4)
        others = logprobs[place - 1].topk(3)
        assert [id for id, _ in token.top] == others.indices.tolist()
        assert token.rank == 1 + int((logprobs[place - 1] > logprobs[place - 1, token.id]).sum())


def test_a_prompt_without_an_answer_is_counted_and_has_no_first_token(engine: Engine) -> None:
    assert len(greedy(engine, PROMPTS[2], 2, ignore_eos=True)) == 2
    for id in range(1, 3):
        got: SimpleQueue[Output] = SimpleQueue()
        scored = Request(
            id=id, prompt=tuple(PROMPTS[0]), sampling=Sampling(max_tokens=0), completions=id, prompt_logprobs=0
        )
        engine.submit(scored, got.put)
        assert all(got.get(timeout=60).finish is Finish.LENGTH for _ in range(id))
    wait_until_idle(engine)
    figures = engine.figures()
    assert figures.prompt_tokens == len(PROMPTS[2]) + 2 * len(PROMPTS[0]) and figures.generated_tokens == 2
    assert (figures.queue_s.count, figures.first_token_s.count, figures.whole_s.count) == (3, 1, 4)


@pytest.mark.parametrize("ended", [0, 1])
def test_a_prompt_is_counted_whichever_of_its_completions_has_ended_elsewhere(engine: Engine, ended: int) -> None:
    got = SimpleQueue[Output]()
    sampling = Sampling(max_tokens=3, ignore_eos=True)
    engine.submit(Request(id=1, prompt=tuple(PROMPTS[0]), sampling=sampling, completions=2, ended=(ended,)), got.put)
    while got.get(timeout=60).finish is None:
        pass
    wait_until_idle(engine)
    figures = engine.figures()
    assert figures.prompt_tokens == len(PROMPTS[0])
    assert figures.queue_s.count == figures.first_token_s.count == 1


def test_what_stops_takes_as_long_as_what_ends_and_what_is_cancelled_does_not(engine: Engine) -> None:
    """Who reads the text finds a stop string in it, and says so."""
    for n, stops in enumerate((True, False), 1):
        asked = Ask(engine, n, PROMPTS[1], max_tokens=300, ignore_eos=True)
        asked.outputs.get(timeout=60)
        (engine.stop if stops else engine.cancel)(n)
        wait_until_idle(engine)
        assert engine.figures().whole_s.count == 1


def test_one_completion_stops_and_the_others_go_on(engine: Engine) -> None:
    """Stopping what has stopped, has ended, or was never there, changes nothing."""
    asked = Ask(engine, 1, PROMPTS[1], completions=3, max_tokens=300, ignore_eos=True)
    told = [asked.outputs.get(timeout=60)]
    while {output.completion for output in told} != {0, 1, 2}:
        told.append(asked.outputs.get(timeout=60))
    for completion in (0, 2, 2, 3):
        engine.stop(1, completion)
    engine.stop(2)
    while sum(output.finish is not None for output in told) < 3:
        told.append(asked.outputs.get(timeout=60))
    of = [[output for output in told if output.completion == number] for number in range(3)]
    assert [each[-1].finish for each in of] == [Finish.STOP, Finish.LENGTH, Finish.STOP]
    assert sum(len(output.tokens) for output in of[1]) == 300
    assert all(sum(len(output.tokens) for output in of[number]) < 300 for number in (0, 2))
    engine.stop(1, 1)
    wait_until_idle(engine)
    figures = engine.figures()
    assert figures.finished == {"stop": 2, "length": 1} and figures.pages_free + figures.pages_cached == figures.pages


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_completion_that_has_told_no_token_has_not_stopped(engine: Engine, stopped: int) -> None:
    both_are_asked = threading.Event()
    engine._loop.ask(lambda: both_are_asked.wait(60))
    asked = Ask(engine, 1, PROMPTS[1], completions=3, max_tokens=20, ignore_eos=True)
    engine.stop(1, stopped)
    both_are_asked.set()
    assert [sum(len(output.tokens) for output in told) for told in asked.all()] == [20] * 3
    wait_until_idle(engine)
    figures = engine.figures()
    assert figures.pages_free + figures.pages_cached == figures.pages


def test_cancelling_frees_all_pages_within_a_step(engine: Engine) -> None:
    asked = [Ask(engine, n, PROMPTS[3], completions=2, max_tokens=300, ignore_eos=True) for n in range(4)]
    for one in asked:
        one.outputs.get(timeout=60)
        engine.cancel(one.request.id)
    wait_until_idle(engine)
    figures = engine.figures()
    assert figures.running == figures.waiting == 0
    assert figures.pages_free + figures.pages_cached == figures.pages
    assert all(of[-1].finish == Finish.CANCELLED for one in asked for of in one.all())


def test_a_stream_that_is_left_is_cancelled(engine: Engine) -> None:
    async def some() -> list[str]:
        parts = engine.stream("Once upon a time", max_tokens=400, temperature=0.0, ignore_eos=True)
        found = []
        async for part in parts:
            found.append(part.text)
            if len(found) == 5:
                break
        await parts.aclose()  # type: ignore[attr-defined]
        return found

    assert "".join(asyncio.run(some())) == tokenizer().decode(expected(PROMPTS[0], 30)[0][:5])
    wait_until_idle(engine)
    assert engine.figures().finished == {"cancelled": 1}


def test_a_stream_gives_the_whole_text(engine: Engine) -> None:
    async def whole() -> str:
        return "".join([part.text async for part in engine.stream("Once upon a time", max_tokens=30, temperature=0.0)])

    assert asyncio.run(whole()) == tokenizer().decode(expected(PROMPTS[0], 30)[0])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [258]}, "numbered from 0 to 257"),
        ({"prompt": [-1]}, "token -1"),
        ({"prompt": [1] * 600}, "the model takes 512"),
        ({"max_tokens": 600}, "the model takes 512"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"logprobs": 1000}, "logprobs"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {999: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"stop_tokens": (999,)}, "stop_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"adapter": "nobody"}, "nobody"),
        ({"warmth": 1.0}, "warmth"),
        ({"n": 2}, "one completion comes of this"),
        ({"stop": 7}, "stop is a string"),
        ({"stop": ["a", 7]}, "stop is a string"),
        ({"stop_tokens": 5}, "stop_tokens"),
    ],
)
def test_bad_input_is_refused_by_name(engine: Engine, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, UnknownAdapter), match=says):
        engine.generate(**{"prompt": [1, 2], **wrong})
    assert greedy(engine, PROMPTS[0]) == expected(PROMPTS[0], 30)[0]


def test_a_text_that_is_larger_than_the_memory_is_refused() -> None:
    with (
        Engine(demo(), memory=5 * 16 * 16 * 4 * 4 * 20) as engine,
        pytest.raises(ConfigError, match="give the server more memory"),
    ):
        engine.generate([1] * 400)


@pytest.mark.parametrize("option", ["max_batch", "adapters_in_batch", "prefill_tokens", "first_token_s", "of_tenant"])
def test_options_must_be_positive(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        Engine(demo(), **{option: 0})
    with pytest.raises(ConfigError, match="policy"):
        Engine(demo(), policy="whim")  # type: ignore[arg-type]


def test_more_requests_than_the_queue_holds_are_refused() -> None:
    with Engine(demo(), memory=1 << 24, max_waiting=2) as engine:
        first = [Ask(engine, n, PROMPTS[0], max_tokens=400, ignore_eos=True) for n in range(2)]
        for one in first:
            one.outputs.get(timeout=60)
        with pytest.raises(ConfigError, match="try again later"):
            Ask(engine, 2, PROMPTS[0])
        engine.close(drain=False)


def test_requests_that_come_during_a_step_are_counted_and_those_that_have_ended_are_not() -> None:
    with Engine(demo(), memory=1 << 24, max_waiting=3) as engine:
        for _ in range(2):
            may_go_on = threading.Event()
            engine._loop.ask(partial(assert_set, may_go_on))  # as a step that takes long
            with ThreadPoolExecutor(8) as pool:
                tries = [pool.submit(Ask, engine, n, PROMPTS[0], max_tokens=4, ignore_eos=True) for n in range(8)]
                refused = [each.exception(60) for each in tries]
            may_go_on.set()
            assert [str(each) for each in refused if each is not None] == [
                "the server has 3 requests already: try again later"
            ] * 5
            assert [len(each.result().tokens()) for each in tries if each.exception() is None] == [4] * 3
        assert len(greedy(engine, PROMPTS[0], 1)) == 1


def test_a_request_of_the_number_of_one_that_has_come_during_this_step_is_refused(engine: Engine) -> None:
    may_go_on = threading.Event()
    engine._loop.ask(partial(assert_set, may_go_on))
    first = Ask(engine, 1, PROMPTS[0], max_tokens=4, ignore_eos=True)
    try:
        with pytest.raises(ConfigError, match="request 1 is under way already"):
            Ask(engine, 1, PROMPTS[1])
    finally:
        may_go_on.set()
    assert len(first.tokens()) == 4
    assert len(Ask(engine, 1, PROMPTS[0], max_tokens=4, ignore_eos=True).tokens()) == 4


def test_the_place_of_a_request_that_is_over_at_once_is_free(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever began it may lose the core before it notes that."""
    busy = Ask(engine, 1, PROMPTS[0], max_tokens=400, ignore_eos=True)
    busy.outputs.get(timeout=60)
    ask = engine._loop.ask

    def slowly(do: Callable[..., None], *arguments: Any, is_end: bool = False) -> None:
        ask(do, *arguments, is_end=is_end)
        time.sleep(0.5)

    monkeypatch.setattr(engine._loop, "ask", slowly)
    for _ in range(2):
        assert len(Ask(engine, 2, PROMPTS[0], max_tokens=1, ignore_eos=True).tokens()) == 1
    engine.cancel(1)


class Fails(nn.Module):
    """A layer that fails on one token's rows, as a defect in one request's adapter would."""

    def __init__(self, inner: nn.Module, error: Exception, poison: int) -> None:
        super().__init__()
        self.inner, self.error, self.poison, self.armed = inner, error, poison, False
        self.calls = 0

    @property
    def weight(self) -> Any:
        return self.inner.weight

    def forward(self, ids: torch.Tensor) -> Any:
        self.calls += self.armed
        if self.armed and (ids == self.poison).any():
            raise self.error
        return self.inner(ids)


def failing(error: Exception) -> tuple[Any, Fails]:
    model = demo()
    layer = model.model.embed_tokens = Fails(model.model.embed_tokens, error, poison=1)
    return model, layer


def test_one_requests_error_ends_no_other() -> None:
    model, layer = failing(RuntimeError("a defect"))
    with Engine(model, memory=1 << 24) as engine:
        layer.armed = True
        good = [Ask(engine, n, PROMPTS[n], max_tokens=30, temperature=0.0) for n in range(3)]
        bad = Ask(engine, 9, b"\x01\x01", completions=2)
        ends = [of[-1] for of in bad.all()]
        assert [(end.finish, "a defect" in str(end.error)) for end in ends] == [(Finish.ERROR, True)] * 2
        assert [one.tokens() for one in good] == [expected(PROMPTS[n], 30)[0] for n in range(3)]
        with pytest.raises(GenerationFailed, match="a defect"):
            engine.generate([1])


def test_errors_of_one_kind_have_their_traceback_logged_seldom(caplog: pytest.LogCaptureFixture) -> None:
    model, layer = failing(RuntimeError("a defect"))
    with Engine(model, memory=1 << 24) as engine:
        layer.armed = True
        for _ in range(5):
            with pytest.raises(GenerationFailed, match="a defect"):
                engine.generate([1])
    told = [each for each in caplog.records if "a request ends: RuntimeError: a defect" in each.getMessage()]
    assert [bool(each.exc_info) for each in told] == [True, True, False, True, False]


def test_one_requests_error_costs_many_others_little() -> None:
    """A step of sixteen was computed by its sixteen segments, and a tenant whose rows always fail made all others slower so."""
    model, layer = failing(RuntimeError("a defect"))
    with Engine(model, memory=1 << 24) as engine:
        begin = threading.Event()
        engine._loop.ask(lambda: assert_set(begin))
        many = [Ask(engine, n, PROMPTS[n % 3] + bytes([65 + n]), max_tokens=2, ignore_eos=True) for n in range(15)]
        bad = Ask(engine, 99, b"\x01\x01")
        layer.armed = True
        begin.set()
        assert {one.all()[0][-1].finish for one in many} == {Finish.LENGTH} and bad.all()[0][-1].finish is Finish.ERROR
    assert layer.calls < 15


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_an_executor_that_stays_away_ends_requests_and_not_the_engine() -> None:
    model, layer = failing(ExecutorUnavailable("no executor at tcp://x"))
    with Engine(model, memory=1 << 24) as engine:
        layer.armed = True
        with pytest.raises(GenerationFailed, match="no executor at"):
            engine.generate([1])
        layer.armed = False  # it is back
        assert greedy(engine, PROMPTS[0]) == expected(PROMPTS[0], 30)[0]


def test_an_engine_waits_for_an_executor_that_comes_up(tmp_path: Path) -> None:
    endpoint = f"local://{tmp_path}/executor.sock"
    with pytest.raises(ExecutorUnavailable):
        Engine(endpoint, memory=1 << 24, wait=0)
    executors: list[symbiosis.Executor] = []
    threading.Timer(0.5, lambda: executors.append(symbiosis.Executor("demo", listen=[endpoint]))).start()
    with Engine(endpoint, memory=1 << 24) as engine:
        assert len(engine.generate(PROMPTS[0], max_tokens=2, temperature=0.0).tokens) == 2
    executors[0].close()


def test_who_fails_to_take_an_output_is_dropped_alone(engine: Engine) -> None:
    def fail(output: Output) -> None:
        raise ValueError("their defect")

    engine.submit(Request(id=1, prompt=(1, 2), sampling=Sampling(max_tokens=400)), fail)
    assert greedy(engine, PROMPTS[0]) == expected(PROMPTS[0], 30)[0]
    wait_until_idle(engine)
    assert engine.figures().running == 0


def test_an_idle_engine_that_was_slow_once_aborts_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(demo(), memory=1 << 24, policy="abort", first_token_s=2.0) as engine:
        forward = engine._served.forward

        def slow(step: SchedulerOutput) -> torch.Tensor:
            monkeypatch.setattr(engine._served, "forward", forward)
            time.sleep(3.0)
            return forward(step)

        monkeypatch.setattr(engine._served, "forward", slow)
        assert len(greedy(engine, PROMPTS[0], most=1)) == 1
        assert engine._scheduler._takes.value > 2.0
        assert [len(greedy(engine, PROMPTS[0], most=2)) for _ in range(5)] == [2] * 5


def test_closing_finishes_what_runs_or_cancels_it() -> None:
    engine = Engine(demo(), memory=1 << 24)
    asked = [Ask(engine, n, PROMPTS[0], max_tokens=30, temperature=0.0) for n in range(3)]
    engine.close()
    assert all(one.tokens() == expected(PROMPTS[0], 30)[0] for one in asked)
    with pytest.raises(ConfigError, match="closed"):
        engine.generate([1])
    engine.close()
    other = Engine(demo(), memory=1 << 24)
    one = Ask(other, 0, PROMPTS[0], max_tokens=400, ignore_eos=True)
    other.close(drain=False)
    assert one.all()[0][-1].finish == Finish.CANCELLED


def test_tokens_come_from_an_executor() -> None:
    with symbiosis.Executor("demo") as executor, Engine(executor.endpoint, DEMO, memory=1 << 24) as engine:
        assert greedy(engine, PROMPTS[0]) == expected(PROMPTS[0], 30)[0]


def test_an_executor_whose_weights_are_mapped_is_told_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Tokens] = []
    made = Mapped.made
    monkeypatch.setattr(Mapped, "made", lambda self, tokens: (told.append(tokens), made(self, tokens))[1])
    url = f"local://{tmp_path}/executor.sock"
    with symbiosis.Executor("demo", listen=[url], share_weights=True), Engine(url, DEMO, memory=1 << 24) as engine:
        told.clear()
        assert greedy(engine, PROMPTS[0]) == expected(PROMPTS[0], 30)[0]
        assert told.count(Tokens.MANY) >= 30, "in each step, however many rows it has"


def test_calls_of_an_engine_are_those_of_who_decodes() -> None:
    """However many rows they have: training gives way to them."""
    with symbiosis.Executor("demo") as executor, Engine(executor.endpoint, DEMO, memory=1 << 24):
        (session,) = executor.server.sessions.values()
        assert session.priority == Priority.DECODE


def test_a_model_without_a_tokenizer_takes_tokens_only() -> None:
    with Engine(demo(), memory=1 << 24) as engine:
        assert engine.generate([1, 2]).text == ""
        for wrong in ({"prompt": "text"}, {"prompt": [1], "stop": "x"}):
            with pytest.raises(ConfigError, match="tokenizer"):
                engine.generate(**wrong)  # type: ignore[arg-type]


def test_models_that_cannot_be_batched_are_served_one_by_one() -> None:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts = [[5, 6, 7], [9] * 20, [3]]
    wanted = [
        model.generate(torch.tensor([p]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(p) :].tolist()
        for p in prompts
    ]
    with Engine(model, memory=1 << 22, prefill_tokens=4) as engine:
        asked = [
            Ask(engine, n, bytes(p), max_tokens=12, temperature=0.0, stop_tokens=()) for n, p in enumerate(prompts)
        ]
        assert [list(one.tokens()) for one in asked] == wanted


ADAPTERS = {"python": "LORA", "shout": "LORA", "whisper": "IA3"}


@cache
def adapted(name: str, prompt: bytes, most: int) -> tuple[int, ...]:
    """By PEFT alone."""
    model = peft.PeftModel.from_pretrained(demo(), DEMO / "adapters" / name).eval()
    ids = torch.tensor([list(prompt)])
    return tuple(model.generate(input_ids=ids, max_new_tokens=most, do_sample=False)[0, ids.shape[1] :].tolist())


def told_when_one_comes_in_the_middle(
    engine: Engine, long: bytes, short: bytes, adapter: str | None = None
) -> list[tuple[int, int]]:
    """Return the request, 1 or 2, and the token of each output. The second comes while the second layer of the first one's only step is
    computed."""
    outputs, gives_way, layers = SimpleQueue[Output](), engine._served.gives_way, count()

    def ask(id: int, prompt: bytes, adapter: str | None = None) -> None:
        sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=id, prompt=tuple(prompt), adapter=adapter, sampling=sampling), outputs.put)

    def asked(step: SchedulerOutput) -> bool:
        if next(layers) == 1:
            ask(2, short)
        return gives_way(step)

    engine._served.gives_way = asked
    ask(1, long, adapter)
    told = [outputs.get(timeout=60) for _ in range(16)]
    return [(output.request, token.id) for output in told for token in output.tokens]


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_a_long_prompt_gives_way_to_a_short_one_and_both_say_the_same(adapter: str | None, ahead: bool) -> None:
    long, short = PROMPTS[3] * 2, PROMPTS[0]
    with Engine(demo(), adapters=DEMO / "adapters", memory=1 << 24) as engine:
        engine._loop.ahead = ahead  # type: ignore[attr-defined]
        greedy(engine, PROMPTS[1], adapter=adapter)  # it learns how fast it is
        told = told_when_one_comes_in_the_middle(engine, long, short, adapter)
    assert told[0][0] == 2
    assert tuple(token for request, token in told if request == 2) == expected(short, 8)[0]
    wanted = expected(long, 8)[0] if adapter is None else adapted(adapter, long, 8)
    assert tuple(token for request, token in told if request == 1) == wanted


def test_a_model_that_cannot_be_batched_gives_way_to_a_short_prompt() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=4)).eval()
    long, short = bytes(range(60)) * 5, bytes(range(9))
    with Engine(model, memory=1 << 24) as engine:
        alone = [greedy(engine, prompt, 8, ignore_eos=True) for prompt in (long, short)]
        told = told_when_one_comes_in_the_middle(engine, long, short)
    assert told[0][0] == 2
    assert [tuple(token for request, token in told if request == id) for id in (1, 2)] == alone


@pytest.mark.parametrize("options", [{}, {"memory": 5 * 16 * 16 * 4 * 4 * 40, "adapters_in_batch": 2}])
@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
def test_each_request_is_answered_by_its_adapter(options: dict[str, Any], ahead: bool) -> None:
    with Engine(demo(), adapters=DEMO / "adapters", **{"memory": 1 << 24, **options}) as engine:
        engine._loop.ahead = ahead  # type: ignore[attr-defined]
        assert engine.adapter_names() == sorted(ADAPTERS)
        asked = []
        for number, prompt in enumerate(PROMPTS[:3]):
            for place, name in enumerate([*ADAPTERS, None]):
                asked.append(
                    (prompt, name, Ask(engine, 10 * number + place, prompt, name, max_tokens=25, temperature=0.0))
                )
        for prompt, name, one in asked:
            assert one.tokens() == (adapted(name, prompt, 25) if name else expected(prompt, 25)[0]), name
        assert {each.name: each.kind for each in engine.adapters()} == ADAPTERS
        figures = engine.figures()
        assert figures.adapters == 3 and figures.adapter_fetches >= 3


def test_an_adapter_is_read_and_brought_while_its_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of an adapter on disk comes as soon as that of one that is there, if others are before it in any case."""
    happened: list[str] = []
    is_brought, read, put = threading.Event(), adapter_files._read, AdapterCache._put

    def noted_read(file: Path, most: int) -> memoryview:
        happened.append(f"read {file.parent.name}")
        return read(file, most)

    def noted_put(self: AdapterCache, adapter: Any, count: int) -> None:
        put(self, adapter, count)
        happened.append(f"brought {adapter.name}")
        is_brought.set()

    monkeypatch.setattr(adapter_files, "_read", noted_read)
    monkeypatch.setattr(AdapterCache, "_put", noted_put)
    with Engine(demo(), tokenizer(), adapters=DEMO / "adapters", memory=1 << 24, max_batch=1) as engine:
        before = Ask(engine, 0, PROMPTS[0], max_tokens=400, temperature=0.0, ignore_eos=True)
        before.outputs.get(timeout=60)
        engine.submit(
            Request(id=1, prompt=tuple(PROMPTS[1]), adapter="shout", sampling=Sampling(max_tokens=2)),
            lambda output: happened.append("told"),
        )
        assert happened[-1] == "read shout" or "brought shout" in happened, "it is read when the request comes"
        assert is_brought.wait(60)
        assert engine.figures().running == 1 and "told" not in happened, "the other one still runs"
        assert len(before.tokens()) == 399
    assert [each for each in happened if each != "told"] == ["read shout", "read shout", "brought shout"]


def test_an_engine_may_be_made_in_inference_mode() -> None:
    """Its memory then is inference tensors, to which adapters are copied later."""
    with torch.inference_mode(), Engine(demo(), adapters=DEMO / "adapters", memory=1 << 24) as engine:
        answer = engine.generate(list(PROMPTS[0]), adapter="python", max_tokens=25, temperature=0.0)
    assert answer.tokens == adapted("python", PROMPTS[0], 25)


def test_a_new_version_is_never_answered_by_what_the_old_one_left(engine: Engine) -> None:
    prompt = PROMPTS[3]
    for name in ("python", "whisper", "shout"):
        engine.add("mine", DEMO / "adapters" / name)
        for _ in range(2):
            assert greedy(engine, prompt, adapter="mine") == adapted(name, prompt, 30)
    under_way = Ask(engine, 1, prompt, "mine", max_tokens=30, temperature=0.0)
    engine.remove("mine")
    assert under_way.tokens() == adapted("shout", prompt, 30)
    with pytest.raises(UnknownAdapter, match="mine"):
        engine.generate(list(prompt), adapter="mine")
    assert greedy(engine, prompt) == expected(prompt, 30)[0]


def test_old_versions_leave_with_the_last_request_that_has_them() -> None:
    """Requests wait with versions that were replaced before they could begin."""
    model = peft.get_peft_model(demo(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    with Engine(demo(), memory=1 << 24, max_batch=1) as engine:
        asked = []
        for id in range(6):
            symbiosis.publish(model, "mine", engine)
            asked.append(Ask(engine, id, PROMPTS[0], "mine", max_tokens=20))
        for one in asked:
            assert len(one.tokens()) == 20
        wait_until_idle(engine)
        assert engine.figures().adapters_here == 1
        engine.remove("mine")
        wait_until_idle(engine)
        figures = engine.figures()
        assert (figures.adapters_here, figures.pages_free) == (0, figures.pages)


def test_what_fails_between_two_steps_ends_no_engine(engine: Engine) -> None:
    def fail() -> None:
        raise RuntimeError("between two steps")

    engine._loop.ask(fail)
    assert len(greedy(engine, PROMPTS[0], 3)) == 3 and engine.is_alive


def test_texts_go_on_however_much_is_asked_between_two_steps(engine: Engine) -> None:
    seen: list[int] = []  # how many steps there were, at each thing that was asked
    may_go_on, is_done = threading.Event(), threading.Event()

    def look() -> None:
        time.sleep(0.001)
        seen.append(engine.figures().steps)

    engine._loop.ask(partial(assert_set, may_go_on))
    asked = Ask(engine, 0, PROMPTS[0], max_tokens=400, ignore_eos=True)
    for _ in range(200):
        engine._loop.ask(look)
    may_go_on.set()
    engine._loop.ask(is_done.set)
    assert is_done.wait(60) and seen == sorted(seen) and len(seen) == 200
    assert len(set(seen)) >= 20  # of 4 ms each
    asked.all()


def test_no_step_delays_the_end_of_an_engine_that_closes(engine: Engine) -> None:
    seen: list[int] = []

    def until_it_closes() -> None:
        while not engine._loop._closing:
            time.sleep(0.001)

    def look() -> None:
        time.sleep(0.001)
        seen.append(engine.figures().steps)

    engine._loop.ask(until_it_closes)
    asked = Ask(engine, 0, PROMPTS[0], max_tokens=400, ignore_eos=True)
    for _ in range(50):
        engine._loop.ask(look)
    engine.close(drain=False)
    assert len(seen) == 50 and len(set(seen)) == 1
    assert asked.all()[0][-1].finish == Finish.CANCELLED


def test_texts_behind_a_window_make_room_for_others() -> None:
    torch.manual_seed(0)
    tiny = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = MistralForCausalLM(MistralConfig(**tiny, num_key_value_heads=2, sliding_window=8, eos_token_id=None)).eval()
    prompts, ids = [[5, 6, 7], [9, 8, 7, 6], [1, 2]], []
    with torch.no_grad():
        for prompt in prompts:
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=150, do_sample=False, pad_token_id=0)
            ids.append(whole[0, len(prompt) :].tolist())
    page = 16 * 2 * 16 * 4  # a text takes 20 of them, the three together 60
    with Engine(model, memory=26 * page) as engine, ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda prompt: engine.generate(prompt, max_tokens=150, temperature=0.0), prompts)
        assert [list(answer.tokens) for answer in answers] == ids
        figures = engine.figures()
        assert figures.evictions == 0 and figures.pages == 26


@pytest.mark.parametrize(
    "layers", [["sliding_attention"] * 2, ["full_attention", "sliding_attention", "sliding_attention"]]
)
def test_a_text_longer_than_the_memory_is_served_if_its_windows_fit(layers: list[str]) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=len(layers), num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=8, use_sliding_window=True, layer_types=layers, eos_token_id=None, max_position_embeddings=1024,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    prompts, ids = [[n % 61 + 1 for n in range(start, start + 300)] for start in (0, 7, 13)], []
    with torch.no_grad():
        for prompt in prompts:
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)
            ids.append(whole[0, len(prompt) :].tolist())
    page, blocks = 16 * 2 * 16 * 4, -(-340 // 16)
    pages = layers.count("full_attention") * blocks + layers.count("sliding_attention") * (40 // 16 + 2)
    assert pages < blocks * len(layers)
    with Engine(deepcopy(model), memory=pages * page, prefill_tokens=32) as engine, ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda prompt: engine.generate(prompt, max_tokens=40, temperature=0.0), prompts)
        assert [list(answer.tokens) for answer in answers] == ids
        assert engine.figures().pages == engine.figures().pages_free + engine.figures().pages_cached
    with (
        Engine(model, memory=(pages - 1) * page, prefill_tokens=32) as engine,
        pytest.raises(ConfigError, match="memory"),
    ):
        engine.generate(prompts[0], max_tokens=40)


def test_what_a_step_tells_crosses_to_http_as_one_message(engine: Engine) -> None:
    ours, theirs = socket.socketpair()
    welcome = EngineReady(model="m", longest=engine.longest, most_tokens=9, vocabulary=engine.vocabulary)
    link = EngineServer(engine, ours, welcome)
    sampling = Sampling(max_tokens=12, ignore_eos=True, seed=1)
    theirs.sendall(framed(Submit(Request(id=3, prompt=(5, 6, 7), sampling=sampling, completions=8))))
    sizes: list[int] = []
    with theirs.makefile("rb") as stream:
        while sum(sizes) < 8 * 12:
            message = from_engine.decode(stream.read(LENGTH.unpack(stream.read(LENGTH.size))[0]))
            if isinstance(message, ReceivedOutputs):
                sizes.append(len(message.outputs))
    link.close()
    theirs.close()
    assert max(sizes) == 8 and len(sizes) <= engine.figures().steps
