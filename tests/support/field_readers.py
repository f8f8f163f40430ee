"""The readers of calls of vLLM, TRL, the package `renderers` and SGLang beside ours, over the spellings of each format.

vLLM and SGLang separate reasoning before they read calls: their readers get what stands behind closed reasoning.
"""

import json
import logging
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from support.corpus import corpus_template
from support.package_renderers import package_tokenizer
from support.parsing import STOP, FormatOnTokenizer, tool
from support.spellings import DIALECTS, spell
from support.tokenizers import make_tokenizer
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.parsing.formats import get_format

Calls = list[tuple[str, Any]]
Reader = Callable[[str], Calls]
"""From the text of a completion, with its control tokens and no stop token, to the calls in it."""

TOOLS: list[Any] = [
    tool(
        "add",
        a={"type": "integer"},
        s={"type": "string"},
        o={"type": "object"},
        t={"type": "boolean"},
    ),
    tool("now"),
]
SGLANG = Path(sys.prefix) / "clients" / "sglang"
"""Where `make clients` installs SGLang."""

VLLM = {
    "hermes": ("hermes", "granite4"),
    "qwen3_coder": ("qwen3_coder", "step3p5", "mimo"),
    "seed": ("seed_oss",),
    "glm": ("glm45", "poolside_v1", "ling3"),
    "minimax_m1, a list": ("jamba", "hunyuan_a13b"),
    "minimax_m2": ("minimax_m2",),
    "minimax_m3": ("minimax_m3",),
    "minicpm5": ("minicpm5",),
    "deepseek_v32": ("deepseek_v32",),
    "deepseek_v4": ("deepseek_v4",),
    "deepseek": ("deepseek_v31",),
    "deepseek, fenced": ("deepseek_v3",),
    "kimi_k2": ("kimi_k2",),
    "kimi_k3": ("kimi_k3",),
    "muse": ("muse_glimmer",),
    "inkling": ("inkling",),
    "gemma4": ("gemma4",),
    "function_gemma": ("functiongemma",),
    "lfm2": ("lfm2",),
    "pythonic": ("pythonic", "llama4_pythonic"),
    "pythonic, between tokens": ("llama4_pythonic",),
    "llama3": ("llama3_json",),
    "llama3, behind its token": ("llama3_json",),
    "olmo3": ("olmo3",),
    "xlam": ("xlam",),
    "granite": ("granite",),
    "granite, as text": ("granite",),
    "internlm": ("internlm",),
    "mistral, a call behind each": ("mistral",),
    "apertus": ("apertus",),
    "gigachat": ("gigachat3",),
    "gigachat3": ("gigachat3",),
    "phi, without tokens": ("phi4_mini_json",),
}
"""vLLM's readers of each dialect."""
SGLANG_READERS = {
    "hermes": ("hermes", "qwen25"),
    "qwen3_coder": ("qwen3_coder", "mimo"),
    "glm": ("glm45",),
    "glm, on one line": ("glm47",),
    "minimax_m2": ("minimax-m2",),
    "minimax_m3": ("minimax-m3",),
    "minicpm5": ("minicpm5",),
    "deepseek_v32": ("deepseekv32",),
    "deepseek_v4": ("deepseekv4",),
    "deepseek": ("deepseekv31",),
    "deepseek, fenced": ("deepseekv3",),
    "kimi_k2": ("kimi_k2",),
    "kimi_k3": ("kimi_k3",),
    "harmony": ("gpt-oss",),
    "muse": ("muse",),
    "inkling": ("inkling",),
    "gemma4": ("gemma4",),
    "lfm2": ("lfm2",),
    "pythonic": ("pythonic",),
    "pythonic, between tokens": ("pythonic",),
    "llama3": ("llama3",),
    "llama3, behind its token": ("llama3",),
    "internlm, a space between": ("interns1",),
    "mistral": ("mistral",),
    "mistral, a call behind each": ("mistral",),
    "cohere2": ("cohere_command4",),
    "apertus": ("apertus2509",),
    "gigachat3": ("gigachat3",),
}
TRL = {
    "hermes": ("qwen3",),
    "qwen3_coder": ("qwen3_5_nothink", "nemotron_3_ultra"),
    "glm": ("glm4moe",),
    "harmony, the recipient first": ("gptoss",),
    "llama3": ("llama3_2",),
    "lfm2": ("lfm2_2_5",),
    "gemma4": ("gemma4_v5",),
}
"""TRL's templates, each with the response template that TRL has for it."""
TRL_STOPS = {"glm4moe": "", "gptoss": "", "llama3_2": "<|eot_id|>", "gemma4_v5": "<turn|>"}
"""The token that ends a turn, if it is another than `<|im_end|>`."""
RENDERERS = {
    "hermes": ("qwen3",),
    "qwen3_coder": ("qwen3.5", "nemotron-3"),
    "glm": ("glm-4.5", "glm-5"),
    "hunyuan3": ("hy3",),
    "minimax_m2": ("minimax-m2",),
    "deepseek_v4": ("deepseek-v4",),
    "deepseek, fenced": ("deepseek-v3",),
    "kimi_k2": ("kimi-k2",),
    "inkling": ("inkling",),
    "gemma4": ("gemma4",),
    "llama3": ("llama-3",),
}


