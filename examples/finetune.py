"""Fine-tune a LoRA adapter with Trainer on an executor's base model. First: symbiosis-executor demo"""

from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, Trainer, TrainingArguments

import symbiosis
from symbiosis.demo_data import blocks, shouting_text
from symbiosis.executor.load import DEMO_MODEL

model = symbiosis.from_executor()  # or: symbiosis.wrap(AutoModelForCausalLM.from_pretrained(...))
print(symbiosis.report(model))
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"))

tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
examples = [
    {"input_ids": ids, "labels": ids} for ids in blocks(shouting_text(), tokenizer, length=128, count=160, seed=0)
]
arguments = TrainingArguments(
    "adapters/shouting", max_steps=60, learning_rate=1e-2, logging_steps=10, report_to=[], use_cpu=True
)
Trainer(model, arguments, train_dataset=examples, callbacks=[symbiosis.SymbiosisCallback()]).train()
model.save_pretrained("adapters/shouting")  # an ordinary PEFT adapter
