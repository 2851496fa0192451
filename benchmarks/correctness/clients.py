"""Tests structured outputs and tools with real clients: `python benchmarks/correctness/clients.py --url URL [-o FILE]`.

The script needs client packages but not megakernel, so it runs in its own environment (`pip install openai instructor
langchain-openai langgraph openai-agents "pydantic-ai-slim[openai]" anthropic`) against a running server (`megakernel
serve --model smollm2-135m`). Two more clients are in the folder clients: one needs a JDK, and the other needs Node.js,
with packages that npm installs into a temporary folder. Each case is tried once. A client that is not installed is
reported and not counted. Exit status 1 means that a case failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import openai
from pydantic import BaseModel, ConfigDict, Field

CLIENTS = (
    "openai",
    "instructor",
    "langchain-openai",
    "langgraph",
    "openai-agents",
    "pydantic-ai-slim",
    "anthropic",
)
PROGRAMS = Path(__file__).with_name("clients")


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    kind: Literal["child", "adult"]


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SQL = """
    ?start: "SELECT " name ("," name)? " FROM " name

    ?name: /[a-z_]{1,12}/
"""
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "nothing", "parameters": NOTHING}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "Bob is 31 years old and lives in Paris. How is the weather there?"}]


def weather(city: str) -> str:
    """Weather of a city."""
    return f"20 degrees in {city}"


def ran(*command: str | Path, folder: Path | None = None) -> str:
    """Return what a command printed to standard output.

    Raises:
        ImportError: the program is not installed.
        AssertionError: the command failed.
    """
    if not shutil.which(command[0]):
        raise ImportError(name=str(command[0]))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Cases:
    """The test cases, one method each. A case fails by raising an exception."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        self.versions = {name: installed(name) for name in CLIENTS} | {"ai": "not installed", "java": "not installed"}

    def _ask(self, **given: Any) -> Any:
        return self.client.chat.completions.create(model=self.model, messages=MESSAGES, **{"max_tokens": 200, **given})

    def _schema(self, temperature: float) -> None:
        schema = {"name": "person", "schema": Person.model_json_schema(), "strict": True}
        answer = self._ask(response_format={"type": "json_schema", "json_schema": schema}, temperature=temperature)
        Person.model_validate_json(answer.choices[0].message.content)

    def json_schema_at_three_temperatures(self) -> None:
        for temperature in (0.0, 0.7, 1.5):
            self._schema(temperature)

    def parse(self) -> None:
        parsed = self.client.chat.completions.parse(model=self.model, messages=MESSAGES, response_format=Person)
        assert isinstance(parsed.choices[0].message.parsed, Person)

    def json_object(self) -> None:
        answer = self._ask(response_format={"type": "json_object"}, max_tokens=400, temperature=0).choices[0]
        assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)

    def _calls(self, **given: Any) -> list[tuple[str, str]]:
        """Return the name and the arguments of each tool call in a streamed answer, put together from its events.

        Then stream an answer once more through the helper of the openai package, and check that the arguments of the
        calls that the helper returns are valid JSON.
        """
        calls: list[list[str]] = []
        reason = None
        for event in self._ask(tools=TOOLS, stream=True, **given):
            [choice] = event.choices
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.id:
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments or ""
        assert reason == "tool_calls", reason
        told = {"model": self.model, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, **given}
        with self.client.chat.completions.stream(**told) as stream:
            [choice] = stream.get_final_completion().choices
        for call in choice.message.tool_calls:
            json.loads(call.function.arguments)
        return [(name, arguments) for name, arguments in calls]

    def required_tool_streamed(self) -> None:
        calls = self._calls(tool_choice="required", parallel_tool_calls=False)
        assert len(calls) == 1 and calls[0][0] in ("weather", "nothing")
        assert isinstance(json.loads(calls[0][1]), dict)

    def named_tool_streamed(self) -> None:
        [(name, arguments)] = self._calls(tool_choice={"type": "function", "function": {"name": "weather"}})
        assert name == "weather" and set(json.loads(arguments)) == {"city", "unit"}

    def refusals_by_name(self) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "unclosed group"),
            ({"extra_body": {"structured_outputs": {"json": {"type": "strin"}}}}, "strin"),
            ({"tool_choice": "required"}, "tool_choice needs tools"),
            ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ]
        for given, why in cases:
            try:
                self._ask(**given)
            except openai.BadRequestError as e:
                assert why in str(e), e
            else:
                raise AssertionError(f"the server did not refuse the request {given}")

    def vllm_example(self) -> None:
        """Test the example of structured outputs in vLLM's documentation."""
        schema = Person.model_json_schema()
        mail = r"[a-z0-9.]{1,20}@[a-z]{2,10}\.com\n"
        forms = {"choice": ["positive", "negative"], "regex": mail, "json": schema, "grammar": SQL}
        for name, form in forms.items():
            stop = ["\n"] if name == "regex" else None
            answer = self._ask(extra_body={"structured_outputs": {name: form}}, stop=stop).choices[0]
            text = answer.message.content
            assert answer.finish_reason == "stop", (name, text)
            if name == "choice":
                assert text in forms["choice"], text
            elif name == "json":
                Person.model_validate_json(text)
            else:
                wanted = mail[:-2] if name == "regex" else "SELECT [a-z_]+(,[a-z_]+)? FROM [a-z_]+"
                assert re.fullmatch(wanted, text), text

    def instructor(self) -> None:
        import instructor

        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(self.client, mode=mode)
            person = client.chat.completions.create(
                model=self.model, messages=MESSAGES, response_model=Person, max_retries=0, max_tokens=200
            )
            assert isinstance(person, Person)

    def langchain_structured(self) -> None:
        from langchain_openai import ChatOpenAI

        chat = ChatOpenAI(base_url=self.url, api_key="none", model=self.model, max_retries=0, max_tokens=200)
        for method in ("json_schema", "function_calling"):
            found = chat.with_structured_output(Person, method=method).invoke("Bob is 31 years old.")
            assert isinstance(found, Person), method

    def langchain_tools(self) -> None:
        from langchain_openai import ChatOpenAI

        chat = ChatOpenAI(base_url=self.url, api_key="none", model=self.model, max_retries=0, max_tokens=200)
        answer = chat.bind_tools(TOOLS, tool_choice="weather").invoke("How is the weather in Paris?")
        [call] = answer.tool_calls
        assert call["name"] == "weather" and set(call["args"]) == {"city", "unit"}

    def langgraph_cut_call(self) -> None:
        """Test that a tool call that max_tokens cuts off is reported as cut off and can be sent back."""
        from langchain_openai import ChatOpenAI
        from langgraph.checkpoint.memory import MemorySaver
        from langgraph.graph import START, MessagesState, StateGraph

        chat = ChatOpenAI(
            base_url=self.url, api_key="none", model=self.model, max_retries=0, max_tokens=24, temperature=0
        ).bind_tools([weather], tool_choice="weather")
        graph = StateGraph(MessagesState)
        graph.add_node("ask", lambda state: {"messages": [chat.invoke(state["messages"])]})
        graph.add_edge(START, "ask")
        app = graph.compile(checkpointer=MemorySaver())
        for turn in (f"How is the weather in {'Taumata' * 6}?", "Go on."):
            told = app.invoke({"messages": [("user", turn)]}, {"configurable": {"thread_id": "1"}})["messages"]
            assert told[-1].response_metadata["finish_reason"] == "length"
        [call] = told[1].invalid_tool_calls or told[1].tool_calls
        assert call["name"] == "weather"

    def openai_agents(self) -> None:
        """Test both of OpenAI's APIs: a tool call, its result and the next turn; then a tool together with an output
        type."""
        import agents

        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0)
        tools: Any = [agents.function_tool(weather)]
        for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            told: dict[str, Any] = {"name": "a", "model": kind(self.model, client), "tools": tools}
            for choice in ("required", "auto", "none"):
                settings = agents.ModelSettings(max_tokens=80, temperature=0, tool_choice=choice)
                wanted = None if choice == "required" else Person
                agent = agents.Agent(**told, model_settings=settings, output_type=wanted)
                try:
                    ended = agents.Runner.run_sync(agent, "Bob is 31 years old. How is Paris?", max_turns=2)
                    items = ended.new_items
                    assert wanted is None or isinstance(ended.final_output, Person)
                except agents.MaxTurnsExceeded as e:  # The model asked for the tool in both turns.
                    assert choice != "none"
                    items = e.run_data.new_items
                made = [item.output for item in items if isinstance(item, agents.ToolCallOutputItem)]
                assert made or choice != "required"
                assert all("20 degrees in " in output for output in made), made

    def pydantic_ai(self) -> None:
        from pydantic_ai import Agent, NativeOutput, UsageLimitExceeded, UsageLimits
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        model = OpenAIChatModel(self.model, provider=OpenAIProvider(base_url=self.url, api_key="none"))
        settings: Any = {"max_tokens": 80}
        agent = Agent(model, output_type=Person, retries=0, model_settings=settings)
        assert isinstance(agent.run_sync("Bob is 31 years old.").output, Person)
        for choice in ("auto", "none"):
            settings = {"max_tokens": 80, "temperature": 0, "tool_choice": choice}
            both = Agent(model, output_type=NativeOutput(Person), tools=[weather], retries=0, model_settings=settings)
            try:
                found = both.run_sync("Bob is 31 years old.", usage_limits=UsageLimits(request_limit=2)).output
                assert isinstance(found, Person)
            except UsageLimitExceeded:  # The model asked for the tool in both turns.
                assert choice == "auto"

    def vercel_ai(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            packages = ("ai@6", "@ai-sdk/openai-compatible@2")
            try:
                ran("npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *packages, folder=folder)
            except AssertionError as e:
                raise ImportError(name="ai") from e
            self.versions["ai"] = json.loads((folder / "node_modules/ai/package.json").read_text())["version"]
            ran("node", shutil.copy(PROGRAMS / "vercel.mjs", folder), self.url, self.model)

    def java_upgrade(self) -> None:
        self.versions["java"] = ran("javac", "--version").split()[-1]
        ran("java", PROGRAMS / "Upgrade.java", self.url, self.model)

    def anthropic_messages(self) -> None:
        """Test text, streams, tools with their results, and token counts with Anthropic's own client package."""
        import anthropic

        client = anthropic.Anthropic(base_url=self.url.removesuffix("/v1"), api_key="none", max_retries=0)
        told: dict[str, Any] = {"model": self.model, "messages": MESSAGES, "max_tokens": 200, "system": "Be brief."}
        told["extra_body"] = {"temperature": 0}  # version 2.14 of the package has no argument `temperature`
        whole = client.messages.create(**told)
        with client.messages.stream(**told) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
        ended = client.messages.create(**told, stop_sequences=[whole.content[0].text[3:9]])
        assert ended.stop_reason == "stop_sequence"
        assert ended.stop_sequence == whole.content[0].text[3:9]
        counted = client.messages.count_tokens(model=self.model, messages=MESSAGES, system="Be brief.")
        assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens

    def anthropic_tools(self) -> None:
        import anthropic

        client = anthropic.Anthropic(base_url=self.url.removesuffix("/v1"), api_key="none", max_retries=0)
        tools: Any = [{"name": "weather", "description": "Weather of a city", "input_schema": WEATHER}]
        choice: Any = {"type": "tool", "name": "weather"}
        told: dict[str, Any] = {"model": self.model, "max_tokens": 200, "tools": tools}
        with client.messages.stream(**told, messages=MESSAGES, tool_choice=choice) as stream:
            asked = stream.get_final_message()
        [call] = asked.content
        assert (asked.stop_reason, call.name, set(call.input)) == ("tool_use", "weather", {"city", "unit"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}
        turns = [*MESSAGES, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**told, messages=turns).role == "assistant"
        try:
            image = {"type": "image", "source": {"type": "url", "url": "http://example.com/x.png"}}
            client.messages.create(**told, messages=[{"role": "user", "content": [image]}])
        except anthropic.BadRequestError as e:
            assert "type image is not supported" in e.message
        else:
            raise AssertionError("the server did not refuse an image")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="such as http://127.0.0.1:8000/v1")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the results to FILE as JSON")
    args = parser.parse_args()
    model = openai.OpenAI(base_url=args.url, api_key="none").models.list().data[0].id
    cases = Cases(args.url, model)
    names = [name for name, kind in vars(Cases).items() if callable(kind) and not name.startswith("_")]
    found = {name: outcome(getattr(cases, name)) for name in names}
    for name, what in found.items():
        print(f"{name}: {what}")
    if args.output:
        told = {"command": "python benchmarks/correctness/clients.py --url URL -o FILE", "model": model}
        told |= {"clients": cases.versions}
        lines = [f" {json.dumps(name)}: {json.dumps(what)}" for name, what in (told | {"cases": found}).items()]
        args.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return any(what.startswith("failed") for what in found.values())


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def outcome(case: Callable[[], None]) -> str:
    try:
        case()
    except ImportError as e:
        return f"not installed: {e.name}"
    except Exception as e:
        return f"failed: {type(e).__name__}: {str(e)[:300]}"
    return "passed"


if __name__ == "__main__":
    sys.exit(main())
