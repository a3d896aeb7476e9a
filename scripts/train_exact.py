"""Runs of many PEFT kinds that one engine trains together, each compared with PEFT alone: losses, gradients, and adapters after ten steps.

Run from the repository root (a few minutes on one core, ten at most for the kills):
    python scripts/train_exact.py
    python scripts/train_exact.py --quick    # fewer runs, steps and families

Each run has a thread of its own, which sends batches of random lengths at random times, so that passes join whoever waits. Some runs are saved in
the middle, and go on from their checkpoint in another engine. A second table has a step of three runs on models of other families. Then a process that
trains in a folder is killed again and again: the next one goes on there, and no step that was acknowledged may be lost, or done twice.
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from _processes import prepare
from peft import LoraConfig, PeftConfig, TaskType, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn

from symbiosis.base.reporting import Report, print_table
from symbiosis.training import Engine, Run

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
RANKS = (1, 2, 4, 8, 16, 64)
LR, EPS = 1e-3, 1e-6  # where a gradient is nothing but rounding, AdamW's usual eps makes a whole step of it
GRADIENT, ADAPTER, LOSS = 1e-5, 1e-4, 1e-5  # relative to the largest


def _of(kind: type[PeftConfig], **options: Any) -> PeftConfig:
    return kind(**{"task_type": TaskType.CAUSAL_LM, **options})


KINDS: dict[str, Callable[[int], PeftConfig]] = {
    "LoRA": lambda r: _of(LoraConfig, r=r, target_modules=ALL),
    "rsLoRA": lambda r: _of(LoraConfig, r=r, use_rslora=True, target_modules=["q_proj", "up_proj"]),
    "LoRA by patterns": lambda r: _of(
        LoraConfig, r=r, target_modules=ATTENTION, rank_pattern={"q_proj": 3}, alpha_pattern={"v_proj": 5}
    ),
    "LoRA with dropout": lambda r: _of(LoraConfig, r=r, lora_dropout=0.2, target_modules=ATTENTION),
    "DoRA": lambda r: _of(LoraConfig, r=r, use_dora=True, target_modules=ATTENTION),
    "VeRA": lambda r: _of(peft.VeraConfig, r=r, target_modules=["q_proj", "down_proj"]),
    "IA3": lambda r: _of(peft.IA3Config, target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda r: _of(peft.LoHaConfig, r=r, target_modules=["q_proj", "v_proj"]),
    "LoKr": lambda r: _of(peft.LoKrConfig, r=r, target_modules=["q_proj", "v_proj"]),
    "OFT": lambda r: _of(peft.OFTConfig, oft_block_size=8, r=0, target_modules=["q_proj", "v_proj"]),
    "HRA": lambda r: _of(peft.HRAConfig, r=2 * min(r, 8), target_modules=["q_proj", "v_proj"]),
    "LN tuning": lambda r: _of(peft.LNTuningConfig, target_modules=["input_layernorm", "norm"]),
    "LoRA at the head": lambda r: _of(LoraConfig, r=r, target_modules=["lm_head", "q_proj"]),
    "prompt tuning": lambda r: _of(peft.PromptTuningConfig, num_virtual_tokens=min(r, 8)),
    "P-tuning": lambda r: _of(peft.PromptEncoderConfig, num_virtual_tokens=3, encoder_hidden_size=32),
    "prefix tuning": lambda r: _of(peft.PrefixTuningConfig, num_virtual_tokens=min(r, 8)),
    "prefix by an encoder": lambda r: _of(
        peft.PrefixTuningConfig, num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=32
    ),
    "saved modules": lambda r: _of(LoraConfig, r=r, target_modules=["q_proj"], modules_to_save=["input_layernorm"]),
}
if hasattr(peft, "CartridgeConfig"):  # since 0.19
    KINDS["Cartridge"] = lambda r: _of(peft.CartridgeConfig, num_virtual_tokens=1 + min(r, 8))

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", TINY),
    "Qwen3": ("Qwen3Config", {**TINY, "head_dim": 16}),
    "Gemma2": ("Gemma2Config", {**TINY, "head_dim": 16, "sliding_window": 5}),
    "GPT-2": (
        "GPT2Config",
        {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.1,
         "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "Mixtral": ("MixtralConfig", {**TINY, **EXPERTS}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {**TINY, **EXPERTS, "head_dim": 16}),
    "Phi3": ("Phi3Config", TINY),
    "gpt-oss": ("GptOssConfig", {**TINY, **EXPERTS, "head_dim": 16, "sliding_window": 5}),
    "Mamba": ("MambaConfig", {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "initializer_range": 0.1}),
}  # fmt: skip
TARGETS = {
    **dict.fromkeys(("Mixtral", "Qwen3-MoE", "gpt-oss"), ATTENTION),  # experts are given some of the rows
    "Mamba": ["in_proj", "x_proj"],
}


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    name, options = FAMILIES[family]
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**options)).eval()


def batches_of(run: int, count: int) -> list[dict[str, Tensor]]:
    chance, generator = random.Random(run), torch.Generator().manual_seed(run)
    made = []
    for _ in range(count):
        ids = torch.randint(3, 96, (chance.randint(1, 3), chance.randint(2, 40)), generator=generator)
        labels = ids.clone()
        labels[:, : chance.randint(0, ids.shape[1] - 2)] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


@dataclass
class Trained:
    """Losses by step, the gradients of the first, and the adapter at the end."""

    losses: list[float]
    gradients: list[Tensor]
    adapter: dict[str, Tensor]


def train_alone(family: str, config: PeftConfig, seed: int, batches: list[dict[str, Tensor]]) -> Trained:
    model = build(family)
    torch.manual_seed(seed)
    model = get_peft_model(model, config).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, eps=EPS, weight_decay=0.0)
    losses, gradients = [], list[Tensor]()
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, gradients, get_peft_model_state_dict(model, save_embedding_layers=False))


def train_run(run: Run, batches: list[dict[str, Tensor]], chance: random.Random) -> Trained:
    losses, gradients = [], list[Tensor]()
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    for batch in batches:
        time.sleep(chance.uniform(0, 0.02))
        losses.append(run.forward_backward(batch).result().loss)
        gradients = gradients or [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        run.step(LR, eps=EPS).result()
    return Trained(losses, gradients, get_peft_model_state_dict(run.model, save_embedding_layers=False))


def relative(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference over the largest value."""
    largest = max(float(each.abs().max()) for each in expected)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(found, expected, strict=True)) / largest


