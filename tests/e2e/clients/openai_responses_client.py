"""Run OpenAI's SDK against a server's Responses: `openai_responses_client.py URL`."""

import json
import sys

import openai
from agent_task import QUESTION, TOOL, add, report

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
tool = {"type": "function", **TOOL["function"], "strict": False}


def play(*, stream: bool) -> str:
    items = [{"role": "user", "content": QUESTION}]
    while True:
        asked = {"model": "tiny", "instructions": "Be brief.", "input": items, "tools": [tool], "store": False}
        asked |= {"include": ["reasoning.encrypted_content"], "max_output_tokens": 300}
        if stream:
            with client.responses.stream(**asked) as events:
                for _ in events:
                    pass
                response = events.get_final_response()
        else:
            response = client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += response.output
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": str(add(**json.loads(call.arguments)))}
            for call in calls
        ]


answer = play(stream=False)
report(openai.__version__, answer, streamed=play(stream=True))
