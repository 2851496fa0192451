"""POST /v1/chat/completions, and the choice among tools."""

from __future__ import annotations

from fastapi.responses import Response

from megakernel.errors import MegakernelError
from megakernel.serving.engine.sampling import StructuredOutputsParams
from megakernel.serving.engine.tokens import TokenIds
from megakernel.serving.server.client import Answers, Delta
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.http import event
from megakernel.serving.server.replay import new_id
from megakernel.serving.server.routes import bodies
from megakernel.serving.server.routes.requests import ChatRequest, Tool, ToolChoice
from megakernel.serving.server.service import AnswerFormat, Service
from megakernel.serving.text.codec import Codec
from megakernel.serving.text.tool_calls import Piece, Reader


async def chat(service: Service, body: ChatRequest) -> Response:
    """Answer a conversation with the whole answer, or with a stream that begins when the first token exists."""
    model = service.model(body.model)
    tools = Tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    structured = tools.structured(body.structured(), service.codec)
    prompt = await service.encode_chat(body, tools.told)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = service.truncated(prompt, body, wanted)
    service.room([prompt], wanted)
    params = body.sampling(
        service.description.sampling,
        service.max_context - len(prompt) if wanted is None else wanted,
        structured,
        n=body.n or 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    answers = service.answers([prompt], params, special=tools.reader(service.codec) is not None)
    return await service.respond(answers, _Chat(service, body, model, prompt, answers, tools), bool(body.stream))


class _Chat(AnswerFormat):
    def __init__(
        self, service: Service, body: ChatRequest, model: str, prompt: TokenIds, answers: Answers, tools: Tools
    ) -> None:
        super().__init__(service, "chatcmpl", body, model, [prompt], answers)
        self._body, self._tools = body, tools
        last = body.messages[-1]
        self._before = last.plain()["content"] if body.echo and last.role == "assistant" else ""
        self._readers: dict[int, Reader | None] = {}  # choice -> parser of its text, if any

    async def whole(self) -> bytes:
        choices = await self._answers.collect()
        response = bodies.ChatResponse(
            **self._head,
            choices=[
                bodies.ChatChoice(
                    index=choice.index,
                    message=message,
                    logprobs=self._logprobs(choice),
                    finish_reason=_reason(choice, bool(message.tool_calls)) or "length",
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if self._shows_ids else None,
                )
                for choice in choices
                for message in [self._message(choice)]
            ],
            usage=self._usage(self._answers.completion_tokens),
            prompt_token_ids=self._prompts[0].tolist() if self._shows_ids else None,
            prompt_logprobs=self._prompt_logprobs(0, self._body.prompt_logprobs),
        )
        return response.model_dump_json().encode()

    def _usage_chunk(self) -> bytes | None:
        return self._chunk([], self._usage(self._answers.completion_tokens)) if self._body.wants_usage_chunk else None

    def _message(self, choice: Delta) -> bodies.ChatMessage:
        """Return a completed choice as a message. Tool calls are extracted from its text."""
        if (reader := self._tools.reader(self._service.codec)) is None:
            return bodies.ChatMessage(content=self._before + choice.text)
        pieces = reader.add(choice.text, choice.finish_reason or "length")
        calls: list[bodies.ToolCall] = []
        for piece in pieces:
            if piece.kind == "call":
                function = bodies.FunctionCall(name=piece.text, arguments="")
                calls.append(bodies.ToolCall(id=call_id(), function=function))
            elif piece.kind == "arguments":
                calls[-1].function.arguments += piece.text
        text = "".join(piece.text for piece in pieces if piece.kind == "content")
        reasoning = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
        text = self._before + text
        content = text or None if calls else text
        return bodies.ChatMessage(content=content, tool_calls=calls or None, reasoning_content=reasoning or None)

    def _tool_events(self, delta: Delta, reader: Reader) -> bytes:
        """Return the events for the new tokens of a choice that may call tools. There is no event for new text that may
        still turn out to be part of a tool call."""
        before = reader.calls
        pieces = []
        for piece in reader.add(delta.text, delta.finish_reason):
            before += piece.kind == "call"
            # Many clients read only one call per event, so each piece of a call gets an event of its own.
            pieces.append(_chat_delta(piece, before - 1))
        new = self._choice(delta)
        new.delta = pieces.pop() if pieces else bodies.ChatDelta()
        new.finish_reason = _reason(delta, bool(reader.calls))
        events = [event(self._chunk([bodies.ChatChunkChoice(index=delta.index, delta=piece)])) for piece in pieces]
        if new.delta != bodies.ChatDelta() or new.finish_reason or new.logprobs or new.token_ids:
            events.append(event(self._chunk([new])))
        return b"".join(events)

    def _event(self, delta: Delta) -> bytes:
        """Return the stream events for new text of a choice. The first event of each choice contains the role and, with
        `echo`, the text of the last assistant message."""
        if delta.index in self._readers:
            return self._later_event(delta)
        self._readers[delta.index] = self._tools.reader(self._service.codec)
        role = bodies.ChatDelta(role="assistant", content=self._before)
        return event(self._chunk([bodies.ChatChunkChoice(index=delta.index, delta=role)])) + self._later_event(delta)

    def _later_event(self, delta: Delta) -> bytes:
        if (reader := self._readers[delta.index]) is not None:
            return self._tool_events(delta, reader)
        if delta.finish_reason is None and not self._body.logprobs and not self._shows_ids:
            return self._text_event(delta.index, delta.text)
        return event(self._chunk([self._choice(delta)]))

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._chunk([bodies.ChatChunkChoice(index=index, delta=bodies.ChatDelta(content=text))])

    def _chunk(self, choices: list[bodies.ChatChunkChoice], usage: bodies.Usage | None = None) -> bytes:
        return bodies.ChatChunk(**self._head, choices=choices, usage=usage).model_dump_json().encode()

    def _choice(self, delta: Delta) -> bodies.ChatChunkChoice:
        return bodies.ChatChunkChoice(
            index=delta.index,
            delta=bodies.ChatDelta(content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._shows_ids else None,
        )

    def _logprobs(self, delta: Delta) -> bodies.ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return bodies.chat_logprobs(self._tokenizer, bodies.scores(delta.tokens), self._body.top_logprobs or 0)


def _reason(choice: Delta, calls: bool) -> bodies.FinishReason | None:
    """Return why a choice has ended. A tool call that max_tokens cut off must not look complete: the reason is
    `length`."""
    return "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason


def _chat_delta(piece: Piece, call: int) -> bodies.ChatDelta:
    """Return a piece of an answer in the form of a stream. `call` is the number of the last call."""
    if piece.kind == "content":
        return bodies.ChatDelta(content=piece.text)
    if piece.kind == "reasoning":
        return bodies.ChatDelta(reasoning_content=piece.text)
    if piece.kind == "arguments":
        part = bodies.FunctionDelta(arguments=piece.text)
        return bodies.ChatDelta(tool_calls=[bodies.ToolCallDelta(index=call, function=part)])
    part = bodies.FunctionDelta(name=piece.text, arguments="")
    return bodies.ChatDelta(tool_calls=[bodies.ToolCallDelta(index=call, id=call_id(), type="function", function=part)])


class Tools:
    """The tools of a request and the field `tool_choice`, which says which of them the model may or must call. The
    constructor raises an HTTP error 400 if the tools and the choice contradict each other."""

    def __init__(self, given: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> None:
        self.functions = {tool.function.name: tool.function.parameters for tool in given or ()}
        if len(self.functions) < len(given or ()):
            raise APIError(400, "tools: two functions have the same name", param="tools")
        if not given and choice not in (None, "none", "auto"):
            raise APIError(400, "tool_choice needs tools, but the request has none", param="tool_choice")
        named = choice.function.name if isinstance(choice, Tool) else None
        if named is not None and named not in self.functions:
            raise APIError(400, f"tool_choice names {named!r:.80}, which is none of the tools", param="tool_choice")
        self.told = [tool.model_dump(exclude_none=True) for tool in given or ()]
        self.used = bool(given) and choice != "none"
        self._required = choice == "required" or named is not None
        self._callable = self.functions if named is None else {named: self.functions[named]}
        self._several = parallel is not False and named is None

    def structured(self, asked: StructuredOutputsParams | None, codec: Codec) -> StructuredOutputsParams | None:
        """Return the format that the answer must match, see `Codec.constraint`. `asked` is the format that the other
        fields of the request set."""
        functions = self._callable if self.used else {}
        try:
            return codec.constraint(functions, asked, required=self._required, several=self._several)
        except MegakernelError as e:
            raise APIError(400, str(e)) from e

    def reader(self, codec: Codec) -> Reader | None:
        """Return a parser that finds the tool calls in the text of one answer, or None if its text is content only."""
        return codec.reader(self._callable if self.used else None, None if self._several else 1)


def call_id() -> str:
    return f"call_{new_id()}"
