"""`LLM` for asyncio: many concurrent requests, each an asynchronous stream of its answer so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.server.client import EngineClient, Job
from megakernel.serving.server.host import EngineHost
from megakernel.serving.text.llm import LLM, Prompt
from megakernel.serving.text.outputs import Completion, RequestOutput, request_output
from megakernel.serving.text.transcript import Transcript
from megakernel.serving.text.vllm_names import as_prompts

_MOST_WAITING = 65536


class AsyncLLM:
    """A model whose engine runs in its own thread. The arguments are those of `LLM`.

    An instance belongs to the first event loop that uses it.
    """

    def __init__(self, model: Any, **how: Any) -> None:
        self._llm = LLM(model, **how)
        self._host = EngineHost(self._llm, source="", name=self._llm.model, frontends=1, max_waiting=_MOST_WAITING)
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
        invalid.
        """
        params = sampling_params or SamplingParams()
        asked = as_prompts(prompt)
        if len(asked) != 1:
            raise MegakernelError(f"generate takes one prompt, not {len(asked)}: call it once for each prompt")
        ids = await asyncio.to_thread(self._llm.encode, asked[0])
        self._llm.check(ids, params)
        number, self._requests = self._requests, self._requests + 1
        transcripts = self._llm.transcripts(params)
        client = self._started()
        job = client.submit([ids], params, "")
        first_at, last_at = [0.0] * params.n, [0.0] * params.n
        try:
            while any(transcript.finish_reason is None for transcript in transcripts):
                for index, pieces in (await job.take()).items():
                    transcript = transcripts[index]
                    for piece in pieces:
                        if transcript.finish_reason is None:
                            transcript.add(piece)
                            first_at[index] = first_at[index] or piece.at
                            last_at[index] = piece.at
                    if transcript.finish_reason is not None:
                        client.stop(job, index)  # does nothing if the engine has ended the choice itself
                choices = [_choice(*one, params, job) for one in zip(transcripts, first_at, last_at, strict=True)]
                text = asked[0] if isinstance(asked[0], str) else None
                name = str(number) if request_id is None else request_id
                scores = job.scores.get(0, ([], []))
                yield request_output(name, text, ids, choices, self._llm.tokenizer, params, scores, job.cached)
        finally:
            client.abort(job)

    def close(self) -> None:
        """Abort all requests and free the weights and the KV pool.

        Call this method in the event loop's thread, or after the event loop has ended.
        """
        if self._client is not None:
            self._client.close()
        self._host.close()
        self._llm.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _started(self) -> EngineClient:
        if self._client is None:
            self._client = EngineClient(self._host.description, "frontend")
            self._client.start()
        return self._client


def _choice(transcript: Transcript, first_at: float, last_at: float, params: SamplingParams, job: Job) -> Completion:
    """Copy the tokens and text that a choice has so far. Later tokens do not change the copy."""
    later = len(transcript.token_ids) - 1
    return Completion(
        token_ids=list(transcript.token_ids),
        text=transcript.text,
        finish_reason=transcript.finish_reason,
        logprobs=list(transcript.logprobs),
        top_logprobs=list(transcript.top_logprobs) if params.logprobs is not None else None,
        ttft_s=first_at - job.submitted_at if later >= 0 else None,
        tpot_s=(last_at - first_at) / later if later > 0 else None,
        stop_reason=transcript.stop_reason,
    )
