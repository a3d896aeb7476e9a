"""RL without moving a weight: GRPO by hand, on one base that trains and samples.

    python examples/rl.py [MODEL] [STEPS]

The reward is the share of vowels. The sampler's adapter is the trainer's: `publish` copies it on the device.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoTokenizer

import symbiosis


def main(model: str, steps: int) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(
        Path(symbiosis.__file__).parent / "demo_model" if model == "demo" else model
    )
    prompt, rewards = tokenizer("Once upon a time")["input_ids"], []
    with (
        symbiosis.Executor(model) as executor,
        symbiosis.serving.Engine(executor.endpoint, memory=1 << 26) as sampler,
        symbiosis.training.Engine(executor.endpoint) as trainer,
    ):
        run = trainer.create(LoraConfig(r=8, target_modules="all-linear"), seed=0)
        for step in range(steps):
            sampler.publish("policy", run)
            answers = [
                sampler.generate(prompt, adapter="policy", max_tokens=24, logprobs=0, seed=100 * step + n)
                for n in range(8)
            ]
            texts = [tokenizer.decode(answer.tokens) for answer in answers]
            reward = torch.tensor([sum(letter in "aeiou" for letter in text) / 24 for text in texts])
            advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
            data = []
            for answer, a in zip(answers, advantage.tolist(), strict=True):
                tokens, n = [*prompt, *answer.tokens], len(answer.tokens)
                sampled = [0.0] * (len(prompt) - 1) + [token.logprob for token in answer.logprobs]
                weights = [0.0] * (len(prompt) - 1) + [a / (8 * n)] * n
                data.append(
                    symbiosis.training.Datum(tokens[:-1], targets=tokens[1:], logprobs=sampled, advantages=weights)
                )
            run.forward_backward(data, "importance_sampling")
            run.step(lr=0.02, max_grad_norm=1.0).result()
            rewards.append(reward.mean().item())
            print(f"step {step}: version {answers[0].model_version}, reward {rewards[-1]:.3f}")
    return rewards


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo", int(sys.argv[2]) if len(sys.argv) > 2 else 12)
