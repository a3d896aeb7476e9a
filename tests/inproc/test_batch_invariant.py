"""`--batch-invariant`: what a client gets never depends on who else is served."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

import symbiosis
from symbiosis.executor.scheduling.batcher import Batcher
from symbiosis.executor.scheduling.queue import Item
from symbiosis.executor.scheduling.rules import OPPORTUNISTIC
from tests.conftest import tiny_llama


def test_results_in_company_are_those_alone(serve: Callable, url: str) -> None:
    model = tiny_llama()
    endpoint = serve(model, batch_invariant=True, policy="lockstep", max_wait_us=50_000, listen=[url]).endpoint
    clients = [symbiosis.wrap(copy.deepcopy(model), endpoint) for _ in range(4)]
    inputs = [
        torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(length)) for length in (1, 2, 5, 30)
    ]

    def run(number: int) -> bool:
        with torch.no_grad():
            expected = model(inputs[number]).logits
            return all(torch.equal(clients[number](inputs[number]).logits, expected) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))
    assert all(symbiosis.stats(client).mean_batch == 1.0 for client in clients)


def test_a_call_is_cut_in_the_same_way_whoever_else_calls() -> None:
    cuts = []
    for others in (False, True):
        batcher, now = Batcher(OPPORTUNISTIC, 0.002, 512, invariant=True), 0.0
        batcher.join(1, "one")
        batcher.join(2, "two")
        for _ in range(20):
            batcher.add(Item(1, "a", 1000, 1, now))
            if others:
                batcher.add(Item(2, "a", 700, 1, now))
            stops = []
            while batch := batcher.next_batch(now):
                assert len(batch.slices) == 1
                stops += [piece.stop for piece in batch.slices if piece.item.session == 1]
                now += 0.02
                batch.ran()
                batcher.done(batch, 0.02, now)
            cuts.append(stops)
    assert all(stops == [512, 1000] for stops in cuts)
