"""What scripts/compat_clients.py has each client ask for, in that client's own environment: `python _clients.py NAME URL MODEL`.

Nothing of Symbiosis is imported here. A check is a function that fails by an exception; the last line is JSON, with what each of them said.
"""

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

URL, MODEL, KEY = "", "", "none"
PROMPT = "The capital of France is"
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": WEATHER},
}
Check = Callable[[], object]
Place = Literal["Paris", "Rome"]  # else the model fills its tokens with one name


def is_one(left: Any, right: Any) -> None:
    if left != right:
        raise AssertionError(f"{left!r:.200} is not {right!r:.200}")


def holds(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)


# ---------------------------------------------------------------- openai-python


def openai_checks() -> dict[str, Check]:
    import openai
    from pydantic import BaseModel

    client = openai.OpenAI(base_url=URL, api_key=KEY)
    chat, once = client.chat.completions.create, {"model": MODEL, "max_tokens": 24, "temperature": 0}

    class City(BaseModel):
        city: str
        inhabitants: int

    def completions() -> None:
        answer = client.completions.create(prompt=PROMPT, logprobs=2, echo=True, **once)
        is_one(len(answer.choices[0].logprobs.tokens), answer.usage.total_tokens)
        parts = client.completions.create(prompt=PROMPT, stream=True, **once)
        is_one(PROMPT + "".join(each.choices[0].text for each in parts), answer.choices[0].text)
        several = client.completions.create(**{**once, "temperature": 1}, prompt=[PROMPT, "One, two,"], n=2, seed=1)
        is_one([each.index for each in several.choices], [0, 1, 2, 3])

    def chats() -> None:
        answer = chat(messages=QUESTION, logprobs=True, top_logprobs=2, **once)
        parts = list(chat(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **once))
        text = "".join(each.choices[0].delta.content or "" for each in parts if each.choices)
        is_one(text, answer.choices[0].message.content)
        is_one(parts[-1].usage.completion_tokens, answer.usage.completion_tokens)
        is_one(len(answer.choices[0].logprobs.content), answer.usage.completion_tokens)

    def tools() -> None:
        answer = chat(messages=QUESTION, tools=[TOOL], tool_choice="required", **once)
        (call,) = answer.choices[0].message.tool_calls
        holds(json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), call.function.arguments)
        parts = chat(
            messages=QUESTION,
            tools=[TOOL],
            tool_choice=TOOL | {"function": {"name": "get_weather"}},
            stream=True,
            **once,
        )
        told = [
            each.choices[0].delta.tool_calls[0].function.arguments
            for each in parts
            if each.choices and each.choices[0].delta.tool_calls
        ]
        is_one(json.loads("".join(told)), json.loads(call.function.arguments))
        said = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        holds(
            chat(messages=[*QUESTION, answer.choices[0].message, said], tools=[TOOL], **once).choices,
            "no answer to a tool",
        )

    def structured() -> None:
        parsed = client.chat.completions.parse(messages=QUESTION, response_format=City, **{**once, "max_tokens": 60})
        holds(isinstance(parsed.choices[0].message.parsed, City), "not parsed")

    def responses() -> None:
        first = client.responses.create(model=MODEL, input="Say a word.", max_output_tokens=8, temperature=0)
        more = client.responses.create(
            model=MODEL, input="And another.", previous_response_id=first.id, max_output_tokens=8
        )
        holds(more.usage.input_tokens > first.usage.input_tokens, "it did not go on")
        with client.responses.stream(model=MODEL, input="Say a word.", max_output_tokens=8, temperature=0) as stream:
            text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
        is_one(text, first.output_text)

    def embeddings() -> None:
        told = client.embeddings.create(model=MODEL, input=["a cat", "a dog"]).data
        floats = client.embeddings.create(model=MODEL, input="a cat", encoding_format="float").data[0].embedding
        holds(max(abs(a - b) for a, b in zip(told[0].embedding, floats, strict=True)) < 1e-5, "base64 is not float")

    def errors() -> None:
        for kind, fields in (
            (openai.NotFoundError, {"model": "nobody"}),
            (openai.BadRequestError, {"max_tokens": -1}),
            (openai.BadRequestError, {"extra_body": {"speed": 1}}),
        ):
            try:
                chat(**{**once, "messages": QUESTION, **fields})
            except kind:
                continue
            raise AssertionError(f"{fields} was taken")

    def concurrent() -> None:
        import asyncio

        async def all_of_them() -> list[str]:
            own = openai.AsyncOpenAI(base_url=URL, api_key=KEY)
            prompts = [f"{PROMPT} {number}" for number in range(24)]
            told = await asyncio.gather(*(own.completions.create(prompt=each, **once) for each in prompts))
            return [each.choices[0].text for each in told]

        is_one(asyncio.run(all_of_them())[0], client.completions.create(prompt=f"{PROMPT} 0", **once).choices[0].text)

    def models() -> None:
        holds(MODEL in [each.id for each in client.models.list()], "it is not listed")
        is_one(client.models.retrieve(MODEL).id, MODEL)

    return {
        "completions": completions, "chats": chats, "tools": tools, "structured": structured, "responses": responses,
        "embeddings": embeddings, "errors": errors, "concurrent": concurrent, "models": models,
    }  # fmt: skip


