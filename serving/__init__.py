"""Who is asking, and which tokens go into the next step."""

from .llm import LLM, Result
from .sampling import SamplingParams
from .structured import StructuredOutputsParams

__all__ = ["LLM", "Result", "SamplingParams", "StructuredOutputsParams"]
