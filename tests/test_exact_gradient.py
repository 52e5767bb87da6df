"""The trainer's gradient against exact ones, of policies small enough to sum over every completion they can write.

Student and teacher are tables of logits, one row for each prefix (3 tokens, of which one stops; 4 steps; float64), wrapped so
that the real trainer, its engine and its teacher work on them. Expectations are sums over all 31 completions of a prompt,
weighted by their probabilities; the reference gradients come from autograd through those sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

from trl_opd import OnPolicyDistillationTrainer
from trl_opd.advantage import kl_advantages
from trl_opd.batch import Completion, Rollout, ScoredBatch
from trl_opd.logprobs import token_logps
from trl_opd.loss import LOSS_FN_DEFAULTS, REDUCTIONS, policy_loss

from .helpers import lora, losses, make_dataset, make_model, make_trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore::trl_opd.checks.DistillationWarning")

V, T, STOP = 3, 4, 0
PROMPTS = {"a": [1], "ba": [2, 1]}
LONGEST = 2 + T
NUM_PREFIXES = sum(V**length for length in range(LONGEST + 1))


# ---- Policies that are tables, and all that they can write


def prefix_number(ids: list[int]) -> int:
    """The row of a prefix: all prefixes, shorter ones first, in order."""
    return sum(V**length for length in range(len(ids))) + sum(i * V**place for place, i in enumerate(reversed(ids)))


class TableConfig(PreTrainedConfig):
    model_type = "table"


class TableModel(PreTrainedModel, GenerationMixin):
    """A language model whose next-token logits are a row of a table, looked up by the whole prefix."""

    config_class = TableConfig

    def __init__(self, config: PreTrainedConfig, table: Tensor) -> None:
        super().__init__(config)
        self.table = nn.Parameter(table)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, use_cache: bool = False, **_: Any) -> CausalLMOutput:
        """Masked positions are no part of the prefix. `generate` gives no mask where nothing is masked."""
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        number_B, numbers = input_ids.new_zeros(len(input_ids)), []
        for ids_B, real_B in zip(input_ids.T, attention_mask.T, strict=True):
            number_B = torch.where(real_B.bool(), V * number_B + ids_B + 1, number_B)
            numbers.append(number_B)
        # what follows the longest prefix is never read
        return CausalLMOutput(logits=self.table[torch.stack(numbers, dim=1).clamp(max=NUM_PREFIXES - 1)])  # type: ignore[arg-type]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore
        return {"input_ids": input_ids, "attention_mask": kwargs["attention_mask"]}


def table_model(seed: int, scale: float = 0.6) -> TableModel:
    generator = torch.Generator().manual_seed(seed)
    table = scale * torch.randn(NUM_PREFIXES, V, generator=generator, dtype=torch.float64)
    settings: dict[str, Any] = {"vocab_size": V, "eos_token_id": STOP, "pad_token_id": STOP, "bos_token_id": None}
    return TableModel(TableConfig(**settings), table).eval()


def table_tokenizer() -> PreTrainedTokenizerFast:
    """`.` (stop, and pad), `a`, `b`."""
    backend = Tokenizer(models.WordLevel({".": 0, "a": 1, "b": 2}))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=".", pad_token=".", clean_up_tokenization_spaces=False)


def all_completions(start: tuple[int, ...] = (), longest: int = T) -> Iterator[list[int]]:
    """Each completion that ends with the stop token or is cut at `longest` tokens."""
    for token in range(V):
        if token == STOP or len(start) + 1 == longest:
            yield [*start, token]
        else:
            yield from all_completions((*start, token), longest)


def all_prefixes() -> list[list[int]]:
    """Each beginning of a completion after which another token is drawn."""
    return sorted({tuple(y[:t]) for y in all_completions() for t in range(len(y))})  # type: ignore[return-value]


def chain(table: Tensor, prompt: list[int], completion: list[int] | tuple[int, ...], temperature: float = 1.0) -> Tensor:
    """(len(completion),) log-probs of a completion's tokens, straight from the table."""
    prefixes = [[*prompt, *completion[:t]] for t in range(len(completion))]
    rows = table[[prefix_number(prefix) for prefix in prefixes]] / temperature
    return rows.log_softmax(dim=-1)[range(len(completion)), list(completion)]


