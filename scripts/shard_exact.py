"""Services of several ranks against one executor and the unsplit model, bit for bit; and with ranks that are killed.

Several clients, each with a pace of its own, train adapters and generate tokens at services of 2 and 4 ranks, laid out by layers and by parts of all
tensors, called and mapped. Then random products, gradients and reads of random layers go to random ranks, which takes each weight from the parts
of all ranks. At last ranks are killed while adapters are trained.

    python scripts/shard_exact.py --quick     # about a minute on two cores
    python scripts/shard_exact.py             # some minutes
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _processes import executor, prepare, progress, save_llama
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.client.session import Session
from symbiosis.endpoints import of_rank
from symbiosis.protocol import Op
from symbiosis.tools.reporting import Report

LAYOUTS, TARGETS = ("layers", "fsdp"), ["q_proj", "v_proj", "down_proj"]
PAUSES_S = (0.0, 0.004, 0.015)  # of the clients, after each step
STEPS, TOKENS = 8, 12
HIDDEN, LAYERS = 256, 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 ranks only, and fewer products")
    options = parser.parse_args()
    prepare(threads=1)
    torch.set_num_threads(1)
    report = Report("shard_exact")
    wanted = 2_000 if options.quick else 10_000
    done = wrong = differs = 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_llama(model, HIDDEN, LAYERS)
        expected = [trained(unsplit(model), seed) for seed in range(len(PAUSES_S))]
        tokens = generated(unsplit(model))
        cases = [(layout, ranks) for layout in LAYOUTS for ranks in ((2,) if options.quick else (2, 4))]
        for layout, ranks in cases:
            url = f"local://{folder}/{layout}{ranks}.sock"
            words = ("--batch-invariant", f"--ranks={ranks}", f"--shard={layout}", f"--listen={url}", "--allow-read")
            with executor(model, 1, *words) as service:
                progress(f"{layout}, {ranks} ranks: clients with paces of their own")
                wrong += clients_that_differ(url, expected, tokens)
                progress(f"{layout}, {ranks} ranks: products at random ranks")
                made, bad = random_products(url, unsplit(model), ranks, layout, wanted // len(cases))
                done, wrong = done + made, wrong + bad
                progress(f"{layout}, {ranks} ranks: kills")
                differs += sum(adapter_differs(service.pid, url, expected[0], share) for share in (False, True))
    report.bar("clients_and_products_that_differ", wrong, "<=", 0)
    report.bar("products_at_random_ranks", done, ">=", wanted)
    report.bar("adapters_that_differ_after_kills", differs, "<=", 0)
    return report.finish()


def unsplit(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model).eval()


def trained(model: nn.Module, seed: int, pause_s: float = 0.0, meanwhile: Any = None) -> list[Tensor]:
    """The losses of some steps, and the adapter that they make."""
    draw = torch.Generator().manual_seed(seed)
    model = get_peft_model(model, LoraConfig(target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM"))  # type: ignore[assignment]
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in own:
        parameter.data = torch.randn(parameter.shape, generator=draw) / 16
    optimizer = torch.optim.AdamW(own, lr=1e-3)
    losses = []
    for step in range(STEPS):
        if meanwhile is not None:
            meanwhile(step)
        ids = torch.randint(3, 2000, (2, 5 + 3 * seed), generator=draw)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        time.sleep(pause_s)
    return [*losses, *(parameter.detach() for parameter in own)]


def generated(model: Any) -> Tensor:
    ids = torch.randint(3, 2000, (2, 7), generator=torch.Generator().manual_seed(9))
    return model.generate(ids, max_new_tokens=TOKENS, do_sample=False)  # type: ignore[no-any-return]


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


def clients_that_differ(url: str, expected: list[list[Tensor]], tokens: Tensor) -> int:
    """Trainers and generators at once, called and mapped: how many got something else than the unsplit model."""

    def train(seed: int, share: bool) -> bool:
        return same(trained(symbiosis.from_executor(url, share=share), seed, PAUSES_S[seed]), expected[seed])

    def generate(share: bool) -> bool:
        return torch.equal(generated(symbiosis.from_executor(url, share=share)), tokens)

    with ThreadPoolExecutor() as pool:
        made = [pool.submit(train, seed, share) for share in (False, True) for seed in range(len(PAUSES_S))]
        made += [pool.submit(generate, share) for share in (False, True)]
        return sum(not one.result() for one in made)


def random_products(url: str, model: nn.Module, ranks: int, layout: str, count: int) -> tuple[int, int]:
    """Products, gradients and reads of layers in random order, at random ranks: how many were made, and how many were wrong."""
    # with `whole` a session goes to the rank that holds a layer; without, it stays at its own, which has parts of all
    sessions = [Session(of_rank(url, rank), whole=layout == "layers") for rank in range(ranks)]
    layers = [(n, layer) for n, layer in enumerate(sessions[0].manifest) if layer.kind == "linear"]
    weights: dict[int, Tensor] = {n: model.get_submodule(layer.name).weight.detach() for n, layer in layers}  # type: ignore[misc, operator]
    draw = random.Random(0)
    wrong = 0
    for _ in range(count):
        number, _layer = draw.choice(layers)
        session, weight, kind = draw.choice(sessions).holder(number), weights[number], draw.randrange(3)
        if kind == 0:
            x = torch.randn(draw.randint(1, 9), weight.shape[1])
            right = torch.equal(session.call(Op.FORWARD, number, x), x @ weight.t())
        elif kind == 1:
            dy = torch.randn(draw.randint(1, 9), weight.shape[0])
            right = torch.equal(session.call(Op.DGRAD, number, dy), dy @ weight)
        else:
            right = torch.equal(session.call(Op.READ, number, dtype=weight.dtype), weight)
        wrong += not right
    for session in sessions:
        session.close()
    return count, wrong


def adapter_differs(pid: int, url: str, expected: list[Tensor], share: bool) -> bool:
    """Whether training ends with another adapter when a rank is killed at each third step."""

    def kill(step: int) -> None:
        if step % 3 == 1:
            os.kill(random.choice(ranks_of(pid)), signal.SIGKILL)

    return not same(trained(symbiosis.from_executor(url, share=share, wait=60.0), 0, meanwhile=kill), expected)


def ranks_of(pid: int) -> list[int]:
    """The processes of a service's ranks."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


if __name__ == "__main__":
    sys.exit(main())
