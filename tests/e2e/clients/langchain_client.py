"""Run an agent of LangChain against a server: `langchain_client.py URL`."""

import sys
from importlib.metadata import version

from agent_task import QUESTION, add, report
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="tiny", base_url=f"{sys.argv[1]}/v1", api_key="none", max_tokens=300, max_retries=0)
agent = create_agent(model, tools=[add], system_prompt="Be brief.")
asked = {"messages": [{"role": "user", "content": QUESTION}]}


def stream() -> str:
    """The content of the last message, from the pieces that stream."""
    pieces: dict[str, str] = {}
    for piece, _ in agent.stream(asked, stream_mode="messages"):
        pieces[piece.id] = pieces.get(piece.id, "") + piece.text
    return list(pieces.values())[-1]


answer = agent.invoke(asked)["messages"][-1].text
report(version("langchain"), answer, streamed=stream())