# ---------------------------------------------------------------- litellm


def litellm_checks() -> dict[str, Check]:
    import litellm

    own: dict[str, Any] = {
        "model": f"hosted_vllm/{MODEL}",
        "api_base": URL,
        "api_key": KEY,
        "max_tokens": 60,
        "temperature": 0,
    }

    def chats() -> None:
        text = litellm.completion(messages=QUESTION, **own).choices[0].message.content
        parts = litellm.completion(messages=QUESTION, stream=True, **own)
        is_one("".join(each.choices[0].delta.content or "" for each in parts), text)
        as_openai = litellm.completion(messages=QUESTION, **{**own, "model": f"openai/{MODEL}"})
        is_one(as_openai.choices[0].message.content, text)

    def completions() -> None:
        told = litellm.text_completion(prompt=PROMPT, **{**own, "model": f"text-completion-openai/{MODEL}"})
        holds(told.choices[0].text, "no text")

    def tools() -> None:
        answer = litellm.completion(messages=QUESTION, tools=[TOOL], tool_choice="required", **own)
        is_one(answer.choices[0].message.tool_calls[0].function.name, "get_weather")

    def embeddings() -> None:
        told = litellm.embedding(model=f"hosted_vllm/{MODEL}", api_base=URL, api_key=KEY, input=["a cat", "a dog"])
        is_one(len(told.data), 2)

    def rerank() -> None:
        documents = ["Paris is a city.", "A cat sleeps."]
        told = litellm.rerank(
            model=f"hosted_vllm/{MODEL}", api_base=URL, api_key=KEY, query="Where is Paris?", documents=documents, top_n=1
        )  # fmt: skip
        is_one(len(told.results), 1)

    def responses() -> None:
        told = litellm.responses(
            model=f"openai/{MODEL}", api_base=URL, api_key=KEY, input="Say a word.", max_output_tokens=8
        )
        holds(told.output, "no output")

    return {
        "chats": chats,
        "completions": completions,
        "tools": tools,
        "embeddings": embeddings,
        "rerank": rerank,
        "responses": responses,
    }


# ---------------------------------------------------------------- langchain-openai


