"""Two processes train the model that one process trains, under DDP and FSDP2, to rounding: weights, completions, figures."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file

from trl_opd import Completion, DistillationWarning, OnPolicyDistillationTrainer, Rollout
from trl_opd.processes import gathered_state, reshard
from trl_opd.rows import Filler

from .helpers import lora, make_dataset, make_model, make_trainer, save_model
from .processes import Processes, launched

pytestmark = pytest.mark.dist
WAYS = pytest.mark.parametrize("how", ["ddp", "fsdp2"])
KINDS = pytest.mark.parametrize("kind", ["full", "lora"])
NOT_FIGURES = ("time/", "per_second", "runtime", "flos", "train_loss", "num_input")


class Recording(OnPolicyDistillationTrainer):
    """Keeps what each rollout wrote: (prompt, ids) of every row that is no filler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.written: list[list[tuple[str, list[int]]]] = []

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        rollout = super().generate_rollout(rows)
        pairs = zip(rows, rollout.completion_ids(), strict=True)
        self.written.append([(row["prompt"], ids) for row, ids in pairs if not isinstance(row, Filler)])
        return rollout


class Given(OnPolicyDistillationTrainer):
    """Completions that depend on the prompt only: of 1 to 5 tokens; every third prompt's is cut."""

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        prompts = [self.prompt_encoder.encode(row) for row in rows]
        completions = []
        for prompt in prompts:
            number = sum((i + 1) * token for i, token in enumerate(prompt))
            stopped = number % 3 > 0
            ids = [5 + (number + 7 * t) % 30 for t in range(number % 5)] + [1 if stopped else 4]
            completions.append(Completion(ids=ids, logps=[0.0] * len(ids), stopped=stopped))
        mask_truncated = self.args.mask_truncated_completions
        rollout = Rollout.build(prompts, completions, rows, pad_id=0, device=self.args.device, mask_truncated=mask_truncated)
        return rollout.with_sampled_logps(self.student_logps(rollout))


def length(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Reward: the completion's length; nothing of those of three tokens."""
    return [None if len(ids) == 3 else float(len(ids)) for ids in completion_ids]


def train(folder: str, cls: type[OnPolicyDistillationTrainer], kind: str = "full", rows: int = 40, **more: Any) -> Any:
    """Trains, then gives weights, logs, completions and what the trainer says of itself."""
    if kind == "lora":
        more["peft_config"] = lora(init_lora_weights=False)
    trainer = make_trainer(Path(folder), cls=cls, train_dataset=make_dataset(rows), **more)
    trainer.train()
    return told(trainer)


def told(trainer: Any) -> dict[str, Any]:
    """What is compared: weights that were trained (on the first process), logs, completions."""
    student = trainer.student()
    if trainer.is_fsdp_enabled:
        state = {name: tensor.clone() for name, tensor in gathered_state(student).items()}
    else:
        state = {name: p.detach().clone() for name, p in student.named_parameters() if p.requires_grad}
    return {
        "weights": state,
        "logs": trainer.state.log_history,
        "written": getattr(trainer, "written", None),
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def both(two: Processes, how: str, folder: Path, *args: Any, batch: int = 4, **more: Any) -> tuple[Any, list[Any]]:
    """A run of one process, and the two processes' shares of the same run, whose batches are half as large."""
    one = launched("one", train, str(folder / "one"), *args, per_device_train_batch_size=2 * batch, **more)
    return one, two.run(how, train, str(folder / how), *args, per_device_train_batch_size=batch, **more)


def assert_same_weights(one: Any, several: list[Any], atol: float = 1e-5) -> None:
    """To `atol`; training moved them by a hundred times as much."""
    mine = {name: tensor for name, tensor in several[0]["weights"].items() if name in one["weights"]}
    assert mine.keys() == one["weights"].keys() and mine
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(mine[name], tensor, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def figures(result: Any) -> list[dict[str, float]]:
    """The logs without what depends on the clock."""
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in NOT_FIGURES)}
        for entry in result["logs"]
    ]


def assert_same_figures(one: Any, several: list[Any]) -> None:
    """Every figure of every log, on each process."""
    for result in several:
        theirs = figures(result)
        assert len(theirs) == len(figures(one)) > 0
        for expected, found in zip(figures(one), theirs, strict=True):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=2e-4, abs=2e-5), f"{name} at step {expected['step']}"


