"""`/generate` and `/generate_stream` of text-generation-inference and LoRAX, whose `adapter_id` is an adapter's name."""

from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp

from symbiosis.server.api_keys import Admission, Tenant
from symbiosis.server.body_readers import takes
from symbiosis.server.generate_protocol import GenerateBody, GenerateCompletion, as_completion
from symbiosis.server.generate_reply import GenerateReply
from symbiosis.server.generation import Generation
from symbiosis.server.openai_protocol import sampling_of
from symbiosis.server.prompts import PromptCut
from symbiosis.server.serving_state import ServingState


@takes(GenerateBody)
async def generate(front: ServingState, request: Request, tenant: Tenant, body: GenerateBody, size: int) -> ASGIApp:
    return await _answered(front, request, tenant, body, size, is_stream=False)


@takes(GenerateBody)
async def generate_stream(
    front: ServingState, request: Request, tenant: Tenant, body: GenerateBody, size: int
) -> ASGIApp:
    return await _answered(front, request, tenant, body, size, is_stream=True)


@takes(GenerateBody)
async def either(front: ServingState, request: Request, tenant: Tenant, body: GenerateBody, size: int) -> ASGIApp:
    """Answer POST /, to which clients of both send: `stream` says what comes."""
    return await _answered(front, request, tenant, body, size, bool(body.stream), in_list=True)


async def _answered(
    front: ServingState, request: Request, tenant: Tenant, body: GenerateBody, size: int, is_stream: bool, in_list: bool = False
) -> ASGIApp:  # fmt: skip
    asked = as_completion(body, front.options.model, is_stream)
    front.prompts.several(body.inputs, "inputs", _cut(body))
    adapter = await front.adapter(tenant, asked.model)
    most = front.remote.welcome.most_tokens if asked.max_tokens is None else asked.max_tokens
    with front.admitted(tenant, asked, 1, most) as admission:
        generation = await front.made(request, tenant, size, 1, partial(_made, front, admission, body, asked, adapter))
        if asked.logprobs is not None:
            front.hold(generation, admission)
        admission.reserve(generation.prompt_tokens + generation.most_tokens)
        ends = generation.requests[0].sampling.ending(front.remote.welcome.ends)
        generation.begin()
        told = body.parameters
        return GenerateReply(generation, front.tokenizer, told, body.inputs, ends, is_stream, in_list, admission.end)


def _cut(body: GenerateBody) -> PromptCut | None:
    return None if body.parameters.truncate is None else PromptCut(body.parameters.truncate, "left")


def _made(
    front: ServingState, admission: Admission, body: GenerateBody, asked: GenerateCompletion, adapter: str
) -> Generation:
    told = body.parameters
    if told.apply_chat_template:
        tokens = front.prompts.of_chat([{"role": "user", "content": body.inputs}], {})
    else:
        tokens = front.prompts.of_text(body.inputs, True, _cut(body))
    most = front.tokens_for([tokens], asked.max_tokens, None, "max_new_tokens", "inputs")
    guide = asked.follows[1] if asked.follows else None
    sampling = sampling_of(asked, most, asked.logprobs, guide)
    scored = (asked.logprobs or 0) if told.decoder_input_details else None
    return front.generation(admission, asked, [tokens], sampling, asked.max_tokens is None, scored, adapter)
