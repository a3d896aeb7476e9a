"""Supervised fine-tuning with TRL on an executor's base model. First: symbiosis-executor demo"""

import pydoc
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import symbiosis

MODEL = Path(symbiosis.__file__).parent / "demo_model"
model = symbiosis.from_executor()
text = pydoc.plain(pydoc.render_doc("argparse")).upper()  # any text will do: this one shouts
lines = [line for line in text.splitlines() if len(line) > 40][:200]
trainer = SFTTrainer(
    model,
    args=SFTConfig(
        "adapters/trl", max_steps=5, max_length=128, learning_rate=1e-3, report_to=[], use_cpu=True, bf16=False
    ),
    train_dataset=Dataset.from_dict({"text": lines}),
    processing_class=AutoTokenizer.from_pretrained(MODEL),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("adapters/trl")