def off(found: Trained, expected: Trained) -> tuple[float, float, float]:
    names = sorted(expected.adapter)
    losses = max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True))
    return (
        losses,
        relative(found.gradients, expected.gradients),
        relative([found.adapter[name] for name in names], [expected.adapter[name] for name in names]),
    )


def many_runs(count: int, steps: int) -> tuple[dict[str, tuple[float, float, float]], float]:
    """The worst of each kind, and how many runs a pass computed on average."""
    numbers = range(count)
    kinds = [list(KINDS)[number % len(KINDS)] for number in numbers]
    configs = [KINDS[kind](RANKS[number % len(RANKS)]) for number, kind in enumerate(kinds)]
    batches = [batches_of(number, steps) for number in numbers]
    found: dict[int, Trained] = {}
    with Engine(build("Llama")) as engine:
        runs = [engine.create(config, seed=number) for number, config in enumerate(configs)]

        def train(number: int) -> None:
            found[number] = train_run(runs[number], batches[number], random.Random(number))

        threads = [threading.Thread(target=train, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        joined = engine.joined
    worst = dict.fromkeys(KINDS, (0.0, 0.0, 0.0))
    for number, kind in enumerate(kinds):
        alone = train_alone("Llama", KINDS[kind](RANKS[number % len(RANKS)]), number, batches[number])
        worst[kind] = tuple(map(max, worst[kind], off(found[number], alone)))  # type: ignore[assignment]
    return {kind: each for kind, each in worst.items() if any(each)}, joined


def resumed(steps: int) -> float:
    """How far an adapter is off that goes on from a checkpoint in another engine."""
    batches = batches_of(100, steps)
    config = KINDS["LoRA"](8)
    with tempfile.TemporaryDirectory() as folder:
        with Engine(build("Llama")) as engine:
            run = engine.create(config, seed=5)
            train_run(run, batches[: steps // 2], random.Random(0))
            saved = run.save(Path(folder) / "half")
        with Engine(build("Llama")) as engine:
            found = train_run(engine.load(saved), batches[steps // 2 :], random.Random(0))
    alone = train_alone("Llama", KINDS["LoRA"](8), 5, batches)
    return relative([found.adapter[name] for name in alone.adapter], list(alone.adapter.values()))


KILLED = ("LoRA", "LoRA with dropout", "DoRA", "LoKr")  # kinds of the runs whose process is killed
ACKNOWLEDGED = "acknowledged"  # a file: a line for each step that was done
LONGEST_S = 600.0  # that all of it may take
PRELOADED = ["peft", "symbiosis.training.training_engine", "transformers.models.llama.modeling_llama"]
processes = multiprocessing.get_context("forkserver")  # these are imported once for all of them


def killed(steps: int, kills: int) -> tuple[float, int]:
    """How far adapters are off that were trained by processes of which so many were killed, and how many steps were acknowledged in all."""
    chance, until = random.Random(kills), time.monotonic() + LONGEST_S
    processes.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kill in range(kills):
            child = processes.Process(target=live, args=(folder, steps))
            child.start()
            if kill % 4 == 3:  # while it begins
                time.sleep(chance.uniform(0.0, 1.0))
            else:
                wait_for_steps(folder, len(KILLED) * steps * (kill + 1) // (kills + 1), child, until)
                time.sleep(chance.uniform(0.0, 0.05))
            child.kill()
            ended(child, -signal.SIGKILL, until)
        child = processes.Process(target=live, args=(folder, steps))
        child.start()
        ended(child, 0, until)
        with Engine(build("Llama"), state=folder / "runs") as engine:
            off = max(off_from_alone(engine.open(str(number)), number, steps) for number in range(len(KILLED)))
        return off, len(acknowledged(folder))


def wait_for_steps(folder: Path, count: int, child: BaseProcess, until: float) -> None:
    while len(acknowledged(folder)) < count:
        if not child.is_alive() or time.monotonic() > until:
            raise RuntimeError("a process that trains ended before it was killed, or takes too long")
        time.sleep(0.005)


def ended(child: BaseProcess, code: int, until: float) -> None:
    child.join(max(0.0, until - time.monotonic()))
    if child.exitcode != code:
        child.kill()
        raise RuntimeError(
            f"a process that trains ended with {child.exitcode}, not {code}: 1 if runs were in another state than it was told"
        )


def acknowledged(folder: Path) -> set[str]:
    """The steps that were acknowledged, as `run number`."""
    file = folder / ACKNOWLEDGED
    return set(file.read_text().splitlines()) if file.exists() else set()


def off_from_alone(run: Run, number: int, steps: int) -> float:
    alone = train_alone("Llama", KINDS[KILLED[number]](8), number, batches_of(number, steps)).adapter
    found = get_peft_model_state_dict(run.model, save_embedding_layers=False)
    return relative([found[name] for name in alone], list(alone.values()))


def live(folder: Path, steps: int) -> None:
    """Train the runs of a folder, from where they are, and note each step that was acknowledged."""
    warnings.filterwarnings("ignore", category=UserWarning)
    known = [tuple(map(int, line.split())) for line in acknowledged(folder)]
    notes = os.open(folder / ACKNOWLEDGED, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Engine(build("Llama"), state=folder / "runs", in_memory=2) as engine:
        runs = [
            engine.open(str(number))
            if str(number) in engine.names
            else engine.create(KINDS[kind](8), seed=number, name=str(number))
            for number, kind in enumerate(KILLED)
        ]
        for number, run in enumerate(runs):
            last = max((command for each, command in known if each == number), default=0)
            if run.next_number <= last or run.steps != (run.next_number - 1) // 2:
                sys.exit(1)

        def train(number: int, run: Run) -> None:
            batches = batches_of(number, steps)
            begins = max(0, run.next_number // 2 - 1)  # the last one again: nobody knows whether its answer came
            for step in range(begins, steps):
                run.submit(2 * step + 1, "forward_backward", batches[step])
                run.submit(2 * step + 2, "step", lr=LR, eps=EPS).result()
                os.write(notes, f"{number} {2 * step + 2}\n".encode())

        threads = [threading.Thread(target=train, args=each) for each in enumerate(runs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def family(name: str) -> tuple[bool, float, float]:
    """Whether it packs; how far gradients and losses of three runs are off, at worst."""
    ranks, batches = (2, 8, 4), [batches_of(number, 2) for number in range(3)]
    targets = TARGETS.get(name, "all-linear")
    configs = [lambda r=r: _of(LoraConfig, r=r, target_modules=targets) for r in ranks]
    with Engine(build(name)) as engine:
        runs = [engine.create(config(), seed=number) for number, config in enumerate(configs)]
        found = [train_run(run, batches[number], random.Random(0)) for number, run in enumerate(runs)]
        packs = engine.packs
    alone = [train_alone(name, config(), number, batches[number]) for number, config in enumerate(configs)]
    worst = [off(mine, other) for mine, other in zip(found, alone, strict=True)]
    return packs, max(gradients for _, gradients, _ in worst), max(losses for losses, _, _ in worst)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="16 runs, 4 steps and three families, instead of 32, 10 and nine"
    )
    quick = parser.parse_args().quick
    prepare(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    report = Report("train_exact")
    kinds, joined = many_runs(*((16, 4) if quick else (32, 10)))
    print_table(
        ("kind of PEFT", "loss off by", "gradients", "adapters at the end"),
        [(kind, *(f"{each:.1e}" for each in worst)) for kind, worst in kinds.items()],
        f"runs of one engine, {joined:.1f} in a pass, and PEFT alone",
    )
    families = {name: family(name) for name in list(FAMILIES)[:: 4 if quick else 1]}
    print_table(
        ("family", "packs", "gradients off by", "loss"),
        [
            (name, "yes" if packs else "padded", f"{g:.1e}", f"{loss:.1e}")
            for name, (packs, g, loss) in families.items()
        ],
        "three runs",
    )
    report.bar("kinds", len(kinds), ">=", 10)
    report.bar("families", len(families), ">=", 3 if quick else 8)
    report.bar("losses_off", max(loss for loss, _, _ in kinds.values()), "<=", LOSS)
    report.bar("gradients_off", max(g for _, g, _ in kinds.values()), "<=", GRADIENT)
    report.bar("adapters_off", max(a for _, _, a in kinds.values()), "<=", ADAPTER)
    report.bar("families_gradients_off", max(g for _, g, _ in families.values()), "<=", GRADIENT)
    report.bar("resumed_adapter_off", resumed(4 if quick else 10), "<=", ADAPTER)
    kills, of_each = (3, 20) if quick else (20, 100)
    began = time.monotonic()
    after_kills, steps = killed(of_each, kills)
    print(f"{kills} kills in {time.monotonic() - began:.0f} s")
    report.bar("adapters_off_after_kills", after_kills, "<=", ADAPTER)
    report.figure("kills", kills)
    report.bar("steps_acknowledged", steps, ">=", len(KILLED) * of_each)
    report.bar("runs_in_a_pass", joined, ">=", 2)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
