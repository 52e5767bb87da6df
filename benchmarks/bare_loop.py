"""The floor: on-policy distillation as a careful person would write it by hand, and nothing else.

Adapters merged while `generate` samples, a forward pass of the teacher, a forward and backward pass of the student, on padded
rows, with logits at the completions only. No metrics, no checks, no trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass
class BareLoop:
    """Trains `student`, a PeftModel.

    Args:
        student: Its adapter is trained.
        teacher: Frozen.
        tokenizer: Pads on the left.
        new_tokens: Given ids and mask of the prompts, (B, P) each, more arguments of `generate`, which decide on the lengths.
        micro_batch: Rows of a forward pass.
        phase: A context manager that times what is inside, under a name.
    """

    student: Any
    teacher: Any
    tokenizer: Any
    new_tokens: Callable[[Tensor, Tensor], dict[str, Any]]
    micro_batch: int
    phase: Phase

    def steps(self, batches: Iterator[list[str]], learning_rate: float) -> Iterator[int]:
        """An optimizer step on each batch of prompts; yields how many tokens it trained on."""
        parameters = [parameter for parameter in self.student.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), fused=True)
        self.student.train()
        for texts in batches:
            prompt = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
            with self.phase("generate"):
                ids_BT = self.sample(prompt)
            mask_BC = self.completion_mask(ids_BT[:, prompt["input_ids"].shape[1] :])
            attention_mask_BT = torch.cat([prompt["attention_mask"], mask_BC.long()], dim=1)
            parts = [tensor.split(self.micro_batch) for tensor in (ids_BT, attention_mask_BT, mask_BC)]
            for ids, attention, mask in zip(*parts, strict=True):
                with self.phase("teacher"), torch.no_grad():
                    teacher_logps = self.logps(self.teacher, ids, attention, mask)
                with self.phase("forward"):
                    logps = self.logps(self.student, ids, attention, mask)
                    advantages = teacher_logps - logps.detach()
                    ratio = (logps - logps.detach()).exp()
                    loss = -(ratio * advantages).sum() / mask_BC.sum()
                with self.phase("backward"):
                    loss.backward()
            with self.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            yield int(mask_BC.sum())

    def sample(self, prompt: Any) -> Tensor:
        """(B, T): prompts and completions, by the adapter merged into its base."""
        self.student.merge_adapter()
        more = self.new_tokens(prompt["input_ids"], prompt["attention_mask"])
        ids_BT = self.student.generate(**prompt, do_sample=True, top_k=0, **more)
        self.student.unmerge_adapter()
        return ids_BT

    def completion_mask(self, ids_BC: Tensor) -> Tensor:
        """(B, C): True up to the first stop token, which is included."""
        stops_BC = ids_BC == self.tokenizer.eos_token_id
        return stops_BC.cumsum(dim=1) - stops_BC.long() == 0

    @staticmethod
    def logps(model: Any, ids_BT: Tensor, attention_mask_BT: Tensor, mask_BC: Tensor) -> Tensor:
        """(N,) log-probs of the completions' tokens."""
        width = mask_BC.shape[1]
        output = model(input_ids=ids_BT, attention_mask=attention_mask_BT, use_cache=False, logits_to_keep=width + 1)
        logits_NV, ids_N = output.logits[:, :-1][mask_BC], ids_BT[:, -width:][mask_BC]
        return -torch.nn.functional.cross_entropy(logits_NV, ids_N, reduction="none")
