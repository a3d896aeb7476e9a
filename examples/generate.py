"""Generate text with an executor's base model; with an adapter, if one is named. First: symbiosis-executor demo"""

import sys
from pathlib import Path

from peft import PeftModel
from transformers import AutoTokenizer

import symbiosis

MODEL = Path(symbiosis.__file__).parent / "demo_model"
model = symbiosis.from_executor(priority="decode")
if len(sys.argv) > 1:
    model = PeftModel.from_pretrained(model, sys.argv[1])

tokenizer = AutoTokenizer.from_pretrained(MODEL)
prompt = tokenizer("The return value is", return_tensors="pt").to(model.device)
tokens = model.generate(**prompt, max_new_tokens=60, do_sample=False)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
print(symbiosis.stats(model))
