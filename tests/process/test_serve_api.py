"""The API as OpenAI's own client uses it, over the demo model and its adapters."""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import symbiosis
from symbiosis.build import build
from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from symbiosis.serving.engine.limits import LIMITS
from symbiosis.serving.request import MANY, Request, Sampling
from tests.processes import run
from tests.serving_api import Api, eventually, http_process, web

PROMPT = "def average(numbers):"
ADAPTERS = DEMO_MODEL / "adapters"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with symbiosis.Executor("demo", listen=f"local://{tmp_path_factory.mktemp('x')}/e.sock") as executor:
        yield executor.endpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of --adapters."""
    return Path(shutil.copytree(ADAPTERS, tmp_path_factory.mktemp("served") / "adapters"))


@pytest.fixture(scope="module")
def engine(endpoint: str, folder: Path) -> Iterator[Engine]:
    with Engine(endpoint, DEMO_MODEL, adapters=folder, memory=1 << 25) as engine:
        yield engine


@pytest.fixture(scope="module")
def api(engine: Engine, folder: Path) -> Iterator[Api]:
    with http_process(engine, forked=False, adapters=str(folder), max_body_bytes=1 << 20) as api:
        yield api


def complete(api: Api, **fields: Any) -> Any:
    return api.client.completions.create(
        **{"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    )


@pytest.mark.parametrize("model", ["demo", "python", "shout", "whisper"])
def test_the_text_is_the_engines(api: Api, model: str) -> None:
    wanted = api.engine.generate(PROMPT, adapter=None if model == "demo" else model, max_tokens=24, temperature=0.0)
    answer = complete(api, model=model)
    assert answer.choices[0].text == wanted.text and answer.choices[0].finish_reason == wanted.finish
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), len(wanted.tokens))
    assert answer.model == model and answer.object == "text_completion"


def test_the_readmes_program_runs(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/usage.md").read_text()
    (program,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "openai.OpenAI(" in each]
    exec(compile(program.replace("http://127.0.0.1:8000", api.url), "docs/usage.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_models_are_the_base_and_its_adapters(api: Api) -> None:
    listed = {model.id: model for model in api.client.models.list()}
    assert set(listed) == {"demo", "python", "shout", "whisper"}
    assert listed["demo"].parent is None and listed["shout"].parent == "demo"
    assert api.client.models.retrieve("shout").id == "shout"
    told = "no model 'nobody': there are 'demo' and adapters"
    with pytest.raises(openai.NotFoundError, match=told) as retrieved:
        api.client.models.retrieve("nobody")
    with pytest.raises(openai.NotFoundError, match=told) as completed:
        complete(api, model="nobody")
    assert retrieved.value.code == completed.value.code == "model_not_found"


def test_what_cannot_be_served_is_no_model_and_asking_for_it_tells_why(api: Api, folder: Path) -> None:
    cut, empty = folder / "cut", folder / "empty"
    shutil.copytree(ADAPTERS / "shout", cut)
    (cut / "adapter_model.safetensors").write_bytes(b"{}")
    empty.mkdir()
    try:
        for name, why in (("cut", "cut off"), ("empty", "has no adapter_config.json")):
            with pytest.raises(openai.InternalServerError, match=why):
                complete(api, model=name)
            with pytest.raises(openai.NotFoundError, match=why) as error:
                api.client.models.retrieve(name)
            assert error.value.code == "model_not_found" and str(folder) not in str(error.value)
        assert {model.id for model in api.client.models.list()} == {"demo", "python", "shout", "whisper"}
        shutil.copy(ADAPTERS / "shout/adapter_model.safetensors", cut)
        eventually(lambda: "cut" in {model.id for model in api.client.models.list()})
        assert api.client.models.retrieve("cut").parent == "demo"
        assert complete(api, model="cut").choices[0].text == complete(api, model="shout").choices[0].text
    finally:
        shutil.rmtree(cut)
        empty.rmdir()


def test_a_stream_has_the_same_text_and_the_usage_last(api: Api) -> None:
    events = list(complete(api, max_tokens=200, stream=True, stream_options={"include_usage": True}))
    whole = complete(api, max_tokens=200)
    assert "".join(choice.text for event in events for choice in event.choices) == whole.choices[0].text
    assert [c.finish_reason for e in events for c in e.choices if c.finish_reason] == ["length"]
    *before, last = events
    assert last.choices == [] and all(event.usage is None for event in before)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len(before) > 4, "text comes piece by piece"


@pytest.mark.parametrize(
    "name", ["tokenizer", "messages", "self", "conversation", "tokenize", "options", "kwargs", "bos_token"]
)
def test_what_a_chats_template_is_given_is_no_argument_of_ours(api: Api, name: str) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "chat_template_kwargs": {name: 1},
    }
    answer = web.post(f"{api.url}/v1/chat/completions", json=body)
    assert answer.status_code in (200, 400) and "multiple values" not in answer.text


def test_each_event_tells_the_usage_so_far(api: Api) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *before, last = complete(api, max_tokens=200, **asked)
    counts = [event.usage.completion_tokens for event in before]
    assert counts == sorted(set(counts)) and counts[0] < counts[-1] == last.usage.completion_tokens == 200
    assert {event.usage.prompt_tokens for event in before} == {last.usage.prompt_tokens}


def test_several_prompts_and_completions_are_numbered(api: Api) -> None:
    prompts: list[Any] = [PROMPT, list(b"class Tree:")]
    answer = complete(api, prompt=prompts[0:1] + ["class Tree:"], n=2, temperature=1.0, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    again = complete(api, prompt=prompts[0:1] + ["class Tree:"], n=2, temperature=1.0, seed=7)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    streamed: dict[int, str] = {}
    for event in complete(api, prompt=prompts[0:1] + ["class Tree:"], n=2, temperature=1.0, seed=7, stream=True):
        for choice in event.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == {choice.index: choice.text for choice in answer.choices}


def test_without_a_seed_texts_differ(api: Api) -> None:
    assert len({complete(api, temperature=1.0).choices[0].text for _ in range(3)}) == 3


def test_prompts_may_be_tokens(api: Api) -> None:
    text = complete(api).choices[0].text
    tokens = list(PROMPT.encode())
    assert complete(api, prompt=tokens).choices[0].text == text
    assert [choice.text for choice in complete(api, prompt=[tokens, tokens]).choices] == [text, text]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(api: Api, stream: bool) -> None:
    whole = complete(api, max_tokens=60).choices[0].text
    stop, before = whole[7:10], api.engine.figures().finished.get("stop", 0)
    answer = complete(api, max_tokens=400, stop=stop, stream=stream)
    choices = [c for event in answer for c in event.choices] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"
    eventually(lambda: not api.running and api.engine.figures().finished.get("stop", 0) > before)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_a_stop_string_may_be_part_of_the_text(api: Api, kind: str, keeps: bool, stream: bool) -> None:
    asked = {"prompt": PROMPT} if kind == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    fields = {"model": "demo", "temperature": 0, "max_tokens": 60, "stream": stream, **asked}

    def text_of(**more: Any) -> str:
        answer = web.post(f"{api.url}/v1/{kind}", json={**fields, **more})
        assert answer.status_code == 200, answer.text
        told = (
            [answer.json()]
            if not stream
            else [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        )
        choices = [choice for event in told for choice in event["choices"]]
        return "".join(
            c.get("text") or (c.get("message") or c.get("delta") or {}).get("content") or "" for c in choices
        )

    whole = text_of()
    for said, stops in ((whole[7:10], {"stop": [whole[7:10]]}), (whole[5], {"stop_token_ids": [ord(whole[5])]})):
        end = whole.index(said) + (len(said) if keeps else 0)
        assert text_of(**stops, include_stop_str_in_output=keeps) == whole[:end]


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_the_text_is_part_of_it_where_it_ends_nothing_or_is_asked_for(api: Api, ignored: bool) -> None:
    end = api.engine.tokenizer.decode(list(api.engine.ends))
    for included in (False, True):
        more = {"skip_special_tokens": False, "include_stop_str_in_output": included, "ignore_eos": ignored}
        text = complete(api, max_tokens=3, logit_bias={"256": 100}, extra_body=more).choices[0].text
        assert text == end * (3 if ignored else int(included))


def test_a_text_is_echoed_as_it_was_given(endpoint: str, tmp_path: Path) -> None:
    """The tokens of this tokenizer begin with one of its own, as Llama's do."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    own = ("<|end|>", tokenizer.convert_tokens_to_ids("<|end|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[own])
    tokenizer.save_pretrained(tmp_path)
    with Engine(endpoint, DEMO_MODEL, memory=1 << 24) as engine, http_process(engine, folder=str(tmp_path)) as other:
        answer = complete(other, prompt=["abc", "d\u00e9"], max_tokens=1, echo=True, logprobs=0)
        assert answer.usage.prompt_tokens == 4 + 4
        assert [choice.text[:-1] for choice in answer.choices] == ["abc", "d\u00e9"]
        assert [choice.logprobs.text_offset for choice in answer.choices] == [[0, 0, 1, 2, 3], [0, 0, 1, 1, 2]]
        assert complete(other, prompt=[65, 66], max_tokens=0, echo=True).choices[0].text == "AB"


