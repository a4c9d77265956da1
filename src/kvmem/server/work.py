"""What is done for one request, from the rendering of its prompt to the end of its replies."""

from collections.abc import Sequence

from starlette.requests import Request

from kvmem.chat.fields import FieldError
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.server.errors import ClientGone, error_body
from kvmem.server.request_log import QUEUED, ROUTE, log_refused
from kvmem.server.worker import EngineWorker, Generation

__all__ = ["Work", "check_n_replies"]


def check_n_replies(field: str, n_replies: int, worker: EngineWorker) -> None:
    """Raises FieldError: so many would never find places, so it is no 503."""
    if n_replies > worker.queue_limit:
        raise FieldError(field, f"asks for {n_replies} replies, but one request may ask for "
                         f"{worker.queue_limit}: send several")  # fmt: skip


class Work:
    """The generations of one request."""

    def __init__(self, worker: EngineWorker, request: Request) -> None:
        self._worker = worker
        self._state = request.state
        self._has_ended = False
        self._generations: list[Generation] = []

    def submit(self, asked: Sequence[tuple[Prompt, GenerateParams]]) -> list[Generation]:
        """Queue all replies, or none: CapacityError, and ClientGone once the work has ended."""
        if self._has_ended:
            raise ClientGone
        self._generations = self._worker.submit(asked)
        setattr(self._state, QUEUED, True)
        return self._generations

    def abandon(self) -> None:
        """The client has gone: end it, and wake who waits for it."""
        self._has_ended = True
        for generation in self._generations:
            generation.abandon()

    def end(self) -> None:
        """Cancel what is not done; nothing is queued from now on."""
        self._has_ended = True
        for generation in self._generations:
            generation.cancel()

    def log_failure(self, error: BaseException | None) -> None:
        """See that the log has a line of a stream that this ended before anything was queued."""
        if isinstance(error, Exception) and not getattr(self._state, QUEUED, False):
            log_refused(error_body(error)["error"], getattr(self._state, ROUTE))
