"""What the routes of a front end share: the servers, the keys, what requests hold here, and where each goes."""

import os
import random
from collections.abc import Sequence

from starlette.requests import Request

from symbiosis.base.fair_share import FairShare, Lease
from symbiosis.cluster.placement import RoutingRequest, version_of
from symbiosis.cluster.router.cluster_page import ClusterPage
from symbiosis.cluster.router.completion_fields import CompletionFields, with_fields
from symbiosis.cluster.router.forward import Forward, ForwardedRequest
from symbiosis.cluster.router.relay import Relay
from symbiosis.cluster.router.response_requests import ResponseFields, tokens_used
from symbiosis.cluster.router.server_registry import Seen, ServerRegistry
from symbiosis.server.api_app import URL_HEADER, ApiState
from symbiosis.server.api_errors import ApiError, busy, unknown_model, wrong
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
        model, adapter = self.chosen(asked.model)
        sequences, longest = self.view.most(model)
        for most in (self.view.limits.get(tenant.name, sequences), sequences):
            if asked.sequences > most:
                raise wrong(f"at most {most} completions, and this would be {asked.sequences}", "n")
        self.check_room(tenant, asked.sequences)
        tokens, is_vain = asked.tokens + asked.most_tokens, asked.longest > longest
        wish = RoutingRequest(
            model=model, adapter=adapter, sequences=asked.sequences, pages=0 if is_vain else tokens, tenant=tenant.name, is_vain=is_vain,
        )  # fmt: skip
        admission, held = self._admitted(tenant, wish, tokens, asked.size)
        return Relay(self.view, request.url.path, passed_on(request), asked, wish, held, admission)

    def forward(self, request: Request, tenant: str, seen: Seen, data: bytes, sequences: int = 0) -> Forward:
        """Return the answer to what one server alone can answer, if the tenant may have so many."""
        held, count = Lease(self._held, tenant), Lease(self._forwarded, tenant)
        if not (count.take(1) and held.take(len(data))):
            count.end()
            raise busy("so many requests of this key wait for their answers", "share_of_key")
        wish = RoutingRequest(model=seen.member.model, sequences=sequences, tenant=tenant)

        def end(_: bytes | None) -> None:
            held.end()
            count.end()

        return Forward(self.view, seen, sent_of(request, data), wish, end)

    def respond(self, request: Request, tenant: Tenant, asked: ResponseFields, data: bytes) -> Forward:
        """Return the answer to /v1/responses: of the server that has what it goes on from, or of one that has room."""
        model, adapter = self.chosen(asked.model)
        seen = self.view.marked(mark_in_response(asked.previous_response_id or ""))
        if seen is not None and asked.model in self.view.told.aliases:
            model = seen.member.model
        wish = asked.wish(model, adapter, tenant.name, len(data), self.view.most(model)[1])
        admission, _ = self._admitted(tenant, wish, wish.pages, len(data))
        sent = sent_of(request, data if adapter else with_fields(data, {"model": model}))
        return Forward(self.view, seen, sent, wish, lambda tail: admission.end(tokens_used(tail, wish.pages)))

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
