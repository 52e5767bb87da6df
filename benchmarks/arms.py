"""Ways of training on the same work, made to take turns: each in a thread of its own does one optimizer step at a time."""

from __future__ import annotations

import copy
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from threading import Semaphore, Thread
from typing import Any, TypeVar

import datasets
import torch
from bare_loop import BareLoop
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl import DistillationConfig, DistillationTrainer
from works import ForcedLengths, Lengths, Work, prompts

from trl_opd import Completion, OnPolicyDistillationConfig, OnPolicyDistillationTrainer

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE = 1e-4
NEVER = 2**31 - 1
"""No token's id: in the place of the stop token's where that is not to end a completion."""
OBJECTIVES = ("sampled", "topk", "full")
ARMS = (*OBJECTIVES, "trl", "bare")
Ours = TypeVar("Ours", bound=OnPolicyDistillationTrainer)
PHASES = ("generate", "teacher", "forward", "backward", "optimizer", "rest")


@dataclass
class Step:
    """What a step took."""

    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each of `PHASES`; what is none of the others is "rest"."""
    tokens: int = 0
    """Trained on."""


class Closed(BaseException):
    """Ends a training run from within."""


class Arm:
    """A training run that goes on by one optimizer step at each call of `step`.

    Args:
        name: One of `ARMS`.
        train: Runs the training; calls `turn` of the arm it is given before each step.
    """

    def __init__(self, name: str, train: Callable[[Arm], None]) -> None:
        self.name, self.now = name, Step()
        self._open: list[str] = []
        self._since = 0.0
        self._go, self._done = Semaphore(0), Semaphore(0)
        self._closed, self._error = False, None
        self._thread = Thread(target=self._run, args=(train,), daemon=True)
        self._thread.start()
        self._wait()

    def step(self) -> Step:
        """Does a step and says what it took."""
        self.now = Step()
        start = time.perf_counter()
        self._go.release()
        self._wait()
        self.now.seconds = time.perf_counter() - start
        self.now.phases["rest"] = self.now.seconds - sum(self.now.phases.values())
        return self.now

    def close(self) -> None:
        """Ends the run."""
        self._closed = True
        self._go.release()
        self._thread.join()

    def turn(self) -> None:
        """In the run's thread, before a step: waits until it may go on."""
        self._done.release()
        self._go.acquire()
        if self._closed:
            raise Closed

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside as the phase's; a phase within another is not the other's."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def timed(self, owner: Any, method: str, phase: str) -> None:
        """Has calls of `owner`'s method counted as a phase."""
        own = getattr(owner, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return own(*args, **kwargs)

        setattr(owner, method, called)

    def _count(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.now.phases[self._open[-1]] += now - self._since
        self._since = now

    def _run(self, train: Callable[[Arm], None]) -> None:
        try:
            train(self)
        except Closed:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error


@dataclass
class Setting:
    """What all arms of a work share: the models they are copies of, the data, the lengths.

    Args:
        student: Without adapter.
        teacher: Frozen; the same object in all arms.
        tokenizer: Of both.
        work: The steps after the first, which is the work's `warm_up`.
        write: Makes texts of given numbers of tokens.
    """

    student: Any
    teacher: Any
    tokenizer: Any
    work: Work
    write: Callable[[tuple[int, ...], Any], list[str]] = prompts

    def __post_init__(self) -> None:
        warm_up = self.work.warm_up()
        lengths = (*warm_up.prompt_tokens, *self.work.prompt_tokens)
        self.texts = self.write(lengths, self.tokenizer)
        number = len(self.work.prompt_tokens)
        self.first, self.others = self.texts[:number], self.texts[number:]
        ids = [tuple(self.tokenizer(text)["input_ids"]) for text in self.texts]
        self.lengths: Lengths = dict(zip(ids, (*warm_up.completion_tokens, *self.work.completion_tokens), strict=True))

    def rows(self, num_steps: int, repeats: int = 1) -> datasets.Dataset:
        """The prompts of so many steps after the first, each `repeats` times in a row."""
        texts = [text for text in [*self.first, *(self.others * num_steps)] for _ in range(repeats)]
        return datasets.Dataset.from_dict({"prompt": texts})

    def adapted(self) -> Any:
        """A copy of the student with a new adapter."""
        torch.manual_seed(0)
        config = LoraConfig(r=32, lora_alpha=64, target_modules=LINEAR, task_type="CAUSAL_LM")
        return get_peft_model(copy.deepcopy(self.student), config)

    def forced(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        """What makes `generate` write as many tokens as the prompts are to get."""
        processor = ForcedLengths(input_ids, attention_mask, self.lengths, self.tokenizer.eos_token_id)
        return {"logits_processor": [processor], "max_new_tokens": int(processor.last_B.max()) + 1}

    def arguments(self, num_steps: int) -> dict[str, Any]:
        """Settings of both trainers; all others are their own defaults."""
        return {
            "output_dir": tempfile.mkdtemp(prefix="trl_opd-benchmark"),
            "max_steps": num_steps + 2,  # the end of a run is no part of a step
            "per_device_train_batch_size": self.work.micro_batch,
            "gradient_accumulation_steps": self.work.accumulation,
            "max_completion_length": max(self.lengths.values()),
            "learning_rate": LEARNING_RATE,
            "activation_checkpointing": False,
            "bf16": torch.cuda.is_available(),
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }


class TakesTurns:
    """What is added to a Trainer: it waits for its turn before each step, and notes where the time goes."""

    arm: Arm

    def get_batch_samples(self, *args: Any) -> Any:
        """The beginning of an optimizer step in Trainer's loop."""
        self.arm.turn()
        return super().get_batch_samples(*args)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Student's forward pass and loss."""
        with self.arm.phase("forward"):
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def take_turns(self, arm: Arm) -> None:
        """Trains as `arm`."""
        trainer: Any = self
        self.arm = arm
        arm.timed(trainer.accelerator, "backward", "backward")
        trainer.add_callback(OptimizerClock(arm))
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class OptimizerClock(TrainerCallback):
    """Times `optimizer.step()`."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Just before it."""
        self._phase = self.arm.phase("optimizer")
        self._phase.__enter__()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Just after it."""
        self._phase.__exit__(None, None, None)


class ForcedEngine:
    """An engine that is told the length of each completion."""

    def __init__(self, engine: Any, lengths: Lengths) -> None:
        self.engine, self.lengths = engine, lengths
        engine.stop_ids = [NEVER]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, model: Any, prompts: list[list[int]], seeds: list[int] | None = None) -> list[Completion]:
        """The engine's."""
        return self.engine.generate(model, prompts, seeds, [self.lengths[tuple(prompt)] for prompt in prompts])


class OurTrainer(TakesTurns, OnPolicyDistillationTrainer):
    """`trl_opd`."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts what is trained on."""
        self.arm.now.tokens += int(inputs.mask_BT.sum())
        return super().compute_loss(model, inputs, *args, **kwargs)


class TheirTrainer(TakesTurns, DistillationTrainer):
    """TRL's."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts what is trained on."""
        self.arm.now.tokens += int(inputs["completion_mask"].sum())
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_last_hidden_state(self, unwrapped_model: Any, *args: Any, **kwargs: Any) -> Tensor:
        if unwrapped_model is self.teacher_model:
            with self.arm.phase("teacher"):
                return super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)
        return super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)


def ours(setting: Setting, num_steps: int, cls: type[Ours], **more: Any) -> Ours:
    """Our trainer; `more` are settings."""
    arguments = setting.arguments(num_steps)
    trainer = cls(
        model=setting.adapted(),
        teacher_model=setting.teacher,
        args=OnPolicyDistillationConfig(
            **{"num_generations": setting.work.num_generations, "train_sampling_strategy": "sequential", **arguments, **more}
        ),
        train_dataset=setting.rows(num_steps + 1),
        processing_class=copy.deepcopy(setting.tokenizer),
    )
    trainer.engine = ForcedEngine(trainer.engine, setting.lengths)  # type: ignore[assignment]
    return trainer


def theirs(setting: Setting, num_steps: int) -> TheirTrainer:
    """TRL's trainer. It samples one completion a row: a prompt of a group is G rows."""
    student = setting.adapted()
    own = student.generate

    def generate(**inputs: Any) -> Tensor:
        forced = setting.forced(inputs["input_ids"], inputs["attention_mask"])
        return own(**inputs, logits_processor=forced["logits_processor"])

    student.generate = generate
    return TheirTrainer(
        model=student,
        teacher_model=setting.teacher,
        args=DistillationConfig(shuffle_dataset=False, **setting.arguments(num_steps)),
        train_dataset=setting.rows(num_steps + 1, setting.work.num_generations),
        processing_class=copy.deepcopy(setting.tokenizer),
    )


def make_arm(name: str, setting: Setting, num_steps: int, **more: Any) -> Arm:
    """The arm called `name`, about to do its first step; it can do `num_steps` more after that. `more` are our settings."""
    if name == "bare":
        return Arm(name, partial(_train_bare, setting, num_steps))
    if name == "trl":
        trainer = theirs(setting, num_steps)
        timed = [(trainer.model, "generate", "generate")]
    else:
        trainer = ours(setting, num_steps, OurTrainer, **{"kl_granularity": name, **more})
        timed = [(trainer.engine, "generate", "generate"), (trainer.teacher, "_score", "teacher")]

    def train(arm: Arm) -> None:
        for call in timed:
            arm.timed(*call)
        trainer.take_turns(arm)

    return Arm(name, train)


def _train_bare(setting: Setting, num_steps: int, arm: Arm) -> None:
    loop = BareLoop(setting.adapted(), setting.teacher, setting.tokenizer, setting.forced, setting.work.micro_batch, arm.phase)
    batches = chain([setting.first], repeat(setting.others, num_steps + 1))
    repeated = ([text for text in texts for _ in range(setting.work.num_generations)] for texts in batches)
    steps = loop.steps(repeated, LEARNING_RATE)
    while True:
        arm.turn()
        arm.now.tokens = next(steps)
