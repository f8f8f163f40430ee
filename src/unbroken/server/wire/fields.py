"""All known fields of the dialects: what is not followed is refused or ignored, each with its reason.

    chat           {"messages": [...], "temperature": 0.5, "min_tokens": 2, "user": "me", "unheard_of": 1}
    followed       messages, temperature     the fields of the dialect's body
    refused        min_tokens                400, by name: it would change the prompt, the sampling or the answer
    ignored        user, unheard_of          named by the answer's header X-Unbroken-Ignored

Null and a field's own default ask for nothing: they are always taken. The tables of docs/protocols.md are made of this
file (`make fields`), and a test compares it with the fields of vLLM and of OpenAI's, Anthropic's and Google's SDKs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from unbroken.messages import REASONING_KEYS
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.http.ignored import MAX_NAMED, asks_for_something


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fields:
    """The fields that one kind of object may have besides those that are followed: names by the reason."""

    refused: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    returned: frozenset[str] = frozenset()
    """Ignored fields that our own answers have: a client sends them back without a wish, and nothing names them."""
    ignores_unknown: bool = False
    """Whether a field that is in no table is ignored; otherwise it is refused."""

    def check(self, given: Mapping[str, Any] | None, *, place: str = "") -> list[str]:
        """The names of the given fields that ask for something and are ignored; `place` is the object they are in.

        Raises `HttpError` for fields that are refused, with the reason.
        """
        asked = {name: value for name, value in (given or {}).items() if asks_for_something(name, value)}
        if not asked:
            return []
        prefix = f"{place}." if place else ""
        if wrong := self._find_refused(asked):
            message = f"{place or 'the body'} must not have {_list_refused(asked, wrong)}"
            raise HttpError(400, message, param=prefix + next(iter(wrong)))
        return [f"{prefix}{name}" for name in sorted(asked) if name not in self.returned][:MAX_NAMED]

    def _find_refused(self, asked: Mapping[str, Any]) -> dict[str, str]:
        """Why each field that is refused is."""
        refused, ignored = _by_name(self.refused), _by_name(self.ignored)
        return {
            name: refused.get(name, "it is not a known field")
            for name in sorted(asked)
            if name in refused or not (name in ignored or self.ignores_unknown)
        }


_MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *REASONING_KEYS})
_PART_KEYS = frozenset({"type", "text", "image", "image_url", "image_pil"})
_CALL_KEYS = frozenset({"id", "type", "index", "function"})
"""`index` is in the calls of a stream, which clients join and send back."""
_URL_KEYS = frozenset({"url"})
_FUNCTION_KEYS = frozenset({"name", "arguments"})


def find_unknown_keys(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys of chat messages, their parts and their calls that are no fields of these, and ask for something."""
    found: dict[str, None] = {}
    for given, known, place in _list_objects(messages):
        if isinstance(given, Mapping) and not known.issuperset(given):
            found.update((f"{place}.{name}", None) for name in _list_asked(given, known))
    return list(found)[:MAX_NAMED]


def _list_objects(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, frozenset[str], str]]:
    """The objects in chat messages, each with its fields and its place."""
    for message in messages:
        yield message, _MESSAGE_KEYS, "messages"
        content, calls = message.get("content"), message.get("tool_calls")
        for part in content if isinstance(content, list) else ():
            yield part, _PART_KEYS, "messages.content"
            if isinstance(part, Mapping):
                yield part.get("image_url"), _URL_KEYS, "messages.content.image_url"
        for call in calls if isinstance(calls, list) else ():
            yield call, _CALL_KEYS, "messages.tool_calls"
            if isinstance(call, Mapping):
                yield call.get("function"), _FUNCTION_KEYS, "messages.tool_calls.function"


def _list_refused(asked: Mapping[str, Any], why: Mapping[str, str]) -> str:
    """The first refused fields with their values and reasons, and how many more there are."""
    first = [f"{shorten(name)[1:-1]}={shorten(asked[name])} ({reason})" for name, reason in list(why.items())[:3]]
    return ", ".join(first) + (f" and {len(why) - 3} more" if len(why) > 3 else "")


def list_asked(given: Mapping[str, Any] | None, place: str, known: Set[str] = frozenset()) -> list[str]:
    """The keys of the object `place` in a body that are not `known`, ask for something, and are ignored."""
    return [f"{place}.{name}" for name in _list_asked(given or {}, known)][:MAX_NAMED]


