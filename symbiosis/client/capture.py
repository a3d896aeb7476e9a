"""A whole step of a client as one CUDA graph: its own kernels, with its calls to the executor among them.

The run before the capture shows which calls the step makes. Where programs share the GPU by MPS, the executor is told of them, and answers
all of them as one round, without a CPU between them. It maps the memory in which the step computes, so that neither rows nor results are
copied (`transport.cuda.captured_step.CapturedStep`).
"""

import logging
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from symbiosis.client.connection.lifetime import sessions
from symbiosis.client.direct.step_routes import Multiplied, Way, advised, following, narrowed
from symbiosis.client.session import Session
from symbiosis.client.stats import Stats
from symbiosis.errors import CaptureError, ConfigError
from symbiosis.kernels import with_triton
from symbiosis.kernels.gpu import shareable_memory
from symbiosis.kernels.gpu.graphs import captured, capturing, nothing_captured
from symbiosis.kernels.gpu.streams import alongside
from symbiosis.protocol import Call, Priority
from symbiosis.transport.cuda.driver import HIGHEST
from symbiosis.transport.cuda.weights import unmap_unused

if TYPE_CHECKING:
    from symbiosis.transport.cuda.captured_step import CapturedStep
    from symbiosis.transport.cuda.client import CudaConnection

logger = logging.getLogger("symbiosis")
Noted = list[tuple["CudaConnection", tuple[Call, ...]]]
WARM_UP = 2  # runs with new shapes before the capture: they allocate and register everything
MOST_WARMING = 32  # kinds of arguments without a graph that are remembered
_ended: "list[tuple[torch.cuda.CUDAGraph, torch.cuda.MemPool | None]]" = []  # graphs to free when no capture is under way
_idle: "dict[int, list[Streams]]" = defaultdict(list)  # by GPU, of captured functions that are gone


class Streams(NamedTuple):
    """The streams of one captured function. Others use them when it is gone: of each stream that ever multiplied, cuBLAS keeps workspaces."""

    usual: torch.cuda.Stream
    urgent: torch.cuda.Stream  # on which steps that make tokens are captured


class WarmUp(NamedTuple):
    """A run before the capture: the calls it made, and what it multiplied by mapped weights."""

    noted: Noted
    parts: list[Multiplied]


class Wanted(NamedTuple):
    """What a step is captured for: its arguments, flat, and how they were given; and the ways that its products are to go."""

    given: list[Any]
    structure: TreeSpec
    chosen: tuple[Way, ...]
    asked: dict[int, tuple[bool, bool]]


