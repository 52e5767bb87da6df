"""Every error says what was found, why it cannot work and what to do; and what need not be an error works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import (
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import BitsAndBytesConfig, PreTrainedTokenizerFast
from trl import TrlParser  # type: ignore[reportPrivateImportUsage]

from trl_opd import DistillationWarning, OnPolicyDistillationConfig, OnPolicyDistillationTrainer, policy_loss
from trl_opd.batch import Completion, Rollout
from trl_opd.loss import count_items

from .helpers import (
    CHARACTERS,
    lora,
    losses,
    make_config,
    make_dataset,
    make_model,
    make_tokenizer,
    make_trainer,
    save_model,
    weights,
)


def assert_error(call: Callable[[], Any], *fragments: Any) -> None:
    """`call` raises a ValueError whose message holds every fragment."""
    with pytest.raises(ValueError) as raised:
        call()
    message = str(raised.value)
    missing = [fragment for fragment in fragments if str(fragment) not in message]
    assert not missing, f"{missing} not in: {message}"


def log_values(trainer: Any, name: str) -> list[float]:
    """One logged figure over the run."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def stream(rows: list[dict[str, Any]]) -> datasets.IterableDataset:
    """A streaming dataset that does not know its columns or its length."""
    return datasets.IterableDataset.from_generator(lambda: iter(rows))  # type: ignore[return-value]


def other_tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with the ids of `tokens` in their order."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>")


# ---- Vocabularies and tokenizers


def test_vocabularies_padded_to_different_sizes_work(tmp_path: Path) -> None:
    """Qwen2.5 0.5B has 151,936 rows and 7B 152,064, with one tokenizer."""
    teacher = save_model(tmp_path / "teacher", make_model(1, vocab_size=64))
    trainer = make_trainer(tmp_path, model=make_model(0, vocab_size=48), teacher_model=teacher, max_steps=1)
    trainer.train()
    assert log_values(trainer, "teacher_kl")[0] > 0.1


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_too_few_rows_for_the_tokenizer(tmp_path: Path, role: str) -> None:
    small: dict[str, Any] = {
        "student": {"model": make_model(0, vocab_size=40)},
        "teacher": {"teacher_model": make_model(0, vocab_size=40)},
    }
    assert_error(lambda: make_trainer(tmp_path, **small[role]), "43 ids", role, "40 rows", "last 3", "resize_token_embeddings")


def test_different_tokenizers_are_told_by_three_ids_and_their_texts(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *"zyxwvutsrqponmlkjihgfedcba =+9876543210"]
    teacher = save_model(tmp_path / "teacher", make_model(1), other_tokenizer(tokens))
    assert_error(
        lambda: make_trainer(tmp_path, teacher_model=teacher),
        *("id 4 is '0' to the student, 'z' to the teacher", "id 5 is '1'", "'y'", "id 6 is '2'", "'x'", "same model family"),
        "38 ids differ",  # of 39 characters, the middle one keeps its place
    )


def test_two_swapped_ids_of_equally_large_vocabularies_are_noticed(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *CHARACTERS]
    tokens[-1], tokens[-2] = tokens[-2], tokens[-1]
    teacher = save_model(tmp_path / "teacher", make_model(1), other_tokenizer(tokens))
    assert_error(lambda: make_trainer(tmp_path, teacher_model=teacher), "2 ids differ", "id 41 is 'y'", "id 42 is 'z'")


