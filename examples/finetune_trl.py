"""Supervised fine-tuning with TRL on an executor's base model. First: symbiosis-executor demo"""

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import symbiosis
from symbiosis.demo_data import base_text
from symbiosis.executor.load import DEMO_MODEL

model = symbiosis.from_executor()
lines = [line.upper() for line in base_text().splitlines() if len(line) > 40][:200]
trainer = SFTTrainer(
    model,
    args=SFTConfig(
        "adapters/trl", max_steps=5, max_length=128, learning_rate=1e-3, report_to=[], use_cpu=True, bf16=False
    ),
    train_dataset=Dataset.from_dict({"text": lines}),
    processing_class=AutoTokenizer.from_pretrained(DEMO_MODEL),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("adapters/trl")
