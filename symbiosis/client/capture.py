"""A whole step of a client as one CUDA graph: its own kernels, and its calls to the executor among them.

What the step calls is known from its last run before. Where programs share the GPU by MPS, the executor is told, and answers all of it
as one round, without a CPU for each call (`transport.cuda_round.Round`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from symbiosis.client.session import Session, Stats, sessions
from symbiosis.errors import CaptureError
from symbiosis.protocol import Call

if TYPE_CHECKING:
    from symbiosis.transport.cuda_client import DeviceLine

Noted = list[tuple["DeviceLine", tuple[Call, ...]]]
WARM_UP = 2  # calls of new shapes that run as they are, so that all is allocated and registered before a graph is made


@dataclass
class Graph:
    """One captured step: where its arguments must lie, what it returns, and the calls it makes of each session."""

    graph: torch.cuda.CUDAGraph
    arguments: Any
    result: Any
    made: list[tuple[Session, Stats]]
    rings: "list[tuple[DeviceLine, int]]"

    def replay(self, arguments: Any) -> Any:
        for mine, given in zip(tree_leaves(self.arguments), tree_leaves(arguments), strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        with ExitStack() as lines:
            for line, _ in self.rings:
                lines.enter_context(line.replaying())
            for line, times in self.rings:
                line.announce(times)
            self.graph.replay()
        for session, stats in self.made:
            session.stats.add(stats)
        return self.result


class Captured:
    """What `capture` returns: call it as the function."""

    def __init__(self, function: Callable[..., Any], max_graphs: int) -> None:
        self._function, self._max_graphs = function, max_graphs
        self._graphs: OrderedDict[Any, Graph] = OrderedDict()
        self._warm: dict[Any, int] = {}
        self._noted: dict[Any, Noted] = {}
        self._stream: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._stream is None:
            if not torch.cuda.is_available():
                raise CaptureError("capture makes CUDA graphs, and there is no CUDA device: call the function itself")
            self._stream = torch.cuda.Stream()
        key = tuple(map(_kind, tree_leaves(arguments)))
        graph = self._graphs.get(key)
        if graph is None and self._warm.get(key, 0) < WARM_UP:
            self._warm[key] = self._warm.get(key, 0) + 1
            with noting() as self._noted[key]:
                return self._aside(lambda: self._function(*arguments))
        if graph is None:
            graph = self._graphs[key] = self._capture(arguments, self._noted.get(key, []))
            if len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph.replay(arguments)

    def _aside(self, run: Callable[[], Any]) -> Any:
        """On the stream that graphs are captured on, because autograd remembers where it ran first."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        return result

    def _capture(self, arguments: Any, noted: Noted) -> Graph:
        """With rounds of what was noted, if that is what the step calls again."""
        in_rounds = [(line, calls) for line, calls in noted if calls and not line.shares_time]
        kernel = kernel_of_rounds() if in_rounds else None
        try:
            for line, calls in in_rounds if kernel else []:
                line.compose(calls, kernel)
            graph = self._capture_with(arguments)
        finally:
            as_noted = [line.captured() for line, _ in noted]
        return graph if all(as_noted) else self._capture_with(arguments)

    def _capture_with(self, arguments: Any) -> Graph:
        mine = tree_map(lambda a: a.clone() if isinstance(a, Tensor) else a, arguments)
        before = [(session, session.stats.copy()) for session in sessions()]
        recorded = [(line, line.recorded) for line in lines()]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                result = tree_map(_owned, self._function(*mine))
        except CaptureError:
            raise
        except RuntimeError as error:
            raise CaptureError(
                f"this step cannot be captured as a CUDA graph: {error}. Look for what needs the values of tensors on the "
                "CPU (.item(), .cpu(), printing, branches on them), or for shapes that change within the step"
            ) from error
        finally:
            made = [(session, session.stats.taken_back(old)) for session, old in before]
        rings = [(line, line.recorded - old) for line, old in recorded if line.recorded > old]
        return Graph(graph, mine, result, [(session, stats) for session, stats in made if stats.calls], rings)


def lines() -> "list[DeviceLine]":
    """Over which this process's GPUs make calls."""
    return [line for session in sessions() for line in session.lines]


@contextmanager
def noting() -> Iterator[Noted]:
    """What is called in the block."""
    noted: Noted = []
    used = lines()
    for line in used:
        line.noted = []
    try:
        yield noted
    finally:
        for line in used:
            noted.append((line, tuple(line.noted or ())))
            line.noted = None


@cache
def kernel_of_rounds() -> Any:
    """What makes a call of a round; nothing without Triton."""
    try:
        from symbiosis.kernels import rounds
    except ImportError:
        return None
    return rounds


def _owned(result: Any) -> Any:
    """A tensor that lies where the executor writes replies, as one of our own."""
    return result.clone() if isinstance(result, Tensor) and any(line.owns(result) for line in lines()) else result


def _kind(argument: Any) -> Any:
    return (argument.shape, argument.dtype, argument.device) if isinstance(argument, Tensor) else argument


def capture(function: Callable[..., Any], *, max_graphs: int = 8) -> Captured:
    """`function` as a CUDA graph for each combination of shapes that it is called with: no Python between its kernels.

    Works for split and for unsplit models. The first two calls with new shapes run as they are, the third captures; every call has
    the effects of exactly one. Tensors among the arguments are copied into the graph's own; what is returned is the graph's own,
    too, and valid until the next call. At most `max_graphs` graphs are kept, the least recently used one goes first.

    >>> import symbiosis
    >>> def train_step(ids):
    ...     loss = model(input_ids=ids, labels=ids).loss
    ...     loss.backward()
    ...     optimizer.step()  # torch.optim.AdamW(..., capturable=True)
    ...     optimizer.zero_grad(set_to_none=False)
    ...     return loss.detach()
    >>> step = symbiosis.capture(train_step)  # from now on: loss = step(ids)
    """
    return Captured(function, max_graphs)
