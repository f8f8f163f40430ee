"""A judge of answers to sums: a model behind a URL, which is asked for a number."""

from __future__ import annotations

import os

from unbroken.runs.prompts.judge import Judge

judge = Judge(
    os.environ.get("JUDGE_URL", "http://127.0.0.1:8020/v1"),
    os.environ.get("JUDGE_MODEL", "stand-in"),
    api_key=os.environ.get("JUDGE_KEY"),
    prompt=(
        "Question: {prompt}\nAnswer: {completion}\n\n"
        "How near is this to a plain number that answers it? Reply with a number from 0 to 1, and nothing else."
    ),
    options={"temperature": 0, "max_tokens": 8},
    cache="judge.sqlite",  # in the current folder
    max_requests=int(os.environ.get("JUDGE_REQUESTS", "100000")),  # raised without a change of this file
)