WITH_READERS = [name for name in DIALECTS if any(name in table for table in (VLLM, SGLANG_READERS, TRL, RENDERERS))]
NOT_RUN = {
    "vLLM": {
        "openai": "it needs gpt-oss's vocabulary, which it downloads",
        "hy_v3": "it looks for its tokens in the model's own tokenizer",
        "cohere_command3, cohere_command4": "they cannot read a whole text",
        "llama4_json": "it looks for a token that Llama 4 does not have",
        "dots, ernie45, granite-20b-fc, hy_v4, k2_horizon, longcat, plamo3, step3": "we have no such format",
    },
    "SGLang": {
        "gigachat35": "it reads the tags of a model that we have no format for",
        "hunyuan": "it looks for its tokens in the model's own tokenizer",
        "beam, dots, iquest_q1, k2_horizon, nanbeige, spark25, step3, trinity": "we have no such format",
    },
}
"""Readers that are not in the table, by library, and why."""


class Outcome(Enum):
    """What we make of a completion in which another reader reads calls."""

    SAME = "the same"
    OTHER = "other calls"
    """As many calls, with other arguments or names."""
    COUNTED = "counted"
    """As a failed call with a status."""
    LOST = "lost"


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One reader of a dialect beside ours."""

    dialect: str
    reader: str
    num_spellings: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """Of the spellings in which it reads calls."""
    statuses: Counter[ToolCallStatus] = field(default_factory=Counter)
    """Of the spellings that we count: the status of the first failed call."""
    lost: list[str] = field(default_factory=list)
    """The spellings with the calls that it reads in them, where we neither read nor count one."""

    def to_row(self) -> str:
        """The row of the table."""
        counted = ", ".join(f"{num} `{status.value}`" for status, num in sorted(self.statuses.items()))
        same, other = (self.outcomes[outcome] or "-" for outcome in (Outcome.SAME, Outcome.OTHER))
        cells = (
            self.dialect,
            self.reader,
            f"{self.outcomes.total()} of {self.num_spellings}",
            same,
            other,
            counted or "-",
        )
        return "| " + " | ".join(map(str, cells)) + " |"


def compare(dialect: str) -> Iterator[Comparison]:
    """Compare each reader of a dialect with ours. A reader that raises reads nothing."""
    ours = FormatOnTokenizer(get_format(dialect.partition(",")[0]), control=control_tokens(dialect))
    spellings = list(spell(DIALECTS[dialect]))
    for name, read in find_readers(dialect).items():
        found = Comparison(dialect=dialect, reader=name, num_spellings=len(spellings))
        for label, text in spellings:
            try:
                theirs = read(text)
            except Exception:  # theirs: what it raises for a malformed call is no call
                continue
            if theirs:
                _judge(found, f"{label}: {text!r}", theirs, ours.parse(text + STOP, tools=TOOLS).tool_calls)
        yield found


def _judge(found: Comparison, spelling: str, theirs: Calls, calls: Any) -> None:
    good = [(call.name, call.arguments) for call in calls if call.status is ToolCallStatus.OK]
    failed = [call.status for call in calls if call.status is not ToolCallStatus.OK]
    if good == theirs:
        outcome = Outcome.SAME
    elif failed:
        outcome = Outcome.COUNTED
        found.statuses[failed[0]] += 1
    elif len(good) >= len(theirs):  # theirs may also have another name: `add<arg_key>a</arg_key>..`
        outcome = Outcome.OTHER
    else:
        outcome = Outcome.LOST
        found.lost.append(f"{spelling} is {theirs}")
    found.outcomes[outcome] += 1


@contextmanager
def quiet() -> Iterator[None]:
    """Without the logs of readers, which say why a text is no call."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def find_readers(dialect: str) -> dict[str, Reader]:
    """The readers of a dialect by library and name: `vLLM hermes`. SGLang's are there if it is installed."""
    tables = (
        ("vLLM", VLLM, _make_vllm_reader),
        ("TRL", TRL, _make_trl_reader),
        ("renderers", RENDERERS, _make_package_reader),
        ("SGLang", SGLANG_READERS if SGLANG.is_dir() else {}, _make_sglang_reader),
    )
    found = {
        f"{library} `{name}`": make(name, dialect) for library, table, make in tables for name in table.get(dialect, ())
    }
    return {
        name: _behind_reasoning(read, DIALECTS[dialect].think[1]) if name.startswith(("vLLM", "SGLang")) else read
        for name, read in found.items()
    }


