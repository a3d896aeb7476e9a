"""A plain program: transformers' Trainer and a LoRA of PEFT's. It knows nothing of Symbiosis. CHECKPOINT DATA OUT STEPS"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

checkpoint, data, out, steps = sys.argv[1:]
set_seed(1)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
texts = load_dataset("json", data_files=data, split="train")
tokens = texts.map(lambda row: tokenizer(row["text"]), remove_columns=["text"])
arguments = TrainingArguments(
    out, max_steps=int(steps), per_device_train_batch_size=2, logging_steps=1, save_steps=2, learning_rate=1e-3,
    report_to="none", disable_tqdm=True, seed=1,
)  # fmt: skip
trainer = Trainer(model, arguments, DataCollatorForLanguageModeling(tokenizer, mlm=False), tokens)
trainer.train()
model.save_pretrained(out)
