"""What one step holds in memory on each process, counted from the tensors, and the peak of the whole process.

    python benchmarks/memory.py models
    accelerate launch --num_processes 1 benchmarks/memory.py full
    accelerate launch --config_file trl_opd/accelerate_configs/fsdp2.yaml benchmarks/memory.py full

Student and teacher are random Llamas of 230 MB each in fp32, which `models` makes. `full` trains all weights; `lora` an
adapter beside a teacher; `base` an adapter whose base, switched back, is the teacher. Prints one JSON object for each process.

Without GPUs, FSDP runs as in the tests: put tests/fsdp_on_cpu.py before the script's name, and --mixed_precision no.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from trl_opd import OnPolicyDistillationConfig, OnPolicyDistillationTrainer

MODEL = LlamaConfig(
    hidden_size=640,
    intermediate_size=2560,
    num_hidden_layers=8,
    num_attention_heads=10,
    num_key_value_heads=10,
    vocab_size=4096,
    max_position_embeddings=256,
    eos_token_id=1,
    pad_token_id=0,
    tie_word_embeddings=False,
)
STEPS = 3


def held(tensors: Any) -> int:
    """Bytes of tensors on this process; of a sharded one, its shard."""
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors if isinstance(tensor, Tensor)]
    return sum(part.numel() * part.element_size() for part in parts)


def resident(name: str) -> int:
    """Bytes of this process's memory: VmRSS (now) or VmHWM (the most so far)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


class Count(TrainerCallback):
    """Counts at the moment at which all is there: gradients before the step, optimizer state after it."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Before each optimizer step."""
        self.bytes["gradients"] = held(parameter.grad for parameter in model.parameters())

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any, model: nn.Module, **_: Any) -> None:
        """After it."""
        self.bytes["optimizer"] = held(value for entry in optimizer.state.values() for value in entry.values())
        self.bytes["student"] = held(model.parameters())


def save_models(folder: Path) -> None:
    """Student, teacher and their tokenizer."""
    words = {f"t{i}": i for i in range(MODEL.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="t0", eos_token="t1")
    for seed, name in enumerate(("student", "teacher")):
        torch.manual_seed(seed)
        LlamaForCausalLM(MODEL).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def main() -> None:
    """Trains a few steps and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["models", "full", "lora", "base"])
    parser.add_argument("--models", type=Path, help="where student and teacher are, or are put")
    parser.add_argument("--batch", type=int, default=4, help="completions a step, over all processes")
    parser.add_argument("--cpu", action="store_true", help="use no GPU (several processes: DDP)")
    parser.add_argument("--each_token", action="store_true", help="FSDP: gather_for_generation=False")
    options = parser.parse_args()
    folder = options.models or Path(tempfile.gettempdir()) / "trl_opd-memory"
    if options.kind == "models":
        save_models(folder)
        return
    args = OnPolicyDistillationConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=options.batch // int(os.environ.get("WORLD_SIZE", "1")),
        max_completion_length=16,
        max_steps=STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=options.cpu,
        gather_for_generation=not options.each_token,
        activation_checkpointing=False,
        bf16=False,
    )
    before = resident("VmRSS")
    count, start = Count(), time.perf_counter()
    trainer = OnPolicyDistillationTrainer(
        model=str(folder / "student"),
        teacher_model="base" if options.kind == "base" else str(folder / "teacher"),
        args=args,
        train_dataset=datasets.Dataset.from_list([{"prompt": f"t{i} t{i + 1} t{i + 2}"} for i in range(10, 10 + 16)]),
        callbacks=[count],
        peft_config=None if options.kind == "full" else LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    teacher = getattr(trainer.teacher, "model", None)
    figures = {
        "kind": options.kind,
        "wrapped": type(trainer.model_wrapped).__name__,
        "process": args.process_index,
        "processes": args.world_size,
        **count.bytes,
        "teacher": 0 if teacher is None else held(teacher.parameters()),
        "peak_rss_above_imports": resident("VmHWM") - before,
        "seconds": round(time.perf_counter() - start, 1),
        "rollout_seconds": sorted(entry["time/rollout"] for entry in trainer.state.log_history if "loss" in entry)[STEPS // 2],
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
