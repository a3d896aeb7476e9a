"""Texts with drafts are those without, whoever drafts them and whatever else runs; and steps are fewer."""

import random
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig

from symbiosis.errors import ConfigError
from symbiosis.serving import Engine
from symbiosis.serving.request import Output, Request, Sampling
from tests.inproc.test_serving_engine import DEMO, PROMPTS, demo, expected, greedy, tokenizer, wait_until_idle

AGAIN = b"def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef add(a, b):\n"
ADAPTERS = DEMO / "adapters"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that knows nothing."""
    folder = tmp_path_factory.mktemp("draft")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DEMO)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["ngram", "itself", pytest.param("another", marks=pytest.mark.full)])
def speculate(request: pytest.FixtureRequest, other: Path) -> str:
    return {"ngram": "ngram:8", "itself": f"draft:{DEMO}:4", "another": f"draft:{other}:4"}[request.param]


@pytest.fixture
def engine(speculate: str) -> Iterator[Engine]:
    with Engine(demo(), tokenizer(), adapters=ADAPTERS, memory=1 << 24, speculate=speculate) as engine:
        yield engine


def test_greedy_texts_are_those_of_generate(engine: Engine) -> None:
    for prompt in PROMPTS:
        assert greedy(engine, prompt, 50) == expected(prompt, 50)[0]
    figures = engine.figures()
    assert figures.drafted_tokens >= figures.accepted_tokens >= 0
    assert figures.pages == figures.pages_free + figures.pages_cached
    assert figures.generated_tokens == figures.between_tokens_s.count + figures.first_token_s.count


@pytest.mark.parametrize(
    "how",
    [
        {"seed": 5}, {"seed": 6, "temperature": 0.5, "top_p": 0.9}, {"temperature": 0.0, "repetition_penalty": 1.3},
        {"seed": 7, "presence_penalty": 1.0, "stop_tokens": (32,), "min_tokens": 6}, {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.0, "stop": "ret"},
        {"temperature": 0.0, "adapter": "python"}, {"seed": 8, "adapter": "shout"}, {"temperature": 0.0, "schema": '{"type": "integer"}'},
    ],
)  # fmt: skip
def test_texts_are_those_of_an_engine_without_drafts(engine: Engine, how: dict[str, Any]) -> None:
    with Engine(demo(), tokenizer(), adapters=ADAPTERS, memory=1 << 24) as plain:
        wanted = plain.generate(list(AGAIN), max_tokens=40, **how)
    found = engine.generate(list(AGAIN), max_tokens=40, **how)
    assert (found.text, found.tokens, found.finish) == (wanted.text, wanted.tokens, wanted.finish)
    for mine, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4) and [id for id, _ in mine.top] == [
            id for id, _ in theirs.top
        ]
    if "schema" in how:
        assert engine.figures().drafted_tokens == 0


def test_steps_are_fewer_where_drafts_are_right() -> None:
    steps = []
    for speculate in (None, "ngram:8", f"draft:{DEMO}:4"):
        with Engine(demo(), memory=1 << 24, speculate=speculate) as engine:
            engine.generate(list(b"0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,"), max_tokens=60, temperature=0.0)
            steps.append(engine.figures().steps)
    assert steps[0] == 60 and steps[1] <= 20 and steps[2] == 1 + 12


def test_an_answer_that_is_predicted_takes_fewer_steps() -> None:
    prompt, how = PROMPTS[4], Sampling(max_tokens=50, temperature=0.0)
    text = expected(prompt, 50)[0]
    steps = []
    for prediction in ((), (*text[:20], 33, *text[21:])):
        with Engine(demo(), memory=1 << 24, speculate="ngram:8") as engine:
            outputs = SimpleQueue[Output]()
            engine.submit(Request(id=1, prompt=tuple(prompt), sampling=how, prediction=prediction), outputs.put)
            assert tokens(outputs) == text
            steps.append(engine.figures().steps)
    assert steps[1] < steps[0] / 2


def test_what_comes_behind_a_stop_string_is_not_told() -> None:
    prompt = "0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,"
    for stop in (", ", "2, 2", " 2,"):
        found = []
        for speculate in (None, "ngram:8"):
            with Engine(demo(), tokenizer(), memory=1 << 24, speculate=speculate) as engine:
                told = engine.generate(prompt, max_tokens=60, temperature=0.0, stop=stop, min_tokens=20)
                found.append((told.text, told.tokens, told.finish))
        assert found[0] == found[1] and found[0][2] == "stop"


@pytest.fixture(scope="module")
def arrivals() -> list[tuple[Request, tuple[int, ...]]]:
    """Seeded requests, and what each says alone, without drafts."""
    chance, made = random.Random(3), []
    with Engine(demo(), memory=1 << 24) as plain:
        for number in range(12):
            how: dict[str, Any] = {"max_tokens": chance.randint(1, 45), "temperature": chance.choice([0.0, 1.0])}
            prompt = tuple(chance.choice([*PROMPTS, AGAIN])[: chance.randint(1, 90)])
            request = Request(id=number, prompt=prompt, sampling=Sampling(seed=number, **how))
            made.append((request, plain.generate(list(prompt), seed=number, **how).tokens))
    return made


def test_random_arrivals_with_little_memory_change_nothing(
    speculate: str, arrivals: list[tuple[Request, tuple[int, ...]]]
) -> None:
    """They come while others run, are evicted and share prefixes."""
    chance = random.Random(4)
    with Engine(demo(), memory=5 * 16 * 16 * 4 * 4 * 20, prefill_tokens=16, speculate=speculate) as engine:
        asked: list[SimpleQueue[Output]] = []
        for request, _ in arrivals:
            asked.append(SimpleQueue())
            engine.submit(request, asked[-1].put)
            if chance.random() < 0.5:
                engine.generate([1], max_tokens=chance.randint(1, 8))  # so that they come at any step of each other
        assert [tokens(outputs) for outputs in asked] == [text for _, text in arrivals]
        wait_until_idle(engine)
        figures = engine.figures()
        assert figures.evictions > 0 and figures.pages == figures.pages_free + figures.pages_cached


def tokens(outputs: "SimpleQueue[Output]") -> tuple[int, ...]:
    found: list[int] = []
    while True:
        output = outputs.get(timeout=60)
        found += [token.id for token in output.tokens]
        if output.finish is not None:
            return tuple(found)


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculate goes with one device"):
        Engine("local:///nobody", devices=("cpu", "cpu"), speculate="ngram:4")
    with pytest.raises(ConfigError, match="one by one"):
        bloom = BloomConfig(vocab_size=258, hidden_size=32, n_layer=1, n_head=2)
        Engine(AutoModelForCausalLM.from_config(bloom), memory=1 << 24, speculate="ngram:4")
    config = AutoConfig.from_pretrained(DEMO)
    config.vocab_size = 300
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has 300 tokens"):
        Engine(demo(), memory=1 << 24, speculate=f"draft:{tmp_path}:4")
