"""What the routes of a front end share: the servers, the keys, what requests hold here, and where each goes."""

import os
import random
from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from symbiosis.base.fair_share import FairShare, Lease
from symbiosis.cluster.placement import RoutingRequest, State, version_of
from symbiosis.cluster.router.bill import Bill
from symbiosis.cluster.router.cluster_page import ClusterPage
from symbiosis.cluster.router.completion_fields import BYTES_PER_TOKEN, CompletionFields, with_fields
from symbiosis.cluster.router.forward import Forward, ForwardedRequest
from symbiosis.cluster.router.generate_requests import GenerateFields
from symbiosis.cluster.router.pooling_requests import PoolingFields
from symbiosis.cluster.router.relay import Relay, no_room
from symbiosis.cluster.router.response_requests import ResponseFields, wish_of_text
from symbiosis.cluster.router.server_registry import Seen, ServerRegistry
from symbiosis.server.api_app import URL_HEADER, ApiState
from symbiosis.server.api_errors import ApiError, busy, too_many_at_once, unknown_model, wrong
from symbiosis.server.api_keys import Admission, Tenant
from symbiosis.server.request_record import this_request
from symbiosis.server.server_marks import mark_in_response
from symbiosis.server.tracing import Tracing

MOST_FORWARDED = 4096  # requests that wait for the one server that can answer them
MOST_HELD = 1 << 30  # bytes of bodies whose answers are not over, and of answers that are not whole
LONGEST_NAME = 256


