"""The output items of POST /v1/responses (messages and function calls), and the stream events for them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from megakernel.serving.server.http import event
from megakernel.serving.server.routes.responses import TokenLogprob
from megakernel.serving.server.routes.tools import call_id
from megakernel.serving.server.service import encode_json
from megakernel.serving.text.tool_calls import CallDelta

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] | None = None


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


class Events:
    """Creates the events of one stream and numbers them."""

    def __init__(self) -> None:
        self._next = 0

    def make(self, kind: str, **content: Any) -> bytes:
        name = f"response.{kind}"
        data = encode_json({"type": name, "sequence_number": self._next, **content})
        self._next += 1
        return b"event: " + name.encode() + b"\n" + event(data)


class Items:
    """The output items of one answer, in order. The last item is open while it may still grow; all others are closed.

    Each method returns the stream events that report the change that it made.
    """

    def __init__(self, events: Events, *, scored: bool) -> None:
        """Create an empty list of items. `scored` says whether text comes with log-probabilities."""
        self.all: list[OutputMessage | OutputCall] = []
        self._events, self._scored = events, scored
        self._open = False

    def add(self, text: str, calls: Sequence[CallDelta] = (), logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Append text, and then function calls. If there is text and no message is open, open a new message for it."""
        events = []
        if text or logprobs:
            if not self._open or not isinstance(self.all[-1], OutputMessage):
                events += [self.close(), self.open_message()]
            message = self.all[-1]
            assert isinstance(message, OutputMessage)
            [part] = message.content
            part.text += text
            if part.logprobs is not None:
                part.logprobs += logprobs
            shown = [one.model_dump() for one in logprobs]
            events.append(self._tell("output_text.delta", content_index=0, delta=text, logprobs=shown))
        for call in calls:
            if call.name is not None:
                made = OutputCall(id=f"fc_{secrets.token_hex(12)}", call_id=call_id(), name=call.name)
                events += [self.close(), self._add(made)]
            if call.arguments:
                item = self.all[-1]
                assert isinstance(item, OutputCall)
                item.arguments += call.arguments
                events.append(self._tell("function_call_arguments.delta", delta=call.arguments))
        return b"".join(events)

    def open_message(self) -> bytes:
        """Open a message without text."""
        message = OutputMessage(id=f"msg_{secrets.token_hex(12)}", content=[])
        events = self._add(message)
        message.content = [OutputText(logprobs=[] if self._scored else None)]
        return events + self._tell("content_part.added", content_index=0, part=OutputText().model_dump())

    def close(self, status: Status = "completed") -> bytes:
        """Close the open item, if there is one."""
        if not self._open:
            return b""
        item, self._open = self.all[-1], False
        item.status = status
        if isinstance(item, OutputCall):
            told = self._tell("function_call_arguments.done", name=item.name, arguments=item.arguments)
        else:
            [part] = item.content
            shown = part.model_dump()
            told = self._tell("output_text.done", content_index=0, text=part.text, logprobs=shown["logprobs"] or [])
            told += self._tell("content_part.done", content_index=0, part=shown)
        return told + self._events.make("output_item.done", output_index=len(self.all) - 1, item=item.model_dump())

    def _add(self, item: OutputMessage | OutputCall) -> bytes:
        self.all.append(item)
        self._open = True
        return self._events.make("output_item.added", output_index=len(self.all) - 1, item=item.model_dump())

    def _tell(self, kind: str, **content: Any) -> bytes:
        """Return an event about the last item."""
        return self._events.make(kind, item_id=self.all[-1].id, output_index=len(self.all) - 1, **content)