def step_kl(p_table: Tensor, q_table: Tensor, prefix: list[int], temperature: float = 1.0) -> Tensor:
    """KL(p‖q) of the next token after a prefix (prompt included)."""
    row = prefix_number(prefix)
    p, q = ((table[row] / temperature).log_softmax(dim=-1) for table in (p_table, q_table))
    return (p.exp() * (p - q)).sum()


STUDENT, TEACHER = table_model(0), table_model(1)


def expected(values: list[Tensor], prompt: list[int], temperature: float = 1.0) -> Tensor:
    """E over the student's completions, in the order of `all_completions`, of values that are given for each."""
    logps = [chain(STUDENT.table.detach(), prompt, y, temperature).sum() for y in all_completions()]
    return sum(logp.exp() * value for logp, value in zip(logps, values, strict=True))  # type: ignore[return-value]


def gradient_of(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Gradient of a function of the student's table, at the student."""
    table = STUDENT.table.detach().clone().requires_grad_()
    return torch.autograd.grad(function(table), table)[0]


@cache
def sequence_kl_gradient(prompt: str, temperature: float = 1.0) -> Tensor:
    """Of KL(p‖q) between whole completions."""
    q_table, ids = TEACHER.table.detach(), PROMPTS[prompt]

    def kl(table: Tensor) -> Tensor:
        p = torch.stack([chain(table, ids, y, temperature).sum() for y in all_completions()])
        q = torch.stack([chain(q_table, ids, y, temperature).sum() for y in all_completions()])
        return (p.exp() * (p - q)).sum()

    return gradient_of(kl)


@cache
def held_prefixes_gradient(prompt: str, temperature: float = 1.0) -> Tensor:
    """Of the sum over steps of KL_t, the distribution of prefixes held at the student's."""
    ids, q_table = PROMPTS[prompt], TEACHER.table.detach()

    def kl(table: Tensor) -> Tensor:
        reach = [chain(table, ids, prefix, temperature).sum().exp().detach() for prefix in all_prefixes()]
        kls = [step_kl(table, q_table, [*ids, *prefix], temperature) for prefix in all_prefixes()]
        return torch.stack([weight * value for weight, value in zip(reach, kls, strict=True)]).sum()

    return gradient_of(kl)


REFERENCE = {0.0: held_prefixes_gradient, 1.0: sequence_kl_gradient}
"""The gradient that each discount stands for."""


def close(found: Tensor, reference: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, reference, rtol=0, atol=tolerance)


def test_the_reference_is_a_distribution_and_its_gradients_are_not_trivial() -> None:
    assert len(list(all_completions())) == 31
    assert len(all_prefixes()) == 15
    for prompt, ids in PROMPTS.items():
        assert expected([torch.tensor(1.0)] * 31, ids).item() == pytest.approx(1, abs=1e-12)
        one, other = sequence_kl_gradient(prompt), held_prefixes_gradient(prompt)
        assert (one != 0).sum() == 15 * V
        assert (one - other).abs().max() > 0.1


def test_the_table_model_gives_the_chain_probabilities_through_the_package() -> None:
    for ids in PROMPTS.values():
        for y in all_completions():
            row = torch.tensor([ids + y])
            found = token_logps(STUDENT, row, torch.ones_like(row))[0, len(ids) :]
            close(found, chain(STUDENT.table, ids, y))


def test_the_kl_of_completions_is_the_expected_sum_of_the_kls_of_steps() -> None:
    """Chain rule."""
    for ids in PROMPTS.values():
        p_table, q_table = STUDENT.table.detach(), TEACHER.table.detach()
        log_ratios = [chain(p_table, ids, y).sum() - chain(q_table, ids, y).sum() for y in all_completions()]
        sums = [torch.stack([step_kl(p_table, q_table, ids + y[:t]) for t in range(len(y))]).sum() for y in all_completions()]
        close(expected(log_ratios, ids), expected(sums, ids))
        assert expected(sums, ids) > 0.1


# ---- The pure functions


def sampled_loss(
    table: Tensor, ids: list[int], y: list[int], discount: float = 0.0, loss_fn: str = "importance_sampling"
) -> Tensor:
    """The policy loss of one completion, summed over its tokens, by `kl_advantages` and `policy_loss`."""
    logps = chain(table, ids, y)[None]
    mask = torch.ones_like(logps)
    teacher_logps = chain(TEACHER.table.detach(), ids, y)[None]
    advantages = kl_advantages(logps, teacher_logps, mask, discount=discount)
    return policy_loss(logps, logps.detach(), advantages, mask, reduction="sum", loss_fn=loss_fn)[0]


def gradients(loss: Callable[[Tensor, list[int], list[int]], Tensor], ids: list[int]) -> list[Tensor]:
    """Gradient of a loss of (table, prompt, completion) for each completion."""
    return [gradient_of(lambda table, y=y: loss(table, ids, y)) for y in all_completions()]


@pytest.mark.parametrize("loss_fn", list(LOSS_FN_DEFAULTS))
@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_the_expected_gradient_of_every_loss_is_exact(discount: float, loss_fn: str) -> None:
    """Discount 1: the gradient of the KL of sequences; 0: of the sum of KL_t with the visited prefixes held."""
    for prompt, ids in PROMPTS.items():
        found = expected(gradients(lambda *a: sampled_loss(*a, discount=discount, loss_fn=loss_fn), ids), ids)
        close(found, REFERENCE[discount](prompt))


def full_loss(table: Tensor, ids: list[int], y: list[int]) -> Tensor:
    """The exact KL of each step of a completion, differentiated."""
    return torch.stack([step_kl(table, TEACHER.table.detach(), ids + y[:t]) for t in range(len(y))]).sum()


def test_the_full_vocabulary_loss_has_the_same_expected_gradient_as_discount_0() -> None:
    for prompt, ids in PROMPTS.items():
        close(expected(gradients(full_loss, ids), ids), held_prefixes_gradient(prompt))


def test_the_k1_estimate_differentiated_as_a_loss_teaches_nothing() -> None:
    """Why the KL is an advantage: the gradient of E[log p - log q] under fixed samples is zero."""

    def k1(table: Tensor, ids: list[int], y: list[int]) -> Tensor:
        return (chain(table, ids, y) - chain(TEACHER.table.detach(), ids, y)).sum()

    for ids in PROMPTS.values():
        each = gradients(k1, ids)
        assert max(float(g.abs().max()) for g in each) > 0.1
        close(expected(each, ids), torch.zeros_like(each[0]))


def test_the_k3_estimate_differentiated_as_a_loss_is_the_forward_kl() -> None:
    def k3(table: Tensor, ids: list[int], y: list[int]) -> Tensor:
        log_ratio = chain(TEACHER.table.detach(), ids, y) - chain(table, ids, y)
        return (log_ratio.exp() - 1 - log_ratio).sum()

    for prompt, ids in PROMPTS.items():
        found = expected(gradients(k3, ids), ids)

        def forward(table: Tensor, ids: list[int] = ids) -> Tensor:
            reach = [chain(table, ids, prefix).sum().exp().detach() for prefix in all_prefixes()]
            kls = [step_kl(TEACHER.table.detach(), table, [*ids, *prefix]) for prefix in all_prefixes()]
            return torch.stack([weight * kl for weight, kl in zip(reach, kls, strict=True)]).sum()

        close(found, gradient_of(forward))
        assert (found - held_prefixes_gradient(prompt)).abs().max() > 0.01


def test_a_full_kl_value_as_an_advantage_teaches_nothing() -> None:
    """It does not depend on the token that was sampled; it belongs in the loss."""

    def value_as_advantage(table: Tensor, ids: list[int], y: list[int]) -> Tensor:
        logps = chain(table, ids, y)[None]
        kls = torch.stack([step_kl(table, TEACHER.table, ids + y[:t]) for t in range(len(y))])[None].detach()
        return policy_loss(logps, logps.detach(), -kls, torch.ones_like(logps), reduction="sum")[0]

    for ids in PROMPTS.values():
        each = gradients(value_as_advantage, ids)
        assert max(float(g.abs().max()) for g in each) > 0.1
        close(expected(each, ids), torch.zeros_like(each[0]))


def variance(each: list[Tensor], ids: list[int]) -> float:
    """Trace of the covariance of a per-completion gradient."""
    return float(expected([g.square().sum() for g in each], ids) - expected(each, ids).square().sum())


def test_the_variance_grows_from_full_to_discount_0_to_discount_1() -> None:
    for ids in PROMPTS.values():
        full, own, later = (
            variance(gradients(loss, ids), ids)
            for loss in (full_loss, sampled_loss, lambda *a: sampled_loss(*a, discount=1.0))
        )
        assert 0 < full < own < later
        assert own > 1.5 * full
        assert later > 1.5 * own


# ---- The trainer, one completion at a time


class Dictated(OnPolicyDistillationTrainer):
    """Writes what it is told to, in place of sampling; the log-probs are those the package itself gives the tokens."""

    dictation: list[list[int]]

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        rollout = Rollout.build(
            [self.prompt_encoder.encode(row) for row in rows],
            [Completion(ids=y, logps=[0.0] * len(y), stopped=y[-1] == STOP) for y in self.dictation],
            rows,
            pad_id=STOP,
            device=self.args.device,
            mask_truncated=self.args.mask_truncated_completions,
        )
        return rollout.with_sampled_logps(self.student_logps(rollout))


def table_trainer(folder: Path, **more: Any) -> Any:
    """A trainer over copies of the tables; the data are the two prompts in turn."""
    num_rows = more.pop("num_rows", 8)
    arguments = {
        "model": table_model(0),
        "teacher_model": table_model(1),
        "processing_class": table_tokenizer(),
        "train_dataset": datasets.Dataset.from_dict({"prompt": (list(PROMPTS) * num_rows)[:num_rows]}),
        "max_completion_length": T,
        "loss_reduction": "sum",
        "train_sampling_strategy": "sequential",
    }
    return make_trainer(folder, **{**arguments, **more})


def dictated_gradient(trainer: Any, prompt: str, y: list[int]) -> Tensor:
    """The gradient of the trainer's own loss of one row, from the dataset row on, for the completion `y`."""
    trainer.dictation = [y]
    loss = trainer.compute_loss(trainer.model, [{"prompt": prompt}])
    return torch.autograd.grad(loss, trainer.model.table)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_the_trainers_expected_gradient_is_exact(tmp_path: Path, discount: float, temperature: float) -> None:
    trainer = table_trainer(tmp_path, cls=Dictated, kl_discount_factor=discount, temperature=temperature)
    for prompt, ids in PROMPTS.items():
        each = [dictated_gradient(trainer, prompt, y) for y in all_completions()]
        close(expected(each, ids, temperature), REFERENCE[discount](prompt, temperature), 1e-9)
        if temperature == 1:
            by_hand = gradients(lambda *a: sampled_loss(*a, discount=discount), ids)
            close(torch.stack(each), torch.stack(by_hand), 1e-9)


@pytest.mark.parametrize("kl_logps", ["sampled", "current"])
def test_completions_of_an_older_policy_are_corrected_by_the_ratio(tmp_path: Path, kl_logps: str) -> None:
    """One token long, sampled from another policy mu: with "current" log-probs the expectation is still exact.

    With "sampled" ones it is the gradient of sum_v p(v)·(log mu(v) - log q(v)), mu held.
    """
    older = table_model(2).table.detach()

    class Stale(Dictated):
        def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
            rollout = super().generate_rollout(rows)
            scores = torch.zeros_like(rollout.sampled_logps_BT)
            scores[0, -1] = chain(older, PROMPTS[rows[0]["prompt"]], self.dictation[0])[0]
            return rollout.with_sampled_logps(scores)

    trainer = table_trainer(tmp_path, cls=Stale, kl_logps=kl_logps, max_completion_length=1)
    for prompt, ids in PROMPTS.items():
        row = prefix_number(ids)
        weights_V = older[row].softmax(dim=-1)
        found = sum(weights_V[v] * dictated_gradient(trainer, prompt, [v]) for v in range(V))

        def objective(table: Tensor, row: int = row) -> Tensor:
            p, mu, q = (t[row].log_softmax(dim=-1) for t in (table, older, TEACHER.table.detach()))
            return (p.exp() * ((p.detach() if kl_logps == "current" else mu) - q)).sum()

        close(torch.as_tensor(found), gradient_of(objective), 1e-9)


def test_another_teacher_changes_loss_and_gradient_but_not_with_coef_0(tmp_path: Path) -> None:
    def run(teacher_seed: int, coef: float) -> tuple[float, Tensor]:
        trainer = table_trainer(tmp_path, cls=Dictated, teacher_model=table_model(teacher_seed), kl_penalty_coef=coef)
        trainer.dictation = [[1, 2, 0]]
        loss = trainer.compute_loss(trainer.model, [{"prompt": "a"}])
        return loss.item(), torch.autograd.grad(loss, trainer.model.table)[0]

    (loss, gradient), (other_loss, other_gradient) = run(1, 1.0), run(2, 1.0)
    assert abs(loss - other_loss) > 0.1
    assert (gradient - other_gradient).abs().max() > 0.1
    for seed in (1, 2):
        loss, gradient = run(seed, 0.0)
        assert loss == 0
        assert gradient.abs().max() == 0


def test_a_teacher_equal_to_the_student_teaches_nothing(tmp_path: Path) -> None:
    for discount in (0.0, 1.0):
        trainer = table_trainer(tmp_path, cls=Dictated, teacher_model=table_model(0), kl_discount_factor=discount)
        for prompt in PROMPTS:
            for y in all_completions():
                trainer.dictation = [y]
                batch = trainer.scored_batch([{"prompt": prompt}])
                assert batch.advantages_BT.abs().max() == 0
                loss = trainer.compute_loss(trainer.model, batch)
                assert loss.item() == 0
                assert torch.autograd.grad(loss, trainer.model.table)[0].abs().max() == 0


def test_with_a_teacher_equal_to_the_student_training_moves_nothing_but_by_rounding(tmp_path: Path) -> None:
    """Real sampling: `generate` computes in fp32, hence not exactly 0."""
    trainer = table_trainer(tmp_path, teacher_model=table_model(0), optim="sgd", learning_rate=1.0, max_grad_norm=0.0)
    before = weights(trainer.model)
    trainer.train()
    assert max(abs(loss) for loss in losses(trainer)) < 1e-5
    assert (trainer.model.table - before["table"]).abs().max() < 1e-5


class ScoredLate(Dictated):
    """Scores token t by the teacher's distribution for token t - 1."""

    def score_with_teacher(self, rollout: Rollout) -> Tensor:
        teacher: Any = self.teacher
        ids, logits = rollout.ids_BT, teacher.model(rollout.ids_BT, rollout.attention_mask_BT).logits
        late = torch.zeros_like(rollout.sampled_logps_BT)
        late[:, 2:] = logits[:, :-2].log_softmax(dim=-1).gather(-1, ids[:, 2:, None]).squeeze(-1)
        return late


class ScoredEarly(Dictated):
    """Gives token t the score of token t + 1."""

    def score_with_teacher(self, rollout: Rollout) -> Tensor:
        return super().score_with_teacher(rollout).roll(-1, dims=1)


def test_scores_of_an_equal_teacher_shifted_by_one_token_are_a_kl_above_0(tmp_path: Path) -> None:
    """The prompt is of two tokens, so that the shifted distribution exists for the first one, too."""
    late = table_trainer(tmp_path, cls=ScoredLate, teacher_model=table_model(0))
    early = table_trainer(tmp_path, cls=ScoredEarly, teacher_model=table_model(0))
    kls = []
    for y in all_completions():
        late.dictation = early.dictation = [y]
        kls.append(-late.scored_batch([{"prompt": "ba"}]).advantages_BT.sum())
        if len(y) > 1:
            assert early.scored_batch([{"prompt": "ba"}]).advantages_BT.abs().max() > 1e-3
    assert expected(kls, PROMPTS["ba"]) > 0.1


# ---- The trainer with its own samples


class Recorder(torch.optim.SGD):
    """Moves nothing; keeps the sum of the gradients of all steps."""

    total: Tensor | float = 0.0
    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.total = self.total + self.param_groups[0]["params"][0].grad.clone()
        self.steps += 1


@pytest.mark.parametrize(
    ("discount", "temperature", "batch_size", "accumulation", "substeps"),
    [(0.0, 1.0, 4096, 1, 1), (1.0, 1.0, 64, 4, 2), (0.0, 0.7, 256, 2, 1)],
)
def test_the_mean_gradient_of_sampled_completions_is_the_exact_one(
    tmp_path: Path, discount: float, temperature: float, batch_size: int, accumulation: int, substeps: int
) -> None:
    """4,096 completions of real training: each of the 90 coordinates within 4 standard errors, which are exact, too.

    The weights stand still, so that all steps estimate the same gradient; 1 rollout of one step, or 8 rollouts of one or two.
    """
    num = 4096
    student = table_model(0)
    recorder = Recorder(student.parameters(), lr=0.0)
    trainer = table_trainer(
        tmp_path,
        model=student,
        num_rows=num,
        optimizers=(recorder, None),
        max_steps=num // (batch_size * accumulation),
        max_grad_norm=0.0,
        kl_discount_factor=discount,
        temperature=temperature,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        num_substeps=substeps,
        seed=4,
    )
    dictated = table_trainer(tmp_path, cls=Dictated, kl_discount_factor=discount, temperature=temperature)
    mean, spread = torch.zeros_like(student.table), torch.zeros_like(student.table)
    for prompt, ids in PROMPTS.items():
        each = [dictated_gradient(dictated, prompt, y) for y in all_completions()]
        exact = REFERENCE[discount](prompt, temperature)
        mean += num / 2 * exact
        spread += num / 2 * (expected([g.square() for g in each], ids, temperature) - exact.square())

    trainer.train()
    assert recorder.steps == num // (batch_size * accumulation)
    error = spread.sqrt()
    sampled = error > 1e-6
    assert sampled.sum() == 90
    met = torch.as_tensor(recorder.total) != 0
    assert not (met & ~sampled).any()
    assert (met & sampled).sum() >= 84  # the rarest prefix, three tokens wide for each prompt, may be missing
    z = ((recorder.total - mean) / error)[sampled]
    assert z.abs().max() < 4
    assert z.square().mean() < 2  # as it would not be if rollouts repeated each other


# ---- One step, however it is cut


SPLITS = [(4, 1), (1, 4), (2, 2)]


def ragged_model(seed: int) -> PreTrainedModel:
    """A Llama with so many stop tokens that completions have all lengths."""
    model = make_model(seed, dtype=torch.float64)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(range(1, 14))
    return model


class Watched(OnPolicyDistillationTrainer):
    """Keeps what it wrote and what each micro-batch's loss was divided by."""

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        rollout = super().generate_rollout(rows)
        self.__dict__.setdefault("rollouts", []).append(rollout)
        return rollout

    def compute_policy_loss(self, logps_BT: Tensor, batch: ScoredBatch, num_items: Any) -> Any:
        self.__dict__.setdefault("micro_batches", []).append((int(batch.mask_BT.sum()), len(batch), num_items))
        return super().compute_policy_loss(logps_BT, batch, num_items)


def split_run(folder: Path, batch_size: int, accumulation: int, **settings: Any) -> Any:
    """Two steps of plain SGD without gradient clipping, whose result shows the scale of the gradient."""
    defaults = {
        "model": ragged_model(0),
        "teacher_model": make_model(1, dtype=torch.float64),
        "cls": Watched,
        "max_completion_length": 16,
        "optim": "sgd",
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
    }
    trainer = make_trainer(folder, **{**defaults, **settings})
    trainer.train()
    return trainer


def assert_same_run(one: Any, other: Any) -> None:
    """Same completions, losses and weights."""
    for mine, theirs in zip(one.rollouts, other.rollouts, strict=True):
        assert mine.completion_ids() == theirs.completion_ids()
    assert losses(one) == pytest.approx(losses(other), rel=1e-6)  # Trainer sums them in fp32
    for name, value in weights(one.model).items():
        torch.testing.assert_close(value, weights(other.model)[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_step_is_the_same_however_it_is_cut_into_micro_batches(tmp_path: Path, reduction: str) -> None:
    whole, *others = (split_run(tmp_path, *split, loss_reduction=reduction) for split in SPLITS)
    lengths = {int(length) for rollout in whole.rollouts for length in rollout.completion_lengths_B}
    assert len(lengths) >= 4
    assert (weights(whole.model)["lm_head.weight"] - weights(ragged_model(0))["lm_head.weight"]).abs().max() > 1e-4
    for other in others:
        assert_same_run(whole, other)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_so_it_is_where_some_micro_batches_have_nothing_to_train_on(tmp_path: Path, reduction: str) -> None:
    """Truncated completions are masked: several micro-batches of one row are empty."""
    settings = {"loss_reduction": reduction, "mask_truncated_completions": True, "max_completion_length": 2}
    whole, *others = (split_run(tmp_path, *split, **settings) for split in SPLITS)
    assert [tokens for tokens, *_ in others[0].micro_batches].count(0) in range(1, 8)
    for other in others:
        assert_same_run(whole, other)


def test_a_step_that_the_datas_end_cuts_short_is_the_same_too(tmp_path: Path) -> None:
    """Six rows: the second step has two of its four, as one micro-batch or as two, and its mean is over those."""
    settings = {"num_train_epochs": 1, "max_steps": -1}
    whole, *others = (split_run(tmp_path, *split, train_dataset=make_dataset(6), **settings) for split in SPLITS)
    assert [rows for _, rows, _ in whole.micro_batches] == [4, 2]
    for other in others:
        assert other.state.global_step == 2
        assert_same_run(whole, other)


def test_the_count_is_that_of_one_update_also_with_substeps_and_accumulation(tmp_path: Path) -> None:
    """Substeps 2 × accumulation 4: action tokens of this update's four micro-batches, after every mask."""
    settings = {"num_substeps": 2, "mask_truncated_completions": True, "max_steps": 2}
    cut, whole = split_run(tmp_path, 1, 4, **settings), split_run(tmp_path, 4, 1, **settings)
    assert len(cut.rollouts) == 1
    for update in (cut.micro_batches[:4], cut.micro_batches[4:]):
        assert {int(items) for *_, items in update} == {sum(tokens for tokens, *_ in update)}
    assert int(cut.micro_batches[0][2]) != int(cut.micro_batches[4][2])
    assert_same_run(whole, cut)


# ---- The ratio


@pytest.mark.parametrize("peft_config", [None, lora(lora_dropout=0.5, init_lora_weights=False)], ids=["full", "lora"])
def test_the_ratio_is_1_before_the_first_update_of_a_rollout(tmp_path: Path, peft_config: Any) -> None:
    """Sampling and training see one policy: ragged prompts, dropout asked for, fp32, two micro-batches."""
    model = make_model(0, attention_dropout=0.5)
    trainer = make_trainer(
        tmp_path, model=model, peft_config=peft_config, gradient_accumulation_steps=2, num_substeps=2, max_steps=4
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for fresh in logs[::2]:
        for name in ("ratio/mean", "ratio/max", "ratio/ess"):
            assert fresh[name] == pytest.approx(1, abs=3e-5 if peft_config else 1e-5)  # merged adapters round otherwise
        assert abs(fresh["sampler_kl/v1"]) < 1e-5
        assert fresh["sampler_kl/v2"] < 1e-10
    for stale in logs[1::2]:
        assert abs(stale["ratio/max"] - 1) > 1e-3


def test_with_one_substep_every_step_is_on_policy(tmp_path: Path) -> None:
    """The next rollout is sampled from the updated weights."""
    trainer = make_trainer(tmp_path, max_steps=3, learning_rate=0.05)
    trainer.train()
    for entry in trainer.state.log_history[:3]:
        assert entry["ratio/max"] == pytest.approx(1, abs=1e-5)
