"""The engine: the loop that every method is, what it counts, and when sequences end."""

from longdraft.engine.loop import PREFILL_CHUNK, Engine
from longdraft.engine.stats import Result, Stats, Step
from longdraft.engine.stopping import eos_rule, stop_string_rule

__all__ = ["PREFILL_CHUNK", "Engine", "Result", "Stats", "Step", "eos_rule", "stop_string_rule"]
