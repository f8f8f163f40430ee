"""Run litellm against a server: `litellm_client.py URL`."""

import json
import os
import sys
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # instead of a download

import litellm
from agent_task import QUESTION, TOOL, add, report

litellm.telemetry = False


def play(*, stream: bool) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        answer = litellm.completion(
            model="openai/tiny",
            api_base=f"{sys.argv[1]}/v1",
            api_key="none",
            messages=messages,
            tools=[TOOL],
            tool_choice="auto",
            max_tokens=300,
            stream=stream,
            num_retries=0,
        )
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump())
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


answer = play(stream=False)
report(version("litellm"), answer, streamed=play(stream=True))
