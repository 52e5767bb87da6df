"""Dense objectives through the trainer: the loss and its gradient against whole logits, teachers, resumes, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trl_opd import DistillationWarning, OnPolicyDistillationTrainer, ScoredBatch
from trl_opd.divergence import Divergence, compare_

from .helpers import lora, losses, make_dataset, make_model, make_trainer, save_model, weights
from .test_errors import assert_error

DENSE = ["topk", "full"]


class Recording(OnPolicyDistillationTrainer):
    """Keeps the gradients of each micro-batch with the batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.updates: list[tuple[ScoredBatch, dict[str, Tensor]]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        grads = {n: p.grad.detach().clone() for n, p in self.student().named_parameters() if p.grad is not None}
        self.updates.append((inputs, grads))
        return loss


def make(folder: Path, granularity: str, **more: Any) -> Any:
    settings: dict[str, Any] = {"cls": Recording, "kl_granularity": granularity, "kl_top_k": 3, "max_steps": 1}
    settings |= {"learning_rate": 0.0, "max_grad_norm": 0.0, "temperature": 0.8}
    return make_trainer(folder, **{**settings, **more})


def action_logits(model: PreTrainedModel, batch: ScoredBatch, temperature: float = 0.8) -> Tensor:
    """(N, V) of the tokenizer's ids, each row alone."""
    found = []
    for ids, real, mask in zip(batch.ids_BT, batch.attention_mask_BT, batch.mask_BT, strict=True):
        logits = model(ids[real][None]).logits[0, :-1][mask[real][1:]]
        found.append(logits[:, :43] / temperature)
    return torch.cat(found)


def textbook(student: Tensor, teacher: Tensor, granularity: str, direction: str, beta: float = 0.5) -> Tensor:
    """(N,) divergences by autograd from whole logits."""
    p, q = student.log_softmax(-1), teacher.log_softmax(-1).detach()
    if granularity == "topk":
        top = p.detach().topk(3).indices

        def buckets(logps: Tensor) -> Tensor:
            kept = logps.gather(-1, top)
            rest = torch.ones_like(logps).scatter(-1, top, 0).bool()
            return torch.cat([kept, logps.masked_fill(~rest, -torch.inf).logsumexp(-1, keepdim=True)], dim=-1)

        p, q = buckets(p), buckets(q)
    if direction == "reverse":
        return (p.exp() * (p - q)).sum(-1)
    if direction == "forward":
        return (q.exp() * (q - p)).sum(-1)
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    return beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1)


