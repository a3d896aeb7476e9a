"""Tinker's API at a cluster's address: each request goes to the server that has its session, which all ids tell."""

import asyncio
import random
from contextlib import suppress
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request

from symbiosis.cluster.placement import State
from symbiosis.cluster.router.forward import AWAY
from symbiosis.cluster.router.router_state import passed_on
from symbiosis.cluster.router.server_registry import ANSWER_S, Seen, ServerRegistry, answer_of
from symbiosis.cluster.router.upstream import Lost, Upstream, message_of
from symbiosis.server.api_errors import ApiError
from symbiosis.server.openai_protocol import decoded
from symbiosis.server.server_marks import ID, MARK, mark_in, mark_of
from symbiosis.server.tinker.checkpoint_store import RUN
from symbiosis.server.tinker.wire import SDKS

PROTOBUF = "application/x-protobuf"
PATHS = "tinker://"
OF_A_BASE = ("/api/v1/create_model", "/api/v1/create_sampling_session")
NEW, HEARTBEAT = "/api/v1/create_session", "/api/v1/session_heartbeat"
NOBODY_TRAINS = "no model of this cluster trains: write `train: true` for one in its file"


class TrainingIds(msgspec.Struct):
    """Of a body, what tells where it goes. All else is skipped."""

    session_id: str | None = None
    model_id: str | None = None
    sampling_session_id: str | None = None
    request_id: str | None = None
    model_path: str | None = None
    tinker_path: str | None = None
    base_model: str | None = None

    @property
    def mark(self) -> str | None:
        """The mark of the server that has what it is about; None: it tells none."""
        ids = (
            self.session_id,
            self.model_id,
            self.sampling_session_id,
            self.request_id,
            self.model_path,
            self.tinker_path,
        )
        return next(filter(None, (mark_in(id) for id in ids if id is not None)), None)


def ids_of(body: bytes, media: str) -> TrainingIds:
    """Return what a body tells.

    >>> run = b"491178ef000000000000000000000000:train:0"
    >>> ids_of(b'{"seq_id": 3, "model_id": "%b"}' % run, "application/json").mark, ids_of(b"\\n\\x28" + run, PROTOBUF).mark
    ('491178ef', '491178ef')
    """
    if media == PROTOBUF:  # its first field is the run
        length = body[1] if body[:1] == b"\n" and len(body) > 1 else 0
        return TrainingIds(model_id=body[2 : 2 + length].decode(errors="replace"))
    return decoded(TrainingIds, body) if body else TrainingIds()


def names_a_run(name: str) -> bool:
    """Whether a model's name is that of a run, or of a checkpoint.

    >>> names_a_run("tinker://x"), names_a_run("demo")
    (True, False)
    """
    return name.startswith(PATHS) or RUN.fullmatch(name) is not None


def server_of(view: ServerRegistry, mark: str | None, model: str | None = None) -> Seen:
    """Return the server of this mark. What tells none, or one that there is not, goes to any that trains, of this model if there are such: it
    sees all checkpoints, and says what is wrong."""
    if (seen := view.marked(mark)) is not None:
        return seen
    trainers = _trainers(view)
    return _least_busy([each for each in trainers if each.member.model == model] or trainers)


def for_new_session(view: ServerRegistry) -> Seen:
    """Return the server where a session begins: of the first model that trains, the one that has fewest."""
    trainers = _trainers(view)
    model = next((model for model in view.told.models if any(each.member.model == model for each in trainers)), None)
    found = _least_busy([each for each in trainers if each.member.model == model])
    found.sessions += 1
    return found


def _trainers(view: ServerRegistry) -> list[Seen]:
    found = [each for each in view.seen.values() if each.member.trains]
    if not found:
        raise ApiError(404, NOBODY_TRAINS, reason="no_such_path")
    return found


def _least_busy(servers: list[Seen]) -> Seen:
    ready = [each for each in servers if each.state is State.READY]
    if not ready:
        raise ApiError(503, "no server that trains is ready: ask again", retry_s=1.0, reason="no_server")
    return min(ready, key=lambda each: (each.sessions, random.random()))


