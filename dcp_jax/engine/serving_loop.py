"""The serving loop, without HTTP: requests in, tokens out, one step of the engine at a time.

    llm = dj.LLM(path)
    requests = [request for prompt in prompts for request in llm.requests(prompt, params)]
    for report in serve(llm.engine, requests):
        for request in report.updated:
            ...  # request.output_token_ids grows; request.finished at the end

Written out, the loop is this; change it as you like:

    for request in requests:
        llm.engine.submit(request)  # at any time: also between steps
    while llm.engine.busy:
        report = llm.engine.step()  # starts step n+1, then reads the tokens of step n
"""

from collections.abc import Iterator, Sequence

from dcp_jax.engine.engine import Engine, StepReport
from dcp_jax.engine.request import Request


def serve(engine: Engine, requests: Sequence[Request]) -> Iterator[StepReport]:
    """Run requests to their end, one step per item, beside whatever else the engine runs.

    Stop iterating to abandon them: those that have not ended are aborted.

    Raises:
        ValueError: a request that can never run; nothing has run then.
    """
    try:
        for request in requests:
            engine.submit(request)
        running = list(requests)
        while running:
            yield engine.step()
            running = [request for request in running if not request.finished]
    finally:
        for request in requests:
            engine.abort(request)