@pytest.mark.parametrize("stop", ["", [""]])
def test_an_empty_stop_string_stops_nothing(api: Api, stop: Any) -> None:
    wanted = api.client.completions.create(model="demo", prompt="def f(", max_tokens=8, temperature=0)
    answer = api.client.completions.create(model="demo", prompt="def f(", max_tokens=8, temperature=0, stop=stop)
    assert answer.choices[0].text == wanted.choices[0].text


def test_log_probabilities(api: Api) -> None:
    told = complete(api, max_tokens=5, logprobs=3).choices[0]
    assert "".join(told.logprobs.tokens) == told.text and len(told.logprobs.token_logprobs) == 5
    for token, logprob, top in zip(
        told.logprobs.tokens, told.logprobs.token_logprobs, told.logprobs.top_logprobs, strict=True
    ):
        assert logprob == max(top.values()) == top[token] <= 0 and len(top) == 3
    assert told.logprobs.text_offset == [0, 1, 2, 3, 4]


def test_a_part_of_a_character_is_told_by_its_bytes(api: Api) -> None:
    first, second = "é".encode()
    told = api.client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=1,
        temperature=0,
        frequency_penalty=2,
        logit_bias={str(first): 100, str(second): 99},
    ).choices[0]
    assert told.message.content == "é" and told.logprobs and told.logprobs.content
    assert [token.bytes for token in told.logprobs.content] == [[first], [second]]