@pytest.mark.parametrize("granularity", DENSE)
@pytest.mark.parametrize("direction", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("groups", [1, 2])
def test_loss_and_gradient_are_those_of_whole_logits(granularity: str, direction: str, groups: int, tmp_path: Path) -> None:
    """With groups that share a row or not; the loss is a mean over action tokens, times kl_penalty_coef."""
    settings = {"kl_direction": direction, "num_generations": groups, "kl_penalty_coef": 0.7}
    trainer = make(tmp_path, granularity, **settings)
    trainer.train()
    ((batch, grads),) = trainer.updates
    student, teacher = make_model(0), make_model(1)
    divergence_N = textbook(action_logits(student, batch), action_logits(teacher, batch), granularity, direction)
    (0.7 * divergence_N.mean()).backward()
    log = trainer.state.log_history[0]
    assert log["divergence"] == pytest.approx(float(divergence_N.mean()), rel=1e-5)
    assert log["loss"] == pytest.approx(0.7 * float(divergence_N.mean()), rel=1e-4)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_discount_adds_the_sampled_kl_of_later_tokens_only(tmp_path: Path) -> None:
    """Advantages by hand: what follows a token, not its own KL, which the loss has."""
    trainer = make(tmp_path, "full", kl_discount_factor=0.5)
    trainer.train()
    ((batch, grads),) = trainer.updates
    student, teacher = make_model(0), make_model(1)
    divergence_N = textbook(action_logits(student, batch), action_logits(teacher, batch), "full", "reverse")
    expected, logps = [], []
    for ids, real, mask, s, q in zip(
        batch.ids_BT, batch.attention_mask_BT, batch.mask_BT, batch.sampled_logps_BT, batch.teacher_logps_BT, strict=True
    ):
        a = (q - s)[mask].tolist()
        expected += [sum(0.5 ** (j - i) * a[j] for j in range(i + 1, len(a))) for i in range(len(a))]
        own = (student(ids[real][None]).logits[0, :-1] / 0.8)[:, :43].log_softmax(-1)
        logps.append(own.gather(-1, ids[real][1:, None])[:, 0][mask[real][1:]])
    advantages = torch.tensor(expected)
    torch.testing.assert_close(batch.advantages_BT[batch.mask_BT], advantages, atol=1e-5, rtol=0)
    (divergence_N.mean() - (torch.cat(logps) * advantages).mean()).backward()
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("granularity", DENSE)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(granularity: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, granularity, teacher_model=make_model(0))
    with pytest.warns(DistillationWarning, match="scores as the student does"):
        trainer.train()
    log = trainer.state.log_history[0]
    assert log["divergence"] == log["loss"] == 0
    assert all(grad.abs().max() < 1e-7 for grad in trainer.updates[0][1].values())


@pytest.mark.parametrize("granularity", DENSE)
@pytest.mark.parametrize("parts", [None, 20])
def test_each_row_is_compared_with_its_own_teacher(granularity: str, parts: int | None, tmp_path: Path) -> None:
    """Two teachers of different widths; in one part and in several."""
    wide = make_model(2, hidden_size=24, intermediate_size=40)
    teachers = {"x": make_model(1), "y": wide}
    data = {"x": make_dataset(8), "y": make_dataset(8)}
    trainer = make(tmp_path, granularity, teacher_model=teachers, train_dataset=data, max_tokens_per_micro_batch=parts)
    trainer.train()
    ((batch, grads),) = trainer.updates
    student = make_model(0)
    divergences = []
    for number in range(len(batch)):
        own = batch.part([(number,)])
        model = [make_model(1), wide][int(batch.states.teacher_B[number])]
        divergences.append(textbook(action_logits(student, own), action_logits(model, own), granularity, "reverse"))
    assert len(set(batch.states.teacher_B.tolist())) == 2
    torch.cat(divergences).mean().backward()
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_tokens_that_the_student_did_not_sample_have_no_divergence(tmp_path: Path) -> None:
    """What a user's loop put between the student's turns; lengths of turns differ."""

    def loop(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[5 + (7 * i + t) % 30 for t in range(4 + i % 3)] for i in range(len(prompts))]
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": ids,
            "env_mask": [[1, 0, *[1] * (len(row) - 2)] for row in ids],
            "logprobs": None,
        }

    trainer = make(tmp_path, "full", rollout_func=loop)
    trainer.train()
    ((batch, grads),) = trainer.updates
    student = make_model(0)
    divergence_N = textbook(action_logits(student, batch), action_logits(make_model(1), batch), "full", "reverse")
    divergence_N.mean().backward()
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("teacher", ["base", "offloaded", "privileged"])
def test_other_teachers_in_the_process(teacher: str, tmp_path: Path) -> None:
    """The student's base; weights that come for scoring only; a prompt of the teacher's own, longer than the student's."""
    more: dict[str, Any] = {"teacher_model": make_model(1)}
    if teacher == "base":
        more = {"teacher_model": "base", "peft_config": lora(init_lora_weights=False)}
    if teacher == "offloaded":
        more = {"teacher_model": save_model(tmp_path / "teacher", make_model(1)), "teacher_offload": True}
    data = make_dataset(8)
    if teacher == "privileged":
        data = make_dataset(8, teacher_prompt=[f"the answer is {i} {prompt}" for i, prompt in enumerate(data["prompt"])])
    trainer = make(tmp_path, "full", train_dataset=data, **more)
    trainer.train()
    ((batch, _),) = trainer.updates
    model = make_model(0) if teacher == "base" else make_model(1)
    seen = []
    for row, states in enumerate(batch.states.by_sequence):
        prompt = batch.ids_BT[row][: int(batch.mask_BT[row].int().argmax())]
        completion = batch.ids_BT[row][batch.mask_BT[row]]
        if teacher == "privileged":
            text = trainer.processing_class.decode(prompt)
            number = next(i for i, p in enumerate(data["prompt"]) if p == text.replace(" ", ""))
            prompt = torch.tensor(trainer.processing_class(data["teacher_prompt"][number])["input_ids"])
        ids = torch.cat([prompt, completion])[None]
        hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
        seen.append(float((hidden - states).abs().max()))
    assert len(seen) == len(batch) and max(seen) < 1e-5


