"""Tests that code written for vLLM's Python API runs after its import is changed, and finds the fields it reads."""

import asyncio
import io
import math
from contextlib import closing, redirect_stderr, redirect_stdout
from typing import Any

import pytest
from rich.console import Console

from megakernel import LLM, AsyncLLM, SamplingParams
from megakernel.errors import MegakernelError
from megakernel.serving.text import llm as progress_module
from megakernel.serving.text.vllm import plain as by_token

LIMITS: dict[str, Any] = {"max_context": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "threads": 1}

EXAMPLE = """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, tensor_parallel_size=1, max_model_len=256, dtype="half", trust_remote_code=True)
params = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=3)
conversation = [
    {"role": "system", "content": "You write poems."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What shall it be about?"},
    {"role": "user", "content": [{"type": "text", "text": "The sea."}]},
]
outputs = llm.generate(["The tallest mountain is", "Rivers flow into", "Two plus two equals"], params)
outputs += llm.chat(conversation, params, use_tqdm=False)
outputs += llm.chat(messages=[conversation] * 3, sampling_params=params, use_tqdm=True)
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Output: {output.outputs[0].text!r}")
"""


def test_an_example_runs_with_another_import(model: str) -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(EXAMPLE.replace("from vllm import", "from megakernel import"), {"MODEL": model})
    lines = printed.getvalue().splitlines()
    assert len(lines) == 7 and all(line.startswith("Prompt: ") and "Output: '" in line for line in lines)


def test_a_prompt_has_any_of_vllms_forms(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    [expected] = llm.generate("prompt", params)
    ids = expected.prompt_token_ids
    forms: list[Any] = [{"prompt": "prompt"}, {"prompt_token_ids": ids}, "prompt", ids]
    for form in forms:
        [one] = llm.generate(form, params)
        assert one.outputs == expected.outputs
        assert one.prompt == ("prompt" if form in (forms[0], forms[2]) else None)
    assert [one.outputs for one in llm.generate(forms, sampling_params=params)] == [expected.outputs] * 4
    assert [one.prompt for one in llm.generate(["b", "a"], [params, params])] == ["b", "a"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "a prompt must be text"),
        ({"prompt": 3}, "a prompt must be text"),
        ({"prompt": "x", "multi_modal_data": {}}, "'multi_modal_data' is not supported"),
    ],
)
def test_a_prompt_of_another_form_is_an_error(llm: LLM, prompt: Any, message: str) -> None:
    for prompts in (prompt, ["x", prompt]):
        with pytest.raises(MegakernelError, match=message):
            llm.generate(prompts)
    assert llm.engine.idle


def test_an_output_has_vllms_fields(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=5, logprobs=2, prompt_logprobs=1)
    [out] = llm.generate("hello", params)
    assert out.finished and int(out.request_id) >= 0 and out.prompt == "hello" and out.lora_request is None
    assert [one.index for one in out.outputs] == [0, 1]
    for one in out.outputs:
        assert one.finished() and (one.finish_reason, one.stop_reason) == ("length", None)
        assert one.cumulative_logprob == math.fsum(one.token_logprobs)
        assert one.logprobs is not None
        for scores, token, logprob in zip(one.logprobs, one.token_ids, one.token_logprobs, strict=True):
            assert next(iter(scores)) == token and scores[token].logprob == logprob
            assert [scores[other].rank for other in list(by_token(scores))[:2]] == [1, 2]
            assert isinstance(scores[token].decoded_token, str)
    # These attributes of the output are shortcuts to its first choice.
    first = out.outputs[0]
    assert (out.text, out.token_ids, out.logprobs) == (first.text, first.token_ids, first.token_logprobs)
    assert out.prompt_logprobs is not None and out.prompt_token_logprobs is not None
    assert out.prompt_logprobs[0] is out.prompt_token_logprobs[0] is None
    each = zip(out.prompt_logprobs, out.prompt_token_ids, out.prompt_token_logprobs, strict=True)
    for scored, token, value in list(each)[1:]:
        assert scored is not None and scored[token].logprob == value
    with pytest.raises(AttributeError, match="no choices: use outputs"):
        _ = out.choices
    [plain] = llm.generate("hello", SamplingParams(max_tokens=1))
    assert plain.outputs[0].logprobs is plain.prompt_logprobs is None
    assert repr(plain).startswith("RequestOutput(request_id='")


