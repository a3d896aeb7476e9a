"""An engine that trains beside a wrapped trainer and a program that makes tokens, on one executor: each alone, then all at once."""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.training import Engine

ROWS = 64  # of a step of each trainer


def beside(model: nn.Module, config: Callable[[], LoraConfig], vocabulary: int, seconds: float, report: Report) -> None:
    """Tokens come first: their calls wait least. The trainers, who ask for as many rows, make as many steps."""
    with symbiosis.Executor(model) as executor:
        models: dict[str, Any] = {
            name: symbiosis.from_executor(executor.endpoint, priority=priority)
            for name, priority in (("tokens", "decode"), ("wrapped", "train"), ("engine", "train"))
        }
        with Engine(models["engine"]) as engine:
            programs = {
                "tokens": tokens(models["tokens"]),
                "wrapped": wrapped(models["wrapped"], config(), vocabulary),
                "engine": trained(engine, config(), vocabulary),
            }
            for step in programs.values():
                step()
            alone = {name: rates({name: step}, seconds)[name] for name, step in programs.items()}
            before = {name: symbiosis.stats(each).copy() for name, each in models.items()}
            together = rates(programs, seconds)
            since = {name: symbiosis.stats(each).taken_back(before[name]) for name, each in models.items()}
    waits = {name: 1e3 * each.wait_s / max(1, each.calls) for name, each in since.items()}
    for name in programs:
        report.figure(f"beside_{name}_alone_per_s", alone[name])
        report.figure(f"beside_{name}_together_per_s", together[name])
        report.figure(f"beside_{name}_wait_ms", waits[name])
    report.bar("beside_tokens_wait_over_trainers", waits["tokens"] / min(waits["wrapped"], waits["engine"]), "<=", 1.0)
    steps = together["wrapped"], together["engine"]
    report.bar("beside_trainers_share", min(steps) / max(steps), ">=", 0.7)
    rows = [(name, f"{alone[name]:.1f}", f"{together[name]:.1f}", f"{waits[name]:.2f}") for name in programs]
    print_table(("program", "steps/s alone", "beside the others", "a call waits ms"), rows)


def rates(programs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """How many steps per second each makes, at the same time."""
    until, made = time.perf_counter() + seconds, dict[str, float]()

    def repeat(name: str, step: Callable[[], Any]) -> None:
        count, began = 0, time.perf_counter()
        while time.perf_counter() < until:
            step()
            count += 1
        made[name] = count / (time.perf_counter() - began)

    threads = [threading.Thread(target=repeat, args=each) for each in programs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def tokens(model: Any) -> Callable[[], Any]:
    ids = torch.tensor([[5]])

    @torch.no_grad()
    def step() -> None:
        model(ids, use_cache=False)

    return step


def wrapped(base: Any, config: LoraConfig, vocabulary: int) -> Callable[[], Any]:
    model: Any = get_peft_model(base, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(vocabulary, (1, ROWS))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def trained(engine: Engine, config: LoraConfig, vocabulary: int) -> Callable[[], Any]:
    run, ids = engine.create(config), torch.randint(vocabulary, (1, ROWS))

    def step() -> None:
        run.forward_backward({"input_ids": ids, "labels": ids})
        run.step(1e-4).result()

    return step
