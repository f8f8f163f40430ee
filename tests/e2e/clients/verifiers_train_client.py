"""Run the train client of verifiers 0.4 against a server, with its message graph and bridges:
`verifiers_train_client.py URL TOKENIZER_FOLDER`.
"""

import asyncio
import json
import sys
from importlib.metadata import version

from agent_task import QUESTION, TOOL, add, report
from renderers import config_from_name
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig

URL, TOKENIZER = sys.argv[1:]


async def main() -> None:
    client = TrainClient(
        TrainClientConfig(base_url=f"{URL}/v1", renderer=config_from_name("qwen3"), renderer_model_name=TOKENIZER)
    )
    dialect, trace = ChatDialect(), Trace.model_construct(nodes=[], tools=[])
    messages = [{"role": "user", "content": QUESTION}]
    turns = []
    while True:
        body = {"model": "tiny", "messages": messages, "tools": [TOOL]}
        request = dialect.parse_request(body)
        turn = prepare_turn(trace, request.messages, request.tools)
        sampling = SamplingConfig(max_tokens=300, temperature=1.0)
        response = await client.get_response(dialect, body, sampling, session_id="rollout-1", turn=turn)
        turn.commit(response)
        tokens = response.tokens
        turns.append([tokens.prompt_ids, tokens.completion_ids, len(tokens.completion_logprobs), tokens.bridged])
        message = response.raw["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            result = add(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    await client.close()
    report(version("verifiers"), message["content"], turns=turns)


asyncio.run(main())