def _list_asked(given: Mapping[str, Any], known: Set[str]) -> list[str]:
    return [name for name, value in given.items() if name not in known and asks_for_something(name, value)]


def _by_name(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: why for why, names in reasons.items() for name in names.split()}


_PROMPT = "the prompt is what the model's own template makes of the messages"
_SAMPLING = "this server has no such sampling or scheduling"
_ANSWER = "no answer has it"
_MEDIA = "images are parts of messages"
_VLLM = "it belongs to vLLM's own servers"
_PLATFORM = "it belongs to OpenAI's platform: nothing is stored, billed or filtered here"
_CACHE = "keys and values of older weights are never reused, and others are the engine's own choice"
_ID = "every answer has its own id"
_TEXT = "texts have no special tokens; the ids have all of them"
_CHUNKS = "what is sampled is sent at once"

_SHARED_REFUSED = {
    _PROMPT: "add_generation_prompt chat_template continue_final_message documents echo prompt_embeds suffix "
    "truncate_prompt_tokens",
    _SAMPLING: "allowed_token_ids bad_words early_stopping length_penalty logit_bias logits_processors min_tokens "
    "priority repetition_detection typical_p use_beam_search vllm_xargs watermarking",
    _ANSWER: "logprob_token_ids return_prompt_text return_token_offsets routed_experts_prompt_start",
    "use response_format or structured_outputs": "guided_choice guided_grammar guided_json guided_regex "
    "guided_whitespace_pattern",
    _MEDIA: "content_parts features images media_io_kwargs",
    _VLLM: "ec_transfer_params kv_transfer_params",
}
_SHARED_IGNORED = {
    _PLATFORM: "metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier "
    "store user",
    _CACHE: "cache_salt",
    _ID: "request_id",
    _TEXT: "skip_special_tokens spaces_between_special_tokens",
    _CHUNKS: "stream_interval",
    "the server chooses": "guided_decoding_backend mm_payload return_mm_kwargs truncation_side",
}
COMPLETIONS = Fields(
    refused={
        **_SHARED_REFUSED,
        _MEDIA: f"{_SHARED_REFUSED[_MEDIA]} mm_processor_kwargs",
        "chat completions have it": "thinking_token_budget",
    },
    ignored={**_SHARED_IGNORED, "a text is encoded as the tokenizer does": "add_special_tokens"},
    ignores_unknown=True,
)
CHAT = Fields(
    refused={
        **_SHARED_REFUSED,
        _PROMPT: f"{_SHARED_REFUSED[_PROMPT]} add_special_tokens",
        _ANSWER: f"{_SHARED_REFUSED[_ANSWER]} audio include_reasoning modalities moderation prompt_logprobs",
        "use tools and tool_choice": "function_call functions",
        "use n": "best_of",
        "the model has no such tool": "web_search_options",
        "nothing is predicted": "prediction",
    },
    ignored={**_SHARED_IGNORED, "set the template's variable in chat_template_kwargs": "reasoning_effort verbosity"},
    ignores_unknown=True,
)
RESPONSES = Fields(
    refused={
        "send the whole conversation as input": "previous_input_messages prompt",
        "an answer comes with its request": "background background_options",
        "the conversation is never edited": "context_management",
        "chat completions have it": "frequency_penalty ignore_eos include_stop_str_in_output logit_bias min_p "
        "presence_penalty repetition_penalty seed stop stop_token_ids structured_outputs top_k top_logprobs",
        _ANSWER: "enable_response_messages image include_reasoning moderation",
        _SAMPLING: "priority vllm_xargs watermarking",
        _MEDIA: "media_io_kwargs",
        _VLLM: "ec_transfer_params kv_transfer_params",
    },
    ignored={
        _PLATFORM: "access_programs client_metadata prompt_cache_key prompt_cache_options prompt_cache_retention "
        "safety_identifier service_tier user",
        "it counts calls of OpenAI's own tools, which are left out": "max_tool_calls",
        "the events are what they are": "stream_options",
        _CACHE: "cache_salt",
        _ID: "request_id",
        "the header X-Session-ID names the conversation": "session_id",
        _TEXT: "skip_special_tokens",
        "the server chooses": "mm_payload return_mm_kwargs",
    },
)
RESPONSES_ITEMS = Fields(
    ignored={
        "it is no content: items come back as this server or another one sent them": "annotations caller created_by "
        "detail end_turn id logprobs phase status prompt_cache_breakpoint"
    },
    returned=frozenset({"annotations", "id", "logprobs", "status"}),
)
MESSAGES = Fields(
    refused={
        "the model has no such tool": "mcp_servers",
        "nothing runs in a container": "container",
        "the conversation is never edited": "compaction thread",
        "one model answers": "fallback_credit_token fallbacks",
        _SAMPLING: "vllm_xargs watermarking",
        _VLLM: "ec_transfer_params kv_transfer_params",
    },
    ignored={
        "it belongs to Anthropic's platform": "anthropic_beta anthropic_version betas billing_policy cache_control "
        "diagnostics inference_geo metadata service_tier speed user_profile_id workspace_id",
        _CACHE: "cache_salt",
        "the server chooses": "mm_payload return_mm_kwargs",
    },
)
MESSAGE_KEYS = Fields(ignores_unknown=True)
"""Of whole messages, and of texts of reasoning: their dialects' servers ignore what they do not know there."""
MESSAGES_BLOCKS = Fields(ignored={_CACHE: "cache_control"})
GEMINI = Fields(
    refused={
        "this server keeps no contents: send all of them": "cachedContent",
        "a reply is never continued": "continuationToken",
    },
    ignored={
        "it belongs to Google's platform: nothing is stored, billed or filtered here": "labels safetySettings "
        "serviceTier store"
    },
)
GEMINI_CONFIG = Fields(
    refused={
        "send the request several times": "candidateCount",
        "chat completions have it": "logprobs responseLogprobs",
        _ANSWER: "audioTranscriptionConfig imageConfig responseModalities speechConfig",
    },
    ignored={
        "it belongs to Google's platform": "enableEnhancedCivicAnswers",
        "set the image processor's own settings in mmProcessorKwargs": "mediaResolution",
    },
)
GEMINI_PARTS = Fields(
    refused={
        "this server runs no tools": "codeExecutionResult executableCode toolCall toolResponse",
        "images are the only files": "audioMetadata audioTranscription documentMetadata mediaProcessing speechMetadata "
        "spreadsheetMetadata videoMetadata",
        "a call and its response are whole": "partialArgs willContinue",
    },
    ignored={"it is no content": "displayName mediaResolution partMetadata scheduling"},
)
GEMINI_TOOLS = Fields(
    ignored={
        "this server has no tools of its own: the model does not see them": "codeExecution computerUse "
        "enterpriseWebSearch exaAiSearch fileSearch googleMaps googleSearch googleSearchRetrieval "
        "includeServerSideToolInvocations mcpServers parallelAiSearch retrieval retrievalConfig urlContext",
        "the model sees no results in advance": "response responseJsonSchema",
        "a call is answered in the next request, whole": "behavior streamFunctionCallArguments",
    }
)
GENERATE = Fields(
    refused={
        _SAMPLING: "priority",
        "calls and reasoning are not read here": "reasoning_parser_kwargs",
        _VLLM: "ec_transfer_params kv_transfer_params",
    },
    ignored={_CACHE: "cache_salt", "`prompt_token_ids` are always in the answer": "return_token_ids token_offsets"},
)
GENERATE_SAMPLING = Fields(
    refused={
        _SAMPLING: "allowed_token_ids bad_words extra_args logit_bias min_tokens repetition_detection "
        "thinking_token_budget trace_decode_token_ids watermarking",
        _ANSWER: "logprob_token_ids prompt_logprob_start prompt_logprob_token_ids prompt_logprobs",
    },
    ignored={
        _CHUNKS: "output_kind output_text_buffer_length stream_interval",
        "no answer has prompt ids' experts": "routed_experts_prompt_start",
        "it changes no sampled id": "flat_logprobs skip_clone skip_reading_prefix_cache spaces_between_special_tokens",
    },
)
GENERATION_KWARGS = Fields()
STRUCTURED_OUTPUTS = Fields(refused={"this server takes regex, json and json_object": "choice grammar structural_tag"})
