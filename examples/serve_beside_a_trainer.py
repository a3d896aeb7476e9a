"""Fine-tune an adapter on the executor of a running server, and publish it while it is trained: symbiosis serve demo, then this with the endpoint
that it printed. No second copy of the base model is loaded."""

import os
import sys

import openai
import peft
import torch

import symbiosis

if len(sys.argv) != 2:
    sys.exit(__doc__)
PROMPT = "The return value is"

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
base = symbiosis.from_executor(sys.argv[1])
model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear"))
data = torch.tensor([list(b"The return value is 42, as everybody knows. ")], device=base.device)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
for step in range(1, 61):
    loss = model(input_ids=data, labels=data).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        symbiosis.publish(model, "everybody", url)
        answer = client.completions.create(model="everybody", prompt=PROMPT, max_tokens=26, temperature=0)
        print(f"step {step}, loss {loss.item():.2f}: {PROMPT}{answer.choices[0].text}")