def test_ids_that_the_teacher_lacks_are_told(tmp_path: Path) -> None:
    """Every id both know is the same, but the last two of the student are padding rows to the teacher."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *CHARACTERS[:-2]]
    teacher = save_model(tmp_path / "teacher", make_model(1), other_tokenizer(tokens))
    with pytest.warns(DistillationWarning, match=r"lacks 2 ids .* id 41 \('y'\)"):
        make_trainer(tmp_path, teacher_model=teacher)


def test_teacher_in_memory_cannot_be_checked_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(DistillationWarning, match="no tokenizer on disk, so that it could not be checked"):
        make_trainer(tmp_path)


def test_teacher_folder_without_a_tokenizer(tmp_path: Path) -> None:
    """By name it is an error; of a model in memory one can only say that it was not checked."""
    make_model(1).save_pretrained(tmp_path / "teacher")
    path = str(tmp_path / "teacher")
    assert_error(lambda: make_trainer(tmp_path, teacher_model=path), "No tokenizer", path, "save_pretrained")
    loaded = type(make_model(1)).from_pretrained(path)
    with pytest.warns(DistillationWarning, match="There is no tokenizer in .*teacher"):
        make_trainer(tmp_path, teacher_model=loaded)


def test_student_without_a_tokenizer(tmp_path: Path) -> None:
    make_model(0).save_pretrained(tmp_path / "student")
    path = str(tmp_path / "student")
    assert_error(lambda: make_trainer(tmp_path, processing_class=None), "made in memory", "processing_class")
    assert_error(lambda: make_trainer(tmp_path, model=path, processing_class=None), "No tokenizer", path, "processing_class")


def test_no_pad_token_trains_with_eos_for_one(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(pad=False)
    trainer = make_trainer(tmp_path, processing_class=tokenizer)
    trainer.train()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert all(torch.tensor(losses(trainer)).isfinite())


def test_neither_pad_nor_eos(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(pad=False)
    tokenizer.eos_token = None
    assert_error(
        lambda: make_trainer(tmp_path, processing_class=tokenizer), "neither a pad token nor an EOS token", "pad_token to"
    )


def test_processor_in_place_of_a_tokenizer(tmp_path: Path) -> None:
    class Processor:
        tokenizer = make_tokenizer()

    assert_error(lambda: make_trainer(tmp_path, processing_class=Processor()), "Processor", "only text", "processor.tokenizer")


def test_nothing_could_ever_end_a_completion(tmp_path: Path) -> None:
    model, tokenizer = make_model(0, eos_token_id=None), make_tokenizer()
    tokenizer.eos_token = None
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    assert_error(
        lambda: make_trainer(tmp_path, model=model, processing_class=tokenizer), "EOS", "could ever end", "tokenizer.eos_token"
    )


# ---- Data


def test_conversations_without_a_chat_template(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}]}] * 4)
    trainer = make_trainer(tmp_path, train_dataset=data)
    assert_error(trainer.train, "no chat template", "tokenizer.chat_template", "plain-text prompts")


@pytest.mark.parametrize("role", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("streaming", [False, True])
def test_missing_column_names_those_that_exist(tmp_path: Path, role: str, streaming: bool) -> None:
    data = datasets.Dataset.from_dict({"question": ["1+1="] * 4, "answer": ["2"] * 4})
    wrong: Any = data.to_iterable_dataset() if streaming else data
    assert_error(
        lambda: make_trainer(tmp_path, **{role: wrong}), role, "no 'prompt' column", "['question', 'answer']", "Rename the one"
    )


def test_missing_column_of_one_among_several_eval_datasets(tmp_path: Path) -> None:
    data = {"good": make_dataset(2), "bad": datasets.Dataset.from_dict({"question": ["1+1="]})}
    assert_error(lambda: make_trainer(tmp_path, eval_dataset=data), "bad", "['question']")


def test_missing_column_of_a_stream_that_does_not_know_its_columns(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=stream([{"question": "1+1=", "answer": "2"}] * 4))
    assert_error(trainer.train, "no 'prompt' column", "['answer', 'question']", "Rename the one")


def test_empty_dataset(tmp_path: Path) -> None:
    empty = make_dataset(1).select([])
    assert_error(lambda: make_trainer(tmp_path, train_dataset=empty), "train_dataset is empty", "no prompt")
    assert_error(lambda: make_trainer(tmp_path, eval_dataset=empty), "eval_dataset is empty", "no prompt")


def test_data_that_is_no_dataset(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1="}]
    assert_error(
        lambda: make_trainer(tmp_path, train_dataset=rows), "train_dataset is a list", "datasets.Dataset.from_list(rows)"
    )


@pytest.mark.parametrize("prompt", ["", None, [], [{"content": "no role"}]])
def test_empty_or_senseless_prompt(tmp_path: Path, prompt: Any) -> None:
    trainer = make_trainer(tmp_path, train_dataset=stream([{"prompt": prompt, "answer": "2"}] * 4))
    what = "empty prompt" if prompt == "" else "non-empty list of messages with 'role' and 'content'"
    assert_error(trainer.train, what, repr(prompt)[:20])


def test_empty_prompt_is_fine_where_the_tokenizer_adds_bos(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(bos=True)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    data = datasets.Dataset.from_dict({"prompt": [""] * 4})
    trainer = make_trainer(tmp_path, train_dataset=data, processing_class=tokenizer, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


class RecordedPrompts(OnPolicyDistillationTrainer):
    """Keeps the rollouts."""

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        rollout = super().generate_rollout(rows)
        self.rollouts: list[Rollout] = [*getattr(self, "rollouts", []), rollout]
        return rollout

    def prompts(self) -> list[str]:
        """The text of every prompt the student continued."""
        tokens = self.processing_class.convert_ids_to_tokens
        return [
            "".join(tokens(ids[:length].tolist()))
            for r in self.rollouts
            for ids, length in zip(r.ids_BT, r.prompt_lengths_B.tolist(), strict=True)
        ]


@pytest.mark.parametrize("limit", ["context", "max_prompt_length"])
def test_long_prompts_are_truncated_from_the_left_and_counted(tmp_path: Path, limit: str) -> None:
    """Room for 10 tokens; one prompt in four has 12."""
    data = datasets.Dataset.from_dict({"prompt": ["abc", "abcdefghij", "abcdefghijkl", "ab"]})
    settings = {
        "context": {"model": make_model(0, max_position_embeddings=16)},
        "max_prompt_length": {"max_prompt_length": 10},
    }
    trainer = make_trainer(tmp_path, cls=RecordedPrompts, train_dataset=data, max_steps=1, **settings[limit])
    trainer.train()
    assert sorted(trainer.prompts()) == ["ab", "abc", "abcdefghij", "cdefghijkl"]
    assert log_values(trainer, "prompts/truncated_fraction") == [0.25]


def test_long_prompts_are_dropped_with_a_count(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"prompt": ["abc", "abcdefghij", "abcdefghijkl", "ab"] * 2})
    settings = {"max_prompt_length": 10, "long_prompts": "drop", "cls": RecordedPrompts, "max_steps": 1}
    with pytest.warns(DistillationWarning, match="2 of 8 prompts are longer than 10 tokens and were dropped"):
        trainer = make_trainer(tmp_path, train_dataset=data, **settings)
    trainer.train()
    assert len(trainer.train_dataset) == 6
    assert "abcdefghijkl" not in trainer.prompts() and "cdefghijkl" not in trainer.prompts()
    assert log_values(trainer, "prompts/truncated_fraction") == [0.0]


def test_long_prompts_of_a_stream_are_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": prompt} for prompt in ["abcdefghijkl", "abc", "abcdefghij", "ab", "abcde"]]
    settings = {"max_prompt_length": 10, "long_prompts": "drop", "cls": RecordedPrompts, "max_steps": 1}
    trainer = make_trainer(tmp_path, train_dataset=stream(rows), **settings)
    with pytest.warns(DistillationWarning, match="longer than 10 tokens and was dropped: 'abcdefghijkl'"):
        trainer.train()
    assert trainer.prompts() == ["abc", "abcdefghij", "ab", "abcde"]


def test_all_prompts_dropped_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"prompt": ["abcdefghijkl"] * 4})
    with pytest.warns(DistillationWarning, match="4 of 4 prompts"):
        assert_error(
            lambda: make_trainer(tmp_path, train_dataset=data, max_prompt_length=10, long_prompts="drop"),
            "0 prompts",
            "4 completions",
        )


def test_completion_leaves_no_room_for_a_prompt(tmp_path: Path) -> None:
    for length in (128, 200):
        assert_error(
            lambda length=length: make_trainer(tmp_path, max_completion_length=length),
            *(f"max_completion_length is {length}", "context is 128", "Lower max_completion_length"),
        )
    make_trainer(tmp_path, max_completion_length=127)


def test_too_few_rows_for_a_step(tmp_path: Path) -> None:
    """3 rows where a step needs 16 would train zero steps and call it success."""
    steps: dict[str, Any] = {"gradient_accumulation_steps": 4}
    expected = (
        "16 completions",
        "per_device_train_batch_size 4",
        "gradient_accumulation_steps 4",
        "3 prompts",
        "= 3",
        "Add prompts",
    )
    assert_error(lambda: make_trainer(tmp_path, train_dataset=make_dataset(3), **steps), *expected)
    trainer = make_trainer(tmp_path, train_dataset=make_dataset(3).to_iterable_dataset(), **steps)
    before = weights(trainer.model)
    assert_error(trainer.train, *expected)
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    make_trainer(tmp_path, train_dataset=make_dataset(4), num_generations=4, **steps)  # 4 prompts x 4 fill it


def test_stream_that_is_empty(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=stream([]))
    assert_error(trainer.train, "4 completions", "0 prompts")


def test_stream_without_max_steps(tmp_path: Path) -> None:
    assert_error(lambda: make_trainer(tmp_path, train_dataset=stream([{"prompt": "1+1="}]), max_steps=-1), "max_steps")


def test_evaluation_without_data(tmp_path: Path) -> None:
    assert_error(lambda: make_trainer(tmp_path, eval_strategy="steps", eval_steps=1), "eval_strategy", "eval_dataset")


def test_teacher_prompt_in_some_rows_only(tmp_path: Path) -> None:
    """The row that lacks one is named, wherever it stands in the batch; it must not be scored without a word."""
    for position in (0, 2):
        rows: list[dict[str, Any]] = [{"prompt": "1+1=", "teacher_prompt": "12+1="} for _ in range(4)]
        del rows[position]["teacher_prompt"]
        trainer = make_trainer(tmp_path, train_dataset=stream(rows))
        assert_error(trainer.train, "no 'teacher_prompt' column", "['prompt']")


def test_teacher_prompt_longer_than_the_teachers_context(tmp_path: Path) -> None:
    """Rotary positions beyond the context give numbers, not an error; they would be noise."""
    data = datasets.Dataset.from_dict({"prompt": ["1+1="] * 4, "teacher_prompt": ["a" * 30] * 4})
    for teacher in (make_model(1, max_position_embeddings=32), "base"):
        student = make_model(0, max_position_embeddings=32)
        trainer = make_trainer(tmp_path, model=student, peft_config=lora(), teacher_model=teacher, train_dataset=data)
        assert_error(trainer.train, "teacher", "context is 32", "max_completion_length")


# ---- Settings


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"temperature": 0.0}, ["temperature is 0.0", "greedy decoding", "> 0"]),
        ({"temperature": -1.0}, ["temperature is -1.0", "> 0"]),
        ({"kl_discount_factor": 1.5}, ["kl_discount_factor is 1.5", "between 0 and 1"]),
        ({"kl_discount_factor": -0.1}, ["kl_discount_factor is -0.1", "between 0 and 1"]),
        ({"kl_clip": 0.0}, ["kl_clip is 0.0", "> 0", "Leave it out"]),
        ({"num_generations": 0}, ["num_generations is 0", "at least 1"]),
        ({"max_completion_length": 0}, ["max_completion_length is 0", "at least 1"]),
        ({"num_substeps": 0}, ["num_substeps is 0", "at least 1"]),
        ({"max_prompt_length": 0}, ["max_prompt_length is 0", "at least 1"]),
        ({"max_prompt_length": -3}, ["max_prompt_length is -3", "at least 1"]),
        ({"per_device_rollout_batch_size": -1}, ["per_device_rollout_batch_size is -1", "at least 1"]),
        ({"long_prompts": "cut"}, ["long_prompts is 'cut'", "truncate, drop"]),
        ({"kl_logps": "old"}, ["kl_logps is 'old'", "sampled, current"]),
        ({"kl_granularity": "top-k"}, ["kl_granularity is 'top-k'", "sampled, topk, full"]),
        ({"kl_granularity": "full", "kl_direction": "back"}, ["kl_direction is 'back'", "reverse, forward, jsd"]),
        ({"kl_granularity": "topk", "kl_top_k": 0}, ["kl_top_k is 0", "at least 1"]),
        ({"kl_direction": "jsd"}, ["kl_direction is 'jsd'", "kl_granularity 'sampled'", "'full' or 'topk'"]),
        ({"kl_granularity": "full", "beta": 0.5}, ["beta is 0.5", "'reverse' has none", "loss_fn_config"]),
        ({"kl_granularity": "full", "kl_direction": "jsd", "beta": 0.0}, ["beta is 0.0", "between 0 and 1", "'forward'"]),
        ({"kl_granularity": "topk", "kl_direction": "jsd", "beta": 1.0}, ["beta is 1.0", "between 0 and 1", "'reverse'"]),
        (
            {"kl_granularity": "full", "kl_direction": "forward", "kl_discount_factor": 0.5},
            ["kl_discount_factor is 0.5", "kl_direction is 'forward'", "kl_discount_factor=0"],
        ),
        ({"kl_granularity": "full", "kl_clip": 2.0}, ["kl_clip is 2.0", "'full'", "Leave it out"]),
        ({"kl_granularity": "topk", "kl_logps": "current"}, ["kl_logps is 'current'", "'topk'", "Leave it out"]),
        ({"loss_reduction": "mean"}, ["loss_reduction is 'mean'", "token_mean, sequence_mean, sum"]),
        ({"scale_rewards": "std"}, ["scale_rewards is 'std'", "none, group, batch"]),
        ({"loss_fn": "grpo"}, ["loss_fn is 'grpo'", "importance_sampling, ppo, cispo, dro"]),
        (
            {"loss_fn": "ppo", "loss_fn_config": {"clip": 0.2}},
            ["['clip']", "'ppo'", "clip_low_threshold, clip_high_threshold"],
        ),
        ({"loss_fn_config": {"beta": 0.2}}, ["['beta']", "'importance_sampling'", "none at all"]),
        ({"loss_fn_config": "beta=0.2"}, ["loss_fn_config is 'beta=0.2'", "not a JSON object", '{"key": 1}']),
        ({"loss_fn_config": '{"beta": 0.2'}, ["loss_fn_config is '{\"beta\": 0.2'", "not a JSON object"]),
        ({"model_init_kwargs": "[1]"}, ["model_init_kwargs is '[1]'", "not a JSON object"]),
        (
            {"train_sampling_strategy": "group_by_length"},
            ["'group_by_length'", "before the rollout", "'random' or 'sequential'"],
        ),
        ({"label_smoothing_factor": 0.1}, ["label_smoothing_factor is 0.1", "no labels"]),
        ({"auto_find_batch_size": True}, ["auto_find_batch_size is True", "cut groups"]),
        (
            {"dataloader_drop_last": True, "num_generations": 8, "gradient_accumulation_steps": 2},
            ["num_generations 8 does not divide per_device_train_batch_size 4"],
        ),
        ({"neftune_noise_alpha": 5.0}, ["neftune_noise_alpha is 5.0", "noise in training only"]),
        ({"accelerator_config": {"split_batches": True}}, ["accelerator_config has split_batches=True", "Leave it out"]),
        ({"accelerator_config": {"dispatch_batches": True}}, ["accelerator_config has dispatch_batches=True", "Leave it out"]),
        ({"num_generations": 3}, ["4 x 1 = 4", "num_generations = 3", "Change one of the three"]),
        ({"num_generations": 3, "gradient_accumulation_steps": 2}, ["4 x 2 = 8", "num_generations = 3"]),
    ],
)
def test_settings(tmp_path: Path, settings: dict[str, Any], fragments: list[str]) -> None:
    assert_error(lambda: make_config(tmp_path, **settings), *fragments)


def test_groups_may_span_micro_batches(tmp_path: Path) -> None:
    config = make_config(tmp_path, num_generations=8, gradient_accumulation_steps=2)
    assert config.step_batch_size == 8


def test_dictionaries_from_the_command_line(tmp_path: Path) -> None:
    """JSON strings through `TrlParser`, down to what they set."""
    save_model(tmp_path / "model", make_model(0))
    arguments = {
        "output_dir": str(tmp_path),
        "model_init_kwargs": '{"dtype": "bfloat16"}',
        "teacher_model_init_kwargs": '{"dtype": "float16"}',
        "chat_template_kwargs": '{"enable_thinking": false}',
        "loss_fn": "ppo",
        "loss_fn_config": '{"clip_high_threshold": 1.3}',
        "activation_checkpointing_kwargs": '{"use_reentrant": true}',
        "teacher_model_name_or_path": str(tmp_path / "model"),
        "max_completion_length": "6",
        "per_device_train_batch_size": "4",
        "report_to": "none",
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    (config,) = TrlParser((OnPolicyDistillationConfig,)).parse_args_and_config([*words, "--use_cpu"])  # type: ignore[arg-type]
    assert config.loss_fn_config == {"clip_high_threshold": 1.3}
    assert config.activation_checkpointing_kwargs == {"use_reentrant": True}
    trainer = OnPolicyDistillationTrainer(model=str(tmp_path / "model"), args=config, train_dataset=make_dataset())
    assert trainer.model.dtype is torch.bfloat16
    assert trainer.teacher.model.dtype is torch.float16  # type: ignore[attr-defined]
    assert trainer.prompt_encoder.chat_template_kwargs == {"enable_thinking": False}


def test_workers_of_a_stream_would_mix_groups(tmp_path: Path) -> None:
    stream = make_dataset(8).to_iterable_dataset(num_shards=2)
    settings: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    assert_error(
        lambda: make_trainer(tmp_path, train_dataset=stream, dataloader_num_workers=2, **settings),
        "2 workers",
        "per_device_train_batch_size (2)",
        "num_generations (4)",
    )
    make_trainer(tmp_path, train_dataset=stream, dataloader_num_workers=0, **settings)


def test_rows_of_a_hook_that_do_not_stand_flush_left(tmp_path: Path) -> None:
    """Parts of a batch are cut on the right: with padding on the left, tokens would be lost without a word."""

    class LeftPadded(OnPolicyDistillationTrainer):
        def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
            rollout = super().generate_rollout(rows)
            names = ("ids_BT", "attention_mask_BT", "mask_BT", "sampled_logps_BT")
            wider = {name: torch.nn.functional.pad(getattr(rollout, name), (1, 0)) for name in names}
            return replace(rollout, **wider)

    trainer = make_trainer(tmp_path, cls=LeftPadded)
    assert_error(trainer.train, "flush left", "padding on the right", "Rollout.build")


def test_advantages_of_a_hook_that_are_not_finite(tmp_path: Path) -> None:
    class Broken(OnPolicyDistillationTrainer):
        def compute_advantages(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().compute_advantages(*args, **kwargs) / 0.0

    assert_error(make_trainer(tmp_path, cls=Broken).train, "advantages (compute_advantages) are not finite")


def test_several_gpus_without_a_launcher(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config._n_gpu = 2
    assert_error(
        lambda: OnPolicyDistillationTrainer(
            model=make_model(0),
            teacher_model=make_model(1),
            args=config,
            train_dataset=make_dataset(),
            processing_class=make_tokenizer(),
        ),
        *("2 GPUs", "nn.DataParallel", "accelerate launch", "CUDA_VISIBLE_DEVICES=0"),
    )


# ---- Students and adapters


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    ],
    ids=["prompt", "prefix", "p-tuning"],
)
def test_prompt_learning_is_refused_by_name(tmp_path: Path, config: PeftConfig) -> None:
    fragments = (str(config.peft_type).rsplit(".", 1)[-1], "before the prompt", "Use LoRA")
    assert_error(lambda: make_trainer(tmp_path, peft_config=config), *fragments)
    assert_error(lambda: make_trainer(tmp_path, model=get_peft_model(make_model(0), config)), *fragments)
    assert_error(lambda: make_trainer(tmp_path, teacher_model=get_peft_model(make_model(1), config)), *fragments)


def test_adapter_on_an_adapter(tmp_path: Path) -> None:
    model = get_peft_model(make_model(0), lora())
    assert_error(
        lambda: make_trainer(tmp_path, model=model, peft_config=lora()),
        "has an adapter already",
        "leave peft_config",
        "merge_and_unload",
    )


def test_adapter_that_is_merged(tmp_path: Path) -> None:
    model = get_peft_model(make_model(0), lora())
    model.merge_adapter()
    assert_error(lambda: make_trainer(tmp_path, model=model), "['default'] is merged", "no gradient", "unmerge_adapter")


def test_nothing_to_train(tmp_path: Path) -> None:
    model = get_peft_model(make_model(0), lora(inference_mode=True))
    assert_error(lambda: make_trainer(tmp_path, model=model), "no trainable parameter", "is_trainable=True")


def test_loading_settings_for_a_loaded_student(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
        {"model_init_kwargs": {"dtype": "bfloat16"}},
    ]
    for setting in settings:
        assert_error(
            partial(make_trainer, tmp_path, **setting),
            *("quantization_config and model_init_kwargs", "loaded already", "name or path"),
        )


def test_quantised_student_without_an_adapter(tmp_path: Path) -> None:
    path = save_model(tmp_path / "student", make_model(0, hidden_size=64, num_hidden_layers=1))
    assert_error(
        lambda: make_trainer(tmp_path, model=path, quantization_config=BitsAndBytesConfig(load_in_4bit=True)),
        *("quantised", "no adapter", "peft_config (QLoRA)"),
    )


# ---- Teachers


def test_no_teacher(tmp_path: Path) -> None:
    assert_error(
        lambda: make_trainer(tmp_path, teacher_model=None),
        "no teacher",
        "teacher_model",
        "'base'",
        "teacher_model_name_or_path",
    )


def test_teacher_is_the_student(tmp_path: Path) -> None:
    model = make_model(0)
    fragments = ("teacher would change with the student", "teacher_model='base'", "load the teacher separately")
    assert_error(lambda: make_trainer(tmp_path, model=model, teacher_model=model), *fragments)
    base = make_model(0)
    student = get_peft_model(base, lora())
    assert_error(lambda: make_trainer(tmp_path, model=student, teacher_model=base), *fragments)
    assert_error(lambda: make_trainer(tmp_path, model=student, teacher_model=student), *fragments)


def test_teacher_shares_one_trained_weight(tmp_path: Path) -> None:
    """As after building a pruned student out of the teacher's own layers: freezing the teacher would freeze the student."""
    student, teacher = make_model(0), make_model(1)
    teacher.model.layers[1].mlp = student.model.layers[0].mlp  # type: ignore[union-attr]
    assert_error(
        lambda: make_trainer(tmp_path, model=student, teacher_model=teacher),
        *("3 of teacher_model's weights", "'model.layers.1.mlp.gate_proj.weight'", "load the teacher separately"),
    )
    copy = make_model(0)
    copy.load_state_dict(student.state_dict(), assign=True)  # other Parameter objects over the same memory
    assert_error(lambda: make_trainer(tmp_path, model=student, teacher_model=copy), "'model.embed_tokens.weight'")


