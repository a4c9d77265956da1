"""The timings of a reply, as llama-server names them."""

from kvmem.engine.stats import RequestStats
from kvmem.server.sse import timings_of


def test_drafts_are_counted_where_there_were_any() -> None:
    stats = RequestStats(prompt_tokens=9, completion_tokens=4)
    assert not {"draft_n", "draft_n_accepted"} & set(timings_of(stats))
    stats = RequestStats(prompt_tokens=9, completion_tokens=4, draft_n=6, draft_n_accepted=0)
    timings = timings_of(stats)
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (6, 0)
