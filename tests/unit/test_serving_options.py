"""What can be said of a server, and what is found wrong with it before it starts."""

from pathlib import Path

import pytest

from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.serving.engine.detokenize import chat_tokens
from symbiosis.serving.http.link.messages import FrontOptions
from symbiosis.serving.http.process import tokenizer_of
from symbiosis.serving.options import ServeOptions
from symbiosis.tools.serve.preflight import chat_template
from symbiosis.tools.serve.run import model_name


def test_a_name_for_clients() -> None:
    assert model_name(ServeOptions(model="/models/base")) == "/models/base"
    assert model_name(ServeOptions(model="/models/base", served_model_name="base")) == "base"


def test_a_share_of_the_batch_is_for_keys() -> None:
    assert ServeOptions().of_tenant is None
    assert ServeOptions(api_keys="keys", max_batch=9).of_tenant == 4
    assert ServeOptions(api_keys="keys", max_batch=1).of_tenant == 1
    assert ServeOptions(api_keys="keys", max_tenant_batch=60).of_tenant == 60
    with pytest.raises(ConfigError, match="max-tenant-batch is for each API key: give --api-keys"):
        ServeOptions(max_tenant_batch=3)


def test_a_chat_template_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    options = ServeOptions(model="demo", chat_template=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        chat_template(options)
    file.write_text("{% for message in messages %}<{{ message.content }}>")
    with pytest.raises(ConfigError, match="line 1: Unexpected end of template"):
        chat_template(options)
    file.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    tokenizer = tokenizer_of(FrontOptions(model="demo", folder=str(DEMO_MODEL), chat_template=chat_template(options)))
    assert chat_tokens(tokenizer, [{"role": "user", "content": "x"}]) == tuple(b"<x>")
    own = tokenizer_of(FrontOptions(model="demo", folder=str(DEMO_MODEL)))
    assert chat_tokens(own, [{"role": "user", "content": "x"}]) == tuple(b"x")
