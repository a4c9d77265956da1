"""The engine's thread: requests one after the other, until someone cancels. Sessions take turns.

Events cross into asyncio by `call_soon_threadsafe`; the only thing that crosses back is the cancel
flag. A request that its client has left is dropped whether it waits, reads or decodes.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool

from kvmem.engine.events import Done, Event
from kvmem.engine.prompt import Prompt
from kvmem.engine.sampling import GenerateParams
from kvmem.errors import Cancelled, CapacityError, EngineError, KvmemError, RequestError
from kvmem.llama.context import CancelToken
from kvmem.server.backend import Backend
from kvmem.server.errors import status_of
from kvmem.server.fair_queue import FairQueue
from kvmem.server.request_log import log_reply, log_unserved
from kvmem.server.watch import Watch

__all__ = ["EngineWorker", "Generation", "Load", "LoadProgress"]

P = ParamSpec("P")
T = TypeVar("T")


class LoadProgress(Protocol):
    def __call__(self, fraction: float, doing: str = "loading") -> None:
        """How far a start is, 0 to 1. Raises EngineError where the server is to stop."""


Load = Callable[[LoadProgress], Backend]

# After this a start that cannot be interrupted ends with the process.
LEAVE_LOADING_S = 2.0

# Where a prompt has no messages: about a page tells sessions apart.
SESSION_TOKENS = 512

STOPPING = "the server is stopping"
LEFT = "the request was cancelled before it began"
UNKNOWN = "internal error; the log has it"

_log = logging.getLogger(__name__)


class Generation:
    """One reply in the worker, from the queue to its end."""

    def __init__(self, prompt: Prompt, params: GenerateParams, worker: "EngineWorker") -> None:
        self._worker = worker
        self._prompt = prompt
        self._params = params
        self._cancel = CancelToken()
        self._cancelled_as = ""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()

    async def next(self, timeout_s: float) -> Event | None:
        """The next event, or None if none comes in time. Raises what the engine raised."""
        try:
            async with asyncio.timeout(timeout_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, BaseException):
            raise event
        return event

    async def drain(self, timeout_s: float) -> list[Event]:
        """All events that are there, after waiting for the first; empty if none comes in time.

        Raises what the engine raised, once all before it were handed out.
        """
        first = await self.next(timeout_s)
        events = [] if first is None else [first]
        while events and not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, BaseException):
                self._events.put_nowait(event)
                break
            events.append(event)
        return events

    def cancel(self, end: str = "cancelled") -> None:
        """Ask the engine to end this request; a Done follows, unless it never began.

        One that waits leaves the queue at once. end: what the log calls it; the first one counts.
        """
        self._cancelled_as = self._cancelled_as or end
        self._cancel.set()
        if self._worker.leave(self):
            self.refuse(LEFT, "left")

    def abandon(self) -> None:
        """Cancel, and wake who waits in `next` at once: the client has gone."""
        self.cancel()
        self._events.put_nowait(Cancelled("the client has gone"))

    def run(self, backend: Backend) -> None:
        """In the worker's thread: generate, and hand over each event or the error."""
        if self._cancel.is_set():
            self.refuse(LEFT, "stopped" if self._cancelled_as == "stopped" else "left")
            return
        watch = self._worker.watch
        watch.began(self._prompt)
        try:
            for event in backend.generate(self._prompt, self._params, self._cancel):
                watch.saw(event)
                if isinstance(event, Done):
                    self._log(event)
                self._put(event)
        except Exception as error:
            n_said = watch.now.reply_tokens
            watch.failed()
            if not isinstance(error, RequestError | CapacityError):
                _log.error("a request failed", exc_info=error)
            self._log_unserved(str(status_of(error)), reply_tokens=n_said)
            # what is not ours is logged here, and then not again where it is answered
            self._put(error if isinstance(error, KvmemError) else EngineError(UNKNOWN))

    def refuse(self, reason: str, end: str) -> None:
        """In any thread: it never begins. end: what the log calls it."""
        self._log_unserved(end)
        self.tell(reason)

    def tell(self, reason: str) -> None:
        """In any thread: tell who waits in `next` that it has ended."""
        self._put(Cancelled(reason))

    def _log(self, done: Done) -> None:
        is_cancelled = done.reason == "cancelled" and self._cancelled_as
        log_reply(done.stats, self._cancelled_as if is_cancelled else done.reason)
        for note in done.stats.memory.notes:
            _log.warning("%s", note)

    def _log_unserved(self, end: str, *, reply_tokens: int = 0) -> None:
        log_unserved(end, prompt_tokens=len(self._prompt.tokens), reply_tokens=reply_tokens)

    def _put(self, item: Event | BaseException) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, item)
        except RuntimeError:  # the loop is gone: nobody listens
            self.cancel()


