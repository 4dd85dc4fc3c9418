"""Prometheus metrics, under vLLM's names with the prefix ``longdraft:``."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from longdraft.serve.choice import Choice

# Upper limits of the histograms' buckets, in seconds.
_REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The server's metrics.

    Args:
        model: value of the label ``model_name``.
        get_load: returns the number of running requests and the number of waiting requests.
    """

    def __init__(self, model: str, get_load: Callable[[], tuple[int, int]]) -> None:
        self._registry, self._model = CollectorRegistry(), model

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"longdraft:{name}", help, ["model_name", *labels], registry=self._registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"longdraft:{name}", help, ["model_name"], buckets=buckets, registry=self._registry)

        def gauge(name: str, help: str, get_value: Callable[[], float]) -> None:
            new_gauge = Gauge(f"longdraft:{name}", help, ["model_name"], registry=self._registry)
            new_gauge.labels(model).set_function(get_value)

        gauge("num_requests_running", "Running requests.", lambda: get_load()[0])
        gauge("num_requests_waiting", "Waiting requests.", lambda: get_load()[1])
        self._requests = counter("request_success", "Requests that ended, by finish reason.", "finished_reason")
        self._failures = counter("request_failure", "Requests that were refused or failed, by HTTP status.", "status")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self._generation_tokens = counter("generation_tokens", "Emitted tokens.")
        self._cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._drafts = counter("spec_decode_num_drafts", "Verifications that had drafted tokens.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted_tokens = counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        per_pos_help = "Drafted tokens that were accepted, by their position in the draft."
        self._accepted_per_pos = counter("spec_decode_num_accepted_tokens_per_pos", per_pos_help, "position")
        self._verifications = counter("verifications", "Forwards of the target, prefill excluded.")
        self._verified_tokens = counter("verification_tokens", "Tokens emitted by verifications.")
        self._ttft = histogram("time_to_first_token_seconds", "Seconds to a request's first token.", _REQUEST_SECONDS)
        tpot_help = "Mean time between the output tokens of a request."
        self._tpot = histogram("time_per_output_token_seconds", tpot_help, _SECONDS_PER_TOKEN)
        self._latency = histogram("e2e_request_latency_seconds", "Seconds to a request's end.", _REQUEST_SECONDS)

    def observe_choice(self, choice: Choice, reason: str) -> None:
        """Records a choice that has ended. ``reason``: OpenAI's finish reason."""
        result, stats = choice.result, choice.spec_stats
        self._requests.labels(self._model, reason).inc()
        if result is None:
            return
        for metric, value in (
            (self._prompt_tokens, result.prompt_tokens), (self._generation_tokens, result.new_tokens),
            (self._cache_queries, result.prompt_tokens), (self._cache_hits, result.cached_tokens),
            (self._drafts, stats.num_drafts), (self._draft_tokens, stats.num_draft_tokens),
            (self._accepted_tokens, stats.num_accepted_tokens),
            (self._verifications, stats.num_rounds), (self._verified_tokens, stats.num_emitted_tokens),
        ):  # fmt: skip
            metric.labels(self._model).inc(value)
        for position, count in stats.num_accepted_tokens_per_pos.items():
            self._accepted_per_pos.labels(self._model, position).inc(count)
        if choice.first_token_time:
            self._ttft.labels(self._model).observe(choice.first_token_time - choice.arrival_time)
            if result.new_tokens > 1:
                seconds = max(0.0, choice.end_time - choice.first_token_time)
                self._tpot.labels(self._model).observe(seconds / (result.new_tokens - 1))
        self._latency.labels(self._model).observe(choice.end_time - choice.arrival_time)

    def count_failure(self, status: int) -> None:
        self._failures.labels(self._model, status).inc()

    def render(self) -> bytes:
        """Returns the metrics in Prometheus's text format."""
        return generate_latest(self._registry)