def test_base_as_the_teacher_of_full_weights(tmp_path: Path) -> None:
    assert_error(
        lambda: make_trainer(tmp_path, teacher_model="base"), "no adapter", "all its weights", "peft_config", "base's name"
    )


@pytest.mark.parametrize(
    ("settings", "model_settings", "found"),
    [
        ({"bias": "all"}, {"attention_bias": True}, "bias all"),
        ({"bias": "lora_only"}, {"attention_bias": True}, "bias lora_only"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights pissa"),
        ({"init_lora_weights": "olora"}, {}, "init_lora_weights olora"),
    ],
)
def test_base_as_the_teacher_of_an_adapter_that_changes_the_base(
    tmp_path: Path, settings: dict[str, Any], model_settings: dict[str, Any], found: str
) -> None:
    """With the adapter off, PiSSA's base lacks its principal part, and trained biases stay trained."""
    assert_error(
        lambda: make_trainer(
            tmp_path, model=make_model(0, **model_settings), peft_config=lora(**settings), teacher_model="base"
        ),
        *(found, "does not give the base back", "base's name"),
    )


def test_base_as_the_teacher_of_a_base_that_is_partly_trained(tmp_path: Path) -> None:
    student = get_peft_model(make_model(0), lora())
    student.get_input_embeddings().requires_grad_(True)
    assert_error(
        lambda: make_trainer(tmp_path, model=student, teacher_model="base"),
        "1 of its base's own",
        "embed_tokens.weight",
        "base's name",
    )


def test_loading_settings_for_a_teacher_that_is_not_loaded(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"teacher_model_init_kwargs": {"dtype": "bfloat16"}}
    assert_error(lambda: make_trainer(tmp_path, **kwargs), "'bfloat16'", "loaded already", "name or path")
    assert_error(lambda: make_trainer(tmp_path, peft_config=lora(), teacher_model="base", **kwargs), "'bfloat16'", "'base'")


def test_adapter_of_another_base(tmp_path: Path) -> None:
    """Of a base with three layers, on one with two."""
    small = save_model(tmp_path / "small", make_model(0))
    large = type(make_model(0)).from_pretrained(save_model(tmp_path / "large", make_model(0, num_hidden_layers=3)))
    adapter = get_peft_model(large, lora())
    adapter.peft_config["default"].base_model_name_or_path = small
    adapter.save_pretrained(str(tmp_path / "adapter"))
    path = str(tmp_path / "adapter")
    fragments = (path, "no place for 14", "layers.2", "another base model")
    assert_error(lambda: make_trainer(tmp_path, teacher_model=path), *fragments)
    assert_error(lambda: make_trainer(tmp_path, model=path), *fragments)


# ---- Rewards


def test_rewards_need_several_completions(tmp_path: Path) -> None:
    assert_error(
        lambda: make_trainer(tmp_path, reward_funcs=lambda **_: [0.0]),
        "num_generations is 1",
        "relative to the mean",
        "at least 2",
    )


def test_reward_weights_of_another_number(tmp_path: Path) -> None:
    funcs = [lambda **_: [0.0], lambda **_: [0.0]]
    assert_error(
        lambda: make_trainer(tmp_path, reward_funcs=funcs, num_generations=2, reward_weights=[1.0]),
        "1 values for 2 reward functions",
    )


def needs_answer(completions: list[str], answer: list[str]) -> list[float]:
    """A reward that needs a column."""
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "fragments"),
    [
        (lambda completions, **_: [0.0] * 3, ["<lambda>", "3 values for 4 completions", "one float or None"]),
        (lambda completions, **_: 0.5, ["<lambda>", "returned 0.5", "one float or None"]),
        (lambda completions, **_: [1.0, float("inf"), 0.0, 0.0], ["<lambda>", "inf for completion 1", "None"]),
        (needs_answer, ["needs_answer", "['answer']", "completions", "Add such a column"]),
    ],
    ids=["length", "scalar", "infinite", "column"],
)
def test_reward_functions(tmp_path: Path, reward: Any, fragments: list[str]) -> None:
    trainer = make_trainer(tmp_path, reward_funcs=reward, num_generations=2)
    assert_error(trainer.train, *fragments)


