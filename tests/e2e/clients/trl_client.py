"""Run TRL's own `VLLMClient` against a server and print what it got, as JSON: `trl_client.py URL FOLDER_OF_TRL`.

Runs in a separate process, since this TRL is older than the one that other tests import.
"""

import json
import sys
import warnings

URL, FOLDER = sys.argv[1:]
sys.path.insert(0, FOLDER)
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


def refused(**request) -> str:
    try:
        client.generate(**request)
    except Exception as error:
        return str(error)
    return "not refused"


client = VLLMClient(base_url=URL, connection_timeout=30)
user = [{"role": "user", "content": "hi"}]
parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
ids = [[5, 6, 7], [8], [9, 10]]
found = {
    "version": trl.__version__,
    "texts": client.generate(["hello", "you"], max_tokens=6),
    "ids": client.generate(ids, max_tokens=6, n=2, top_k=0),
    "none": client.generate(ids, max_tokens=6, logprobs=None),
    "five": client.generate(ids, max_tokens=6, logprobs=5),
    "seeded": [client.generate(ids, max_tokens=6, generation_kwargs={"seed": 3}) for _ in range(2)],
    "regex": client.generate(ids, max_tokens=6, structured_outputs_regex="[ab]+"),
    "empty": client.generate([], max_tokens=6),
    "chat": client.chat([user, parts], max_tokens=6),
    "tools": client.chat([user], max_tokens=6, tools=[add]),
    "thinking": client.chat([user], max_tokens=6, chat_template_kwargs={"enable_thinking": False}),
    "scores": client.get_sequence_logprobs([[5, 6, 7, 8], [9, 10]], [2, 1], top_logprobs=3),
    "scores_default": client.get_sequence_logprobs([[5, 6, 7, 8]], [1]),
    "scores_warm": client.get_sequence_logprobs([[5, 6, 7, 8]], [1], top_logprobs=1, temperature=0.5),
    "refused": {
        "empty ids": refused(prompts=[[]]),
        "large id": refused(prompts=[[10**6]]),
        "negative id": refused(prompts=[[-1]]),
        "mixed": refused(prompts=["a", [1]]),
        "long": refused(prompts=[[5] * 2048]),
        "regex": refused(prompts=["a"], structured_outputs_regex="[0-9+"),
        "logprobs": refused(prompts=["a"], logprobs=100_000),
        "key": refused(prompts=["a"], generation_kwargs={"unheard_of": 1}),
    },
    "after": client.generate(ids, max_tokens=2),
}
client.reset_prefix_cache()
print(json.dumps(found))
