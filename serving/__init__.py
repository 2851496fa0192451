"""Who is asking, and which tokens go into the next step."""

from .async_llm import AsyncLLM
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
