"""Services of several ranks against one executor and the unsplit model, bit for bit; and with ranks that are killed.

Several clients, each with a pace of its own, train adapters and generate tokens at services of 2 and 4 ranks, laid out by layers and by parts of all
tensors, called and mapped. Then random products, gradients and reads of random layers go to random ranks, which takes each weight from the parts
of all ranks, and ranks are killed while adapters are trained. At last calls of few rows are spread over all ranks, which rounds otherwise: each
result is held to the bound that its sums allow, and training goes on when ranks are killed.

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
from symbiosis.base.reporting import Report
from symbiosis.client.session import Session
from symbiosis.protocol import Op
from symbiosis.protocol.endpoints import of_rank

LAYOUTS, TARGETS = ("layers", "fsdp"), ["q_proj", "v_proj", "down_proj"]
PAUSES_S = (0.0, 0.004, 0.015)  # of the clients, after each step
STEPS, TOKENS = 8, 12
HIDDEN, LAYERS = 256, 4
MOST_SPREAD = 16  # rows of a call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 ranks only, and fewer products")
    options = parser.parse_args()
    prepare(threads=1)
    torch.set_num_threads(1)
    report = Report("shard_exact")
    wanted = 2_000 if options.quick else 10_000
    done = wrong = differs = 0
    spread = Spread()
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
        for ranks in (2,) if options.quick else (2, 4):
            url = f"local://{folder}/spread{ranks}.sock"
            how = (f"--ranks={ranks}", "--shard=fsdp", f"--spread-rows={MOST_SPREAD}", f"--listen={url}")
            with executor(model, 1, *how) as service:
                progress(f"{ranks} ranks: few rows on all of them")
                spread.products(url, unsplit(model), wanted // 5)
                spread.train(service.pid, url, expected[0])
    report.bar("clients_and_products_that_differ", wrong, "<=", 0)
    report.bar("products_at_random_ranks", done, ">=", wanted)
    report.bar("adapters_that_differ_after_kills", differs, "<=", 0)
    report.bar("spread_products", spread.made, ">=", wanted // 5)
    report.bar("spread_error_over_bound", round(spread.worst, 4), "<=", 1)
    report.bar("spread_training_loss_off", round(spread.loss_off, 7), "<=", 1e-4)
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
        return same(
            trained(symbiosis.from_executor(url, share=share, device="cpu"), seed, PAUSES_S[seed]), expected[seed]
        )

    def generate(share: bool) -> bool:
        return torch.equal(generated(symbiosis.from_executor(url, share=share, device="cpu")), tokens)

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

    return not same(
        trained(symbiosis.from_executor(url, share=share, patience=60.0, device="cpu"), 0, meanwhile=kill), expected
    )


class Spread:
    """Calls of few rows that all ranks answer together: how many were made, and the largest error of an element, over what rounding allows."""

    def __init__(self) -> None:
        self.made, self.worst, self.loss_off = 0, 0.0, 0.0

    def products(self, url: str, model: nn.Module, count: int) -> None:
        """Products and gradients of random layers. An element that sums K products may be off by K roundings of the sum of their sizes."""
        session, draw = Session(url), random.Random(1)
        layers = [(n, layer) for n, layer in enumerate(session.manifest) if layer.kind == "linear"]
        for _ in range(count):
            number, layer = draw.choice(layers)
            weight: Tensor = model.get_submodule(layer.name).weight.detach().double()  # type: ignore[assignment, operator]
            forward = draw.random() < 0.5
            matrix = weight.t() if forward else weight
            x = torch.randn(draw.randint(1, MOST_SPREAD), len(matrix))
            got = session.call(Op.FORWARD if forward else Op.DGRAD, number, x)
            bound = len(matrix) * torch.finfo(torch.float32).eps * (x.double().abs() @ matrix.abs())
            self.worst = max(self.worst, float(((got - x.double() @ matrix).abs() / bound).max()))
            self.made += 1
        made = session.stats.by_op
        assert made.keys() == {"PRODUCT"}, f"calls that were not spread: {made}"
        session.close()

    def train(self, pid: int, url: str, expected: list[Tensor]) -> None:
        """Train while ranks are killed: how far the losses are off those of the unsplit model."""

        def kill(step: int) -> None:
            if step % 3 == 1:
                os.kill(random.choice(ranks_of(pid)), signal.SIGKILL)

        got = trained(symbiosis.from_executor(url, share=False, patience=60.0, device="cpu"), 0, meanwhile=kill)
        off = [abs(float(mine / theirs) - 1) for mine, theirs in zip(got[:STEPS], expected[:STEPS], strict=True)]
        self.loss_off = max(self.loss_off, *off)


def ranks_of(pid: int) -> list[int]:
    """The processes of a service's ranks."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


if __name__ == "__main__":
    sys.exit(main())