def in_order_of_one(several: list[Any], shares: int) -> list[list[tuple[str, list[int]]]]:
    """The rollouts of both processes as one process would have written them, a block of `shares` rows from each in turn."""
    joined = []
    for parts in zip(*(result["written"] for result in several), strict=True):
        blocks = max(math.ceil(len(part) / shares) for part in parts)
        joined.append([row for i in range(blocks) for part in parts for row in part[i * shares : (i + 1) * shares]])
    return joined


# ---- The same weights, the same completions


@WAYS
@KINDS
def test_five_steps_from_fixed_completions_train_the_same_weights(two: Processes, tmp_path: Path, how: str, kind: str) -> None:
    """AdamW, gradients clipped; every figure of the logs is the same, too."""
    one, several = both(two, how, tmp_path, Given, kind, max_steps=5, learning_rate=1e-3)
    assert several[0]["wrapped"].startswith({"ddp": "DistributedDataParallel", "fsdp2": "FSDP"}[how])
    assert_same_weights(one, several)
    assert_same_figures(one, several)


@WAYS
@KINDS
def test_micro_batches_in_parts_train_the_same_weights(two: Processes, tmp_path: Path, how: str, kind: str) -> None:
    """Parts of at most twelve tokens, of which the processes have different numbers; some rows have no action token at all."""
    settings: dict[str, Any] = {"max_steps": 3, "learning_rate": 1e-3, "batch": 8, "num_generations": 2}
    settings |= {"max_tokens_per_micro_batch": 12, "mask_truncated_completions": True}
    one, several = both(two, how, tmp_path, Given, kind, **settings)
    assert_same_weights(one, several)
    assert_same_figures(one, several)


@WAYS
@KINDS
def test_sampled_completions_are_those_of_one_process(two: Processes, tmp_path: Path, how: str, kind: str) -> None:
    """Row by row the same prompts and ids, so the same weights; rows end at different lengths on each process.

    Of the seeds, one with which no number is drawn within 1e-5 of where one token ends and the next begins: weights round
    differently in each way, and with seed 0 one of the 480 is 3e-7 off.
    """
    settings: dict[str, Any] = {"max_steps": 5, "learning_rate": 1e-3, "max_completion_length": 12, "seed": 1}
    one, several = both(two, how, tmp_path, Recording, kind, **settings)
    assert in_order_of_one(several, shares=4) == one["written"]
    lengths = [{len(ids) for _, ids in rollout} for result in several for rollout in result["written"]]
    assert max(map(len, lengths)) > 1
    assert_same_weights(one, several)
    assert_same_figures(one, several)


@WAYS
def test_one_prompt_is_answered_differently_on_each_process_and_a_seed_repeats(
    two: Processes, tmp_path: Path, how: str
) -> None:
    def written(seed: int) -> list[Any]:
        results = two.run(how, train_on_one_prompt, str(tmp_path), seed=seed, max_completion_length=12)
        return [result["written"] for result in results]

    first, second = written(0)
    assert first[0] != second[0]
    assert written(0) == [first, second] != written(1)


def train_on_one_prompt(folder: str, **more: Any) -> Any:
    trainer = make_trainer(
        Path(folder), cls=Recording, train_dataset=datasets.Dataset.from_list([{"prompt": "1+1="}] * 8), max_steps=1, **more
    )
    trainer.train()
    return told(trainer)


# ---- However the step is cut up


