"""The bodies of requests for vectors, classes and scores of texts, by the names of OpenAI, vLLM, Cohere and Jina."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from symbiosis.server.api_errors import wrong
from symbiosis.server.json_costs import Most
from symbiosis.server.openai_fields import Label
from symbiosis.server.openai_protocol import MOST, MOST_PROMPTS, Truncation, Whole

OF_SCORE = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
TEXTS = Most(MOST_PROMPTS, 1, MOST_PROMPTS)


class PoolingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that all of them have."""

    model: str | None = None  # None: the base
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None  # which end goes. Default: as the tokenizer says
    padding: Literal["do_not_pad"] | None = None
    use_activation: bool | None = None
    priority: Whole | None = None
    # HARMLESS
    user: Label | None = None


class TextsBody(PoolingBody, kw_only=True):
    """What the bodies of embeddings and classes have in common: texts, or one chat."""

    most: ClassVar[dict[str, Most]] = {"input": MOST["prompt"]}

    input: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # of texts
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def field(self) -> str:
        """The one in which its prompts are."""
        return "messages" if self.input is None else "input"


class EmbeddingsBody(TextsBody, kw_only=True):
    """The body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    embed_dtype: Literal["float32"] | None = None  # of base64
    endianness: Literal["native", "little"] | None = None


class ClassifyBody(TextsBody, kw_only=True):
    """The body of POST /classify."""


Texts = str | list[str]


class ScoreBody(PoolingBody, kw_only=True):
    """The body of POST /score: two fields of texts, by one of vLLM's pairs of names."""

    most: ClassVar[dict[str, Most]] = {name: TEXTS for pair in OF_SCORE for name in pair}

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two fields that are there."""
        there = {name for pair in OF_SCORE for name in pair if getattr(self, name) is not None}
        for pair in OF_SCORE:
            if there == set(pair):
                return pair
        told = ", or ".join(" and ".join(pair) for pair in OF_SCORE)
        raise wrong(f"give two fields of texts, and no others: {told}", min(there, default="queries"))

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The texts on either side: as many, or one on the left."""
        left, right = (listed(getattr(self, name)) for name in self.names)
        if len(left) not in (1, len(right)):
            message = f"{self.names[0]} are {len(left)}, and {self.names[1]} {len(right)}: give one, or as many"
            raise wrong(message, self.names[0])
        return left, right


class RerankBody(PoolingBody, kw_only=True):
    """The body of POST /rerank."""

    most: ClassVar[dict[str, Most]] = {"documents": TEXTS}

    query: str
    documents: Texts
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None  # 0: all
    return_documents: bool | None = None

    names: ClassVar[tuple[str, str]] = ("query", "documents")

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        return [self.query], listed(self.documents)


def listed(texts: Texts | None) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts or ())


def check_texts(body: TextsBody) -> None:
    """Check what belongs together in a body of texts or a chat."""
    if (body.input is None) == (body.messages is None):
        raise wrong("give input or messages", "input")
    if body.continue_final_message and body.add_generation_prompt:
        raise wrong("continue_final_message goes with add_generation_prompt=false", "continue_final_message")
    if body.messages is not None and body.add_special_tokens:
        raise wrong("add_special_tokens goes with input: a chat template has its own", "add_special_tokens")
    of_chats = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
    if given := [name for name in of_chats if body.messages is None and getattr(body, name) is not None]:
        raise wrong(f"{given[0]} goes with messages", given[0])
