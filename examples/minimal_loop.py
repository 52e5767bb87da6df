"""On-policy distillation without a Trainer: the whole algorithm on two screens, for reading.

    python examples/minimal_loop.py

A student that adds three-digit numbers right about half of the time learns from a teacher that nearly always does
(`addition.py`), in seconds on a CPU. It imports nothing of `trl_opd`: the tests hold the trainer against it step by step.

    prompts ─ write ─► completions ─ pack ─► Batch ─ token_logps ─► student's and teacher's log-probs of what was written
            ─ kl_advantages ─► advantages ─ policy_loss ─► loss ─ backward, AdamW ─► a better student, which writes again

How this differs from the textbook's policy gradient:
1. There is no reward, value function or baseline. The advantage of a token is log q - log p: how much likelier the teacher
   finds it than the student did. Every token gets its own verdict, where a reward gives the completion one.
2. The teacher writes nothing. One forward pass over the student's text scores all of its tokens.
3. A token answers for itself only (discount 0), not for what follows: a little bias, a third of the variance.
4. The loss is the mean over all tokens of the step, so that a token weighs the same in a short and in a long completion.

How `trl_opd` does it otherwise, with the same numbers:
5. Here rows are padded on the left up to the completion, as `generate` wants them, and positions are counted from the first
   real token. There rows are flush left.
6. Here the log-probs at the time of sampling cost another forward pass. There they are noted while sampling.
7. Here a step is one batch on one process. There are also micro-batches, processes, rewards, other losses, checkpoints.

Shapes: B sequences, T tokens of a padded row: padding, prompt, completion, padding. What stands at t belongs to token t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import addition
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

Ids = list[list[int]]


class Batch(NamedTuple):
    """Prompts with their completions."""

    ids_BT: Tensor
    real_BT: Tensor
    """True on prompt and completion."""
    action_BT: Tensor
    """True on the tokens that the student chose: the completion, its stop token included."""


class Update(NamedTuple):
    """One optimizer step."""

    batch: Batch
    sampled_logps_BT: Tensor
    teacher_logps_BT: Tensor
    advantages_BT: Tensor
    loss: float


@torch.no_grad()
def write(model: Any, prompts: Ids, *, stop: int, pad: int, longest: int, temperature: float) -> Ids:
    """Samples a completion for each prompt, up to and with the stop token."""
    width = max(len(prompt) for prompt in prompts)
    ids_BT = model.generate(
        input_ids=torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        do_sample=True,
        temperature=temperature,
        top_k=0,  # from the whole softmax, which is what is trained; `generate` would take the likeliest 50
        top_p=1.0,
        max_new_tokens=longest,
        eos_token_id=stop,
        pad_token_id=pad,
    )
    # by position, not by comparing with `pad`: pad and stop may be the same token, and the stop token is an action
    return [row[: row.index(stop) + 1] if stop in row else row for row in ids_BT[:, width:].tolist()]


def pack(prompts: Ids, completions: Ids, pad: int) -> Batch:
    """Pads so that all completions begin in the same column."""
    before, after = max(map(len, prompts)), max(map(len, completions))
    ids, real, action = [], [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = before - len(prompt), after - len(completion)
        ids.append([pad] * left + prompt + completion + [pad] * right)
        real.append([False] * left + [True] * (len(prompt) + len(completion)) + [False] * right)
        action.append([False] * before + [True] * len(completion) + [False] * right)
    return Batch(torch.tensor(ids), torch.tensor(real), torch.tensor(action))


def token_logps(model: Any, batch: Batch, temperature: float) -> Tensor:
    """log p(token t | tokens before t), nats."""
    positions_BT = (batch.real_BT.cumsum(dim=1) - 1).clamp(min=0)
    mask = batch.real_BT.long()
    outputs = model(input_ids=batch.ids_BT, attention_mask=mask, position_ids=positions_BT, use_cache=False)
    logps_BTV = (outputs.logits[:, :-1] / temperature).log_softmax(dim=-1)  # the logits at t - 1 are for token t
    logps_BT = logps_BTV.gather(-1, batch.ids_BT[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(logps_BT, (1, 0))  # no one predicts token 0


def kl_advantages(sampled_logps_BT: Tensor, teacher_logps_BT: Tensor, action_BT: Tensor, discount: float) -> Tensor:
    """The negative reverse KL of each action, and of those after it with weight discount, discount², ..."""
    advantages_BT = torch.where(action_BT, teacher_logps_BT - sampled_logps_BT, 0.0)
    for t in reversed(range(advantages_BT.shape[1] - 1)):
        advantages_BT[:, t] += discount * advantages_BT[:, t + 1]
    return torch.where(action_BT, advantages_BT, 0.0)


def policy_loss(logps_BT: Tensor, sampled_logps_BT: Tensor, advantages_BT: Tensor, action_BT: Tensor) -> Tensor:
    """Importance sampling: the mean of -r·A over all actions, r = p now / p when it was sampled (1 on the first update)."""
    ratio = (logps_BT[action_BT] - sampled_logps_BT[action_BT]).exp()
    return -(ratio * advantages_BT[action_BT]).mean()


def distill(
    student: Any,
    teacher: Any,
    prompts: Ids,
    *,
    write: Callable[[Any, Ids], Ids],
    pad: int,
    batch_size: int,
    learning_rate: float,
    temperature: float = 1.0,
    discount: float = 0.0,
    num_substeps: int = 1,
) -> Iterator[Update]:
    """Trains `student` on what it writes to `prompts`, each once; the learning rate falls linearly to 0.

    Args:
        write: (student, prompts) -> completions.
        num_substeps: Optimizer steps for each round of writing.
    """
    student.eval()  # no dropout: sampling and training must see one policy
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(prompts) // batch_size)

    for start in range(0, len(prompts), batch_size * num_substeps):
        rows = prompts[start : start + batch_size * num_substeps]
        batch = pack(rows, write(student, rows), pad)
        with torch.no_grad():  # all scores are from before the first update
            sampled_logps_BT = token_logps(student, batch, temperature)
            teacher_logps_BT = token_logps(teacher.eval(), batch, temperature)
        advantages_BT = kl_advantages(sampled_logps_BT, teacher_logps_BT, batch.action_BT, discount)

        for i in range(0, len(rows), batch_size):
            part = slice(i, i + batch_size)
            part_batch = Batch(*(tensor[part] for tensor in batch))
            logps_BT = token_logps(student, part_batch, temperature)
            loss = policy_loss(logps_BT, sampled_logps_BT[part], advantages_BT[part], part_batch.action_BT)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            yield Update(part_batch, sampled_logps_BT[part], teacher_logps_BT[part], advantages_BT[part], loss.item())


def main(num_steps: int = 80, batch_size: int = 128) -> None:
    """Distils the addition student, all of its weights."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(addition.FOLDER / "student")
    student, teacher = (AutoModelForCausalLM.from_pretrained(addition.FOLDER / name) for name in ("student", "teacher"))
    prompts = tokenizer(addition.train_prompts(num_steps * batch_size, seed=0)[:]["prompt"])["input_ids"]
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def sample(model: Any, prompts: Ids) -> Ids:
        return write(model, prompts, stop=stop, pad=pad, longest=addition.MAX_COMPLETION_LENGTH, temperature=1.0)

    def solved() -> str:
        test = addition.heldout(500)[:]
        return f"{addition.accuracy(addition.solve(student, tokenizer, test['prompt']), test['answer']):.0%} right"

    print("before:", solved())
    updates = distill(student, teacher, prompts, write=sample, pad=pad, batch_size=batch_size, learning_rate=3e-4)
    for step, update in enumerate(updates, start=1):
        if step == 1 or step % 10 == 0:
            action_BT = update.batch.action_BT
            kl = -(update.teacher_logps_BT - update.sampled_logps_BT)[action_BT].mean()
            print(f"step {step:3}  KL {kl:.3f} nats a token  {int(action_BT.sum())} tokens")
    print("after:", solved())


if __name__ == "__main__":
    main()
