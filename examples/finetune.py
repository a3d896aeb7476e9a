"""Fine-tune a LoRA adapter with Trainer on an executor's base model. First: symbiosis-executor demo"""

import pydoc
from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, Trainer, TrainingArguments

import symbiosis

MODEL = Path(symbiosis.__file__).parent / "demo_model"
model = symbiosis.from_executor()  # or: symbiosis.wrap(AutoModelForCausalLM.from_pretrained(...))
print(symbiosis.report(model))
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"))

tokenizer = AutoTokenizer.from_pretrained(MODEL)
text = pydoc.plain(pydoc.render_doc("argparse")).upper()  # any text will do: this one shouts
ids = tokenizer.encode(text, add_special_tokens=False)
examples = [{"input_ids": ids[at : at + 128], "labels": ids[at : at + 128]} for at in range(0, len(ids) - 128, 128)]
arguments = TrainingArguments(
    "adapters/shouting", max_steps=60, learning_rate=1e-2, logging_steps=10, report_to=[], use_cpu=True
)
Trainer(model, arguments, train_dataset=examples, callbacks=[symbiosis.SymbiosisCallback()]).train()
model.save_pretrained("adapters/shouting")  # an ordinary PEFT adapter
