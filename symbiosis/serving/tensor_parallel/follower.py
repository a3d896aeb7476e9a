"""A rank that follows the first one: it takes its part of the model, and runs the steps that it is told. It decides nothing.

Each step names the pages of its sequences, and of adapters that have come. So its keys and values lie in the pages in which those of the first rank
lie there.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import torch

from symbiosis.base import procs
from symbiosis.base.logs import set_up_logging
from symbiosis.base.pulse import BEAT_S
from symbiosis.client.weights.remote_weight import close_sessions
from symbiosis.errors import SymbiosisError
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter
from symbiosis.serving.lora.loader import AdapterContents, placed
from symbiosis.serving.lora.target_layers import TargetLayers
from symbiosis.serving.request import Request
from symbiosis.serving.scheduler.scheduler_output import Block, Fed, ScheduledRequest, SchedulerOutput, Sequence
from symbiosis.serving.tensor_parallel import adapter_pieces, rank_messages
from symbiosis.serving.tensor_parallel.rank_group import rank_group
from symbiosis.serving.tensor_parallel.rank_messages import (
    AdapterGone,
    AdapterPages,
    AdapterPiece,
    MeetRanks,
    PieceRefused,
    PieceTaken,
    RankBeat,
    RankFailed,
    RankOrder,
    RankReady,
    RankStep,
)
from symbiosis.serving.tensor_parallel.rank_runner import RankRunner, whole_model

logger = logging.getLogger("symbiosis")
Say = Callable[[msgspec.Struct], None]


def main() -> None:
    """Follow until the first rank hangs up. If anything fails, tell why, and end: all ranks are started again then."""
    order = msgspec.json.decode(procs.heard, type=RankOrder)
    set_up_logging(order.log_format)
    procs.when_told_to_end(lambda: os._exit(0))
    steps, adapters = socket.socket(fileno=order.steps), socket.socket(fileno=order.adapters)
    sending = threading.Lock()

    def say(message: msgspec.Struct) -> None:
        with sending:
            rank_messages.send(steps, message)

    threading.Thread(target=_beat, args=[say], name="symbiosis-beat", daemon=True).start()
    try:
        _follow(RankFollower(order, say), steps, adapters)
    except OSError:
        pass  # the first rank is gone
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        logger.error("this rank ends: %s", told, exc_info=None if isinstance(error, SymbiosisError) else error)
        say(RankFailed(f"rank {order.rank} failed: {told}"))
    logging.shutdown()
    os._exit(0)  # what waits on a device for other ranks would keep an orderly end waiting


def _beat(say: Say) -> None:
    """Say that this rank runs, until the first one is gone. Then end at once: the other thread may wait for a device that waits for that rank."""
    try:
        while True:
            say(RankBeat())
            time.sleep(BEAT_S)
    except OSError:
        os._exit(0)


def _follow(follower: "RankFollower", steps: socket.socket, adapters: socket.socket) -> None:
    threading.Thread(target=follower.take_pieces, args=[adapters], name="symbiosis-pieces", daemon=True).start()
    with torch.inference_mode():
        while True:
            message, _ = rank_messages.receive(steps, rank_messages.to_rank)
            if isinstance(message, RankStep):
                follower.run(message)
            elif isinstance(message, MeetRanks):
                follower.meet(message)
            else:
                return


class RankFollower:
    """One rank, and what it knows of sequences and adapters."""

    def __init__(self, order: RankOrder, say: Say) -> None:
        device = torch.device(order.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        whole = whole_model(order.endpoint, order.wait)
        self._served = served = RankRunner(whole, order)
        served.whole = served.model
        close_sessions(whole)
        self._residency = AdapterCache(served.arena, fetcher=served.fetcher)
        self._sites = TargetLayers(served, self._residency)
        self._sequences: dict[int, Sequence] = {}
        self._adapters: dict[int, LoadedAdapter] = {}
        say(RankReady(served.arena.pool.total, served.weight_bytes, served.arena.page_bytes))

    def meet(self, meet: MeetRanks) -> None:
        """Connect with the other ranks."""
        collectives = self._served.collectives
        collectives.group = rank_group(meet, collectives.rank, collectives.ranks, self._served.device)

    def take_pieces(self, connection: socket.socket) -> None:
        """Prepare pieces of adapters, in a thread of its own: steps go on meanwhile."""
        if self._served.device.type == "cuda":
            torch.cuda.set_device(self._served.device)
        while True:
            piece, descriptors = rank_messages.receive(connection, rank_messages.to_rank)
            if not isinstance(piece, AdapterPiece):
                return
            try:
                with torch.no_grad():
                    contents = AdapterContents(
                        piece.name, piece.kind, piece.version, *adapter_pieces.read(descriptors[0])
                    )
                    self._adapters[piece.number] = made = placed(self._served, contents)
                rank_messages.send(connection, PieceTaken(made.pages))
            except Exception as error:
                rank_messages.send(connection, PieceRefused(f"{type(error).__name__}: {error}"))
            finally:
                rank_messages.close(descriptors)

    def run(self, step: RankStep) -> None:
        """Do what happened since the last step, and run this one."""
        for number in step.released:
            if (sequence := self._sequences.pop(number, None)) is not None:
                sequence.blocks = []
                self._served.release(sequence)
        for each in step.adapters:
            if isinstance(each, AdapterGone):
                self._residency.drop(each.version)
            else:
                assert isinstance(each, AdapterPages)
                adapter = self._adapters[each.number]
                self._residency.put_at(adapter, each.pages[: adapter.pages])
        for number in step.unwanted:
            self._adapters.pop(number, None)
        fed = None
        if step.fed is not None:
            chosen = torch.zeros(step.fed.count, dtype=torch.int64, device=self._served.device)
            self._served.broadcast(chosen)
            fed = Fed(step.fed.rows, step.fed.sources, chosen)
        segments, first = [], 0
        for part in step.parts:
            sequence = self._sequences.get(part.sequence)
            if sequence is None:
                its = self._adapters[part.adapter] if part.adapter else None
                sequence = Sequence(Request(id=part.sequence, prompt=(0,)), 0, [], its, 0.0)
                self._sequences[part.sequence] = sequence
            tokens, position = sequence.tokens, part.position
            tokens[position:] = part.tokens if position <= len(tokens) else [0] * (position - len(tokens)) + part.tokens
            sequence.blocks[part.kept :] = [Block(tuple(pages)) for pages in part.blocks]
            segments.append(ScheduledRequest(sequence, first, len(part.tokens), position, True))
            first += len(part.tokens)
        self._served.logits(SchedulerOutput(tuple(segments), fed), torch.tensor(step.kept, dtype=torch.long))