@pytest.mark.parametrize("asked", [0, 2])
def test_the_chosen_token_is_always_among_the_most_likely(api: Api, asked: int) -> None:
    unlikely = {str(ord("~")): 100}
    told = complete(api, max_tokens=2, logprobs=asked, logit_bias=unlikely).choices[0]
    assert told.text == "~~"
    for logprob, top in zip(told.logprobs.token_logprobs, told.logprobs.top_logprobs, strict=True):
        assert top["~"] == logprob and asked <= len(top) <= asked + 1


def test_an_echo_with_the_log_probabilities_of_the_prompt(api: Api) -> None:
    told = complete(api, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert told.text == PROMPT and told.finish_reason == "length"
    assert "".join(told.logprobs.tokens) == PROMPT and told.logprobs.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in told.logprobs.token_logprobs[1:])
    both = complete(api, max_tokens=5, echo=True, logprobs=1).choices[0]
    assert both.text.startswith(PROMPT) and both.logprobs.token_logprobs[: len(PROMPT)] == pytest.approx(
        told.logprobs.token_logprobs
    )


def test_how_tokens_are_chosen_can_be_said(api: Api) -> None:
    text = complete(api, max_tokens=1).choices[0].text
    banned = complete(api, max_tokens=1, logit_bias={str(ord(text)): -100}).choices[0].text
    forced = complete(api, max_tokens=6, logit_bias={str(ord("x")): 100}).choices[0].text
    assert banned != text and forced == "xxxxxx"
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3, "ignore_eos": True}
    answer = complete(api, temperature=1.5, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, extra_body=extra)
    assert answer.usage.completion_tokens == 24
    ended = complete(api, logit_bias={str(ord("x")): 100}, extra_body={"stop_token_ids": [ord("x")]})
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")


