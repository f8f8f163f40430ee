from support.demo import tokenizer, tools

__all__ = ["tokenizer", "tools"]
