"""`LLM` for asyncio: many concurrent requests, each an asynchronous stream of its answer so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from megakernel.errors import MegakernelError
from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.server.client import Answers, EngineClient
from megakernel.serving.server.loop import EngineLoop
from megakernel.serving.text.llm import LLM, Prompt
from megakernel.serving.text.vllm import Question, RequestOutput, as_prompts
from megakernel.settings import SETTINGS


class AsyncLLM:
    """A model whose engine runs in its own thread. The arguments are those of `LLM`. An instance works only in the
    first event loop that uses it."""

    def __init__(self, model: Any, **args: Any) -> None:
        self._llm = LLM(model, **args)
        most = SETTINGS["max_queued_requests"].value()
        self._host = EngineLoop(self._llm, source="", frontends=1, max_waiting=most)
        self._host.start()
        self._client: EngineClient | None = None
        self._requests = 0

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._llm.get_tokenizer()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt. Yields the whole answer so far whenever new tokens arrive; the last answer is `finished`.
        The request is aborted if the caller stops iterating. Raises MegakernelError if the prompt or a parameter is
        invalid."""
        params = sampling_params or self._llm.get_default_sampling_params()
        asked = as_prompts(prompt)
        if len(asked) != 1:
            raise MegakernelError(f"generate takes one prompt, not {len(asked)}: call it once for each prompt")
        ids = await asyncio.to_thread(self._llm.encode, asked[0])
        self._llm.check(ids, params)
        number, self._requests = self._requests, self._requests + 1
        if self._client is None:
            self._client = EngineClient(self._host.description, "frontend")
            self._client.start()
        name = str(number) if request_id is None else request_id
        question = Question(name, asked[0], ids, params, self._llm.tokenizer)
        transcripts = self._llm.codec.transcripts(ids, params)
        answers = self._client.submit(Answers(self._client, [np.array(ids, np.int32)], params, transcripts))
        try:
            while not answers.finished:
                await answers.take()
                outputs = [question.output(i, text, answers.submitted_at) for i, text in enumerate(answers.transcripts)]
                yield question.result(outputs, answers.scores.get(0, ([], [])), answers.cached)
        finally:
            answers.close()

    def close(self) -> None:
        """Abort all requests and free the weights and the KV pool. Call this method in the event loop's thread, or
        after the event loop has ended."""
        if self._client is not None:
            self._client.close()
        self._host.close()
        self._llm.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
