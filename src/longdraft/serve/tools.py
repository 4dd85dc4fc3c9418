def checked_choice(tools, choice):
    return "none"


def with_tools(tokenizer, messages, tools):
    return messages, {}


def grammar_for_tools(tools, choice):
    return None


class ToolParser:
    pass
