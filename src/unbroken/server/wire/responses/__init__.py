"""OpenAI's Responses: input items to conversations, replies to output items."""
