from longdraft.kv.prompt_cache import PromptCache


class DiskPrefixes(PromptCache):
    pass
