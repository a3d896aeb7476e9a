"""Generate text with each token one CUDA graph, its calls included; without a GPU by the same loop as it stands. First:
symbiosis-executor demo"""

import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, StaticCache

import symbiosis

MODEL = Path(symbiosis.__file__).parent / "demo_model"
NEW_TOKENS = 60
device = "cuda" if torch.cuda.is_available() else "cpu"
model = symbiosis.from_executor(priority="decode", device=device).eval()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
prompt = tokenizer("The return value is", return_tensors="pt").input_ids.to(device)
length = prompt.shape[1]
cache = StaticCache(config=model.config, max_cache_len=length + NEW_TOKENS)


@torch.no_grad()
def next_token(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True).logits
    return logits[:, -1:].argmax(-1)


step = symbiosis.capture(next_token) if device == "cuda" else next_token
text = [next_token(prompt, torch.arange(length, device=device)[None])]
begun = time.perf_counter()
for position in range(length, length + NEW_TOKENS - 1):
    token = step(text[-1], torch.tensor([[position]], device=device))
    text.append(token.clone())  # what a graph returns is valid until its next call
tokens = torch.cat([prompt, *text], dim=1)[0].tolist()
print(tokenizer.decode(tokens, skip_special_tokens=True))
print(f"{len(text) / (time.perf_counter() - begun):.0f} tokens/s, the capturing included")
