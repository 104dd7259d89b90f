"""Continuous batching: who runs in the next step, on which pages. Plain Python: no jax.

Every step decodes all running requests and reads chunks of prompts up to a budget of tokens, so
neither waits for the other. Requests are served in their order of arrival: when the pool is full,
the latest one gives its pages back and is read again later (what it published may still be in the
prefix cache), so the oldest always ends.

Plans are made before the last step's tokens are known: a request counts as longer by its `pending`
tokens. What cannot be known, that one of them ends it, costs one row that nobody reads. Launches
run in their order, so that pages can be given back as soon as a request ends: whoever gets them
writes them by a later launch, after any row still on its way. And such rows lie beyond the tokens
that were read, so that no page of the prefix cache has any of them.
"""

from collections import deque
from collections.abc import Mapping, Sequence

from dcp_jax.cache.pages import Holding, PagePool
from dcp_jax.engine.request import Request
from dcp_jax.engine.scheduler_options import SchedulerOptions
from dcp_jax.engine.step_plan import DecodeRow, PrefillChunk, StepPlan


class QueueFull(ValueError):
    """More requests wait than the engine accepts."""


class Scheduler:
    """Owner of the queue, the slots and the pages.

    Attributes:
        pool: pages and prefix cache.
        waiting: in order of arrival.
        running: likewise; each has a slot.
        preemptions: how often a running request had to give its pages back.
        reserved: pages of sequences outside the scheduler.
    """

    def __init__(self, pool: PagePool, options: SchedulerOptions):
        self.pool = pool
        self.options = options
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.reserved: set[int] = set()
        self._slots = list(range(options.max_running_requests - 1, -1, -1))
        # The first of the queue when it did not fit, and what `pool.returned` was then.
        self._refused: tuple[Request, int] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFull: as many as allowed wait already.
            ValueError: it would never fit the pool, or was added before.
        """
        most = self.options.max_queued_requests
        if most is not None and len(self.waiting) >= most:
            raise QueueFull(
                f"{len(self.waiting)} requests wait already: try again later, or raise "
                "max_queued_requests."
            )
        needed = self.pool.needed(request.most_tokens)
        if needed > self.pool.pages:
            raise ValueError(
                f"a request of {request.most_tokens} tokens needs {needed} pages and the pool has "
                f"{self.pool.pages}: shorten it, or raise max_total_tokens."
            )
        if request.added or request.finished:
            raise ValueError("this request was submitted or aborted before: make a new one.")
        request.added = True
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request wherever it is; nothing if it has ended."""
        if not request.finished:
            self._end(request, "abort")

    def fail(self, request: Request, error: Exception) -> None:
        """End a request because of an error; what it computed is not shared."""
        request.error = error
        request.computed = 0
        self._end(request, "error")

    def reserve(self, tokens: int) -> list[int] | None:
        """Pages for a sequence outside the scheduler; None if there are not enough now."""
        pages = self.pool.allocate(self.pool.needed(tokens))
        self.reserved.update(pages or ())
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give back what `reserve` gave."""
        self.reserved.difference_update(pages)
        self.pool.free(pages)

    def preempt_all(self) -> None:
        """The caches are lost: everything running starts again, and no prefix is known."""
        while self.running:
            request = self.running[-1]
            request.computed = 0
            self._preempt(request)
        self.pool.clear()

    def check(self) -> None:
        """Every page is accounted for (see `PagePool.check`)."""
        self.pool.check([request.holding for request in self.running], list(self.reserved))

    # -- planning ------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to launch before tokens are read.

        One step may be on its way: `apply` takes the plans in their order, each before the plan
        after the next is made.
        """
        plan, read, before = StepPlan(), 0, self.preemptions
        for request in list(self.running):
            if request.slot >= 0:  # else it gave its pages to one before it
                read += self._continue(request, plan, read)
        while self.waiting and self._slots and read < self._budget(plan):
            if self.preemptions != before or not self._admit(self.waiting[0], plan):
                break
            read += self._continue(self.running[-1], plan, read)
        plan.admitted = [request for request in plan.admitted if request.slot >= 0]
        return plan if plan.decode or plan.chunks else None

    def _budget(self, plan: StepPlan) -> int:
        """Tokens of prompts; many decode rows leave at least half to them."""
        chunk = self.options.chunked_prefill_size
        return max(chunk - len(plan.decode), (chunk + 1) // 2)

    def _continue(self, request: Request, plan: StepPlan, read: int) -> int:
        """Add a running request's next row, or a chunk after the `read` tokens of others; its size.

        All that decode come before any that reads its prompt, as both keep the order of arrival.
        """
        length, launched = request.length + request.pending, request.launched
        if request.pending or (request.output_token_ids and launched == length - 1):
            left = request.limit - len(request.output_token_ids) - request.pending
            steps = min(self.options.decode_steps, left)
            if steps > 0 and self._make_room(request, launched + steps):
                in_flight = request.pending > 0
                plan.decode.append(DecodeRow(request, launched, steps, in_flight))
                request.launched += steps
                request.pending += steps
            return 0
        tokens = min(self._budget(plan) - read, length - launched)
        if tokens <= 0 or not self._make_room(request, launched + tokens):
            return 0
        last = launched + tokens == length
        plan.chunks.append(PrefillChunk(request, launched, tokens, last))
        request.launched += tokens
        request.pending += last
        return tokens

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Give the first waiting request a slot, if its tokens and one more fit now."""
        if self._refused == (request, self.pool.returned):
            return False  # nothing was given back since
        holding = self.pool.open(request.token_ids, request.cache_salt)
        wanted = min(request.length + 1, request.most_tokens)
        missing = self.pool.needed(wanted) - len(holding.pages)
        if missing > self.pool.available and self.running:
            self.pool.close(holding)
            self._refused = request, self.pool.returned
            return False
        self.waiting.popleft()
        request.holding, request.slot = holding, self._slots.pop()
        request.launched = request.computed = len(holding.pages) * self.pool.page_tokens
        request.pending = 0
        if request.runs == 0:
            request.cached_tokens = request.launched
        request.runs += 1
        self.running.append(request)
        plan.admitted.append(request)
        return True

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Pages for `tokens` tokens, from the latest requests if need be; False if from itself."""
        while not self.pool.grow(request.holding, tokens):
            latest = self.running[-1]
            self._preempt(latest)
            if latest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._leave(request)
        request.pending = 0
        self.waiting.appendleft(request)

    # -- results -------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, tokens: Mapping[Request, Sequence[int]]) -> list[Request]:
        """Take a step's tokens; the requests that ended with them.

        Args:
            plan: the step.
            tokens: that each of its requests drew; none for a chunk that is not the last.
        """
        finished = []
        for row in (*plan.decode, *plan.chunks):
            request = row.request
            if request.finished or request not in tokens:
                continue
            taken = 0
            for token in tokens[request]:
                request.append(token)
                taken += 1
                if request.finished:
                    break
            # One that was preempted meanwhile keeps its tokens, and has no rows any more. It has
            # not got a slot again: the plan that preempts admits nobody.
            if request.slot >= 0:
                decode = isinstance(row, DecodeRow)
                request.computed = row.start + (taken if decode else row.length)
                request.pending -= row.steps if decode else row.last
                self._publish(request)
            if request.finished:
                finished.append(request)
                self._end(request, request.finish_reason)
        return finished

    def _end(self, request: Request, reason: str | None) -> None:
        if request.slot >= 0:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.finish_reason = reason

    def _leave(self, request: Request) -> None:
        """Take a request out of `running`: slot and pages are free again."""
        self._publish(request)
        self.pool.close(request.holding)
        request.holding = Holding()
        self.running.remove(request)
        self._slots.append(request.slot)
        request.slot = -1

    def _publish(self, request: Request) -> None:
        self.pool.publish(request.holding, request.computed, request.tokens)
