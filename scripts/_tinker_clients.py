"""Clients of Tinker's SDK that train while the server's processes are killed, for compat_tinker.py: they run where nothing of Symbiosis is.

python _tinker_clients.py MODEL FILE FIRST COUNT END

Each client is a thread with a session of its own: until there is a file END it makes passes and steps, has a sampler of every fifth, and draws from it. Then it does
as many steps again with a run of its own that nobody disturbs, and FILE tells, of each: its steps, those that the server tells of, and how far
the two are apart.
"""

import json
import os
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import tinker

TOKENS = list(b"Once upon a time there was a base model that was shared by many.")
EVERY = 5  # steps between two samplers
DRAWN = tinker.SamplingParams(max_tokens=8, seed=7)


def datum(tokens: list[int]) -> tinker.Datum:
    inputs = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


class Client:
    """One run, and what it was told."""

    def __init__(self, model: str, number: int) -> None:
        self._number = number
        self._service = tinker.ServiceClient()
        self._run = self._service.create_lora_training_client(base_model=model, rank=4, seed=number).result()
        self.id = str(self._run.model_id)
        self.steps = 0
        self.drawn: list[Any] = []  # of each sampler: the tokens, and their log probabilities

    def step(self) -> None:
        first = (self._number + self.steps) % 20  # no two steps are the same
        passed = self._run.forward_backward([datum(TOKENS[first : first + 24])], "cross_entropy")
        stepped = self._run.optim_step(tinker.AdamParams(learning_rate=3e-3))
        passed.result(), stepped.result()
        self.steps += 1
        if self.steps % EVERY == 0:
            sampler = self._run.save_weights_and_get_sampling_client()
            [found] = sampler.sample(tinker.ModelInput.from_ints(TOKENS[:9]), 1, DRAWN).result().sequences
            self.drawn.append((found.tokens, list(found.logprobs)))

    def logprobs(self) -> Any:
        [found] = self._run.forward([datum(TOKENS)], "cross_entropy").result().loss_fn_outputs
        return found["logprobs"].to_numpy()


def trained(model: str, number: int, end: Path) -> dict[str, Any]:
    client = Client(model, number)
    while not end.exists():
        client.step()
    undisturbed = Client(model, number)
    for _ in range(client.steps):
        undisturbed.step()
    pairs = list(zip(client.drawn, undisturbed.drawn, strict=True))
    same = [np.abs(np.array(one[1]) - other[1]).max() for one, other in pairs if one[0] == other[0]]
    return {
        "steps": client.steps,
        "of_server": steps_of_server(client.id),
        "apart": float(np.abs(client.logprobs() - undisturbed.logprobs()).max()),
        "samples": len(pairs),
        "other_samples": len(pairs) - len(same),
        "samples_apart": float(max(same, default=0.0)),
    }


def steps_of_server(run: str) -> int:
    """Return how many steps the server has made, as its page shows."""
    with urllib.request.urlopen(f"{os.environ['TINKER_BASE_URL']}/figures", timeout=60) as answer:
        return next(int(each["steps"]) for each in json.load(answer)["runs"] if each["id"] == run)


def main(model: str, file: str, first: int, count: int, end: Path) -> None:
    told: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda number=number: told.append(trained(model, number, end)))  # type: ignore[misc]
        for number in range(first, first + count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(told) < count:
        sys.exit(f"{count - len(told)} of {count} clients failed, as they say above")
    Path(file).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:5]), Path(sys.argv[5]))