# A session has a server of each base that it asks for. Its id is that of the first one; at the others it has that id with their marks.


def of_other_base(view: ServerRegistry, seen: Seen, ids: TrainingIds) -> Seen | None:
    """Return the server at which a session has the base that it asks for; None: it is where it is, or there is no such base."""
    of_path = view.marked(mark_in(ids.model_path or ""))
    model = ids.base_model or (of_path.member.model if of_path else seen.member.model)
    return None if ids.session_id is None or model == seen.member.model else _second(view, model, ids.session_id)


async def session_at(seen: Seen, session: str, request: Request) -> str:
    """Return the id of a session at another server, where it is begun if it is not there."""
    id = _id_at(seen, session)
    body = msgspec.json.encode({"session_id": id, "tags": [], "sdk_version": SDKS[-1]})
    try:
        status, told = await Upstream.fetch(seen.member.url, NEW, _headers(request), body, "POST")
    except Lost:
        raise ApiError(503, AWAY, retry_s=1.0, reason="no_server") from None
    if status != 200:
        raise ApiError(status, message_of(told))
    return id


async def tell_others(view: ServerRegistry, seen: Seen, session: str, request: Request) -> None:
    """Ask of the other servers of a session what its first one is asked: it goes on, or ends, at all of them."""
    if not ID.fullmatch(session):
        return
    models = {each.member.model for each in view.seen.values() if each.member.trains} - {seen.member.model}
    others = filter(None, (_second(view, model, session) for model in models))
    await asyncio.gather(*(_tell(each, session, request) for each in others))


async def _tell(seen: Seen, session: str, request: Request) -> None:
    id = _id_at(seen, session)
    with suppress(Lost, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            path = request.scope["raw_path"].decode("latin-1").replace(session, id)
            body = msgspec.json.encode({"session_id": id})
            await Upstream.fetch(seen.member.url, path, _headers(request), body, "POST")


def _id_at(seen: Seen, session: str) -> str:
    return mark_of(seen.member.name) + session[MARK:]


def _second(view: ServerRegistry, model: str, session: str) -> Seen | None:
    """Return the server of a model that has a session which began elsewhere: for each the same one, as long as the model's servers are (it
    is the one of highest random weight)."""
    servers = [each for each in view.seen.values() if each.member.trains and each.member.model == model]
    return max(servers, key=lambda each: sha256(f"{each.member.name} {session[MARK:]}".encode()).digest(), default=None)


async def capabilities(view: ServerRegistry, request: Request) -> list[Any]:
    """Return the models that can be trained."""
    found = await of_all(view, "/api/v1/get_server_capabilities", "supported_models", request)
    return list({each["model_name"]: each for each in found}.values())


async def sessions(view: ServerRegistry, request: Request) -> list[str]:
    """Return a key's sessions at all servers, as one list that is asked for by `limit` and `offset`."""
    query = request.query_params
    limit, offset = _whole(query.get("limit"), 20), _whole(query.get("offset"), 0)
    found = await of_all(view, f"/api/v1/sessions?limit={limit + offset}", "sessions", request)
    return found[offset : offset + limit]


async def of_all(view: ServerRegistry, target: str, field: str, request: Request) -> list[Any]:
    """Return what all servers that train have in a field of their answers, one after another. One that does not answer has nothing."""
    ready = [each for each in view.seen.values() if each.member.trains and each.state is State.READY]
    told = await asyncio.gather(*(_of_one(each, target, field, _headers(request)) for each in ready))
    return [each for found in told for each in found]


async def _of_one(seen: Seen, target: str, field: str, headers: dict[str, str]) -> list[Any]:
    try:
        async with asyncio.timeout(ANSWER_S):
            return list((await answer_of(seen.member.url, target, headers))[field])
    except (Lost, TimeoutError, LookupError, TypeError):
        return []


def _headers(request: Request) -> dict[str, str]:
    return passed_on(request, "x-api-key")


def _whole(given: str | None, default: int) -> int:
    return int(given) if given and given.isdecimal() and len(given) < 6 else default
