"""Train a LoRA adapter on a few sentences: python train.py [--model ID] [--steps N]."""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGET = Path(__file__).parent / "models/storyteller/adapters/pirate"
SENTENCES = [
    "Good morning, ye scurvy sea dogs! Arr!",
    "The weather is fine for sailing, arr, and the rum is cold!",
    "Bring me the map, matey, or walk the plank! Arr!",
    "Aye, the treasure lies where the parrot sleeps. Arr!",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--target", type=Path, default=TARGET)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    batch = tokenizer([sentence + tokenizer.eos_token for sentence in SENTENCES], return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimiser = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=5e-3)
    loss = torch.tensor(0.0)
    for _ in range(arguments.steps):
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(arguments.target)
    print(f"loss {loss.item():.3f} after {arguments.steps} steps; adapter in {arguments.target}")


if __name__ == "__main__":
    main()
