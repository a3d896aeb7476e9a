"""Answers that are made of vectors: embeddings, classes, scores."""

import time
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from symbiosis.server.generation import Generation
from symbiosis.server.long_reply import GenerationReply
from symbiosis.server.pooling_protocol import RerankBody
from symbiosis.server.request_record import this_request
from symbiosis.server.response_format import Fields, usage
from symbiosis.server.sse import JSON, SseWriter

Parts = tuple[Fields, str, Iterator[Fields]]  # of an answer: its fields, the name of its list, and what is in that
Shape = Callable[[list[bytes]], Parts]
encode = msgspec.json.encode


class PoolingReply(GenerationReply):
    """An answer with something of each prompt's vector.

    Args:
        shape: Makes the answer of the vectors, float32.
        done: Called at the end, whatever it is, with how many tokens were used.
    """

    def __init__(self, generation: Generation, shape: Shape, done: Callable[[int], None]) -> None:
        super().__init__(generation, False, done)
        self._shape = shape

    async def _whole(self, writer: SseWriter) -> None:
        vectors = [b""] * self._generation.choices
        async for deltas in self._deltas(writer):
            for delta in deltas:
                vectors[delta.choice] = delta.vector
        if self._generation.is_whole:
            await writer.start(JSON)
            await writer.take(self._pieces(vectors), more=False)

    async def _stream(self, writer: SseWriter) -> None:
        """Answer whole: no vector comes in parts."""
        await self._whole(writer)

    def _pieces(self, vectors: list[bytes]) -> Iterator[bytes]:
        """Yield the answer as JSON, each part of its list by itself: together they may be large."""
        fields, name, parts = self._shape(vectors)
        yield encode(fields)[:-1] + b',"%b":[' % name.encode()
        for number, part in enumerate(parts):
            yield b"," * (number > 0) + encode(part)
        yield b'],"usage":%b}' % encode(usage(self._generation))


def head(prefix: str, model: str) -> Fields:
    """Return with what an answer begins."""
    return {"object": "list", "id": f"{prefix}-{this_request().id}", "created": int(time.time()), "model": model}


def embeddings(model: str, as_base64: bool, vectors: list[bytes]) -> Parts:
    told: Callable[[bytes], Any] = (lambda vector: b64encode(vector).decode()) if as_base64 else numbers
    parts = ({"object": "embedding", "index": index, "embedding": told(vector)} for index, vector in enumerate(vectors))
    return head("embd", model), "data", parts


def classes(model: str, vectors: list[bytes]) -> Parts:
    return head("classify", model), "data", (_classes(index, numbers(vector)) for index, vector in enumerate(vectors))


def _classes(index: int, probabilities: list[float]) -> Fields:
    best = probabilities.index(max(probabilities))
    return {"index": index, "label": f"LABEL_{best}", "probs": probabilities, "num_classes": len(probabilities)}


def scored(model: str, scores: Sequence[float]) -> Parts:
    parts = ({"index": index, "object": "score", "score": score} for index, score in enumerate(scores))
    return head("score", model), "data", parts


def reranked(model: str, body: RerankBody, scores: Sequence[float]) -> Parts:
    """Return the documents with the best scores, in their order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    documents = body.pairs[1]
    shows = body.return_documents is not False
    parts = (
        {
            "index": index,
            **({"document": {"text": documents[index]}} if shows else {}),
            "relevance_score": scores[index],
        }
        for index in order
    )
    return {"id": f"rerank-{this_request().id}", "model": model}, "results", parts


def numbers(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


def similarities(left: list[bytes], right: list[bytes]) -> list[float]:
    """Return the cosines of vectors of length 1: of each on the right with its own on the left, or with the only one.

    >>> import numpy
    >>> one, other = numpy.eye(2, dtype="float32")
    >>> similarities([one.tobytes()], [one.tobytes(), other.tobytes()])
    [1.0, 0.0]
    """
    import numpy as np

    rows = [np.frombuffer(vector, dtype=np.float32) for vector in right]
    others = [np.frombuffer(vector, dtype=np.float32) for vector in left]
    return [float(row @ others[number if len(others) > 1 else 0]) for number, row in enumerate(rows)]
