"""Teachers: a rollout in, the log-probability of each of its tokens out. One kind a file."""

from typing import Protocol

from torch import Tensor

from ..batch import Rollout
from .adapter import AdapterTeacher as AdapterTeacher
from .loading import make_teacher as make_teacher
from .loading import teacher_name as teacher_name
from .model import ModelTeacher as ModelTeacher
from .server import ServerTeacher as ServerTeacher


class Teacher(Protocol):
    """Scores what the student wrote. A second kind of teacher is a second class with this method."""

    def score(self, rollout: Rollout) -> Tensor:
        """(B, T) nats, no gradient: the value at t is log q(ids[t] | what the teacher has seen before t).

        Values off the action mask are ignored. Where the rollout has `teacher_prompts`, the completion is scored after those.
        """
        ...
