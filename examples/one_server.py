"""One vLLM server does all: it serves the base, which is the teacher, and the student's adapter, which writes.

The student is SmolLM2-135M with an adapter that harms it; it learns back what its base can do, as one does after training that
cost a model some of its old skills. First the base, as a checkpoint that vLLM can read, and a server (in the environment that
`make vllm-env` makes, or with `vllm serve smollm2-base` and the same options on a GPU):

    python examples/one_server.py --save_base smollm2-base
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python -m vllm.entrypoints.openai.api_server --model smollm2-base \\
        --served-model-name base --dtype float32 --enable-lora --max-lora-rank 32 --max-loras 2 \\
        --lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj

    python examples/one_server.py --server http://localhost:8000
"""

from __future__ import annotations

import argparse

import torch
from heal_pruned import load_smollm2, questions
from peft import LoraConfig, get_peft_model
from torch import nn

from trl_opd import OnPolicyDistillationConfig, OnPolicyDistillationTrainer

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def harm(student: nn.Module, strength: float) -> None:
    """Makes a new adapter, which changes nothing, one that does."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=strength)


def main() -> None:
    """Saves the base for a server, or distils with one and prints the reverse KL at each step."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--save_base", metavar="FOLDER")
    options.add_argument("--server", metavar="URL", default="http://localhost:8000")
    options.add_argument("--max_steps", type=int, default=20)
    options.add_argument("--output_dir", default="recovered-smollm2")
    chosen = options.parse_args()

    model, tokenizer = load_smollm2()
    if chosen.save_base:
        model.save_pretrained(chosen.save_base)
        tokenizer.save_pretrained(chosen.save_base)
        return
    student = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules=LINEAR, task_type="CAUSAL_LM"))
    harm(student, strength=0.1)
    trainer = OnPolicyDistillationTrainer(
        model=student,
        teacher_model=f"{chosen.server}#base",
        args=OnPolicyDistillationConfig(
            output_dir=chosen.output_dir,
            rollout_engine="vllm",
            vllm_server_base_url=[chosen.server],
            max_steps=chosen.max_steps,
            per_device_train_batch_size=16,
            max_completion_length=40,
            learning_rate=5e-4,
            activation_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=questions()[0],
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    kls = [entry["teacher_kl"] for entry in trainer.state.log_history if "teacher_kl" in entry]
    print(
        f"reverse KL to the base, nats a token: {' -> '.join(f'{kl:.3f}' for kl in kls)} ({kls[-1] / kls[0]:.2f} of the start)"
    )
    print(f"adapter saved in {chosen.output_dir}")


if __name__ == "__main__":
    main()