class EngineWorker:
    """Owns the backend: loads it, runs generations on it and closes it, all in one thread.

    load: makes the backend, and says how far it is.
    on_ready, on_failure: called in the worker's thread, when requests are served from now on, or
        when they cannot be, or no longer.
    """

    def __init__(
        self,
        load: Load,
        *,
        queue_limit: int = 64,
        on_ready: Callable[[Backend], object] | None = None,
        on_failure: Callable[[BaseException], object] | None = None,
    ) -> None:
        self._load = load
        self._queue_limit = queue_limit
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._queue: FairQueue[Generation] = FairQueue()
        self.watch = Watch()
        self._lock = threading.Lock()
        self._current: Generation | None = None
        self._backend: Backend | None = None
        self._failure: BaseException | None = None
        self._stopping = False
        self._halts: set[Callable[[], None]] = set()  # wake who waits in until_halt
        self._n_in_threads = 0
        self._is_left_open = False
        self._may_close = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvmem-engine", daemon=True)
        self._progress = "loading (0%)"

    def start(self) -> None:
        """Begin to load, in the worker's thread."""
        self._thread.start()

    @property
    def queue_limit(self) -> int:
        """Requests that may wait."""
        return self._queue_limit

    def halt(self) -> None:
        """Refuse what waits and what comes, and cancel what runs. Clients are told at once."""
        with self._lock:
            self._stopping = True
            current = self._current
            halts = tuple(self._halts)
        for halt in halts:
            halt()
        for generation in self._queue.close():
            generation.refuse(STOPPING, "stopped")
        if current is not None:
            current.cancel("stopped")
            current.tell(STOPPING)

    def stop(self) -> None:
        """Halt, close the backend, wait for the thread; not long for one that still loads."""
        self.halt()
        self._may_close.set()
        self._thread.join(LEAVE_LOADING_S if self._backend is None else None)

    @property
    def is_in_use(self) -> bool:
        """Whether a thread still loads or reads the backend, though nobody waits for it."""
        is_alive = self._stopping and self._thread.is_alive()
        return self._n_in_threads > 0 or self._is_left_open or is_alive

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What it returns, out of a thread that may read the backend.

        Raises Cancelled as the server stops, though the thread goes on: it cannot be interrupted.
        """

        def call() -> T:
            try:
                if self._stopping:  # it waited for a thread
                    raise Cancelled(STOPPING)
                return function(*args, **kwargs)
            finally:
                with self._lock:
                    self._n_in_threads -= 1

        with self._lock:
            if self._stopping:
                raise Cancelled(STOPPING)
            self._n_in_threads += 1
        work = asyncio.ensure_future(run_in_threadpool(call))
        work.add_done_callback(_look_at)
        return await self.until_halt(work)

    async def until_halt(self, work: "asyncio.Future[T]") -> T:
        """What it comes to. Raises Cancelled as the server stops, and leaves it to the caller."""
        loop = asyncio.get_running_loop()
        halted = asyncio.Event()

        def halt() -> None:
            loop.call_soon_threadsafe(halted.set)

        with self._lock:
            if self._stopping:
                raise Cancelled(STOPPING)
            self._halts.add(halt)
        end = asyncio.ensure_future(halted.wait())
        try:
            first: set[asyncio.Future[Any]] = {work, end}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            end.cancel()
            with self._lock:
                self._halts.discard(halt)
        if not work.done():
            raise Cancelled(STOPPING)
        return work.result()

    @property
    def backend(self) -> Backend:
        """Raises CapacityError while it loads, EngineError if it could not be loaded."""
        if self._failure is not None:
            raise EngineError(f"the model cannot be served: {self._failure}")
        if self._backend is None:
            raise CapacityError(f"the model is {self._progress}")
        return self._backend

    @property
    def n_waiting(self) -> int:
        """Requests in the queue, without the one that runs."""
        return len(self._queue)

    def leave(self, generation: Generation) -> bool:
        """Take a request out of the queue; False if it is not in it."""
        return self._queue.remove(generation)

    def submit(self, asked: Sequence[tuple[Prompt, GenerateParams]]) -> list[Generation]:
        """Queue the replies to a request: all of them, or none.

        Raises CapacityError when too many wait, or the server stops.
        """
        if self._stopping:
            raise CapacityError(STOPPING)
        _ = self.backend  # it may have failed since the prompt was rendered
        n_waiting = self.n_waiting
        if n_waiting + len(asked) > self._queue_limit:
            most = self._queue_limit
            raise CapacityError(f"{n_waiting} requests wait already, of {most}; try again later")
        generations = [Generation(prompt, params, self) for prompt, params in asked]
        for generation, (prompt, _) in zip(generations, asked, strict=True):
            self._queue.put(generation, _session_of(prompt))
        _ = self.backend  # where it has failed meanwhile, nobody takes from the queue
        return generations

    def _set_progress(self, fraction: float, doing: str = "loading") -> None:
        self._progress = f"{doing} ({fraction:.0%})"
        if self._stopping:
            raise EngineError("stopped while loading")

    def _run(self) -> None:
        try:
            backend = self._load(self._set_progress)
        except Exception as error:
            self._fail(error)
            return
        try:
            self._backend = backend
            if self._on_ready is not None:
                self._on_ready(backend)
            while (generation := self._queue.get()) is not None:
                with self._lock:
                    self._current = generation
                    comes_late = self._stopping
                if comes_late:
                    generation.refuse(STOPPING, "stopped")
                else:
                    generation.run(backend)
                with self._lock:
                    self._current = None
        except Exception as error:
            self._fail(error)
        finally:
            if self._stopping:  # handlers may still count tokens
                self._may_close.wait()
            self._is_left_open = self._n_in_threads > 0  # the process ends with it
            if not self._is_left_open:
                backend.close()

    def _fail(self, error: Exception) -> None:
        """Nothing is served from now on; who waits is told."""
        self._failure = error
        for waiting in self._queue.close():
            waiting.refuse("the server has failed", "500")
        if self._on_failure is not None and not self._stopping:
            self._on_failure(error)


def _look_at(work: "asyncio.Future[Any]") -> None:
    """Of a failure that nobody waits for, asyncio would complain."""
    if not work.cancelled():
        work.exception()


def _session_of(prompt: Prompt) -> Hashable:
    """What the requests of one session have in common: its id, or how it begins."""
    if prompt.conversation_id is not None:
        return prompt.conversation_id
    end = next((item.span.stop for item in prompt.spans if item.role == "user"), SESSION_TOKENS)
    return prompt.tokens[:end]
