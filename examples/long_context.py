"""Read a long text and go on with it, its keys and values in the host's memory: read on a GPU if there is one, written beside the memory
by the CPUs. The base stays where the executor has it. First: symbiosis-executor demo"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

import symbiosis

MODEL = Path(symbiosis.__file__).parent / "demo_model"
TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 450  # the demo model knows texts of up to 512
device = "cuda" if torch.cuda.is_available() else "cpu"
model = symbiosis.from_executor(priority="decode", device=device).eval()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
text = " ".join(path.read_text() for path in sorted(Path(symbiosis.__file__).parent.glob("*.py")))
prompt = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS].to(device)

cache = symbiosis.offload_cache(model)
begun = time.perf_counter()
read = model.generate(prompt, past_key_values=cache, max_new_tokens=1, do_sample=False, prefill_chunk_size=4096)
print(f"{prompt.shape[1]} tokens read in {time.perf_counter() - begun:.1f} s")
begun = time.perf_counter()
written = model.generate(read, past_key_values=cache, max_new_tokens=40, do_sample=False)  # goes on from the cache
print(tokenizer.decode(written[0, prompt.shape[1] :], skip_special_tokens=True))
print(
    f"{40 / (time.perf_counter() - begun):.0f} tokens/s with a context of {cache.get_seq_length()} tokens in the host's memory"
)
