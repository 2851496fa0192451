"""Follows one chat request through the files of the package, to the launch and back, and counts them."""

import re
import threading
from pathlib import Path
from types import FrameType

from api_support import serving

from megakernel import LLM

ROOT = Path(__file__).parents[3]
# What the tables of docs/architecture.md leave out: checks before the route, counters, and the step's table.
BESIDE = re.compile(
    r"serving/server/(http|limits|board|metrics|frontend)\.py|serving/engine/(live|programs)\.py"
    r"|megakernel/(runtime|isa|targets|roofline|machine|program)/.*|megakernel/settings\.py"
)
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "ignore_eos": True, "stream": True}


def listed(column: str) -> set[str]:
    """Return the files in the table of docs/architecture.md whose first column is named `column`."""
    table = (ROOT / "docs" / "architecture.md").read_text().split(f"\n| {column} |")[1].split("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`([\w/]+\.py)`", row.split("|")[1])}


def test_a_chat_request_passes_the_files_that_the_architecture_lists(model: str) -> None:
    """The way begins where the body is checked and turns where the launch has started."""
    engine: list[tuple[str, str]] = []  # file and name of each function that the engine's thread calls
    frontend: list[tuple[str, str]] = []  # the same for all other threads
    frames: set[FrameType] = set()  # of calls, because a coroutine that goes on is no new call
    recording = False

    def trace(frame: FrameType, event: str, arg: object) -> None:
        if recording and frame not in frames and (file := source(frame)):
            frames.add(frame)
            calls = engine if threading.current_thread().name == "engine" else frontend
            calls.append((file, frame.f_code.co_qualname))

    threading.settrace(trace)
    try:
        limits = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32, "threads": 1}
        with LLM(model, backend="null", **limits) as llm, serving(llm) as live:  # type: ignore[arg-type]
            for _ in range(3):  # later requests of this kind compile no program
                live.request("POST", "/v1/chat/completions", BODY)
            recording = True
            status, _, data = live.request("POST", "/v1/chat/completions", BODY)
            recording = False
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    assert status == 200 and data.endswith(b"data: [DONE]\n\n")
    ends = ("._only_known_fields", "unpack", "._events")
    begun, read, written = ([name.endswith(end) for _, name in frontend] for end in ends)
    names = ("EngineLoop._submit", "CpuBackend.start", "_own")
    submitted, launched, ended = ([name == wanted for _, name in engine] for wanted in names)
    there = files(frontend[begun.index(True) : read.index(True)], engine[submitted.index(True) : launched.index(True)])
    # While the launch runs, the engine plans the next step, which is no part of the way back.
    back = files(engine[ended.index(True) :], frontend[read.index(True) : len(written) - written[::-1].index(True)])
    assert there == listed("to the launch") and len(there) <= 15
    assert back == listed("back") and len(back) <= 9


def source(frame: FrameType) -> str:
    """Return the file of a function of the package as the checkout names it, wherever the package is installed, or ""
    for another function."""
    module = str(frame.f_globals.get("__name__"))
    if not module.startswith("megakernel.") or not frame.f_code.co_filename.endswith(".py"):
        return ""
    name = module.replace(".", "/") + ("/__init__.py" if "__path__" in frame.f_globals else ".py")
    return re.sub(r"^megakernel/(?=serving/|scheduler/)", "", name)


def files(*parts: list[tuple[str, str]]) -> set[str]:
    return {file for part in parts for file, _ in part if not BESIDE.fullmatch(file)}
