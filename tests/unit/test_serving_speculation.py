"""Drafts: where a text's end stood before, how many are worth it, and which of them are chosen."""

from array import array
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symbiosis.errors import ConfigError
from symbiosis.server.api_errors import ApiError
from symbiosis.server.openai_protocol import ChatBody, PredictedPart, Prediction, read
from symbiosis.server.prompts import Prompts
from symbiosis.serving.lora.adapter import Adapter
from symbiosis.serving.request import Request, Sampling, Token
from symbiosis.serving.sampling.sampler import begin_choice
from symbiosis.serving.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput, Sequence
from symbiosis.serving.serve_options import ServeOptions
from symbiosis.serving.speculation.ngram import LONGEST, SHORTEST, NgramProposer, continued
from symbiosis.serving.speculation.speculation import REST, Drafted, Speculation, accepted, choosing
from tests.unit.test_serving_detokenize import bytes_tokenizer


def sequence(tokens: list[int], prompt: int = 1, adapter: Adapter | None = None, **how: Any) -> Sequence:
    how = {"max_tokens": 100, **how}
    return Sequence(Request(id=1, prompt=tuple(tokens[:prompt]), sampling=Sampling(**how)), 0, tokens, adapter, 0.0)


def plainly(tokens: list[int], count: int) -> tuple[int, ...]:
    """What `continued` does, place by place."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for place in range(len(tokens) - length - 1, -1, -1):
            if length < len(tokens) and tokens[place : place + length] == tokens[-length:]:
                going_on = list(tokens)
                for _ in range(count):
                    going_on.append(going_on[place + length])
                    place += 1
                return tuple(going_on[len(tokens) :])
    return ()


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from([0, 1, 2, 256, 65536, 1 << 24]), max_size=40), st.integers(1, 8))
def test_a_text_goes_on_as_where_its_end_stood_last(tokens: list[int], count: int) -> None:
    assert continued(bytearray(array("i", tokens).tobytes()), count) == plainly(tokens, count)


def test_the_tokens_of_an_adapter_are_no_text_and_what_was_rejected_is_forgotten() -> None:
    virtual = Adapter(name="a", kind="PROMPT_TUNING", bytes=1, version=1, virtual=3)
    of_adapter, plain = sequence([0, 0, 0, 5, 6, 0, 0], 2, virtual), sequence([5, 6, 7, 5, 6])
    proposer = NgramProposer()
    assert proposer.propose({of_adapter: 2, plain: 3}) == {plain: (7, 5, 6)}
    plain.tokens += [8, 5, 6]
    assert proposer.propose({plain: 2}) == {plain: (8, 5)}


def test_what_is_predicted_is_looked_at_before_the_text() -> None:
    request = Request(id=1, prompt=(1, 2), prediction=(7, 1, 2, 3, 4, 5), sampling=Sampling())
    one = Sequence(request, 0, [1, 2], None, 0.0)
    proposer = NgramProposer()
    assert proposer.propose({one: 4}) == {one: (3, 4, 5, 1)}
    one.tokens += [3, 9, 1, 2]
    assert proposer.propose({one: 2}) == {one: (3, 9)}, "what came last counts"
    proposer.forget(one)
    assert proposer.propose({one: 2}) == {one: (3, 9)}


def test_a_prediction_is_text_or_parts_of_it() -> None:
    prompts = Prompts(bytes_tokenizer(), longest=8, vocabulary=258, most=1)
    parts = [PredictedPart("text", "ab"), PredictedPart("text", "cd")]
    assert prompts.predicted(Prediction("content", parts)) == tuple(b"abcd")
    assert prompts.predicted(Prediction("content", "0123456789")) == tuple(b"01234567")


@pytest.mark.parametrize(
    "wrong", [{"type": "content"}, {"type": "x", "content": "a"}, {"type": "content", "content": ["a"]}, []]
)
def test_a_prediction_is_checked_whether_or_not_it_makes_drafts(wrong: Any) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    assert read(ChatBody, msgspec.json.encode({**chat, "prediction": None})).prediction is None
    with pytest.raises(ApiError, match="prediction") as error:
        read(ChatBody, msgspec.json.encode({**chat, "prediction": wrong}))
    assert error.value.status == 400


class Asked:
    """Notes what it is asked for, and drafts ones."""

    def __init__(self) -> None:
        self.wanted: list[int] = []

    def propose(self, wanted: Any) -> dict[Sequence, tuple[int, ...]]:
        self.wanted += wanted.values()
        return {each: (1,) * count for each, count in wanted.items()}

    def forget(self, sequence: Sequence) -> None: ...


def test_drafts_follow_what_was_chosen_of_them_and_rest_where_none_is() -> None:
    asked, one = Asked(), sequence([0])
    speculation = Speculation(asked, 8)
    for chosen in (8, 3, 0, 0):
        drafts = speculation.drafts([one], 15)
        speculation.learn(one, len(drafts[one]), chosen)
    assert asked.wanted == [8, 8, 6, 1]
    assert not speculation.drafts([one], 15)
    one.tokens += [0] * REST
    assert speculation.drafts([one], 15) == {one: (1,)}
    assert (speculation.drafted, speculation.accepted) == (23, 11)


def test_no_more_is_drafted_than_may_be_told_and_nothing_where_a_grammar_decides() -> None:
    speculation = Speculation(Asked(), 8)
    last, ends, guided = sequence([0, 1], max_tokens=2), sequence([0, 1], max_tokens=5), sequence([0], regex="a*")
    assert speculation.drafts([last, ends, guided], 15) == {ends: (1, 1, 1)}
    assert speculation.drafts([ends], 2) == {ends: (1, 1)} and not speculation.drafts([ends], 0)


def test_drafts_are_chosen_as_long_as_they_are_the_tokens_that_come() -> None:
    a, b, prompt = sequence([7]), sequence([7]), sequence([1, 2, 3], 3)
    segments = (
        ScheduledRequest(prompt, 0, 2, 0, False),
        ScheduledRequest(a, 2, 3, 0, True, (4, 5)),
        ScheduledRequest(b, 5, 2, 0, True, (9,)),
    )
    step = SchedulerOutput(segments)
    assert (step.choices, step.rows, step.has_prompts) == ([2, 3, 4, 5, 6], 7, True)
    assert not SchedulerOutput(segments[1:]).has_prompts
    assert [segment.tokens for segment in segments] == [[1, 2], [7, 4, 5], [7, 9]]
    rows = [(each.tokens, each.produced) for each in choosing(step)]
    assert rows == [([7], 0), ([7, 4], 1), ([7, 4, 5], 2), ([7], 0), ([7, 9], 1)]
    told = [Token(4), Token(6), Token(5), Token(9), None]
    assert [its for _, its in accepted(step, told)] == [[Token(4), Token(6)], [Token(9), None]]


@pytest.mark.parametrize(
    "how",
    [
        {"seed": 3}, {"temperature": 0.0}, {"repetition_penalty": 1.5, "seed": 1}, {"presence_penalty": 1.0, "frequency_penalty": 0.5, "seed": 2},
        {"min_tokens": 4, "stop_tokens": (3,), "seed": 5}, {"bad_sequences": ((1, 2, 4),), "temperature": 0.0}, {"logprobs": 3, "seed": 9},
    ],
)  # fmt: skip
def test_a_row_behind_drafts_chooses_as_the_text_that_has_them(how: dict[str, Any]) -> None:
    logits = torch.randn(1, 11, generator=torch.Generator().manual_seed(0)) * 2
    drafted = begin_choice(logits, [Drafted(sequence([0, 1], **how), (2, 3))]).tokens()
    assert drafted == begin_choice(logits, [sequence([0, 1, 2, 3], **how)]).tokens()


@pytest.mark.parametrize("text", ["", "ngram", "ngram:0", "ngram:16", "draft:4", "draft::4", "medusa:4", "ngram:4:4"])
def test_what_speculation_is_there_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="ngram:N or draft:CHECKPOINT:N"):
        ServeOptions(model="demo", speculate=text)


def test_a_divided_model_drafts_nothing() -> None:
    with pytest.raises(ConfigError, match="speculate goes with one device"):
        ServeOptions(model="demo", speculate="ngram:4", devices="cpu", ranks=2)
