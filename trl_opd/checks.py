"""Checks of what is put together for a run, before it starts: same tokens, same ends, room for the text."""

from __future__ import annotations

import warnings
from typing import Any, cast

import datasets
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .batch import Rollout, check_shape
from .config import OnPolicyDistillationConfig
from .models import without_peft
from .prompts import PromptEncoder

TeacherModel = str | list[str] | PreTrainedModel | PeftModel


class DistillationWarning(UserWarning):
    """Something about a run looks wrong, though it can work."""


def warn(message: str) -> None:
    """Issues a `DistillationWarning`."""
    warnings.warn(message, DistillationWarning, stacklevel=3)


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Gives a tokenizer without a pad token its EOS token for one; masks come from lengths, so that this is safe."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            f"processing_class is a {type(tokenizer).__name__}, but only text is distilled. Pass its tokenizer, as in "
            "processor.tokenizer."
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                "The tokenizer has neither a pad token nor an EOS token. Set tokenizer.pad_token to any token and pass the "
                "tokenizer as processing_class."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def policy_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of ids that mean something: one more than the tokenizer's greatest."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocab_rows(model: PreTrainedModel | PeftModel, vocab_size: int, role: str) -> None:
    """Raises ValueError if the model has fewer rows than the tokenizer has ids. More rows are padding, and fine."""
    rows = model.config.get_text_config().vocab_size
    if rows < vocab_size:
        raise ValueError(
            f"The tokenizer has {vocab_size} ids, but the {role} has a vocabulary of {rows} rows, so that it cannot score the "
            f"last {vocab_size - rows}. Resize its embeddings (model.resize_token_embeddings) or use the tokenizer it came "
            "with."
        )


