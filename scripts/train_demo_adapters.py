"""Train the adapters that `symbiosis serve demo` serves: three styles for the bundled demo model, by three PEFT methods.

Run from the repository root (some minutes on one core):
    python scripts/train_demo_adapters.py --out symbiosis/demo_model/adapters
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from symbiosis.base.reporting import Report, print_table
from symbiosis.demo import data

MODEL = Path("symbiosis/demo_model")
LENGTH, BATCH, TOKENS = 160, 4, 80
CAUSAL = {"task_type": "CAUSAL_LM", "target_modules": "all-linear"}


def lower_text() -> str:
    return data.base_text().lower()


@dataclass(frozen=True)
class Style:
    """What an adapter learns, how, and a text that shows it."""

    text: Callable[[], str]
    config: Callable[[], PeftConfig]
    learning_rate: float
    prompt: str


STYLES = {
    "python": Style(data.python_text, lambda: LoraConfig(r=4, lora_alpha=8, **CAUSAL), 3e-3, "Return the number of "),
    "shout": Style(data.shouting_text, lambda: LoraConfig(r=2, use_dora=True, **CAUSAL), 3e-3, "The statement "),
    "whisper": Style(
        lower_text,
        lambda: IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "up_proj", "down_proj"], feedforward_modules=["down_proj"]),
        1e-2,
        "the statement ",
    ),
}  # fmt: skip


def train(model: nn.Module, blocks: list[list[int]], learning_rate: float) -> float:
    """In place; the mean loss of the last tenth."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    losses = []
    model.train()
    for first in range(0, len(blocks), BATCH):
        ids = torch.tensor(blocks[first : first + BATCH])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 50 == 0:
            print(f"step {len(losses):4d}  loss {sum(losses[-50:]) / 50:.3f}", flush=True)
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def make(
    name: str, style: Style, tokenizer: PreTrainedTokenizerBase, steps: int, out: Path
) -> tuple[str, float, int, str]:
    """Trained, saved in half the bytes, and tried: name, loss, parameters, a text."""
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), style.config())
    loss = train(model, data.blocks(style.text(), tokenizer, LENGTH, steps * BATCH, seed=0), style.learning_rate)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    model.save_pretrained(out / name)
    (out / name / "README.md").unlink(missing_ok=True)
    settings = out / name / "adapter_config.json"
    contents = json.loads(settings.read_text()) | {"base_model_name_or_path": "demo"}
    settings.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    ids = tokenizer(style.prompt, return_tensors="pt").input_ids
    model = model.float().eval()
    text = tokenizer.decode(model.generate(input_ids=ids, max_new_tokens=TOKENS, do_sample=False)[0])
    return name, loss, count, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL / "adapters", help="folder to write")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each")
    parser.add_argument("--only", choices=STYLES, help="one of them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    report, rows = Report("train_demo_adapters"), []
    for name in [args.only] if args.only else STYLES:
        made = make(name, STYLES[name], tokenizer, args.steps, args.out)
        rows.append((made[0], f"{made[1]:.3f}", f"{made[2]:,}", made[3]))
        report.figure(name, {"loss": made[1], "parameters": made[2], "text": made[3]})
    print_table(("adapter", "loss, nats per byte", "parameters", "text"), rows)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