def test_a_rollout_that_was_half_used_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The teachers' hidden states are in the checkpoint."""
    settings = {"num_substeps": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-2}
    whole = make(tmp_path, "full", **settings)
    whole.train()
    again = make(tmp_path, "full", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(again) == losses(whole)
    assert all(torch.equal(one, weights(whole.model)[name]) for name, one in weights(again.model).items())


@pytest.mark.parametrize("granularity", ["sampled", *DENSE])
def test_it_learns(granularity: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, granularity, learning_rate=1e-2, max_steps=25, per_device_train_batch_size=16, max_grad_norm=1.0)
    trainer.train()
    kl = [entry["teacher_kl"] for entry in trainer.state.log_history if "teacher_kl" in entry]
    assert sum(kl[-5:]) < 0.8 * sum(kl[:5])


def test_a_head_that_is_adapted_is_told(tmp_path: Path) -> None:
    trainer = make(tmp_path, "full", teacher_model="base", peft_config=lora(target_modules=["lm_head", "q_proj"]))
    assert_error(trainer.train, "is trained or adapted", "kl_granularity='sampled'")


def test_teachers_on_servers_are_told(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    assert_error(lambda: make(tmp_path, "topk", teacher_model=url), "'topk'", url, "the log-prob of one", "'sampled'")


def test_a_teacher_that_rules_a_token_out_is_told(tmp_path: Path) -> None:
    teacher = make_model(1)
    teacher.lm_head = torch.nn.Linear(16, 43)
    with torch.no_grad():
        teacher.lm_head.bias.zero_()[7] = -torch.inf
    trainer = make(tmp_path, "full", teacher_model=teacher)
    with pytest.raises(ValueError, match=r"(?i)infinite|not finite|-inf"):
        trainer.train()


def test_the_reference_here_is_that_of_the_functions() -> None:
    """`textbook` against `compare_`, which has tests of its own."""
    torch.manual_seed(0)
    student, teacher = torch.randn(5, 43), torch.randn(5, 43)
    for granularity in DENSE:
        for direction in ("reverse", "forward", "jsd"):
            divergence = Divergence(granularity, direction, 0.5, 3)
            ids = torch.zeros(5, dtype=torch.long)
            found = compare_(student.clone(), teacher.clone(), ids, divergence, entropy=False, logp_slopes=False)
            torch.testing.assert_close(found.divergence_C, textbook(student, teacher, granularity, direction))


@pytest.mark.parametrize("step", ["compute_advantages", "compute_policy_loss"])
def test_a_subclass_with_a_loss_of_its_own_has_log_probs_with_a_gradient(tmp_path: Path, step: str) -> None:
    """Without rewards and discount the trainer's own policy loss is zero; a subclass's need not be."""

    def advantages(self: Any, logps: Any, teacher_logps: Any, mask: Any, rewards: Any) -> Any:
        return mask.float()

    def loss(self: Any, logps: Any, batch: Any, num_items: Any) -> Any:
        return -logps.sum(), {}

    own: Any = type("Own", (OnPolicyDistillationTrainer,), {step: {"compute_advantages": advantages}.get(step, loss)})
    moved = []
    for cls in (OnPolicyDistillationTrainer, own):
        trainer = make_trainer(tmp_path, cls=cls, kl_granularity="full", max_steps=1)
        trainer.train()
        moved.append(weights(trainer.model))
    assert any(not torch.equal(moved[0][name], moved[1][name]) for name in moved[0])
