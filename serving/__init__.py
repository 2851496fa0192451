"""Serving: requests, continuous batching, sampling parameters, the Python API and the HTTP server."""

from .async_llm import AsyncLLM
from .llm import LLM
from .outputs import CompletionOutput, RequestOutput
from .sampling import SamplingParams
from .structured import StructuredOutputsParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]