@WAYS
@pytest.mark.parametrize(
    ("mine", "theirs", "shares"),
    [
        ({"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}, {"per_device_train_batch_size": 8}, 4),
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, {"per_device_train_batch_size": 8}, 4),
        ({"num_substeps": 2, "per_device_train_batch_size": 4}, {"per_device_train_batch_size": 8, "num_substeps": 2}, 4),
    ],
    ids=["accumulation 4", "accumulation 2", "substeps"],
)
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_groups_rewards_and_accumulation(
    two: Processes, tmp_path: Path, how: str, mine: Any, theirs: Any, shares: int, scale: str
) -> None:
    """Groups of four are whole on one process though micro-batches are not; rewards are scaled by the deviation of all."""
    settings = {"num_generations": 4, "reward_funcs": length, "scale_rewards": scale, "learning_rate": 1e-3, "max_steps": 4}
    settings |= {"max_completion_length": 8, "kl_penalty_coef": 0.1}
    one = launched("one", train, str(tmp_path / "one"), Recording, **settings, **theirs)
    several = two.run(how, train, str(tmp_path / how), Recording, **settings, **mine)
    assert in_order_of_one(several, shares) == one["written"]
    for result in several:
        groups = [rollout[i : i + 4] for rollout in result["written"] for i in range(0, len(rollout), 4)]
        assert all(len({prompt for prompt, _ in group}) == 1 for group in groups)
    assert_same_weights(one, several)
    assert_same_figures(one, several)


@WAYS
def test_a_process_whose_completions_are_all_cut_changes_nothing(two: Processes, tmp_path: Path, how: str) -> None:
    """Masked completions: in some steps one process has no token to train on."""
    settings = {"mask_truncated_completions": True, "max_steps": 8, "learning_rate": 1e-3, "rows": 16}
    one, several = both(two, how, tmp_path, Given, batch=1, loss_reduction="sequence_mean", **settings)
    tokens = [0.0, *(entry["tokens"] for entry in one["logs"] if "loss" in entry)]
    assert 0 < min(after - before for before, after in itertools.pairwise(tokens)) <= 5
    assert_same_weights(one, several)
    assert_same_figures(one, several)


@WAYS
def test_a_last_step_that_does_not_reach_all_processes(two: Processes, tmp_path: Path, how: str) -> None:
    """10 prompts in steps of 8: in the second, the first process has two rows and the second none."""
    settings = {"max_steps": -1, "num_train_epochs": 2, "learning_rate": 1e-3, "rows": 10, "log_completions": True}
    one, several = both(two, how, tmp_path, Recording, **settings)
    assert [len(rollout) for rollout in several[1]["written"]] == [4, 0, 4, 0]
    assert in_order_of_one(several, shares=4) == one["written"]
    assert_same_weights(one, several)
    assert_same_figures(one, several)
    for step, rows in enumerate([8, 2, 8, 2], start=1):
        table = datasets.Dataset.from_parquet(str(tmp_path / how / "_completions" / f"step_{step:06d}.parquet"))
        assert len(table) == rows, "completions of one process only, or of fillers"


@WAYS
def test_evaluation_counts_each_row_once(two: Processes, tmp_path: Path, how: str) -> None:
    """5 held-out rows in batches of 2 on each process, before, between and after steps."""
    settings: dict[str, Any] = {"eval_dataset": make_dataset(5), "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    settings |= {"num_generations": 2, "reward_funcs": length}
    one = launched("one", train, str(tmp_path / "one"), Given, per_device_eval_batch_size=4, **settings)
    two_batch = {"per_device_eval_batch_size": 2, "per_device_train_batch_size": 2}
    several = two.run(how, train, str(tmp_path / how), Given, **two_batch, **settings)
    assert len([entry for entry in one["logs"] if "eval_teacher_kl" in entry]) == 3
    assert_same_figures(one, several)


@WAYS
def test_post_kl_and_current_logps(two: Processes, tmp_path: Path, how: str) -> None:
    settings = {"compute_post_kl": True, "num_substeps": 2, "kl_logps": "current", "max_steps": 4, "learning_rate": 1e-3}
    one, several = both(two, how, tmp_path, Recording, "lora", kl_discount_factor=0.5, **settings)
    assert_same_weights(one, several)
    assert_same_figures(one, several)


@WAYS
def test_a_stream_is_dealt_like_a_dataset(two: Processes, tmp_path: Path, how: str) -> None:
    settings = {"num_generations": 2, "max_steps": 3, "learning_rate": 1e-3}
    one = launched("one", train_on_stream, str(tmp_path / "one"), per_device_train_batch_size=8, **settings)
    several = two.run(how, train_on_stream, str(tmp_path / how), per_device_train_batch_size=4, **settings)
    assert in_order_of_one(several, shares=4) == one["written"]
    assert_same_weights(one, several)


def train_on_stream(folder: str, rows: int = 16, **more: Any) -> Any:
    stream = make_dataset(rows).to_iterable_dataset()
    trainer = make_trainer(Path(folder), cls=Recording, train_dataset=stream, **more)
    trainer.train()
    return told(trainer)


@WAYS
def test_a_streams_end_is_filled_up_and_not_repeated(two: Processes, tmp_path: Path, how: str) -> None:
    """21 rows, 8 a step, two passes; 5 held-out rows in batches of 4: each row counts once in each pass."""
    settings: dict[str, Any] = {"rows": 21, "max_steps": 6, "learning_rate": 1e-3, "eval_strategy": "steps", "eval_steps": 2}
    settings["eval_dataset"] = make_dataset(5).to_iterable_dataset()
    one = launched("one", train_on_stream, str(tmp_path / "one"), per_device_train_batch_size=8, **settings)
    halves = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 2}
    several = two.run(how, train_on_stream, str(tmp_path / how), **halves, **settings)
    assert_same_weights(one, several)
    assert_same_figures(one, several)


def test_a_stream_whose_groups_would_be_parted_is_refused(two: Processes, tmp_path: Path) -> None:
    settings = {"num_generations": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    with pytest.raises(RuntimeError, match=r"2 processes.*per_device_train_batch_size \(2\) must be a multiple of num_gener"):
        two.run("ddp", train_on_stream, str(tmp_path), **settings)


# ---- Ways of computing


@WAYS
@KINDS
@pytest.mark.parametrize("accumulation", [1, 2])
def test_activation_checkpointing_and_accumulation(
    two: Processes, tmp_path: Path, how: str, kind: str, accumulation: int
) -> None:
    """Recomputed activations, and micro-batches whose gradients are reduced with the last one only (`no_sync`)."""
    settings: dict[str, Any] = {"max_steps": 3, "learning_rate": 1e-3}
    one = launched("one", train, str(tmp_path / "one"), Given, kind, per_device_train_batch_size=8, **settings)
    settings |= {"activation_checkpointing": True, "gradient_accumulation_steps": accumulation}
    batch = 4 // accumulation
    several = two.run(how, train, str(tmp_path / how), Given, kind, per_device_train_batch_size=batch, **settings)
    assert_same_weights(one, several)


@WAYS
@KINDS
def test_bf16_computes_logps_in_fp32(two: Processes, tmp_path: Path, how: str, kind: str) -> None:
    """Mixed precision: weights stay fp32, log-probs are fp32, and the run is that of one process to bf16's rounding.

    Which is not the same under FSDP2: it casts all weights, so that the residual stream is in bf16, too.
    """
    settings = {"bf16": True, "max_steps": 3, "learning_rate": 1e-3}
    one, several = both(two, how, tmp_path, InFp32, kind, **settings)
    assert {tensor.dtype for tensor in several[0]["weights"].values()} == {torch.float32}
    for expected, found in zip(one["logs"][:-1], several[0]["logs"][:-1], strict=True):
        assert found["teacher_kl"] == pytest.approx(expected["teacher_kl"], abs=0.03)
        assert found["sampler_kl/v2"] < 1e-3


class InFp32(Given):
    """Stops if log-probs are not in fp32."""

    def compute_policy_loss(self, logps_BT: Any, batch: Any, num_items: Any) -> Any:
        assert logps_BT.dtype == batch.sampled_logps_BT.dtype == batch.teacher_logps_BT.dtype == torch.float32
        return super().compute_policy_loss(logps_BT, batch, num_items)


@WAYS
def test_a_compiled_model_trains_the_same_weights(two: Processes, tmp_path: Path, how: str) -> None:
    settings = {"max_steps": 2, "learning_rate": 1e-3}
    one = launched("one", train, str(tmp_path / "one"), Given, per_device_train_batch_size=8, **settings)
    several = two.run(how, train, str(tmp_path / how), Given, torch_compile=True, torch_compile_backend="eager", **settings)
    renamed = {name.replace("_orig_mod.", ""): tensor for name, tensor in several[0]["weights"].items()}
    assert_same_weights(one, [{"weights": renamed}])


# ---- Who holds what


def held_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of the weights that this process holds, and of all."""
    mine = whole = 0
    for parameter in model.parameters():
        local = getattr(parameter, "to_local", lambda p=parameter: p)()
        mine += local.numel() * local.element_size()
        whole += parameter.numel() * parameter.element_size()
    return mine, whole


def sizes(folder: str, kind: str, teacher: Any, **more: Any) -> Any:
    if kind == "lora":
        more["peft_config"] = lora()
    trainer = make_trainer(Path(folder), cls=Given, teacher_model=teacher, max_steps=1, **more)
    trainer.train()
    held = {"student": held_bytes(trainer.model)}
    if hasattr(trainer.teacher, "model"):
        held["teacher"] = held_bytes(trainer.teacher.model)
    return held


@KINDS
def test_each_process_holds_half_of_student_and_teacher(two: Processes, tmp_path: Path, kind: str) -> None:
    """A teacher of another architecture and size than the student's."""
    for held in two.run("fsdp2", sizes_with_other_teacher, str(tmp_path), kind):
        for mine, whole in held.values():
            assert mine <= 0.55 * whole
        assert held["teacher"][1] > 100_000


def sizes_with_other_teacher(folder: str, kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    teacher = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=43, n_positions=64, eos_token_id=1))
    return sizes(folder, kind, teacher)


class Elsewhere(Given):
    """As where a server samples: no forward pass of the student has gathered weights when the teacher begins."""

    def generate_rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        rollout = super().generate_rollout(rows)
        reshard(self.student())
        return rollout


@pytest.mark.parametrize("cls", [Given, Elsewhere])
def test_base_as_teacher_leaves_the_roots_weights_trainable(two: Processes, tmp_path: Path, cls: type) -> None:
    """After a forward pass the root's weights stay whole until the next, as other parameters than its shards."""
    settings = {"teacher_model": "base", "max_steps": 3, "learning_rate": 1e-3}
    settings |= {"peft_config": lora(init_lora_weights=False, target_modules=["q_proj", "lm_head"])}
    one, several = both(two, "fsdp2", tmp_path, cls, "with an adapter on the root", **settings)
    assert_same_weights(one, several)
    assert_same_figures(one, several)


def test_base_as_teacher_shares_the_sharded_weights(two: Processes, tmp_path: Path) -> None:
    """No second model; weights and figures are those of one process."""
    settings = {"teacher_model": "base", "max_steps": 5, "learning_rate": 1e-3}
    one, several = both(two, "fsdp2", tmp_path, Recording, "lora", **settings)
    assert_same_weights(one, several)
    assert_same_figures(one, several)
    for held in two.run("fsdp2", sizes, str(tmp_path), "lora", "base"):
        assert held.keys() == {"student"} and held["student"][0] <= 0.55 * held["student"][1]


@WAYS
def test_an_adapter_on_the_students_base_as_teacher(two: Processes, tmp_path: Path, how: str) -> None:
    base, adapter = save_pair(tmp_path)
    settings = {"model": base, "teacher_model": adapter, "max_steps": 4, "learning_rate": 1e-3}
    one, several = both(two, how, tmp_path, Recording, "lora", **settings)
    assert_same_weights(one, several)
    assert_same_figures(one, several)
    assert not [name for name in several[0]["weights"] if "trl_opd_teacher" in name]


def save_pair(folder: Path) -> tuple[str, str]:
    """A base and an adapter for it, on disk."""
    from peft import get_peft_model

    base = str(folder / "base")
    save_model(Path(base), make_model(0))
    torch.manual_seed(5)
    model = get_peft_model(type(make_model(0)).from_pretrained(base), lora(init_lora_weights=False))
    model.save_pretrained(str(folder / "adapter"))
    return base, str(folder / "adapter")


def loaded_by(folder: str, student: str, teacher: str) -> Any:
    """Trains from files; tells which models each process had read before they were sharded."""
    read: dict[str, bool] = {}

    def is_read(model: torch.nn.Module, path: str) -> bool:
        file = load_file(f"{path}/model.safetensors")
        return all(torch.equal(parameter, file[name]) for name, parameter in model.named_parameters() if name in file)

    class Looking(Recording):
        def _prepare_teacher(self, model: torch.nn.Module) -> torch.nn.Module:
            read.update(teacher=is_read(model, teacher), student=is_read(self.model, student))
            return super()._prepare_teacher(model)

    trainer = make_trainer(
        Path(folder), cls=Looking, model=student, teacher_model=teacher, max_steps=3, learning_rate=1e-3, processing_class=None
    )
    trainer.train()
    return told(trainer) | {"read": read}


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_process_alone_loads_the_weights(two: Processes, tmp_path: Path, tied: bool) -> None:
    """`fsdp_cpu_ram_efficient_loading`: the others get their parts from it, and train the same model."""
    for name, seed in (("student", 0), ("teacher", 1)):
        save_model(tmp_path / name, make_model(seed, tie_word_embeddings=tied))
    paths = str(tmp_path / "student"), str(tmp_path / "teacher")
    one, *_ = two.run("fsdp2", loaded_by, str(tmp_path / "a"), *paths)
    several = two.run("fsdp2", loaded_by, str(tmp_path / "b"), *paths, environment={"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})
    assert one["read"] == several[0]["read"] == {"student": True, "teacher": True}
    assert several[1]["read"] == {"student": False, "teacher": False}
    assert several[0]["written"] == one["written"]
    assert_same_weights(one, several, atol=1e-7)


@WAYS
def test_an_adapter_on_a_four_bit_base(two: Processes, tmp_path: Path, how: str) -> None:
    """QLoRA. Under FSDP2 the quantised weights stay whole, and the adapter is sharded."""
    save_model(tmp_path / "base", make_model(0, hidden_size=64, intermediate_size=64))
    one = launched("one", train_four_bit, str(tmp_path / "base"), str(tmp_path), per_device_train_batch_size=8)
    several = two.run(how, train_four_bit, str(tmp_path / "base"), str(tmp_path), per_device_train_batch_size=4)
    assert_same_weights(one, several)
    assert_same_figures(one, several)


def train_four_bit(base: str, folder: str, **more: Any) -> Any:
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")
    trainer = make_trainer(
        Path(folder),
        cls=Recording,
        model=base,
        quantization_config=quantization,
        peft_config=lora(init_lora_weights=False),
        processing_class=None,
        max_steps=3,
        learning_rate=1e-3,
        **more,
    )
    trainer.train()
    return told(trainer)


def test_fsdp1_is_refused(two: Processes, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"FSDP1.*Set `fsdp_version: 2` in its fsdp_config"):
        two.run("fsdp2", train, str(tmp_path), Given, environment={"FSDP_VERSION": "1"})


def test_checkpointing_that_renames_the_layers_is_refused(two: Processes, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"`fsdp_activation_checkpointing: true`.*Set it to false"):
        two.run("fsdp2", train, str(tmp_path), Given, environment={"FSDP_ACTIVATION_CHECKPOINTING": "true"})


def test_processes_that_would_each_train_alone_are_refused(tmp_path: Path) -> None:
    """Two processes on the CPU without `use_cpu`, which accelerate does not join."""
    with pytest.raises(ValueError, match=r"2 processes were launched, but each would train alone.*--use_cpu"):
        launched("one", train, str(tmp_path), Given, environment={"WORLD_SIZE": "2"}, use_cpu=False)


def test_evaluation_before_training(two: Processes, tmp_path: Path) -> None:
    """The student is sharded for it, and trains on from there."""
    one = launched("one", evaluate_then_train, str(tmp_path / "one"), per_device_train_batch_size=8)
    several = two.run("fsdp2", evaluate_then_train, str(tmp_path / "two"), per_device_train_batch_size=4)
    assert several[0]["before"] == pytest.approx(one["before"], rel=1e-4)
    assert_same_weights(one, several)


def evaluate_then_train(folder: str, **more: Any) -> Any:
    trainer = make_trainer(
        Path(folder), cls=Recording, eval_dataset=make_dataset(4), max_steps=3, learning_rate=1e-3, peft_config=lora(), **more
    )
    before = trainer.evaluate()["eval_teacher_kl"]
    trainer.train()
    return told(trainer) | {"before": before}


def test_a_quantised_teacher_stays_whole_and_says_so(two: Processes, tmp_path: Path) -> None:
    for said, (mine, whole) in two.run("fsdp2", with_quantised_teacher, str(tmp_path)):
        assert mine == whole
        assert "quantised" in said and "each process holds the whole of it" in said


def with_quantised_teacher(folder: str) -> Any:
    from transformers import BitsAndBytesConfig

    save_model(Path(folder) / "teacher", make_model(1, hidden_size=64, intermediate_size=64))
    kwargs = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    with pytest.warns(DistillationWarning, match="quantised") as caught:
        trainer = make_trainer(
            Path(folder),
            cls=Recording,
            teacher_model=f"{folder}/teacher",
            teacher_model_init_kwargs=kwargs,
            max_steps=1,
            peft_config=lora(),
        )
        trainer.train()
    said = next(str(warning.message) for warning in caught if "quantised" in str(warning.message))
    return said, held_bytes(trainer.teacher.model)
