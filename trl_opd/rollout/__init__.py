"""Rollout engines: prompts in, completions with their sampled log-probabilities out. One engine a file."""

from .engine import RolloutEngine as RolloutEngine
from .func import RolloutFunc as RolloutFunc
from .func import trajectories as trajectories
from .loading import make_engine as make_engine
from .tools import Tool as Tool
from .tools import ToolEngine as ToolEngine
from .tools import ToolTemplate as ToolTemplate
from .tools import make_tool_template as make_tool_template
from .transformers import TransformersEngine as TransformersEngine
from .vllm import VLLMEngine as VLLMEngine
