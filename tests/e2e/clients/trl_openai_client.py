"""Run the `VLLMClient` of the installed TRL (1.16 speaks OpenAI's dialects) against a server and print what it got, as
JSON: `trl_openai_client.py URL`.
"""

import json
import sys
import warnings

warnings.simplefilter("ignore")

import trl  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: other
    """
    return a + b


def refused(call, *args, **request) -> str:
    try:
        call(*args, **request)
    except Exception as error:
        return str(error)
    return "not refused"


client = VLLMClient(base_url=sys.argv[1], connection_timeout=30)
user = [{"role": "user", "content": "hi"}]
ids = [[5, 6, 7], [8], [9, 10]]
found = {
    "version": trl.__version__,
    "model": client.model,
    "world_size": client.get_world_size(),
    "texts": client.generate(["hello", "you"], max_tokens=6),
    "ids": client.generate(ids, max_tokens=6, n=2),
    "none": client.generate(ids, max_tokens=6, logprobs=None),
    "three": client.generate(ids, max_tokens=6, logprobs=3),
    "chat": client.chat([user, user], max_tokens=6),
    "tools": client.chat([user], max_tokens=6, tools=[add]),
    "thinking": client.chat([user], max_tokens=6, chat_template_kwargs={"enable_thinking": False}),
    "scores": client.get_sequence_logprobs([[5, 6, 7, 8], [9, 10]], [2, 1], top_logprobs=3),
    "refused": {
        "regex": refused(client.generate, ids, structured_outputs_regex="[0-9+"),
        "images": refused(client.generate, ids, features=[{"mm_hashes": {"image": ["a"]}}, None, None]),
        "image message": refused(client.chat, [[{"role": "user", "content": [{"type": "image_url"}]}]]),
        "key": refused(client.generate, ids, generation_kwargs={"logit_bias": {"5": 1}}),
        "template": refused(client.chat, [user], chat_template="{{ messages }}"),
    },
}
client.reset_prefix_cache()
print(json.dumps(found))
