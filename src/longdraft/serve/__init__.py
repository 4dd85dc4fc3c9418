"""``longdraft serve``: the OpenAI API in front of the engine."""
