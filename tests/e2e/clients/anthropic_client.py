"""Run Anthropic's SDK against a server: `anthropic_client.py URL`."""

import sys

import anthropic
from agent_task import QUESTION, TOOL, add, report

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
function = TOOL["function"]
tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}


def play(*, stream: bool) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        asked = {"model": "tiny", "max_tokens": 300, "system": "Be brief.", "messages": messages, "tools": [tool]}
        if stream:
            with client.messages.stream(**asked) as events:
                for _ in events:
                    pass
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        if message.stop_reason != "tool_use":
            return "".join(block.text for block in message.content if block.type == "text")
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(add(**block.input))}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


answer = play(stream=False)
counted = client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": QUESTION}]).input_tokens
streamed, refused = play(stream=True), None
if "/s/" not in sys.argv[1]:  # in a session any name means the served model
    try:
        client.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": QUESTION}])
    except anthropic.NotFoundError as error:
        refused = error.body["error"]["type"]
report(anthropic.__version__, answer, streamed=streamed, counted=counted, refused=refused)
