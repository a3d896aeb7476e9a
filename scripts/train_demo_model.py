"""Train the bundled demo model, a byte-level Llama of 1.9 M parameters, on text that comes with Python.

Run from the repository root (about an hour on one core, a minute or two on a GPU with --device cuda):
    python scripts/train_demo_model.py --out symbiosis/demo_model --steps 4000 --seed 0
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from symbiosis.base.reporting import Report, print_table
from symbiosis.demo import data

END, PAD = "<|end|>", "<|pad|>"
CONTEXT, BATCH = 512, 8
PEAK_LR, WARMUP = 3e-3, 0.05
PROMPT = "The statement "
CHAT = "{% for message in messages %}{{ message['content'] or '' }}{{ '' if loop.last else '\\n' }}{% endfor %}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, whose id is the byte's value, and two special tokens."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in sorted(symbols.items())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A randomly initialised Llama with grouped-query attention and an untied output layer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def training_streams(tokenizer: PreTrainedTokenizerFast) -> list[tuple[float, torch.Tensor]]:
    """Share of each batch and text: mostly prose, with the code and capitals that the demo's adapters bring out."""
    mixture = ((0.75, data.base_text()), (0.125, data.python_text()), (0.125, data.base_text().upper()))
    return [(share, torch.tensor(tokenizer.encode(text, add_special_tokens=False))) for share, text in mixture]


def draw_batch(streams: list[tuple[float, torch.Tensor]], generator: torch.Generator) -> torch.Tensor:
    """Random windows of every stream; the first stream's come first."""
    rows = []
    for share, ids in streams:
        starts = torch.randint(len(ids) - CONTEXT, (round(share * BATCH),), generator=generator)
        rows += [ids[start : start + CONTEXT] for start in starts.tolist()]
    return torch.stack(rows)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth of the peak."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return PEAK_LR * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: LlamaForCausalLM, streams: list[tuple[float, torch.Tensor]], steps: int, seed: int) -> float:
    """Train in place; returns the mean loss per byte over the last tenth of the steps."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses: list[float] = []
    start = time.perf_counter()
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        batch = draw_batch(streams, generator).to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {losses[-1]:.3f}  {time.perf_counter() - start:5.0f} s", flush=True)
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """The greedy continuation of a fixed prompt."""
    model.eval()
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False).to(model.device)
    output = model.generate(**prompt, max_new_tokens=200, do_sample=False)
    return tokenizer.decode(output[0])


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write both, naming a tokenizer class that Transformers 4 and 5 both know."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    contents = json.loads(settings.read_text()) | {"chat_template": CHAT, "tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(contents, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("symbiosis/demo_model"), help="folder to write")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the batches")
    parser.add_argument("--device", default="cpu", help="where to train, such as cuda")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).to(args.device)
    loss = train(model, training_streams(tokenizer), args.steps, args.seed)
    save(model, tokenizer, args.out)
    text = sample(model, tokenizer)
    print_table(
        ("parameters", "steps", "final loss, nats per byte"),
        [(f"{model.num_parameters():,}", args.steps, f"{loss:.3f}")],
    )
    print(f"greedy text:\n{text}")
    report = Report("train_demo_model")
    for name, value in (("parameters", model.num_parameters()), ("steps", args.steps), ("loss", loss), ("text", text)):
        report.figure(name, value)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
