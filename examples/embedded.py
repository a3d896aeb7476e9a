"""Executor and two clients in one process: one copy of the base model, two adapters. No daemon needed."""

import torch
from peft import IA3Config, LoraConfig, get_peft_model

import symbiosis

with symbiosis.Executor("demo") as executor:
    first = get_peft_model(symbiosis.from_executor(executor.endpoint), LoraConfig(target_modules=["q_proj", "v_proj"]))
    second = get_peft_model(
        symbiosis.from_executor(executor.endpoint),
        IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    )
    ids = torch.randint(0, 256, (2, 32))
    for client in (first, second):
        loss = client(input_ids=ids, labels=ids).loss
        loss.backward()
        print(f"{client.peft_config['default'].peft_type.value}: loss {loss.item():.3f}, {symbiosis.stats(client)}")