def langchain_checks() -> dict[str, Check]:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
    from pydantic import BaseModel

    own: dict[str, Any] = {"base_url": URL, "api_key": KEY, "model": MODEL, "temperature": 0, "max_tokens": 100}
    model = ChatOpenAI(**own)

    class City(BaseModel):
        """A city."""

        name: Literal["Paris", "Rome"]
        is_large: bool

    @tool
    def get_weather(city: Place) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    def chats() -> None:
        text = model.invoke("Say a word.").content
        is_one("".join(each.content for each in model.stream("Say a word.")), text)
        is_one([each.content for each in model.batch(["Say a word."] * 3)], [text] * 3)

    def completions() -> None:
        holds(OpenAI(**own).invoke(PROMPT), "no text")

    def bind_tools() -> None:
        answer = model.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Paris?")
        holds(answer.tool_calls and answer.tool_calls[0]["name"] == "get_weather", "no call")
        holds(model.bind_tools([get_weather]).invoke("Hi.") is not None, "no answer")

    def with_structured_output() -> None:
        for method in ("json_schema", "function_calling"):
            told = model.with_structured_output(City, method=method).invoke("Tell me of Paris.")
            holds(isinstance(told, City), f"{method}: {told!r}")

    def embeddings() -> None:
        made = OpenAIEmbeddings(base_url=URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
        is_one(len(made.embed_documents(["a cat", "a dog"])), 2)

    def responses() -> None:
        holds(ChatOpenAI(**own, use_responses_api=True).invoke("Say a word.").content, "no content")

    return {
        "chats": chats, "completions": completions, "bind_tools": bind_tools, "with_structured_output": with_structured_output,
        "embeddings": embeddings, "responses": responses,
    }  # fmt: skip


# ---------------------------------------------------------------- instructor


def instructor_checks() -> dict[str, Check]:
    import instructor
    import openai
    from pydantic import BaseModel

    class City(BaseModel):
        name: Literal["Paris", "Rome"]
        is_large: bool

    def by(mode: Any) -> Check:
        def check() -> None:
            client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY), mode=mode)
            messages: list[Any] = [{"role": "user", "content": "Tell me of Paris."}]
            told = client.chat.completions.create(
                model=MODEL, messages=messages, response_model=City, max_tokens=120, temperature=0, max_retries=0
            )  # fmt: skip
            holds(isinstance(told, City), repr(told))

        return check

    modes = {
        name: getattr(instructor.Mode, name)
        for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")
        if hasattr(instructor.Mode, name)
    }
    return {name: by(mode) for name, mode in modes.items()}


# ---------------------------------------------------------------- openai-agents


def agents_checks() -> dict[str, Check]:
    import asyncio

    import openai
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from pydantic import BaseModel

    set_tracing_disabled(True)
    called: list[str] = []

    class Greeting(BaseModel):
        word: Literal["hello", "good day"]

    @function_tool
    def get_weather(city: Place) -> str:
        """The weather of a city."""
        called.append(city)
        return f"sunny in {city}"

    def by(kind: Any, is_stream: bool) -> Check:
        async def answer(agent: Any, given: Any) -> Any:
            if not is_stream:
                return await Runner.run(agent, given)
            result = Runner.run_streamed(agent, given)
            async for _ in result.stream_events():
                pass
            return result

        async def run() -> None:
            """One agent calls, and another one goes on from that: the model itself would call again and again."""
            client = openai.AsyncOpenAI(base_url=URL, api_key=KEY)
            own: dict[str, Any] = {"instructions": "Be brief.", "model": kind(model=MODEL, openai_client=client)}
            forced = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=60)
            calls = Agent(
                name="calls", tools=[get_weather], tool_use_behavior="stop_on_first_tool", model_settings=forced, **own
            )
            result = await answer(calls, "What is the weather in Paris?")
            holds(called, "the tool was not called")
            is_one(result.final_output, f"sunny in {called[0]}")
            tells = Agent(
                name="tells", output_type=Greeting, model_settings=ModelSettings(temperature=0, max_tokens=60), **own
            )
            told = await answer(tells, [*result.to_input_list(), {"role": "user", "content": "Say hello."}])
            holds(isinstance(told.final_output, Greeting), f"no greeting: {told.final_output!r}")

        def check() -> None:
            called.clear()
            asyncio.run(run())

        return check

    kinds = {"chats": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    return {
        f"{name}{'_stream' * is_stream}": by(kind, is_stream)
        for name, kind in kinds.items()
        for is_stream in (False, True)
    }


CLIENTS: dict[str, Callable[[], dict[str, Check]]] = {
    "openai": openai_checks,
    "litellm": litellm_checks,
    "langchain": langchain_checks,
    "instructor": instructor_checks,
    "agents": agents_checks,
}


def main(name: str) -> None:
    told: dict[str, str] = {}
    for check, run in CLIENTS[name]().items():
        try:
            run()
            told[check] = ""
        except Exception as error:  # of any client
            traceback.print_exc()
            told[check] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps(told))


if __name__ == "__main__":
    _, which, URL, MODEL = sys.argv
    main(which)