def test_reward_function_that_raises_stops_the_run_with_its_own_error(tmp_path: Path) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        raise ZeroDivisionError("the verifier is down")

    trainer = make_trainer(tmp_path, reward_funcs=broken, num_generations=2)
    before = weights(trainer.model)
    with pytest.raises(ZeroDivisionError, match="the verifier is down"):
        trainer.train()
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


# ---- What subclasses return


class WrongHooks(OnPolicyDistillationTrainer):
    """Spoils what one hook returns."""

    spoil: str = ""

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        rollout = super().generate_rollout(rows if self.spoil != "too few" else rows[:-1])
        if self.spoil == "wide":
            rollout = replace(rollout, sampled_logps_BT=rollout.sampled_logps_BT[:, :-1])
        if self.spoil == "nan student":
            rollout.sampled_logps_BT[2, int(rollout.prompt_lengths_B[2])] = torch.nan
        return rollout

    def score_with_teacher(self, rollout: Rollout) -> Tensor:
        scores_BT = super().score_with_teacher(rollout)
        position = int(rollout.prompt_lengths_B[1])
        if self.spoil in ("nan", "-inf", "inf"):
            scores_BT[1, position] = float(self.spoil)
        return scores_BT[:, 1:] if self.spoil == "shifted" else scores_BT

    def compute_advantages(self, *tensors: Tensor, **named: Tensor) -> Tensor:
        advantages_BT = super().compute_advantages(*tensors, **named)
        return advantages_BT.mean(dim=1) if self.spoil == "mean" else advantages_BT


