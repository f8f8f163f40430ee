"""Run Google's SDK against a server: `gemini_client.py URL`."""

import sys

from agent_task import QUESTION, TOOL, add, report
from google import genai
from google.genai import errors, types

client = genai.Client(api_key="none", http_options={"base_url": sys.argv[1]})
function = TOOL["function"]
declared = types.FunctionDeclaration(
    name=function["name"], description=function["description"], parameters_json_schema=function["parameters"]
)


def play() -> str:
    """The SDK calls the function by itself, and declares it in Google's form of a schema."""
    config = types.GenerateContentConfig(system_instruction="Be brief.", tools=[add], top_k=40)
    return client.chats.create(model="tiny", config=config).send_message(QUESTION).text


def play_streamed() -> str:
    """A chat keeps each chunk of a stream as a content of its own; responses have no ids."""
    config = types.GenerateContentConfig(
        system_instruction="Be brief.",
        tools=[types.Tool(function_declarations=[declared])],
        thinking_config=types.ThinkingConfig(include_thoughts=True),
    )
    chat = client.chats.create(model="tiny", config=config)
    message = QUESTION
    while True:
        parts = [part for chunk in chat.send_message_stream(message) for part in chunk.candidates[0].content.parts]
        calls = [part.function_call for part in parts if part.function_call]
        if not calls:
            return "".join(part.text for part in parts if part.text and not part.thought)
        message = [
            types.Part.from_function_response(name=call.name, response={"output": str(add(**call.args))})
            for call in calls
        ]


answer = play()
counted = client.models.count_tokens(model="tiny", contents=QUESTION).total_tokens
streamed, refused = play_streamed(), None
if "/s/" not in sys.argv[1]:  # in a session any name means the served model
    try:
        client.models.generate_content(model="other", contents=QUESTION)
    except errors.ClientError as error:
        refused = error.status
report(genai.__version__, answer, streamed=streamed, counted=counted, refused=refused)
