"""A plain program: a LightningModule. It knows nothing of Symbiosis. CHECKPOINT DATA OUT STEPS"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


class Tuned(lightning.LightningModule):
    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch, labels=batch["input_ids"]).loss
        print({"step": number, "loss": loss.item()}, flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


checkpoint, data, out, steps = sys.argv[1:]
lightning.seed_everything(1)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
texts = [json.loads(line)["text"] for line in Path(data).read_text().splitlines()]
loader = DataLoader(texts, batch_size=2, collate_fn=lambda two: tokenizer(two, return_tensors="pt", padding=True))
tuned = Tuned(checkpoint)
fit = lightning.Trainer(
    accelerator="cpu", max_steps=int(steps), logger=False, enable_checkpointing=False, enable_progress_bar=False
)
fit.fit(tuned, loader)
tuned.model.save_pretrained(out)
