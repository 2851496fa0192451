"""POST /v1/embeddings: returns the hidden state of a text's last token, or the mean over its tokens, with length 1."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Literal

import numpy as np
from fastapi.responses import Response
from pydantic import Field

from megakernel.serving.engine.sampling import POOLINGS, SamplingParams
from megakernel.serving.server import requests
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.service import Served
from megakernel.serving.server.writer import WholeAnswer, encode_json


class EmbeddingRequest(requests.Truncated):
    where = "/v1/embeddings"

    input: requests.Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, description="how many dimensions to keep"), requests.NUMBER] | None = None
    add_special_tokens: requests.AddSpecial | None = None

    @property
    def wanted(self) -> int:
        return 0


async def embed(service: Served, body: EmbeddingRequest) -> Response:
    """Answer a request with one embedding for each input. The model's folder says how hidden states are pooled."""
    model, known = service.model(body.model), service.description
    if known.pooling not in POOLINGS:
        told = f"{model} makes embeddings with {known.pooling} pooling: only last and mean pooling are supported"
        raise APIError(400, told)
    if body.dimensions is not None and body.dimensions > known.hidden:
        raise APIError(400, f"dimensions must be at most {known.hidden}, not {body.dimensions}", param="dimensions")
    asked, special = requests.prompt_list(body.input), body.add_special_tokens is not False
    prompts = await service.encode_prompts(asked, special, service.limit(body))
    service.room(prompts, 0)
    answers = service.answers(prompts, SamplingParams(temperature=0.0, max_tokens=1, pooling=known.pooling))
    await service.finished(answers, answers.complete())
    data = []
    for index in range(len(prompts)):
        vector = answers.pooled[index][: body.dimensions]
        vector = (vector / (float(np.linalg.norm(vector)) or 1.0)).astype("<f4")  # a vector of zeros stays
        shown = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append(encode_json({"object": "embedding", "index": index, "embedding": shown}))
        await asyncio.sleep(0)  # Other clients have their turn between the vectors.
    usage = dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, prompts)))
    head = encode_json({"object": "list", "model": model, "usage": usage})
    return WholeAnswer(head[:-1] + b',"data":[' + data[0], *(b"," + one for one in data[1:]), b"]}")