def _behind_reasoning(read: Reader, closing: str) -> Reader:
    return lambda text: read(text.partition(closing)[2] if closing and closing in text else text)


@cache
def control_tokens(dialect: str) -> tuple[str, ...]:
    """The delimiters of a dialect's format that are control tokens of its models."""
    delimiters = get_format(dialect.partition(",")[0]).delimiters
    return tuple(sorted(each for each in delimiters if each[-1] in ">]|" and "=" not in each))


def _make_vllm_reader(name: str, dialect: str) -> Reader:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], tools=TOOLS)
    tokenizer = make_tokenizer(None, control_tokens=(*control_tokens(dialect), STOP))
    make_parser = ToolParserManager.get_tool_parser(name)

    def read(text: str) -> Calls:
        found = make_parser(tokenizer, request.tools).extract_tool_calls(text, request)
        return [(call.function.name, _to_value(call.function.arguments)) for call in found.tool_calls]

    return read


def _make_sglang_reader(name: str, dialect: str) -> Reader:
    _import_sglang()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    tools = [Tool(**each) for each in TOOLS]
    make_detector = FunctionCallParser.ToolCallParserEnum[name]
    prompt = "<|start|>assistant" if dialect == "harmony" else ""  # it looks for the whole header of a message

    def read(text: str) -> Calls:
        found = make_detector().detect_and_parse(prompt + text, tools)
        return [(call.name, _to_value(call.parameters)) for call in found.calls]

    return read


@cache
def _import_sglang() -> None:
    """Make SGLang's readers importable: its package imports its engine, and IPython."""
    package, ipython, display = (types.ModuleType(name) for name in ("sglang", "IPython", "IPython.display"))
    package.__path__ = [str(SGLANG / "sglang")]
    display.HTML = display.display = None  # type: ignore[attr-defined]
    for module in (package, ipython, display):
        sys.modules.setdefault(module.__name__, module)


def _make_trl_reader(name: str, dialect: str) -> Reader:
    from trl.chat_template_utils import add_response_schema, parse_response

    tokenizer = add_response_schema(corpus_template(f"trl/{name}").tokenizer())
    user: Any = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, tokenize=False)
    stop = TRL_STOPS.get(name, "<|im_end|>")
    prefix = tokenizer(prompt, add_special_tokens=False)["input_ids"]

    def read(text: str) -> Calls:
        ids = tokenizer(text + stop, add_special_tokens=False)["input_ids"]
        found = parse_response(tokenizer, ids, prefix=prefix, tools=TOOLS)
        calls = [call["function"] for call in found.get("tool_calls") or ()]
        return [(call["name"], _to_value(call.get("arguments"))) for call in calls if call.get("name")]

    return read


def _make_package_reader(name: str, dialect: str) -> Reader:
    from renderers import config_from_name, create_renderer

    tokenizer = package_tokenizer(name)
    renderer = create_renderer(tokenizer, config_from_name(name))

    def read(text: str) -> Calls:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = renderer.parse_response(ids, tools=[each["function"] for each in TOOLS])
        return [(call.name, _to_value(call.arguments)) for call in found.tool_calls if call.status == "ok"]

    return read


def _to_value(arguments: Any) -> Any:
    """The value of arguments that may be its text; text that is no JSON stays text, and nothing is no arguments."""
    for _ in range(2):
        if not isinstance(arguments, str):
            break
        try:
            arguments = json.loads(arguments)
        except ValueError:
            break
    return {} if arguments in (None, "") else arguments
