"""Serving: requests, continuous batching, sampling parameters, the Python API and the HTTP server."""

from megakernel.serving.engine.sampling import SamplingParams, StructuredOutputsParams
from megakernel.serving.text.async_llm import AsyncLLM
from megakernel.serving.text.llm import LLM
from megakernel.serving.text.vllm import CompletionOutput, RequestOutput

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]