@dataclass
class Graph:
    """One captured step: its own copies of the arguments, what it returns, and the calls it makes in each session."""

    graph: torch.cuda.CUDAGraph
    given: list[Any]
    result: Any
    made: list[tuple[Session, Stats]]
    rings: "list[tuple[CudaConnection, int]]"
    pool: "torch.cuda.MemPool | None"  # its memory, which must outlive it
    steps: "list[tuple[CudaConnection, CapturedStep]]"  # what executors know of it
    parts: list[Multiplied]  # the products that it makes with mapped weights
    weights: list[Any]  # those weights, which must stay where they are

    def replay(self, given: list[Any]) -> Any:
        for mine, one in zip(self.given, given, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(one)
        with ExitStack() as lines:
            for line, _ in self.rings:
                lines.enter_context(line.replaying())
            for line, times in self.rings:
                line.announce(times)
            self.graph.replay()
        for session, stats in self.made:
            session.stats.add(stats)
        for part in self.parts:
            part.happens()
        return self.result

    def __del__(self) -> None:
        if self.steps and not sys.is_finalizing():
            _ended.append((self.graph, self.pool))
            for line, step in self.steps:
                line.steps.drop(step, _free_ended)


def _free_ended() -> None:
    """Free graphs that are not used any more, unless something is being captured: when an executor knows that they are gone, or before another
    step runs. CUDA takes memory back only when all streams are done, and other threads have to run while it waits for that."""
    unmap_unused()
    if not _ended:
        return
    with nothing_captured() as free:
        if not free:
            return
        torch.cuda.synchronize()
        while _ended:
            graph, pool = _ended.pop()
            graph.reset()
            del graph, pool


class Captured:
    """What `capture` returns. It is called like the function, which may draw random numbers unless `draws` is False.

    Graphs of one `pool` use the same memory, one after another; what one returns is its own."""

    def __init__(self, function: Callable[..., Any], max_graphs: int, *, draws: bool = True, pool: Any = None) -> None:
        self._function, self._max_graphs, self._draws, self._pool = function, max_graphs, draws, pool
        self._graphs: OrderedDict[Any, Graph] = OrderedDict()
        self._warming: OrderedDict[Any, list[WarmUp]] = OrderedDict()  # for keys without a graph
        self._in_vain = 0  # how many of these keys were forgotten
        self._asked: OrderedDict[Any, dict[int, tuple[bool, bool]]] = OrderedDict()  # which advice makes a difference
        self._joins: dict[int, int] = {}  # by session: the join at which its weights were mapped
        self._streams: Streams | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given, structure = tree_flatten((arguments, named))
        if self._streams is None:
            if not torch.cuda.is_available():
                raise CaptureError("capture makes CUDA graphs, and there is no CUDA device: call the function itself")
            self._streams = _streams_on(_device_of(given))
        kind = key_of(given, structure)
        _free_ended()
        asked = self._what_is_asked(kind)
        chosen = narrowed(advised(), asked)
        self._drop_what_was_unmapped(chosen)
        graph = self._graphs.get((kind, chosen))
        if graph is None:
            runs = self._warming.get((kind, chosen), [])
            if len(runs) < WARM_UP:
                with noting() as noted, following(chosen, asked) as parts:
                    result = _aside(self._streams.usual, lambda: self._function(*arguments, **named))
                self._is_warming((kind, narrowed(chosen, asked)), WarmUp(noted, parts))
                return result
            stream = self._streams.urgent if only_makes_tokens(runs[-1], asked) else self._streams.usual
            graph = self._capture(Wanted(given, structure, chosen, asked), runs[-1].noted, stream)
            self._graphs[kind, chosen] = graph
            del self._warming[kind, chosen]
            if len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end((kind, chosen))
        return graph.replay(given)

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def _what_is_asked(self, kind: Any) -> dict[int, tuple[bool, bool]]:
        asked = self._asked.setdefault(kind, {})
        self._asked.move_to_end(kind)
        if len(self._asked) > MOST_WARMING + self._max_graphs:
            self._asked.popitem(last=False)
        return asked

    def _drop_what_was_unmapped(self, chosen: tuple[Way, ...]) -> None:
        """Drop the graphs, and the runs before a capture, by weights of an executor that is gone, because they would keep its memory."""
        joins = {way.session: way.join for way in chosen}
        if joins != self._joins:
            self._joins = joins
            for kept in self._graphs, self._warming:
                for key in [key for key in kept if any(way.join != joins.get(way.session) for way in key[1])]:
                    del kept[key]

    def _is_warming(self, key: Any, run: WarmUp) -> None:
        self._warming.setdefault(key, []).append(run)
        self._warming.move_to_end(key)
        self._forget_what_does_not_come_again()

    def _forget_what_does_not_come_again(self) -> None:
        if len(self._warming) <= MOST_WARMING:
            return
        self._warming.popitem(last=False)
        self._in_vain += 1
        if self._in_vain == MOST_WARMING:
            logger.warning(
                "a captured function was called with %d kinds of arguments that never came again, and ran uncaptured: pass numbers "
                "that change as tensors, and pad what comes in many lengths",
                MOST_WARMING,
            )

    def _capture(self, wanted: Wanted, noted: Noted, stream: Any) -> Graph:
        """Capture the step on that stream, in memory that can be shared, with rounds of the calls that were noted. If the step makes other
        calls this time, capture it once more, without them."""
        if not noted:
            return self._capture_in(None, wanted, [], stream)
        pool = None if any(session.keeps_secrets for session in sessions()) else shareable_memory.new_pool()
        steps: list[tuple[CudaConnection, CapturedStep]] = []
        try:
            for line, calls in noted:
                line.begin_step(calls, pool is not None, with_triton("gpu.doorbell"))
            graph = self._capture_in(None if pool is None else pool.id, wanted, steps, stream)
            graph.pool = pool
        except BaseException:
            for line, step in _ended_steps(noted):
                line.steps.drop(step, _free_ended)
            if pool is not None:
                _ended.append((torch.cuda.CUDAGraph(), pool))
                pool = None  # the traceback would hold it
            raise
        steps += _ended_steps(noted)
        if all(step.complete for _, step in steps):
            return graph
        return self._capture_in(None, wanted, [], stream)

    def _capture_in(
        self,
        pool: tuple[int, int] | None,
        wanted: Wanted,
        steps: "list[tuple[CudaConnection, CapturedStep]]",
        stream: Any,
    ) -> Graph:
        """`pool`: the id of that which the graph's memory is taken from, if it is not one of its own."""
        mine = [one.clone() if isinstance(one, Tensor) else one for one in wanted.given]
        arguments, named = tree_unflatten(mine, wanted.structure)
        before = [(session, session.stats.copy()) for session in sessions()]
        recorded = [(line, line.recorded) for line in lines()]
        results: list[Any] = []
        parts: list[Multiplied] = []
        try:
            with capturing, torch.cuda.stream(stream), following(wanted.chosen, wanted.asked) as parts:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # as much as can be had for the graph
                graph = captured(
                    lambda: results.append(tree_map(_owned, self._function(*arguments, **named))),
                    pool or self._pool or torch.cuda.graph_pool_handle(),
                    draws=self._draws,
                )
        except CaptureError:
            raise
        except RuntimeError as error:
            raise CaptureError(
                f"this step cannot be captured as a CUDA graph: {error}. Look for what needs the values of tensors on the "
                "CPU (.item(), .cpu(), printing, branches on them), or for shapes that change within the step"
            ) from error
        finally:
            made = [(session, session.stats.taken_back(old)) for session, old in before]
            for part in parts:
                part.happens(-1)  # a capture computes nothing
        rings = [(line, line.recorded - old) for line, old in recorded if line.recorded > old]
        made = [(session, stats) for session, stats in made if stats.calls]
        assert graph is not None  # no other thread captures
        return Graph(graph, mine, results[0], made, rings, None, steps, parts, [part.mapped.held for part in parts])

    def __del__(self) -> None:
        if self._streams is not None and not sys.is_finalizing():
            _idle[self._streams.usual.device.index].append(self._streams)


def _streams_on(device: torch.device | None) -> Streams:
    """Return streams on a GPU that no other captured function uses."""
    number = torch.cuda.current_device() if device is None else device.index
    with suppress(IndexError):
        return _idle[number].pop()
    return Streams(torch.cuda.Stream(number), torch.cuda.Stream(number, priority=HIGHEST))


def _aside(stream: torch.cuda.Stream, run: Callable[[], Any]) -> Any:
    """Run on the stream on which graphs are captured, because autograd remembers the stream on which it ran first."""
    with alongside(torch.cuda.current_stream(stream.device), [stream]), torch.cuda.stream(stream):
        return run()


def only_makes_tokens(run: WarmUp, asked: dict[int, tuple[bool, bool]]) -> bool:
    """Whether a step makes tokens and trains nothing. Its kernels go first then, where several programs share the GPU."""
    called = {call.priority for _, calls in run.noted for call in calls}
    trains = Priority.TRAIN in called or any(training for _, training in asked.values())
    return not trains and (Priority.DECODE in called or any(part.tokens for part in run.parts))


def _ended_steps(used: Noted) -> "list[tuple[CudaConnection, CapturedStep]]":
    """End the step on each line, whether it was captured or failed, and return what the executors know of it."""
    return [(line, step) for line, _ in used if (step := line.steps.end())]


def lines() -> "list[CudaConnection]":
    """Return the lines over which the GPUs of this process make calls."""
    return [line for session in sessions() for line in session.lines]


@contextmanager
def noting() -> Iterator[Noted]:
    """Note the calls that are made in the block."""
    noted: Noted = []
    used = lines()
    for line in used:
        line.noted = []
    try:
        yield noted
    finally:
        for line in used:
            if line.noted:
                noted.append((line, tuple(line.noted)))
            line.noted = None


def _owned(result: Any) -> Any:
    """Return a copy of a tensor that lies where the executor writes replies; anything else as it is."""
    return result.clone() if isinstance(result, Tensor) and any(line.owns(result) for line in lines()) else result


def _device_of(given: list[Any]) -> torch.device | None:
    """Return the GPU of the first tensor that is on one; None means the current device."""
    return next((one.device for one in given if isinstance(one, Tensor) and one.is_cuda), None)


def key_of(given: list[Any], structure: TreeSpec) -> tuple[Any, ...]:
    """Return what a graph is made for. A graph may only be replayed for the same key."""
    kinds = tuple(map(_kind, given))
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    return repr(structure), kinds, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def _kind(given: Any) -> Any:
    """Return a tensor's shape, dtype and device; of anything else its value and type, because 0 is not False."""
    if not isinstance(given, Tensor):
        try:
            hash(given)
        except TypeError:
            raise CaptureError(
                f"a captured function was given a {type(given).__name__}: give it tensors, numbers and strings, alone or in lists, "
                "tuples and dicts (of a BatchEncoding: `**batch`)"
            ) from None
        return type(given), given
    if given.requires_grad and torch.is_grad_enabled():
        raise CaptureError(
            "a captured function was given a tensor that requires grad: it would get no gradient, since the graph works on a copy. "
            "Detach it, or let the function find it by itself, as it finds the parameters"
        )
    return given.shape, given.dtype, given.device


def capture(function: Callable[..., Any], *, max_graphs: int = 8) -> Captured:
    """Make `function` a CUDA graph for each combination of shapes that it is called with: no Python runs between its kernels.

    This works for split and for unsplit models. The first two calls with new shapes run as they are, and the third captures; each call has
    the effects of exactly one run. Tensors among the arguments, also within lists, tuples and dicts, are copied into the graph's own
    tensors. Everything else (numbers, strings) belongs to the graph, as shapes do: for another number there is another graph. The result is
    the graph's own and valid until the next call. Whatever the function finds elsewhere (the model's mode, a scheduler's number) stays as it
    was when the graph was made. While a step is captured, no other thread should use a wrapped model: what it does would be taken for a part of
    the step. At most `max_graphs` graphs are kept; the least recently used one is dropped first.

    >>> import symbiosis
    >>> def train_step(ids):
    ...     loss = model(input_ids=ids, labels=ids).loss
    ...     loss.backward()
    ...     optimizer.step()  # torch.optim.AdamW(..., capturable=True)
    ...     optimizer.zero_grad(set_to_none=False)
    ...     return loss.detach()
    >>> step = symbiosis.capture(train_step)  # from now on: loss = step(ids)
    """
    if not callable(function):
        raise ConfigError(
            f"capture takes a function, not {function!r:.80}: give it the step, not what the step returns"
        )
    if type(max_graphs) is not int or max_graphs < 1:
        raise ConfigError(f"max_graphs={max_graphs!r:.80}: write a whole number of at least 1")
    return Captured(function, max_graphs)
