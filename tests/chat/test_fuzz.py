"""Whatever a client sends is answered or refused by name; nothing dies."""

from typing import Any

from bodies import BODIES, some_of
from hypothesis import HealthCheck, given, settings

from kvmem.chat.render import ChatRenderer
from kvmem.chat.request import parse_chat_request
from kvmem.engine.events import TokenEvent
from kvmem.errors import RequestError
from kvmem.llama.model import Model
from kvmem.llama.sampler import Sampler


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(body=some_of(BODIES, messages=[{"role": "user", "content": "hi"}]))
def test_any_body_is_served_or_refused(
    renderer: ChatRenderer, model: Model, body: dict[str, Any]
) -> None:
    try:
        rendered = renderer.render(parse_chat_request(body))
        Sampler(model, rendered.params().sampling.as_dict()).close()
    except RequestError as error:
        assert str(error)
        return
    assert len(rendered.prompt.tokens) > 0
    reader = rendered.reader()
    reader.feed([TokenEvent(1, b"x</think>\n<tool_call>\n<function=f>\n")])
    reader.finish("length")
