"""Errors of a step, as the caller should read them. Plain Python: no jax."""

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")


class StepError(RuntimeError):
    """A request failed because the step that it was part of did."""


def step_error(error: BaseException) -> StepError:
    """`error` in one sentence; out of memory says what to lower."""
    first = (str(error).splitlines() or [""])[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if any(sign in str(error) for sign in _OUT_OF_MEMORY) or isinstance(error, MemoryError):
        return StepError(
            f"a step ran out of memory ({what}): lower mem_fraction_static or max_total_tokens "
            "(smaller caches leave more for steps), chunked_prefill_size (smaller prefill steps) "
            "or max_running_requests (smaller decode steps)."
        )
    return StepError(f"the step failed ({what}); other requests are not affected.")