def test_a_chat_with_the_demo_model_goes_on_where_its_messages_end(api: Api) -> None:
    messages: Any = [{"role": "system", "content": "import math"}, {"role": "user", "content": PROMPT}]
    fields: Any = {"model": "python", "temperature": 0}
    answer = api.client.chat.completions.create(messages=messages, max_completion_tokens=24, **fields)
    assert answer.choices[0].message.content == complete(api, prompt=f"import math\n{PROMPT}", **fields).choices[0].text


OF_REQUEST = ("completions", "prompt_logprobs", "priority")
WHOLE = ("top_k", "seed", "logprobs", "min_tokens", "max_tokens", *OF_REQUEST)
BEYOND: list[tuple[str, str, Any, Any]] = [  # the engine's name, the API's, what may be, and what may not
    *((name, {"completions": "n"}.get(name, name), limit.most, limit.most + 1) for name, limit in LIMITS.items() if limit.most < MANY),
    *((name, {"completions": "n"}.get(name, name), limit.least, limit.least - 1) for name, limit in LIMITS.items() if not limit.above and name not in ("max_tokens", "top_k")),
    ("top_p", "top_p", 0.01, 0.0),
    ("top_k", "top_k", 1, -2),
    ("min_tokens", "min_tokens", 2, 3),
    ("stop_tokens", "stop_token_ids", list(range(128)), list(range(129))),
    ("stop_tokens", "stop_token_ids", [257], [258]),
    ("logit_bias", "logit_bias", {5: -100}, {5: -101}),
    ("logit_bias", "logit_bias", {257: 1}, {258: 1}),
    ("temperature", "temperature", 1e-300, float("nan")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "called", "good", "bad"), BEYOND)
def test_a_program_and_a_client_are_refused_alike(api: Api, name: str, called: str, good: Any, bad: Any) -> None:
    for value, is_good in ((good, True), (bad, False)):
        value = int(value) if name in WHOLE and isinstance(value, float) else value
        own: Any = (
            {name: {int(k): v for k, v in value.items()}}
            if isinstance(value, dict)
            else {name: tuple(value) if isinstance(value, list) else value}
        )
        data = {"model": "demo", "prompt": PROMPT, "max_tokens": 2, called: value}
        answer = web.post(f"{api.url}/v1/completions", content=json.dumps(data).encode(), timeout=60)
        assert (answer.status_code == 200) == is_good, answer.text
        if name in OF_REQUEST:
            request = Request(id=api.engine.next_id(), prompt=(5,), sampling=Sampling(max_tokens=1), **{name: value})
        else:
            request = Request(id=api.engine.next_id(), prompt=(5,), sampling=Sampling(**{"max_tokens": 2, **own}))
        if is_good:
            api.engine.submit(request, lambda output: None)
        else:
            with pytest.raises(ConfigError, match=name):
                api.engine.submit(request, lambda output: None)
            if value == value:  # JSON has no NaN
                assert answer.json()["error"]["param"] == called


def test_a_prompt_may_be_echoed_by_itself(api: Api) -> None:
    assert complete(api, max_tokens=0, echo=True).choices[0].text == PROMPT


