"""Sampling what is trained: what it costs to publish an adapter, and how far the sampler is from the trainer.

    python scripts/bench_rollout.py publish              # a LoRA on Llama-7B's shapes, on a GPU
    python scripts/bench_rollout.py mismatch             # SmolLM2's and Llama-7B's shapes, bfloat16, on a GPU
    python scripts/bench_rollout.py --tiny               # both for a small model on the CPU, in float32 and bfloat16
    python scripts/bench_rollout.py mismatch --model DIR # a real checkpoint

`mismatch`: texts are sampled with a LoRA in float32, and PEFT scores the same tokens. KL is the cookbook's `kl_sample_train_v2`. Below it stands what
else rounds by as much: the adapter, if it were served in the model's dtype; the trainer's own attention, eager against SDPA; and its
head, logits in the model's dtype against such in float32.
"""

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch
from _gpu import ATTENTION, MLP, Shape, synchronize
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from symbiosis.base.reporting import Report, print_table
from symbiosis.serving import Engine

RANK, PROMPTS, PROMPT, TOKENS = 16, 16, 24, 64
PUBLISH_MS = 10.0
BARS = {torch.float32: 1e-6, torch.bfloat16: 2e-4}  # KL
SHARP = 12.0  # by which a random head is multiplied: its texts are then about as certain as a real model's


def trained(base: nn.Module) -> Any:
    """A PEFT model whose float32 adapter matters."""
    lora = LoraConfig(r=RANK, target_modules=[*ATTENTION, *MLP], task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(base, lora).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3 / parameter.shape[0] ** 0.5)
    return model


def publish(base: nn.Module, device: str, report: Report) -> None:
    model, times = trained(copy.deepcopy(base)), []
    with Engine(base, memory=1 << 28) as engine:
        for number in range(12):
            synchronize(device)
            began = time.perf_counter()
            engine.publish("policy", model)
            synchronize(device)
            times.append(1e3 * (time.perf_counter() - began))
            engine.generate([1, 2, 3], adapter="policy", max_tokens=2)
            report.figure(f"publish_{number}_ms", times[-1])
    middle = statistics.median(times[2:])
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    report.bar("publish_ms", middle, "<=", PUBLISH_MS if device == "cuda" else 1000.0)
    print_table(("numbers", "first ms", "median ms"), [(f"{count:,}", f"{times[0]:.1f}", f"{middle:.2f}")])


def sampled(engine: Engine, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    from concurrent.futures import ThreadPoolExecutor

    def one(number: int) -> tuple[list[int], list[float]]:
        answer = engine.generate(
            prompts[number], adapter="policy", max_tokens=TOKENS, logprobs=0, seed=number, ignore_eos=True
        )
        return list(answer.tokens), [token.logprob or 0.0 for token in answer.logprobs]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, range(len(prompts))))


@torch.no_grad()
def scored(model: Any, prompts: list[list[int]], texts: list[list[int]], wide_head: bool = False) -> Tensor:
    """The trainer's log probabilities of texts, all in one batch."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)], device=device)
    head, kept = model.get_output_embeddings(), list[Tensor]()
    hook = head.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    logits = model(input_ids=ids, use_cache=False).logits
    hook.remove()
    if wide_head:
        logits = kept[0].float() @ head.weight.float().t()
    found = logits[:, PROMPT - 1 : -1].float().log_softmax(-1)
    return found.gather(2, ids[:, PROMPT:, None])[..., 0].cpu()


def apart(mine: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Mean |difference|, and half the mean of its square."""
    off = (mine - theirs).double()
    return float(off.abs().mean()), float(0.5 * off.square().mean())


def mismatch(name: str, base: nn.Module, report: Report) -> None:
    dtype, model = next(base.parameters()).dtype, trained(copy.deepcopy(base))
    vocabulary = base.config.vocab_size
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, vocabulary, (PROMPTS, PROMPT), generator=generator).tolist()
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(dtype)
    rows = []

    def tell(what: str, mine: Tensor, theirs: Tensor) -> float:
        difference, kl = apart(mine, theirs)
        rows.append((what, f"{difference:.1e}", f"{kl:.1e}"))
        report.figure(f"mismatch_{name}_{what.replace(' ', '_')}_kl", kl)
        return kl

    with Engine(base, memory=1 << 30, max_batch=PROMPTS) as engine:
        engine.publish("policy", model)
        made = sampled(engine, prompts)
        engine.publish("policy", rounded)
        again = sampled(engine, prompts)
    texts, logprobs = [tokens for tokens, _ in made], torch.tensor([each for _, each in made])
    theirs = scored(model, prompts, texts)
    kl = tell("sampler against trainer", logprobs, theirs)
    report.bar(f"mismatch_{name}", kl, "<=", BARS[dtype])
    other = torch.tensor([each for _, each in again])
    tell("adapter served in the model's dtype", other, scored(model, prompts, [tokens for tokens, _ in again]))
    wide = scored(model, prompts, texts, wide_head=True)
    tell("trainer: head in float32 against its own", theirs, wide)
    model.base_model.model.set_attn_implementation("eager")
    tell("trainer: eager attention against SDPA", scored(model, prompts, texts), theirs)
    print_table((f"{name}, {str(dtype)[6:]}", "mean |difference|", "KL"), rows)


def built(shape: Shape, device: str, dtype: torch.dtype) -> nn.Module:
    model = shape.build(device).to(dtype)
    model.get_output_embeddings().weight.data.mul_(SHARP)  # type: ignore[operator]
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help="publish, mismatch; default: both")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--model", help="of mismatch: a checkpoint")
    given = parser.parse_args()
    if not given.tiny and not given.model and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --tiny measures a small model on the CPU")
    suites = given.suites or ["publish", "mismatch"]
    if unknown := set(suites) - {"publish", "mismatch"}:
        parser.error(f"there is no {', '.join(unknown)}: the suites are publish and mismatch")
    device, report = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu", Report("bench_rollout")
    small = Shape(30, 576, 1536, 9, 49152, others=(("num_key_value_heads", 3), ("head_dim", 64)))
    shapes = {"tiny": Shape(2, 256, 688, 4, 1000)} if given.tiny else {"smollm2": small, "7b": Shape(layers=32)}
    dtypes = (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16,)
    if "publish" in suites:
        publish(built(next(reversed(shapes.values())), device, dtypes[-1]), device, report)
    if "mismatch" in suites and given.model:
        for dtype in dtypes:
            mismatch("model", AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(device).eval(), report)
    elif "mismatch" in suites:
        for name, shape in shapes.items():
            for dtype in dtypes:
                mismatch(name if len(dtypes) == 1 else f"{name}_{str(dtype)[6:]}", built(shape, device, dtype), report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