def check_same_tokens(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if an id means different tokens to student and teacher; vocabularies of different size are fine."""
    teacher_tokens = {token_id: token for token, token_id in teacher.get_vocab().items()}
    different = sorted(
        (token_id, token, teacher_tokens[token_id])
        for token, token_id in student.get_vocab().items()
        if teacher_tokens.get(token_id, token) != token
    )
    if different:
        examples = "; ".join(
            f"id {i} is {mine!r} to the student, {theirs!r} to the teacher" for i, mine, theirs in different[:3]
        )
        raise ValueError(
            f"Student and teacher have different tokenizers: {len(different)} ids differ. {examples}. The teacher scores the "
            "ids the student wrote, so that both must read the same text in them. Choose a teacher of the same model family."
        )
    unknown = sorted((token_id, token) for token, token_id in student.get_vocab().items() if token_id not in teacher_tokens)
    if unknown:
        warn(
            f"The teacher's tokenizer lacks {len(unknown)} ids that the student's has, the first is id {unknown[0][0]} "
            f"({unknown[0][1]!r}): the teacher scores them with rows it was never trained on."
        )


def stop_token_ids(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a completion: the tokenizer's EOS and all of the model's."""
    stops = _stops(model, tokenizer)
    if not stops:
        raise ValueError(
            "Neither the tokenizer nor the model names an EOS token, so that no completion could ever end. Set "
            "tokenizer.eos_token or model.generation_config.eos_token_id."
        )
    return sorted(stops)


def _stops(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    base = without_peft(model)
    stops = _ends(tokenizer)
    for eos in (base.generation_config.eos_token_id, base.config.get_text_config().eos_token_id):
        stops |= {eos} if isinstance(eos, int) else set(eos or [])
    return stops


def _ends(tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """The one id that a tokenizer calls EOS, if it does."""
    return set() if tokenizer is None or tokenizer.eos_token_id is None else {cast(int, tokenizer.eos_token_id)}


def check_stop_tokens(
    student: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    teacher: PreTrainedModel | PeftModel,
    teacher_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Warns unless each of the two knows the token the other ends its answers with: its tokenizer's EOS, else the model's."""
    mine, theirs = _stops(student, tokenizer), _stops(teacher, teacher_tokenizer)
    my_end, their_end = _ends(tokenizer) or mine, _ends(teacher_tokenizer) or theirs
    if theirs and not (my_end & theirs and their_end & mine):
        my_stops, their_stops = (tokenizer.convert_ids_to_tokens(sorted(ids)) for ids in (mine, theirs))
        warn(
            f"A completion of the student ends with {my_stops}, one of the teacher with {their_stops}. Where the teacher "
            "would end, the student writes on, or the teacher finds the student's end unlikely: the student may learn never "
            "to stop. Use a teacher with the student's chat template, or set the student's tokenizer.eos_token to the "
            "teacher's."
        )


def context_length(model: PreTrainedModel | PeftModel) -> int | None:
    """Most tokens a model can read; None if it has no bound."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)  # recurrent models have none


def prompt_limit(model: PreTrainedModel | PeftModel, args: OnPolicyDistillationConfig) -> int:
    """Longest prompt in tokens that leaves room for a completion."""
    context = context_length(model)
    room = None if context is None else context - args.max_completion_length
    if room is not None and room < 1:
        raise ValueError(
            f"max_completion_length is {args.max_completion_length}, but the student's context is {context} tokens, so that "
            "no prompt fits before the completion. Lower max_completion_length."
        )
    limits = [limit for limit in (room, args.max_prompt_length) if limit is not None]
    return min(limits, default=2**31)


def check_step_has_rows(num_prompts: int, args: OnPolicyDistillationConfig, num_processes: int) -> None:
    """Raises ValueError if the data does not fill one optimizer step, so that nothing would be trained as configured."""
    needed = args.step_batch_size * num_processes
    found = num_prompts * args.num_generations
    if found < needed:
        raise ValueError(
            f"An optimizer step needs {needed} completions (per_device_train_batch_size {args.per_device_train_batch_size} x "
            f"gradient_accumulation_steps {args.gradient_accumulation_steps} x {num_processes} processes), but train_dataset "
            f"has {num_prompts} prompts x num_generations {args.num_generations} = {found}. Add prompts or make the step "
            "smaller."
        )


def check_stream_groups(args: OnPolicyDistillationConfig, num_processes: int) -> None:
    """Raises ValueError if a streaming data loader would part groups among its workers or among processes."""
    shares = {"workers": args.dataloader_num_workers, "processes": num_processes if num_processes > 1 else 0}
    for sharers, number in shares.items():
        if number and args.per_device_train_batch_size % args.num_generations:
            raise ValueError(
                f"Each of the {number} {sharers} of a streaming train_dataset gets micro-batches of its own, so "
                f"per_device_train_batch_size ({args.per_device_train_batch_size}) must be a multiple of num_generations "
                f"({args.num_generations}). Change one of them, or set dataloader_num_workers to 0 and use one process."
            )


def check_devices(num_gpus: int) -> None:
    """Raises ValueError if one process would use several GPUs through nn.DataParallel."""
    if num_gpus > 1:
        raise ValueError(
            f"This process sees {num_gpus} GPUs and no launcher, which would mean nn.DataParallel; it is not supported. Start "
            "it with `trl-opd train --accelerate_config ddp`, a script with `accelerate launch`, or show it one GPU with "
            "CUDA_VISIBLE_DEVICES=0."
        )


def teacher_given(
    teacher: TeacherModel | dict[str, TeacherModel] | None, args: OnPolicyDistillationConfig
) -> TeacherModel | dict[str, TeacherModel]:
    """The teacher of the constructor, else that of the settings."""
    given = teacher if teacher is not None else args.teacher_model_name_or_path
    if given is None:
        raise ValueError(
            "There is no teacher. Pass teacher_model (an id, a path, a model, a vLLM server's URL, 'base' for the student "
            "without its adapter, 'self' for the student, or a dict of several), or set teacher_model_name_or_path."
        )
    return cast(Any, given)


def reward_weights(args: OnPolicyDistillationConfig, num_funcs: int) -> list[float]:
    """One weight for each reward function."""
    if num_funcs and args.num_generations < 2:
        raise ValueError(
            "reward_funcs are given, but num_generations is 1: a reward counts relative to the mean of its prompt's "
            "completions, which is the reward itself. Set num_generations to at least 2."
        )
    weights = args.reward_weights if args.reward_weights is not None else [1.0] * num_funcs
    if len(weights) != num_funcs:
        raise ValueError(f"reward_weights has {len(weights)} values for {num_funcs} reward functions; give one for each.")
    return list(weights)


def drop_long_prompts(
    dataset: datasets.Dataset | datasets.IterableDataset, encoder: PromptEncoder
) -> datasets.Dataset | datasets.IterableDataset:
    """The rows whose prompts fit; how many were dropped is told, or of a stream, where it is not known, each as it comes."""

    def fits_or_warns(row: dict[str, Any]) -> bool:
        if fits := encoder.fits(row):
            return fits
        warn(f"A prompt of the stream is longer than {encoder.max_length} tokens and was dropped: {row['prompt']!r:.200}")
        return False

    if isinstance(dataset, datasets.IterableDataset):
        return dataset.filter(fits_or_warns)
    kept = dataset.filter(encoder.fits, desc="Dropping long prompts")
    if dropped := len(dataset) - len(kept):
        warn(f"{dropped} of {len(dataset)} prompts are longer than {encoder.max_length} tokens and were dropped.")
    return kept


def check_first_rows(rows: list[dict[str, object]], step: int, args: OnPolicyDistillationConfig) -> None:
    """Raises ValueError if the data ends before it has filled the first optimizer step (a stream's length is not known)."""
    if step == 0 and len(rows) < args.step_batch_size:
        check_step_has_rows(len(rows) // args.num_generations, args, num_processes=1)


def check_rollout(rollout: Rollout, num_rows: int) -> None:
    """Raises ValueError if a rollout does not belong to the rows it was made for, or its log-probs make no sense."""
    if len(rollout) != num_rows or len(rollout.rows) != num_rows:
        raise ValueError(
            f"generate_rollout returned {len(rollout)} completions with {len(rollout.rows)} dataset rows for {num_rows} rows; "
            "it must return one completion for each row, in their order."
        )
    for name in ("attention_mask_BT", "mask_BT", "sampled_logps_BT"):
        check_shape(f"generate_rollout's {name}", getattr(rollout, name), rollout.ids_BT)
    real_BT, mask_BT = rollout.attention_mask_BT.bool(), rollout.mask_BT.bool()
    if (real_BT[:, 1:] & ~real_BT[:, :-1]).any() or (mask_BT & ~real_BT).any() or mask_BT[:, 0].any():
        raise ValueError(
            "generate_rollout must return rows that stand flush left, padding on the right only, with actions on real tokens "
            "and none in the first place, which has nothing before it. Rollout.build makes such rows."
        )
    bad_BT = rollout.mask_BT & ~rollout.sampled_logps_BT.isfinite()
    if bad_BT.any():
        raise ValueError(
            f"The student's log-prob of {int(bad_BT.sum())} tokens it sampled is not finite; the first is "
            f"{_first(bad_BT, rollout.sampled_logps_BT, rollout)}. Its weights have diverged (lower learning_rate), or the "
            "rollout engine is broken."
        )


def check_scores(rollout: Rollout, teacher_logps_BT: Tensor, kl_clip: float | None) -> None:
    """Raises ValueError if the teacher's scores do not belong to the rollout or make no sense on action tokens."""
    check_shape("The teacher log-probs (score_with_teacher)", teacher_logps_BT, rollout.ids_BT)
    bad_BT = rollout.mask_BT & ~(teacher_logps_BT.isfinite() | (teacher_logps_BT.isneginf() if kl_clip is not None else False))
    if bad_BT.any():
        raise ValueError(
            f"The teacher's log-prob of {int(bad_BT.sum())} sampled tokens is not finite; the first is "
            f"{_first(bad_BT, teacher_logps_BT, rollout)}. NaN points to a broken teacher; -inf means it rules the token out, "
            "which kl_clip makes a finite penalty."
        )


def _first(where_BT: Tensor, values_BT: Tensor, rollout: Rollout) -> str:
    row, position = (int(i) for i in where_BT.nonzero()[0])
    token = int(rollout.ids_BT[row, position])
    return f"{float(values_BT[row, position])} for id {token} at position {position} of row {row}"


def check_advantages(advantages_BT: Tensor) -> None:
    """Raises ValueError if an advantage is not finite: the loss would be NaN, which Trainer leaves out of its logs."""
    if not advantages_BT.isfinite().all():
        bad = int((~advantages_BT.isfinite()).sum())
        raise ValueError(
            f"{bad} of {advantages_BT.numel()} advantages (compute_advantages) are not finite, counting positions off the "
            "mask too, which must be 0. Bound what you compute them from."
        )


def check_engine_agrees(gap: float, max_gap: float | None, step: int) -> None:
    """Tells if a rollout's log-probs are not those of the weights that are trained, before these have been updated.

    Args:
        gap: Mean difference in nats a token.
        max_gap: What rounding explains. None: the engine shares the weights, and only the first rollout is looked at.
        step: Optimizer steps so far.

    Raises:
        ValueError: If the gap is greater than `max_gap`.
    """
    if max_gap is None and step == 0 and gap > 0.1:
        warn(
            f"Before the first update the rollout's log-probs differ from the trainer's by {gap:.2f} nats a token (expected: "
            "rounding). The engine samples at another temperature, or the model treats padding or dropout differently while "
            "it generates (per_device_rollout_batch_size=1 generates without padding)."
        )
    if max_gap is not None and not gap <= max_gap:
        raise ValueError(
            f"After step {step} the log-probs that came with the rollout differ by {gap:.4f} nats a token from those of the "
            f"student as it is now; rounding explains {max_gap:.4f}. The rollout servers sampled from other weights: the "
            "adapter that was published did not take effect there (see the servers' log), or from another distribution "
            "(plugins that change logits). Nothing was trained on this rollout; the last checkpoint resumes."
        )


def check_sampling(args: OnPolicyDistillationConfig, *, own_loop: bool) -> None:
    """Warns if tokens are not drawn from the distribution that is trained.

    Raises:
        ValueError: If a user's loop (`rollout_func`) would have to run while the student trains.
    """
    if own_loop and args.rollout_lag:
        raise ValueError(
            "rollout_lag is 1 and rollout_func is given: the function would run in another thread while a step changes the "
            "weights it may sample from. Use rollout_lag=0."
        )
    if args.truncates_sampling:
        warn(
            f"top_p {args.top_p}, top_k {args.top_k}, min_p {args.min_p}, repetition_penalty {args.repetition_penalty}: "
            "completions are drawn from a truncated distribution, but scored under the full softmax, which is trained: the "
            "gradient is that of the tokens truncation leaves. 1.0, 0, none and 1.0 avoid this."
        )