def run_spoilt(folder: Path, spoil: str, **settings: Any) -> Any:
    """Trains one step of a run whose hook is spoilt."""
    trainer = make_trainer(folder, cls=WrongHooks, max_steps=1, **settings)
    trainer.spoil = spoil
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("spoil", "fragments"),
    [
        ("too few", ["generate_rollout", "3 completions", "4 rows", "one completion for each row"]),
        ("wide", ["generate_rollout", "sampled_logps_BT has shape (4, 11)", "token ids have (4, 12)"]),
        ("shifted", ["score_with_teacher", "shape (4, 11)", "token ids have (4, 12)"]),
        ("mean", ["advantages", "shape (4,)", "token ids have (4, 12)"]),
        ("nan", ["teacher's log-prob of 1 ", "first is nan", "position", "of row 1", "broken teacher"]),
        ("-inf", ["teacher's log-prob of 1 ", "first is -inf", "of row 1", "kl_clip makes a finite penalty"]),
        ("inf", ["teacher's log-prob of 1 ", "first is inf", "of row 1"]),
    ],
)
def test_what_hooks_return(tmp_path: Path, spoil: str, fragments: list[str]) -> None:
    """The hook is named, with both shapes or with the token."""
    assert_error(lambda: run_spoilt(tmp_path, spoil), *fragments)


