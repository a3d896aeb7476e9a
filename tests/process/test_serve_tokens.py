"""Tokens by number: those of texts and chats, of answers, those that may come, and those that may not; and answers that go on with a message."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serving_api import Api, demo_api, web

PROMPT = "def average(numbers):"
CHAT: Any = [{"role": "user", "content": "def "}]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with demo_api() as api:
        yield api


def complete(api: Api, **fields: Any) -> Any:
    return api.client.completions.create(
        **{"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    )


def asked(api: Api, path: str, **fields: Any) -> Any:
    return web.post(api.url + path, json=fields, timeout=60)


def test_texts_and_chats_are_tokenized_and_back(api: Api) -> None:
    told = asked(api, "/tokenize", model="demo", prompt="né", return_token_strs=True).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) == 3 and told["max_model_len"] == 512
    assert told["token_strs"] == api.engine.tokenizer.convert_ids_to_tokens(told["tokens"])
    assert asked(api, "/detokenize", model="demo", tokens=told["tokens"]).json() == {"prompt": "né"}
    chat = asked(api, "/tokenize", messages=CHAT).json()
    answer = api.client.chat.completions.create(model="demo", messages=CHAT, max_tokens=1)
    assert chat["count"] == answer.usage.prompt_tokens and chat["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("/tokenize", {}, "a prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "a prompt or messages"),
        ("/tokenize", {"prompt": "x" * 10_000}, "reduce the length"),
        ("/tokenize", {"prompt": "x", "speed": 1}, "speed"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "robot"),
        ("/tokenize", {"messages": []}, "empty"),
        ("/detokenize", {"tokens": [10**6]}, "token 1000000"),
        ("/detokenize", {"tokens": [1] * 10_000}, "tokens may have 512"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_said(api: Api, path: str, fields: dict[str, Any], told: str) -> None:
    answer = asked(api, path, **fields)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]


def test_answers_tell_their_tokens(api: Api) -> None:
    prompt = asked(api, "/tokenize", prompt=PROMPT).json()["tokens"]
    whole = complete(api, n=2, temperature=1, seed=1, extra_body={"return_token_ids": True}).choices
    for choice in whole:
        assert choice.prompt_token_ids == prompt
        assert asked(api, "/detokenize", tokens=choice.token_ids).json()["prompt"].startswith(choice.text)
    found: dict[int, list[int]] = {0: [], 1: []}
    first = dict[int, list[int]]()
    for event in complete(api, n=2, temperature=1, seed=1, stream=True, extra_body={"return_token_ids": True}):
        choice = event.choices[0]
        if not found[choice.index]:
            first[choice.index] = choice.prompt_token_ids
        found[choice.index] += choice.token_ids
    assert [found[n] for n in (0, 1)] == [choice.token_ids for choice in whole] and first == {0: prompt, 1: prompt}
    plain = complete(api).choices[0].to_dict()
    assert (plain["token_ids"], plain["prompt_token_ids"]) == (None, None), "as vLLM"


def test_chats_tell_their_tokens(api: Api) -> None:
    fields: Any = {"model": "demo", "messages": CHAT, "max_tokens": 8, "temperature": 0, "extra_body": {"return_token_ids": True}}  # fmt: skip
    whole = api.client.chat.completions.create(**fields)
    assert whole.prompt_token_ids == asked(api, "/tokenize", messages=CHAT).json()["tokens"]  # type: ignore[attr-defined]
    events = list(api.client.chat.completions.create(**fields, stream=True))
    assert events[0].prompt_token_ids == whole.prompt_token_ids  # type: ignore[attr-defined]
    tokens = [token for event in events[1:] for token in event.choices[0].token_ids]  # type: ignore[attr-defined]
    assert tokens == whole.choices[0].token_ids  # type: ignore[attr-defined]


def test_log_probabilities_of_prompts_are_told_as_by_vllm(api: Api) -> None:
    tokens = asked(api, "/tokenize", prompt=PROMPT).json()["tokens"]
    choices = complete(api, prompt=[PROMPT, "x"], n=2, temperature=1, seed=1, extra_body={"prompt_logprobs": 2}).choices
    echoed = complete(api, max_tokens=0, echo=True, logprobs=2).choices[0].logprobs
    for number, choice in enumerate(choices):
        first, *others = choice.prompt_logprobs
        assert first is None and len(others) == (0 if number > 1 else len(tokens) - 1)
    for place, told in enumerate(choices[0].prompt_logprobs[1:], 1):
        mine = told[str(tokens[place])]
        assert mine["logprob"] == pytest.approx(echoed.token_logprobs[place], abs=1e-4)
        assert {each["decoded_token"] for each in told.values()} == set(echoed.top_logprobs[place])
        assert {1, 2} <= {each["rank"] for each in told.values()} and mine["rank"] >= 1
    assert choices[0].prompt_logprobs == choices[1].prompt_logprobs
    alone = complete(api, extra_body={"prompt_logprobs": 0}).choices[0].prompt_logprobs
    assert [list(each) for each in alone[1:]] == [[str(token)] for token in tokens[1:]]
    assert complete(api).choices[0].to_dict()["prompt_logprobs"] is None
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        complete(api, stream=True, extra_body={"prompt_logprobs": 0})
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs must be from 0 to 20, not -1"):
        complete(api, extra_body={"prompt_logprobs": -1})


def test_a_chat_tells_log_probabilities_of_its_prompt_once(api: Api) -> None:
    whole = api.client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=2, n=2, extra_body={"prompt_logprobs": 1}
    )
    first, *others = whole.prompt_logprobs  # type: ignore[attr-defined]
    assert first is None and len(others) == whole.usage.prompt_tokens - 1  # type: ignore[union-attr]
    assert all(1 in [each["rank"] for each in told.values()] for told in others)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_given_tokens(api: Api, stream: bool) -> None:
    (x, y, z) = asked(api, "/tokenize", prompt="xyz").json()["tokens"]
    more = {"logprob_token_ids": [x, y], "allowed_token_ids": [z], "return_tokens_as_token_ids": True}
    fields: Any = {"model": "demo", "messages": CHAT, "max_tokens": 1, "logprobs": True, "extra_body": more}
    if stream:
        events = api.client.chat.completions.create(**fields, stream=True)
        (told,) = [each for event in events if event.choices[0].logprobs for each in event.choices[0].logprobs.content]
    else:
        told = api.client.chat.completions.create(**fields).choices[0].logprobs.content[0]
    assert [each.token for each in told.top_logprobs] == [f"token_id:{id}" for id in (z, x, y)]
    assert told.token == f"token_id:{z}" and all(-100 < each.logprob < 0 for each in told.top_logprobs)
    completion = complete(api, max_tokens=1, logprobs=0, extra_body=more).choices[0].logprobs
    assert set(completion.top_logprobs[0]) == {f"token_id:{id}" for id in (x, y, z)}
    with pytest.raises(openai.BadRequestError, match="logprob_token_ids go with logprobs"):
        complete(api, extra_body={"logprob_token_ids": [x]})
    with pytest.raises(openai.BadRequestError, match="logprob_token_ids has the token 1000000"):
        complete(api, logprobs=0, extra_body={"logprob_token_ids": [10**6]})


def test_only_what_is_allowed_comes(api: Api) -> None:
    allowed = asked(api, "/tokenize", prompt="xyz").json()["tokens"]
    text = complete(api, extra_body={"allowed_token_ids": allowed}).choices[0].text
    assert len(text) == 12 and set(text) <= set("xyz")
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids has the token 1000000"):
        complete(api, extra_body={"allowed_token_ids": [10**6]})


def test_bad_words_do_not_come(api: Api) -> None:
    free = complete(api, max_tokens=40).choices[0].text
    word = free.split()[0]
    assert len(word) > 1 and word in free
    other = complete(api, max_tokens=40, extra_body={"bad_words": [word]}).choices[0].text
    assert word not in other and other
    many = complete(api, max_tokens=40, n=2, temperature=1, seed=1, extra_body={"bad_words": ["e"]}).choices
    assert all("e" not in choice.text for choice in many)


def test_an_answer_goes_on_with_the_last_message(api: Api) -> None:
    messages: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "def average("}]
    how: Any = {"continue_final_message": True, "add_generation_prompt": False}
    fields: Any = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0}
    plain = api.client.chat.completions.create(**fields, extra_body=how).choices[0].message.content
    echoed = api.client.chat.completions.create(**fields, extra_body={**how, "echo": True})
    assert echoed.choices[0].message.content == "def average(" + str(plain)
    stream = api.client.chat.completions.create(**fields, extra_body={**how, "echo": True}, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == echoed.choices[0].message.content


def test_probes_are_answered(api: Api) -> None:
    assert web.get(f"{api.url}/ping").status_code == web.post(f"{api.url}/ping").status_code == 200
    assert web.get(f"{api.url}/load").json() == {"server_load": 0}


def test_prompts_are_cut_where_that_is_asked_for(api: Api) -> None:
    tokens = list(PROMPT.encode())
    for side, kept in (("right", tokens[:5]), ("left", tokens[-5:])):
        fields = {"truncate_prompt_tokens": 5, "truncation_side": side, "return_token_ids": True}
        for given in (PROMPT, tokens):
            assert complete(api, prompt=given, max_tokens=1, extra_body=fields).choices[0].prompt_token_ids == kept
        chat = api.client.chat.completions.create(model="demo", messages=CHAT, max_tokens=1, extra_body=fields)
        assert chat.prompt_token_ids == list((b"def ")[:5] if side == "right" else b"def "[-5:])
    echoed = complete(api, max_tokens=1, echo=True, extra_body={"truncate_prompt_tokens": 5, "truncation_side": "left"})
    assert echoed.choices[0].text.startswith(PROMPT[-5:]) and len(echoed.choices[0].text) == 6
    with pytest.raises(openai.BadRequestError, match="goes with truncate_prompt_tokens"):
        complete(api, extra_body={"truncation_side": "left"})
