"""How much a request may have that does not say so: what the model, the adapter and the memory leave."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import peft
import pytest
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig

import symbiosis
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving import Engine
from tests.serving_api import Api, http_process

LEFT, VIRTUAL, BIG = 40, 5, 1 << 25  # so few tokens are left after a prompt that all of them are soon made


def demo() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    soft = peft.get_peft_model(demo(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL))
    with Engine(demo(), DEMO_MODEL, memory=BIG) as engine, http_process(engine) as api:
        symbiosis.publish(soft, "soft", engine)
        yield api


def chat(api: Api, length: int, **fields: Any) -> Any:
    """How many tokens were made after a prompt of so many."""
    messages = [{"role": "user", "content": "x" * length}]
    how = {"model": "demo", "messages": messages, "extra_body": {"ignore_eos": True}, **fields}
    return api.client.chat.completions.create(**how).usage.completion_tokens


@pytest.mark.parametrize(("model", "virtual", "param"), [("demo", 0, "max_tokens"), ("soft", VIRTUAL, "messages")])
def test_a_chat_has_what_the_model_and_virtual_tokens_leave(api: Api, model: str, virtual: int, param: str) -> None:
    length = api.engine.longest - virtual - LEFT
    assert chat(api, length, model=model) == LEFT
    assert chat(api, length, model=model, max_tokens=LEFT) == LEFT
    with pytest.raises(openai.BadRequestError, match="(reduce the length of the input|shorten the) prompt") as refusal:
        chat(api, length, model=model, max_tokens=LEFT + 1)
    assert refusal.value.param == param  # as clients call what the engine has as its prompt


def test_a_completion_has_what_is_left_if_that_is_less_than_the_default(api: Api) -> None:
    prompt = [97] * (api.engine.longest - VIRTUAL - 3)
    made = api.client.completions.create(model="soft", prompt=prompt, extra_body={"ignore_eos": True})
    assert made.usage and made.usage.completion_tokens == 3


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}], ids=["none", "null", "empty"])
def test_a_request_that_names_no_model_gets_the_base(api: Api, model: dict[str, Any]) -> None:
    asked: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "def", "max_tokens": 4},
        "chat/completions": {"messages": [{"role": "user", "content": "def"}], "max_tokens": 4},
        "responses": {"input": "def", "max_output_tokens": 16},
    }
    for path, body in asked.items():
        answer = httpx.post(f"{api.url}/v1/{path}", json={**body, **model}, timeout=60)
        assert answer.status_code == 200 and answer.json()["model"] == "demo", answer.text


def test_a_chat_has_what_the_memory_holds() -> None:
    with Engine(demo(), DEMO_MODEL, memory=1 << 20) as engine, http_process(engine) as api:
        assert LEFT < engine.most_tokens < engine.longest
        length = engine.most_tokens - LEFT
        assert chat(api, length) == LEFT
        with pytest.raises(openai.BadRequestError, match="give the server more memory") as refusal:
            chat(api, length, max_tokens=LEFT + 1)
        assert refusal.value.param == "messages" and str(refusal.value.body).count("prompt") == 0


def test_a_chat_with_a_model_that_has_no_longest_text() -> None:
    bloom = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=258, hidden_size=32, n_layer=2, n_head=4)).eval()
    with Engine(bloom, DEMO_MODEL, memory=1 << 20) as engine, http_process(engine) as api:
        assert chat(api, engine.most_tokens - LEFT) == LEFT