def test_kl_clip_takes_minus_infinity_but_neither_nan_nor_plus_infinity(tmp_path: Path) -> None:
    assert all(torch.tensor(losses(run_spoilt(tmp_path, "-inf", kl_clip=2.0))).isfinite())
    assert_error(lambda: run_spoilt(tmp_path, "nan", kl_clip=2.0), "first is nan")
    assert_error(lambda: run_spoilt(tmp_path, "inf", kl_clip=2.0), "first is inf")


def test_student_that_has_diverged(tmp_path: Path) -> None:
    """Trainer's logging would show a NaN loss as the one before it."""
    assert_error(
        lambda: run_spoilt(tmp_path, "nan student"), "student's log-prob of 1 ", "nan", "position 5 of row 2", "learning_rate"
    )


def test_rollouts_that_do_not_fit_together() -> None:
    device = torch.device("cpu")
    done, row = Completion(ids=[5, 1], logps=[-1.0, -2.0], stopped=True), {"prompt": "1"}

    def build(prompts: list[list[int]], completions: list[Completion], **more: Any) -> Rollout:
        return Rollout.build(prompts, completions, more.pop("rows", [row]), pad_id=0, device=device, **more)

    assert_error(lambda: build([[4]], [done, done]), "1 prompts came with 2 completions")
    assert_error(lambda: build([[4], [4]], [done, done]), "2 prompts came with 1 dataset rows")
    assert_error(lambda: build([[4]], [done], teacher_prompts=[]), "1 prompts came with 0 teacher prompts")
    assert_error(lambda: build([[4]], [replace(done, logps=[-1.0])]), "2 token ids of completion 0 came with 1 log-probs")
    assert_error(lambda: build([[4]], [done]).with_sampled_logps(torch.zeros(1, 2)), "sampled_logps", "(1, 2)", "(1, 3)")


def test_loss_of_different_shapes() -> None:
    one, other = torch.zeros(2, 3), torch.zeros(2, 1)
    assert_error(lambda: policy_loss(one, one, other, one > 0), "one shape", "advantages (2, 1)", "logps (2, 3)")
    assert_error(lambda: count_items(one, "mean"), "reduction is 'mean'", "token_mean, sequence_mean, sum")
