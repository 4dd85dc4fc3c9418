"""A file of prompts to a file of answers, through the continuous engine: ``longdraft batch``."""
