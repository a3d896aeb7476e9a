"""Tokens of texts and chats, and texts of tokens, as vLLM's `/tokenize` and `/detokenize` tell them."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from symbiosis.server.api_app import json_response
from symbiosis.server.api_errors import wrong
from symbiosis.server.api_keys import Tenant
from symbiosis.server.body_readers import takes
from symbiosis.server.openai_protocol import refused
from symbiosis.server.serving_state import ServingState
from symbiosis.server.tools import Tool
from symbiosis.serving.engine.limits import Unfit, check_count, check_tokens


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True  # of a prompt
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


@takes(TokenizeBody)
async def tokenize(front: ServingState, request: Request, tenant: Tenant, body: TokenizeBody, size: int) -> ASGIApp:
    if (body.prompt is None) == (body.messages is None):
        raise wrong("give a prompt or messages", "prompt")
    tokens = await front.made(request, tenant, size, 1, lambda: _tokens(front, body))
    told = {"count": len(tokens), "max_model_len": front.remote.welcome.longest, "tokens": tokens}
    texts = front.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return json_response({**told, "token_strs": texts})


def _tokens(front: ServingState, body: TokenizeBody) -> list[int]:
    if body.messages is None:
        front.prompts.several(body.prompt or "")
        encoded = front.tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)
        return list(encoded.input_ids)
    if body.continue_final_message and body.add_generation_prompt:
        raise wrong("continue_final_message goes with add_generation_prompt=false", "continue_final_message")
    if not body.messages:
        raise wrong("messages is empty", "messages")
    try:
        check_count("messages", len(body.messages))
        check_count("tools", len(body.tools or ()))
    except Unfit as unfit:
        raise refused(unfit) from None
    tools = msgspec.to_builtins(body.tools) if body.tools else None
    options = body.chat_template_kwargs or {}
    of_chat = front.prompts.of_chat(
        body.messages, options, tools, body.add_generation_prompt, body.continue_final_message
    )
    return list(of_chat)


@takes(DetokenizeBody)
async def detokenize(front: ServingState, request: Request, tenant: Tenant, body: DetokenizeBody, size: int) -> ASGIApp:
    return json_response({"prompt": await front.made(request, tenant, size, 1, lambda: _text(front, body.tokens))})


def _text(front: ServingState, tokens: list[int]) -> str:
    if len(tokens) > front.remote.welcome.longest:
        raise wrong(f"tokens may have {front.remote.welcome.longest}, and has {len(tokens)}", "tokens")
    try:
        check_tokens("tokens", tokens, front.remote.welcome.vocabulary)
    except Unfit as unfit:
        raise refused(unfit) from None
    text: str = front.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
