"""Before BPE, a tokenizer splits a text into pieces. This module lists the splitting rules by llama.cpp's names for
them.

The regular expressions are those of the models' own tokenizers. Rules that only unsupported model families
use are left out.
"""

from __future__ import annotations

# Parts of the regular expressions: English endings such as 's, words, and what usually follows words and numbers.
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = _REST.replace(r"\r\n]*", r"\r\n/]*")
_DIGIT, _DIGITS = r"|\p{N}", r"|\p{N}{1,3}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


def _camel(ending: str, without: str = "") -> str:
    """Return a regular expression for words. A word ends where a lower-case letter precedes a capital. `ending` matches
    an optional ending such as 's, and `without` excludes characters."""
    upper, lower = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]" for case in (r"Lu}\p{Lt", "Ll"))
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{upper}*{lower}+{ending}|{first}{upper}+{lower}*{ending}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = f"{_ENDING}|{_WORD}{_DIGITS}{_REST}"
_QWEN2 = f"{_ENDING}|{_WORD}{_DIGIT}{_REST}"
_GPT4O = _camel(f"{_ENDING}?") + _DIGITS + _REST_SLASH
_DEEPSEEK3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The letters in DeepSeek LLM's expression: those of most scripts that have upper and lower case.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_LLAMA3_NAMES = "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0"

# For each rule, its names and its regular expressions. The first expression splits the text into its matches and the
# parts between them. Each further expression splits the resulting pieces in the same way.
_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt-2 gigachat a.x-4.0 mellum olmo exaone4 trillion granite-docling", (_GPT2,)),
    ("smollm starcoder command-r exaone minerva-7b mellum2", (r"\p{N}", _GPT2)),
    (f"{_LLAMA3_NAMES} smaug-bpe glm4 chatglm-bpe", (_LLAMA3,)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan", (_QWEN2,)),
    ("tekken", (_camel("") + _DIGIT + _REST_SLASH,)),
    ("gpt-4o talkie", (_GPT4O,)),
    ("default", (_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9]{3}")),
    (
        "deepseek-llm",
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _ASIAN,
            r"\p{N}+",
        ),
    ),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
    ("deepseek-v3 hunyuan-dense", (r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    ("spark2_5", (r"\p{N}{1,3}", _CJK, _DEEPSEEK3.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"), r"\p{N}")),
    ("poro-chat bloom", (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",)),
    ("viking", (" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}")),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("seed-coder", (f"{_ENDING}|{_WORD}{_DIGIT}" + _REST.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),)),
    ("ufakzeka", (_WORD + _DIGIT + _REST,)),
    ("laguna", (r"[^\n]+|\n+", _QWEN2)),
    ("minicpm5", (r"\p{N}{1,3}", rf"{_ENDING}|{_WORD}|\p{{N}}+{_REST}")),
)
SPLITS = {name: expressions for names, expressions in _RULES for name in names.split()}
# With these rules, a piece that is itself a token becomes that token, without applying merges.
WHOLE_PIECES = {*_LLAMA3_NAMES.split(), "tekken", "minicpm5", "glm4"}
# With these rules, BOS is put before a text unless the file says otherwise.
BEGUN = {*_LLAMA3_NAMES.split(), "tekken"}
# With these rules, characters are composed first (Unicode NFC), such as e and an accent.
COMPOSED = {"qwen2", "deepseek-r1-qwen"}
