"""A plain program: a loop of one's own under accelerate. It knows nothing of Symbiosis. CHECKPOINT DATA OUT STEPS"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

checkpoint, data, out, steps = sys.argv[1:]
set_seed(1)
accelerator = Accelerator(cpu=True)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
texts = [json.loads(line)["text"] for line in Path(data).read_text().splitlines()]
loader = DataLoader(texts, batch_size=2, collate_fn=lambda two: tokenizer(two, return_tensors="pt", padding=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in zip(range(int(steps)), loader, strict=False):
    loss = model(**batch, labels=batch["input_ids"]).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print({"step": step, "loss": loss.item()}, flush=True)
accelerator.unwrap_model(model).save_pretrained(out, is_main_process=accelerator.is_main_process)
accelerator.end_training()