def test_a_role_that_there_is_not_is_refused(api: Api) -> None:
    messages: Any = [{"role": "robot", "content": "x"}]
    with pytest.raises(
        openai.BadRequestError, match="role 'robot' is not supported: it may be system, developer, user"
    ):
        api.client.chat.completions.create(model="demo", messages=messages)


@pytest.mark.parametrize(
    ("fields", "status", "told"),
    [
        ({"model": "nobody"}, 404, "nobody"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [10**6]}, 400, "token 1000000"),
        ({"prompt": [1, "x"]}, 400, "list of tokens"),
        ({"max_tokens": 10**6}, 400, "reduce the length of the input prompt"),
        ({"temperature": -1}, 400, "temperature"),
        ({"extra_body": {"speed": 1}}, 400, "speed"),
        ({"extra_body": {"guided_whitespace_pattern": "x"}}, 400, "guided_whitespace_pattern"),
        ({"prompt": "x" * (1 << 21)}, 413, "larger"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_openais(api: Api, fields: dict[str, Any], status: int, told: str, stream: bool) -> None:
    with pytest.raises(openai.APIStatusError, match=told) as error:
        complete(api, **fields, stream=stream)
    assert error.value.status_code == status and error.value.type
    assert set(error.value.body) == {"message", "type", "param", "code"}


def test_what_is_no_request_is_refused(api: Api) -> None:
    for path, data, status in (
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b'{"model": "demo"}', 400),
        ("/v1/nothing", b"{}", 404),
        ("/v1/models", b"{}", 405),
        ("/v1/load_lora_adapter", b'{"lora_name": 1}', 400),
        ("/v1/load_lora_adapter", b'{"lora_name": "\xff", "lora_path": "x"}', 400),
        ("/v1/unload_lora_adapter", b"[]", 400),
    ):
        answer = web.post(api.url + path, content=data)
        assert answer.status_code == status and answer.json()["error"]["message"], path


def test_adapters_come_and_go_as_with_vllm(api: Api, folder: Path, tmp_path: Path) -> None:
    def load(name: str, path: str) -> Any:
        return web.post(f"{api.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, timeout=60)

    assert load("loud", "shout").status_code == 200
    assert complete(api, model="loud").choices[0].text == complete(api, model="shout").choices[0].text
    (folder / "loop").symlink_to(folder / "loop")
    for path in ("/etc", "../adapters", str(tmp_path), ".", "nothing", "loop"):
        assert load("other", path).status_code == 404, path
        assert "--adapters" in load("other", path).text
    assert load("demo", "shout").status_code == 400
    assert load("loud", "whisper").status_code == 400 and "has already been loaded" in load("loud", "whisper").text
    replaced = {"lora_name": "loud", "lora_path": "shout", "load_inplace": True}
    assert web.post(f"{api.url}/v1/load_lora_adapter", json=replaced, timeout=60).status_code == 200
    unloaded = web.post(f"{api.url}/v1/unload_lora_adapter", json={"lora_name": "loud"})
    assert unloaded.status_code == 200
    with pytest.raises(openai.NotFoundError):
        complete(api, model="loud")


def packed(folder: Path) -> bytes:
    """An adapter of PEFT as one body."""
    from safetensors import safe_open
    from safetensors.torch import save

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return save(tensors, metadata={"adapter_config": (folder / "adapter_config.json").read_text()})


def test_an_adapter_can_be_sent(api: Api) -> None:
    sent = web.put(f"{api.url}/v1/adapters/sent", content=packed(ADAPTERS / "python"), timeout=60)
    assert sent.status_code == 200 and sent.json()["name"] == "sent"
    assert complete(api, model="sent").choices[0].text == complete(api, model="python").choices[0].text
    again = web.put(f"{api.url}/v1/adapters/sent", content=packed(ADAPTERS / "shout"), timeout=60)
    assert again.json()["version"] > sent.json()["version"]
    assert complete(api, model="sent").choices[0].text == complete(api, model="shout").choices[0].text
    for data in (b"", b"x" * 100, b"\xff" * 16, json.dumps({}).encode()):
        refused = web.put(f"{api.url}/v1/adapters/sent", content=data)
        assert refused.status_code == 400 and "safetensors" in refused.json()["error"]["message"]
    for ask in (partial(web.put, content=packed(ADAPTERS / "python")), web.delete):
        other = ask(f"{api.url}/v1/adapters/sent?model=other")  # as to a cluster, which has several
        assert other.status_code == 404 and "there is no model 'other'" in other.json()["error"]["message"]
    assert web.delete(f"{api.url}/v1/adapters/sent").status_code == 204
    assert web.delete(f"{api.url}/v1/adapters/sent").status_code == 404


def test_what_prometheus_reads(api: Api) -> None:
    complete(api)
    text = web.get(f"{api.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    samples = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    assert samples["symbiosis_serve_generation_tokens_total",] >= 24
    assert samples["symbiosis_serve_request_success_total", "length"] >= 1
    assert samples["symbiosis_serve_http_requests_total", "/v1/completions", "200"] >= 1
    assert samples["symbiosis_serve_time_to_first_token_seconds_bucket", "+Inf"] >= 1


def test_what_waits_and_runs_is_all_that_is_under_way(api: Api) -> None:
    """Also what the engine has not looked at, since a step takes long."""

    def figures() -> tuple[float, float]:
        found = {each.name: each for each in text_string_to_metric_families(web.get(f"{api.url}/metrics").text)}
        running, waiting = (
            found[f"symbiosis_serve_num_requests_{what}"].samples[0].value for what in ("running", "waiting")
        )
        return running, waiting

    may_go_on = threading.Event()
    api.engine._loop.ask(lambda: may_go_on.wait(60))  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(20) as pool:
        try:
            asked = [
                pool.submit(api.client.completions.create, model=model, prompt=PROMPT, n=3, max_tokens=4)
                for model in ("demo", "shout") * 10
            ]
            eventually(lambda: figures() == (0, 60))
        finally:
            may_go_on.set()
        assert all(len(each.result().choices) == 3 for each in asked)
    assert figures() == (0, 0)


def test_no_torch_is_loaded_to_speak_http(api: Api) -> None:
    """It would take longer to load, and more memory, than all else in that process."""
    assert api.client.completions.create(model="demo", prompt="x", max_tokens=1).usage.completion_tokens == 1
    status = Path(f"/proc/{api.http.child.pid}/status").read_text()
    assert int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) < 200 << 10
    assert "libtorch" not in Path(f"/proc/{api.http.child.pid}/maps").read_text()


def test_version_health_and_page(api: Api) -> None:
    assert web.get(f"{api.url}/version").json() == {"version": symbiosis.__version__, "build": build()}
    assert web.get(f"{api.url}/health").status_code == 200
    page = web.get(api.url)
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    assert "://" not in page.text, "the page needs no other host"
    assert web.get(f"{api.url}/figures").json()["model"] == "demo"


def run_example(name: str, api: Api, *arguments: str) -> str:
    environment = {**os.environ, "OPENAI_BASE_URL": f"{api.url}/v1", "OMP_NUM_THREADS": "1"}
    file = Path(__file__).parents[2] / "examples" / name
    done = run(str(file), *arguments, seconds=110, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_a_client(api: Api) -> None:
    text = run_example("serve_client.py", api)
    for model in ("demo", "python", "shout", "whisper"):
        name = None if model == "demo" else model
        assert (
            f"--- {model}\n{PROMPT}{api.engine.generate(PROMPT, adapter=name, max_tokens=64, temperature=0.0).text}\n"
            in text
        )


def test_the_example_of_a_trainer_beside_the_server(api: Api, endpoint: str) -> None:
    assert "The return value is 42, as everybody knows" in run_example("serve_beside_a_trainer.py", api, endpoint)
