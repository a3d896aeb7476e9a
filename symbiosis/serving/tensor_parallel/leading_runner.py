"""The first rank: it has the scheduler, the pages, the sampling and all adapters' files, and tells the others what to compute."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import replace as replaced
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from symbiosis.base import procs
from symbiosis.base.folders import temporary_folder
from symbiosis.errors import AdapterError, ConfigError, SymbiosisError
from symbiosis.offload.logit_check import place_of
from symbiosis.serving.kv_cache.paged_memory import KvShape, page_elements
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter
from symbiosis.serving.lora.loader import AdapterContents, placed
from symbiosis.serving.runner.model_runner import RanksLost
from symbiosis.serving.runner.paged_runner import CannotBatch, logits_of_probes
from symbiosis.serving.scheduler.scheduler_output import SchedulerOutput, Sequence
from symbiosis.serving.tensor_parallel.adapter_pieces import piece_of, tensors_of, written
from symbiosis.serving.tensor_parallel.collectives import RankGroup
from symbiosis.serving.tensor_parallel.division import INSTEAD
from symbiosis.serving.tensor_parallel.followers import Followers, threads_of_a_rank
from symbiosis.serving.tensor_parallel.places import must_be_reachable
from symbiosis.serving.tensor_parallel.rank_group import meeting_of, rank_group
from symbiosis.serving.tensor_parallel.rank_messages import AdapterPiece, RankOrder, RankReady
from symbiosis.serving.tensor_parallel.rank_runner import RankRunner, whole_model
from symbiosis.serving.tensor_parallel.step_log import StepLog

logger = logging.getLogger("symbiosis")

WITHIN_S = 60.0  # ranks that are lost so often in this time are given up


class KeepLosingRanks(SymbiosisError):
    """Ranks die again and again, and starting them once more would not help."""


def divided(model: object, devices: Items[str], **options: Any) -> "LeadingRunner":
    """Divide the model of an executor over devices, with a rank on each."""
    if not isinstance(model, str):
        raise ConfigError("over several devices, a model comes from an executor: give its endpoint")
    return LeadingRunner(RankOrder(endpoint=model, rank=0, ranks=len(devices), device=devices[0], **options), devices)


class HandedAdapter:
    """The pieces of an adapter, in memory that outlives the processes that have them."""

    def __init__(self, pieces: list[AdapterPiece], memories: list[int]) -> None:
        self.pieces, self.memories = pieces, memories

    def __del__(self) -> None:
        for memory in self.memories:
            with suppress(OSError):
                os.close(memory)


class LeadingRunner(RankRunner):
    """The first rank's runner.

    Args:
        order: What all ranks are told: the base and the options. Devices are those of each rank.
    """

    def __init__(self, order: RankOrder, devices: Items[str]) -> None:
        must_be_reachable(order.endpoint)
        self._order, self._devices, self._live = order, devices, False
        self.told_bytes = 0  # of the last step
        self.restarts = 0
        self._steps = StepLog()
        self._handed: WeakKeyDictionary[LoadedAdapter, HandedAdapter] = WeakKeyDictionary()
        self._numbers, self._handing = count(1), threading.Lock()  # of adapters
        self._restarts: deque[float] = deque(maxlen=procs.MOST_STARTS)
        self._followers = self._started(None)
        try:
            self._begin(order)
        except BaseException:
            self._followers.close(at_once=True)
            raise

    def _begin(self, order: RankOrder) -> None:
        whole, device = whole_model(order.endpoint, order.wait), torch.device(order.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(min(torch.get_num_threads(), threads_of_a_rank(order.ranks)))
        references = logits_of_probes(whole)
        super().__init__(whole, order)
        try:
            self._meet()
            self._prove(references)
        except CannotBatch as why:
            raise ConfigError(
                f"{type(whole).__name__} cannot be divided over {order.ranks} ranks: {why}. {INSTEAD}"
            ) from why
        except RanksLost as why:
            raise ConfigError(f"{type(whole).__name__} is not served, as a rank was lost at the start: {why}") from why
        self.divide_adapter = self._hand_out

    def _memory_for(self, model: nn.Module, layers: tuple[KvShape, ...], memory: int | float | None) -> int:
        """Return memory for as many pages as each rank has room for."""
        mine = super()._memory_for(model, layers, memory)
        self.ready: list[RankReady] = self._followers.ready()
        nbytes = page_elements(layers) * place_of(model)[1].itemsize
        return min([mine // nbytes, *(each.pages for each in self.ready)]) * nbytes

    def _started(self, pages: int | None) -> Followers:
        orders = [
            replace(self._order, rank=rank, device=device, pages=pages)
            for rank, device in enumerate(self._devices)
            if rank
        ]
        return Followers(orders, self._on_lost)

    def _on_lost(self) -> None:
        """End what this rank waits for. It is called by the thread that notices."""
        group = getattr(self, "collectives", None) and self.collectives.group
        if group:
            group.abort()

    def _meet(self) -> None:
        """Connect with the others, which are ready."""
        with temporary_folder("symbiosis-ranks-") as folder:
            meet = meeting_of(self._devices, folder)
            self._followers.tell(meet)

            def connected() -> RankGroup:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)  # of this thread
                return rank_group(meet, 0, self._order.ranks, self.device)

            self.collectives.group = self._followers.unless_lost(connected)
        self._live = True

    def logits(self, step: SchedulerOutput, rows: Tensor) -> Tensor:
        self.check()
        if not self._live:
            return super().logits(step, rows)
        self.told_bytes = self._followers.tell(self._steps.message(step, rows))
        try:
            if step.fed is not None:
                self.broadcast(step.fed.chosen)
            return super().logits(step, rows)
        except Exception as error:
            self._followers.lose_by(error)
            raise RanksLost(self._followers.lost) from error

    def release(self, sequence: Sequence) -> None:
        self._steps.release(sequence)
        super().release(sequence)

    @property
    def rank_pids(self) -> list[int]:
        """The processes of the other ranks."""
        return self._followers.pids

    def lead(self, residency: AdapterCache) -> None:
        """Tell the others of adapters that come to the device and go."""
        self._residency = residency
        residency.on_put, residency.on_gone = self._steps.put, self._steps.gone

    def check(self) -> None:
        if self._followers.lost:
            raise RanksLost(self._followers.lost)

    def restart(self) -> None:
        """Start the others again, and give them the adapters that there are. Raises `KeepLosingRanks` if that has been too often."""
        now = time.monotonic()
        if len(self._restarts) == procs.MOST_STARTS and now - self._restarts[0] < WITHIN_S:
            raise KeepLosingRanks(
                f"ranks were lost {procs.MOST_STARTS} times within {WITHIN_S:g} s: {self._followers.lost}"
            )
        self._restarts.append(now)
        self._followers.lose("they are started again")
        with self._handing:
            self._live, self.collectives.group = False, None
            self._residency.forget_all()
            self._steps.forget_told()
            self.blocks.forget_all()
            if self.runner is not None:
                self.runner.drop_graphs()
            self._followers = self._started(self.arena.pool.total)
            self.ready = self._followers.ready()
            self._meet()
            for handed in list(self._handed.values()):
                self._followers.load(handed.pieces, handed.memories)
        self.restarts += 1

    def close(self) -> None:
        self._followers.close()

    def _hand_out(self, contents: AdapterContents) -> LoadedAdapter:
        """Give each rank its piece of an adapter: all have theirs, or nobody has it."""
        pieces = [piece_of(contents, self.division, rank) for rank in range(self._order.ranks)]
        mine = placed(self, pieces[0])
        number = next(self._numbers)
        told = AdapterPiece(number, contents.name, contents.kind, contents.version)
        handed = HandedAdapter([told] * (len(pieces) - 1), [written(each) for each in pieces[1:]])
        nbytes = sum(t.nbytes for piece in pieces for t in tensors_of(piece).values())
        with self._handing:
            try:
                pages = max(mine.pages, self._followers.load(handed.pieces, handed.memories))
                if pages > self.arena.pool.total // 2:
                    raise AdapterError(
                        f"it takes {pages} pages on a rank, more than half of its memory: give the server more memory"
                    )
            except BaseException:
                self._steps.unwanted(number)
                raise
            made = replaced(mine, pages=pages, bytes=nbytes)
            self._steps.note_adapter(made, number)
            self._handed[made] = handed
        return made
