def grammar_for(response_format):
    return None


def constraint(tokenizer, grammar, prompt_tokens, vocabulary=0):
    return None