class RouterState(ApiState):
    """What the routes share."""

    def __init__(
        self, view: ServerRegistry, api_keys: str | None, host: str = "127.0.0.1", allowed_hosts: Sequence[str] = (),
        tracing: Tracing | None = None, processes: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(api_keys, host, allowed_hosts, tracing, processes, threads=2)
        self.view, self.shown = view, ClusterPage(view)
        self._held, self._forwarded = FairShare(MOST_HELD), FairShare(MOST_FORWARDED)  # bytes, and requests

    def model_of(self, name: str) -> tuple[str, str | None]:
        """Return the model that serves this name, and the adapter, None for the model itself."""
        models = self.view.told.models
        if name in models:
            return name, None
        if len(name) > LONGEST_NAME:
            raise unknown_model(name, self.view.told.names)
        for model in models:
            folder = self.view.told.adapters.get(model)
            if folder and "/" not in name and os.path.isfile(f"{folder}/{name}/adapter_config.json"):  # noqa: PTH113
                return model, name
        if len(models) == 1:
            return models[0], name  # the server knows
        raise unknown_model(name, self.view.told.names)

    def is_of(self, name: str, model: str) -> bool:
        """Whether requests for this name go to this model, and to no other."""
        try:
            return name not in self.view.told.aliases and self.model_of(name)[0] == model
        except ApiError:
            return False

    def check_room(self, tenant: Tenant, sequences: int) -> None:
        """Raise `ApiError` if too many requests wait."""
        if not self.view.room.has(tenant.name, sequences):
            raise busy("too many requests wait for a server", "share_of_key")

    def chosen(self, name: str) -> tuple[str, str | None]:
        """Return the model, and the adapter, to which a request for this name goes; of an alias, one by its share."""
        self.view.look()  # `shift` and `apply` hold from the next request on
        shares = self.view.told.aliases.get(name)
        return self.model_of(version_of(shares, random.random()) if shares else name)

    def relay(self, request: Request, tenant: Tenant, asked: CompletionFields) -> Relay:
        """Return the answer to a completion, if the tenant may have so many."""
        wish = self._wish_of(tenant, asked, *self.chosen(asked.model or self.only_model()))
        admission, held = self._admitted(tenant, wish, asked.tokens + asked.most_tokens, asked.size)
        return Relay(self.view, request.url.path, passed_on(request), asked, wish, held, admission)

    def complete_at(self, at: Seen, request: Request, tenant: Tenant, asked: CompletionFields) -> Forward:
        """Return the answer to a completion that one server alone can compute, by a run that it has."""
        wish = self._wish_of(tenant, asked, at.member.model, asked.model)
        return self._answer_of_one(request, tenant, wish, asked.body(), asked.tokens, at)

    def _wish_of(self, tenant: Tenant, asked: CompletionFields, model: str, adapter: str | None) -> RoutingRequest:
        """Return what a completion needs of a server. Raises `ApiError` if it is more than there can be."""
        sequences, longest = self.view.most(model)
        if asked.sequences > sequences:
            raise too_many_at_once("n", sequences, asked.sequences)
        self._check_sequences(tenant, asked.sequences)
        tokens, is_vain = asked.tokens + asked.most_tokens, asked.longest > longest
        return RoutingRequest(
            model=model, adapter=adapter, sequences=asked.sequences, pages=0 if is_vain else tokens, tenant=tenant.name, is_vain=is_vain,
        )  # fmt: skip

    def _check_sequences(self, tenant: Tenant, sequences: int, field: str = "n") -> None:
        """Raise `ApiError` for more than a tenant may ever have, or have now."""
        if sequences > (most := self.view.limits.get(tenant.name, sequences)):
            raise too_many_at_once(field, most, sequences)
        if tenant.is_limited:
            tenant.check_most(sequences, field)
        self.check_room(tenant, sequences)

    def forward(self, request: Request, tenant: str, seen: Seen, data: bytes) -> Forward:
        """Return the answer to what one server alone can answer without computing texts, if the tenant may have so many."""
        held, count = Lease(self._held, tenant), Lease(self._forwarded, tenant)
        if not (count.take(1) and held.take(len(data))):
            count.end()
            raise busy("so many requests of this key wait for their answers", "share_of_key")
        wish = RoutingRequest(model=seen.member.model, sequences=0, tenant=tenant, server=seen.member.number)

        def end(_: bool) -> None:
            held.end()
            count.end()

        return Forward(self.view, sent_of(request, data), wish, end)

    def respond(self, request: Request, tenant: Tenant, asked: ResponseFields, data: bytes, at: Seen | None) -> Forward:
        """Return the answer to /v1/responses: of the server that has the run or what it goes on from, or of one that has room."""
        model, adapter = self._chosen_at(at, asked.model or self.only_model())
        if at is None:
            at = self.view.marked(mark_in_response(asked.previous_response_id or ""))
            if at is not None and asked.model in self.view.told.aliases:
                model = at.member.model
        wish = wish_of_text(model, adapter, tenant.name, len(data), asked.max_output_tokens, self.view.most(model)[1])
        body = data if adapter else with_fields(data, {"model": model})
        return self._answer_of_one(request, tenant, wish, body, len(data) // BYTES_PER_TOKEN, at)

    def generate(
        self, request: Request, tenant: Tenant, asked: GenerateFields, data: bytes, at: Seen | None
    ) -> Forward:
        """Return the answer to /generate, of the server that has the run, or of one that has room."""
        model, adapter = self._chosen_at(at, asked.model or self.only_model("adapter_id"))
        wish = wish_of_text(model, adapter, tenant.name, len(data), asked.wanted, self.view.most(model)[1])
        body = data if adapter else asked.body(model)
        return self._answer_of_one(request, tenant, wish, body, len(data) // BYTES_PER_TOKEN, at)

    def pool(self, request: Request, tenant: Tenant, asked: PoolingFields, data: bytes, at: Seen | None) -> Forward:
        """Return the answer to a request for vectors, classes or scores of texts."""
        model, adapter = self._chosen_at(at, asked.model or self.only_model())
        self._check_sequences(tenant, asked.texts, asked.field)
        wish = asked.wish(model, adapter, tenant.name, self.view.most(model)[0])
        body = data if adapter else with_fields(data, {"model": model})
        return self._answer_of_one(request, tenant, wish, body, asked.tokens, at)

    def _chosen_at(self, at: Seen | None, name: str) -> tuple[str, str | None]:
        """Return the model, and the adapter: of the server that has the run of this name, if it is one of a run."""
        return self.chosen(name) if at is None else (at.member.model, name)

    def tokens(self, request: Request, tenant: Tenant, model: str | None, data: bytes) -> Forward:
        """Return the answer to a request that any server of a model answers, however full it is."""
        name, _ = self.chosen(model or self.only_model())
        ready = [seen for seen in self.view.seen.values() if seen.member.model == name and seen.state is State.READY]
        if not ready:
            raise no_room(self.view, name)
        return self.forward(request, tenant.name, min(ready, key=lambda seen: seen.mine), data)

    def only_model(self, field: str = "model") -> str:
        """Return the only model that there is: a body that names none means the base, which a cluster may have several of. `field` would name it."""
        if len(self.view.told.names) == 1:
            return self.view.told.names[0]
        raise wrong(f"name a model: there are {', '.join(map(repr, self.view.told.names))} and adapters", field)

    def _answer_of_one(
        self, request: Request, tenant: Tenant, wish: RoutingRequest, body: bytes, prompt: int, at: Seen | None = None
    ) -> Forward:
        """Return the answer of one server, which no other goes on with. Who has asked pays for the tokens that it tells.

        Args:
            prompt: About how many tokens are read.
            at: The only one that can answer it.
        """
        if at is not None:
            wish = msgspec.structs.replace(wish, server=at.member.number)
        admission, _ = self._admitted(tenant, wish, wish.pages, len(body))
        bill = Bill(admission, prompt, max(0, wish.pages - prompt))
        return Forward(self.view, sent_of(request, body), wish, bill.end, bill.count)

    def _admitted(self, tenant: Tenant, wish: RoutingRequest, tokens: int, size: int) -> tuple[Admission, Lease]:
        """Let a request of so many tokens in, with a body of so many bytes, which it holds until it ends."""
        admission, held = tenant.admit(wish.sequences, self.keys.clock(), tokens), Lease(self._held, tenant.name)
        admission.at_end.append(held.end)
        if not held.take(size):
            admission.end()
            raise busy("what waits and runs is too large together", "share_of_key")
        record = this_request()
        record.model, record.adapter, record.choices = wish.model, wish.adapter or wish.model, wish.sequences
        return admission, held

    def drop_what_is_gone(self) -> None:
        """Count no more what adapters did that are gone."""
        for model, name in self.observer.adapters.named:
            if name != model and not self.is_of(name, model):
                self.observer.adapters.drop((model, name))


def passed_on(request: Request, *more: str) -> dict[str, str]:
    """Return the headers of what a server is asked for this request: who asks, and what it is called in logs and traces; and others of its own."""
    record, authorization = this_request(), request.headers.get("authorization")
    told = {"X-Request-Id": record.id, **record.trace_headers}
    told |= {name: request.headers[name] for name in more if name in request.headers}
    return {**told, "Authorization": authorization} if authorization else told


def sent_of(request: Request, data: bytes) -> ForwardedRequest:
    """Return a request as a server is asked, with a body in the place of its own."""
    query = request.url.query
    target = request.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
    headers = passed_on(request, "x-api-key", "content-type") | {
        URL_HEADER: f"{request.url.scheme}://{request.url.netloc}{target}"
    }
    return ForwardedRequest(request.method, target, headers, data)
