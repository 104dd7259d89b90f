"""The text of a sequence while its tokens come: whole characters only, cut at a stop string."""

from collections.abc import Sequence as Many

from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.engine.stop import StopMatcher
from dcp_jax.tokenizer import IncrementalDetokenizer, Tokenizer


class TextStream:
    """Detokenizer and stop matcher of one sequence.

    Attributes:
        text: what may be shown so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Many[int], params: SamplingParams):
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._stop = StopMatcher(params.stop, params.include_stop_str_in_output)
        self.text = ""

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stop.matched

    def add(self, token: int, *, may_stop: bool = True) -> None:
        """Take a generated token; its text is matched with the stop strings if it `may_stop`."""
        self.text += self._stop.add(self._detokenizer.add(token), may_stop=may_stop)

    def finish(self) -> None:
        """Take what was withheld: no token follows."""
        self.text += self._stop.add(self._detokenizer.flush())
        self.text += self._stop.flush()
