"""Run OpenAI's SDK against a server: `openai_client.py URL`."""

import json
import sys

import openai
from agent_task import QUESTION, TOOL, add, report

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)


def play(*, stream: bool) -> str:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    while True:
        asked = {"model": "tiny", "messages": messages, "tools": [TOOL], "max_completion_tokens": 300}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": call.function.arguments},
                    }
                    for call in message.tool_calls
                ],
            }
        )
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


answer = play(stream=False)
report(openai.__version__, answer, streamed=play(stream=True), model=client.models.list().data[0].id)