def test_what_ended_an_output_is_told(llm: LLM) -> None:
    free = llm.generate("x", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0]
    token, text = free.token_ids[3], free.text or ""
    ended = llm.generate("x", SamplingParams(temperature=0.0, stop_token_ids=[token]))[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)
    ended = llm.generate("x", SamplingParams(temperature=0.0, stop=["\0never", text[2:4]]))[0].outputs[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", text[2:4])
    kept = SamplingParams(temperature=0.0, stop=text[2:4], include_stop_str_in_output=True)
    assert llm.generate("x", kept)[0].text == ended.text + text[2:4]


def test_conversations(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.decode(one.prompt_token_ids) for one in llm.chat([said, said[:1]], params)]
    assert prompts == ["<user>a<assistant>b<assistant>", "<user>a<assistant>"]
    [continued] = llm.chat(said, params, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(continued.prompt_token_ids) == "<user>a<assistant>b"
    assert tokenizer.decode(tokenizer.encode("é")) == "é"
    for wrong in ([{"content": "x"}], ["x"], [{"role": "user", "content": [{"type": "image_url"}]}]):
        with pytest.raises(MegakernelError, match="a message m"):
            llm.chat(wrong, params)  # type: ignore[arg-type]


def test_arguments_in_vllms_names(model: str) -> None:
    how = {"max_model_len": 96, "max_num_seqs": 3, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    with LLM(model=model, tensor_parallel_size=2, dtype="float", threads=2, gpu_memory_utilization=0.4, **how) as made:
        dims = made.engine.dims
        assert (dims.split.tp, dims.bucket.max_context, dims.bucket.max_seqs) == (2, 96, 3) and made.dtype.name == "F32"
        assert [made.generate([7] * 40)[0].num_cached_tokens for _ in range(2)] == [0, 0]
    # max_num_seqs exceeds the default of max_num_batched_tokens. This is no error: the latter becomes 700 instead.
    with LLM(model, dtype="half", max_num_seqs=700, max_model_len=64, enable_prefix_caching=None) as made:
        assert made.dtype.name == "BF16" and made.args.enable_prefix_caching  # None: the default, as in vLLM
    for wrong, message in (
        ({"quantization": "awq"}, "quantization='awq'"),
        ({"seed": 1}, "give SamplingParams a seed"),
        ({"load_format": "dummy"}, "load_format='dummy'"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"tp": 2, "tensor_parallel_size": 4}, "tensor_parallel_size is given twice"),
        ({"max_seqs": 4}, "does not take max_seqs=4: it takes .*max_num_seqs"),
    ):
        with pytest.raises(MegakernelError, match=message):
            LLM(model, **wrong)  # type: ignore[arg-type]


def test_a_bar_shows_on_a_terminal_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(terminal: bool, **how: Any) -> str:
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=100)
        monkeypatch.setattr(progress_module, "Console", lambda stderr: console)
        with redirect_stderr(screen):
            llm.generate(["a", "b", "c"], SamplingParams(max_tokens=3, stop=["\0"]), **how)
        return screen.getvalue()

    assert "3/3" in shown(True)
    assert shown(True, use_tqdm=False) == shown(False) == shown(True, on_step=lambda step: None) == ""


def test_requests_of_an_event_loop(quiet_model: str, llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=9, n=n, logprobs=1, prompt_logprobs=0) for n in (1, 2)]
    expected = [llm.generate("hello", p)[0] for p in params]

    async def read(engine: AsyncLLM, p: SamplingParams) -> list[Any]:
        return [output async for output in engine.generate("hello", p, request_id="mine")]

    async def leave(engine: AsyncLLM) -> None:
        async for output in engine.generate([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True)):
            assert output.outputs[0].token_ids
            break

    async def main() -> None:
        with AsyncLLM(quiet_model, **LIMITS) as engine:
            runs = await asyncio.gather(*(read(engine, p) for p in params), leave(engine))
            for outputs, alone in zip(runs[:2], expected, strict=True):
                assert outputs is not None
                last = outputs[-1]
                assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
                assert last.outputs == alone.outputs and last.prompt_logprobs == alone.prompt_logprobs
                assert (last.request_id, last.prompt) == ("mine", "hello")
                lengths = [len(one.outputs[0].token_ids) for one in outputs]
                assert lengths == sorted(lengths) and lengths[-1] == 9
            text = expected[0].text or ""
            stops = SamplingParams(temperature=0.0, max_tokens=200, stop=text[2:4])
            ended = [output async for output in engine.generate("hello", stops)][-1].outputs[0]
            assert (ended.text, ended.stop_reason) == (text[:2], text[2:4])
            for prompt, p, message in (
                (["a", "b"], None, "takes one prompt, not 2"),
                ([], None, "takes one prompt, not 0"),
                ("x" * 300, None, "shorten the prompt"),
                ([999], None, "outside the vocabulary"),
            ):
                with pytest.raises(MegakernelError, match=message):
                    await anext(engine.generate(prompt, p))  # type: ignore[arg-type]
            assert engine.get_tokenizer().decode(expected[0].prompt_token_ids) == "hello"
            while engine._host.engine.stats.running or engine._host._open_of:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    with AsyncLLM(quiet_model, **LIMITS) as engine, closing(asyncio.new_event_loop()) as loop:
        unfinished = engine.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True))
        loop.run_until_complete(anext(unfinished))
