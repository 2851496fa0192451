"""Tests conversion between text and tokens: continuations with SentencePiece, offsets in texts, developer messages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
from api_support import Live, serving
from model_helpers import tiny_llama
from tokenizer_support import ggml, loaded, spm_keys
from tokenizers import decoders, models, normalizers, processors

from megakernel import LLM, SamplingParams
from megakernel.serving.text.codec import Codec, Conversation, Token, Transcript, _Matcher

WORDS = ("▁The", "▁capital", "▁is", "▁Paris", "▁", *"TheCapitlsoPr")
KEYS = spm_keys(*WORDS)
IDS = {token: i for i, token in enumerate(KEYS["tokens"])}
PARIS, E_ACUTE = IDS["▁Paris"], (IDS["<0xC3>"], IDS["<0xA9>"])
CHAT = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the vocabulary of `KEYS`, whose tokenizer.json is that of Llama 2."""
    path = tmp_path_factory.mktemp("spm")
    tiny_llama(vocab_size=len(IDS)).save_pretrained(path)
    merges = [(w[:cut], w[cut:]) for w in WORDS for cut in range(1, len(w)) if w[:cut] in IDS and w[cut:] in IDS]
    backend = tokenizers.Tokenizer(models.BPE(IDS, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": CHAT}))
    return path


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with LLM(str(folder), threads=1, max_context=64) as llm, serving(llm) as server:
        yield server


FORCED: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "logit_bias": {str(PARIS): 100}}


@pytest.mark.parametrize(
    ("prompt", "shown", "first"),
    [
        ("The capital is", "The capital is", " Paris"),
        ([1, IDS["▁The"]], "<s> The", " Paris"),
        ([IDS["▁The"]], "The", " Paris"),
        ("The ", "The ", " Paris"),
        ([1], "<s>", "Paris"),
        ("<s>", "<s>", "Paris"),
    ],
)
def test_a_continuation_keeps_its_space(live: Live, prompt: Any, shown: str, first: str) -> None:
    """Only the start of the whole text loses a space. The texts, streams and offsets agree."""
    body = {"prompt": prompt, **FORCED}
    [choice] = live.post("/v1/completions", body)["choices"]
    assert choice["text"] == f"{first} Paris"
    assert "".join(e["choices"][0]["text"] for e in live.events("/v1/completions", body)) == choice["text"]
    body |= {"echo": True, "logprobs": 0}
    [echoed] = live.post("/v1/completions", body)["choices"]
    assert echoed["text"] == shown + choice["text"]
    events = [event["choices"][0] for event in live.events("/v1/completions", body)]
    assert "".join(event["text"] for event in events) == echoed["text"]
    for name, values in echoed["logprobs"].items():
        assert [value for event in events for value in event["logprobs"][name]] == values
    texts, offsets = echoed["logprobs"]["tokens"], echoed["logprobs"]["text_offset"]
    assert offsets[-2:] == [len(shown), len(shown) + len(first)]
    for text, at in zip(texts, offsets, strict=True):
        begins = echoed["text"].startswith((text, text.removeprefix(" ")), at)
        assert begins or (text == "<s>" and at == 0), (text, at)
    [alone] = live.post("/v1/completions", {**body, "echo": False})["choices"]
    assert alone["logprobs"]["text_offset"] == [0, len(first)]


def test_offsets_count_characters_and_no_hidden_tokens(live: Live) -> None:
    """A character of several tokens begins where its first token begins, and a hidden special token has no text."""
    ids = [1, IDS["▁The"], *E_ACUTE, 2, IDS["▁is"]]
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    [choice] = live.post("/v1/completions", body)["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("<s> Theé</s> is", [0, 3, 7, 7, 8, 12])
    forced = {"prompt": "The", "max_tokens": 2, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    for skip, offsets in ((True, [0, 0]), (False, [0, 3])):
        asked = {**forced, "logit_bias": {"1": 100}, "skip_special_tokens": skip}
        assert live.post("/v1/completions", asked)["choices"][0]["logprobs"]["text_offset"] == offsets


def test_texts_of_token_ids(live: Live, folder: Path) -> None:
    owner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("The capital is", " The", "  é", ""):
        ids = live.post("/tokenize", {"prompt": text})["tokens"]
        assert ids == owner.encode(text).ids
        told = live.post("/detokenize", {"tokens": ids})["prompt"]
        assert told == owner.decode(ids, skip_special_tokens=False)
        assert live.post("/detokenize", {"tokens": ids[1:]})["prompt"] == text


def test_chats_and_the_python_api_keep_the_space(live: Live, folder: Path) -> None:
    messages = [{"role": "user", "content": "The"}]
    answer = live.post("/v1/chat/completions", {"messages": messages, **FORCED})
    assert answer["choices"][0]["message"]["content"] == " Paris Paris"
    params = SamplingParams(max_tokens=2, temperature=0, logit_bias={PARIS: 100}, n=2)
    with LLM(str(folder), threads=1, max_context=64) as llm:
        whole, start = llm.generate(["The", [1]], params, use_tqdm=False)
    assert [one.text for one in (*whole.outputs, *start.outputs)] == [" Paris Paris"] * 2 + ["Paris Paris"] * 2


def test_gguf_files_continue_as_folders_do(tmp_path: Path, folder: Path) -> None:
    file = loaded(ggml(tmp_path / "m.gguf", **KEYS))
    for prompt in ("The capital is", "", "<s>"):
        ids = file.encode(prompt)
        assert ids == loaded(folder).encode(prompt)
        for tokenizer in (file, loaded(folder)):
            stream = Codec("m", tokenizer).transcripts(ids, SamplingParams())[0]._decoder
            assert stream is not None and stream.add(PARIS) == (" Paris" if "The" in prompt else "Paris")


ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.usefixtures("templates_here")
@pytest.mark.parametrize(
    ("template", "roles", "text"),
    [
        (ROLES, "developer user", "<system>0<user>1"),
        (ROLES, "system developer user", "<system>0\n\n1<user>2"),
        (ROLES, "developer system user", "<system>0\n\n1<user>2"),
        (ROLES, "user developer", "<user>0<system>1"),
        (ROLES, "system system user", "<system>0<system>1<user>2"),
        (ROLES + "{# developer #}", "developer user", "<developer>0<user>1"),
    ],
)
def test_developer_messages(tmp_path: Path, template: str, roles: str, text: str) -> None:
    tokenizer = loaded(ggml(tmp_path / "m.gguf", **KEYS, add_bos_token=False, tokenizer__chat_template=template))
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles.split())]
    codec, kept = Codec("m", tokenizer), [dict(message) for message in messages]
    assert tokenizer.decode(codec.chat_ids(Conversation(messages))) == text and messages == kept
    with_tools = tokenizer.decode(codec.chat_ids(Conversation(messages, [{"name": "f"}])))
    assert ("developer" in with_tools) == ("developer" in template)


def stopped(stops: list[str], pieces: list[str], **more: Any) -> tuple[str, str]:
    """Return the text of a choice whose tokens have `pieces` as texts, and what was shown of it piece by piece. Text is
    held back only while it may become a stop string."""
    stream: Any = Mock(add=Mock(side_effect=pieces), finish=Mock(return_value=""))
    transcript = Transcript(SamplingParams(stop=stops, max_tokens=None, **more), stream)
    ends = [*[None] * (len(pieces) - 1), "length"]
    shown = ""
    for count, end in enumerate(ends, 1):
        shown += transcript.add(Token(0, 0, 0.0, {}, end, 0.0))
        held = len("".join(pieces[:count])) - len(shown)
        assert transcript.finish_reason or held < max(map(len, stops))
    assert transcript.text is not None
    return transcript.text, shown


@pytest.mark.parametrize("seed", range(20))
def test_the_first_stop_string_ends_a_text(seed: int) -> None:
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab", k=rng.randint(2, 6))) for _ in range(3)]
    for most in (1, 4):
        pieces = ["".join(rng.choices("abc", k=rng.randint(1, most))) for _ in range(60)]
        text = "".join(pieces)
        ends = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        first = min(ends, key=lambda end: end[0] + len(end[1]), default=(len(text), ""))[0]
        told, shown = stopped(stops, pieces)
        assert shown == told and (told == text[:first] or most > 1)
        assert not any(stop in told for stop in stops) and text.startswith(told)
    assert stopped(["ab"], [*"abcab"], min_tokens=4)[0] == "abc"


def test_a_long_stop_string_takes_few_comparisons() -> None:
    class Counted(str):
        compared = 0

        def startswith(self, *given: Any) -> bool:
            Counted.compared += 1
            return super().startswith(*given)

    matcher = _Matcher(Counted("a" * 1000 + "b"))
    assert {matcher.read("a" * n, 1) for n in range(1, 2000)} == {-1} and matcher.matched == 1000
    assert matcher.read("a" * 2000 + "c", 1) == -1 and matcher.matched == 0
    assert Counted.compared == 3000 - 1
